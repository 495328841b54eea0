"""Versions along an axis as runs of equal ones: a completion nearly always has one."""

import itertools
from collections.abc import Sequence

import numpy as np


def to_runs(version: np.ndarray) -> list[tuple[int, int]]:
    """Each run's version and length, in order."""
    if not len(version):
        return []
    if (version == version[0]).all():  # nearly always
        return [(int(version[0]), len(version))]
    begins = np.concatenate([[0], np.flatnonzero(np.diff(version)) + 1, [len(version)]])
    return [(int(version[begin]), int(end - begin)) for begin, end in itertools.pairwise(begins)]


def from_runs(versions: Sequence[int], lengths: Sequence[int], length: int, subject: str) -> np.ndarray:
    """The versions of all `length` places, int32.

    Raises:
      ValueError: the runs do not add up, or a version is not one; names the subject.
    """
    if sum(lengths) != length or min(lengths, default=1) < 1 or not all(-(1 << 31) <= v < 1 << 31 for v in versions):
        raise ValueError(f"{subject}: expected 32-bit versions in runs of {length} in all, got {versions} x {lengths}")
    if len(versions) == 1:  # nearly always
        return np.full(length, versions[0], np.int32)
    return np.repeat(np.array(versions, np.int32), lengths)
