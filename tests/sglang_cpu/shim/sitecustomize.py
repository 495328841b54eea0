"""Lets the index's torchvision be imported beside a CPU-only torch.

Its compiled operators cannot load there, and the import registers shape functions for two of them. Declaring these two
is enough: nobody calls them. They must exist before torchvision's first import, and torch must not be imported for
processes that never need it, so the declaration hangs on that import.
"""

import importlib.abc
import sys

_DECLARED = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and not _DECLARED:
            from torch import library

            declared = library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED.append(declared)  # it is undone when collected


sys.meta_path.insert(0, _BeforeTorchvision())
