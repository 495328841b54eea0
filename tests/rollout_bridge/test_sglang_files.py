"""Pushes as files: what SGLang's own reader finds in them is what was pushed."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rollout_bridge.engines import sglang_files
from rollout_bridge.engines.sglang_files import StageRoot
from rollout_bridge.weights import Weights

SHAPES = st.lists(st.integers(1, 5), max_size=3)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from([np.float32, ml_dtypes.bfloat16])), min_size=1, max_size=8),
    file_bytes=st.integers(1, 400),
)
def test_the_files_hold_every_tensor_once_bit_for_bit(shapes, file_bytes, tmp_path_factory):
    rng = np.random.default_rng(0)
    tensors = {f"täßor.{i}": np.asarray(rng.normal(size=shape), dtype) for i, (shape, dtype) in enumerate(shapes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_files, "_FILE_BYTES", file_bytes)
        root = StageRoot(tmp_path_factory.mktemp("stage"), "x")
        push = root.begin(Weights(version=3, model_digest="m", tensors=tensors).manifest, {"a": 1})
        for array in tensors.values():
            push.put(array)
        push.finish()
        files = sorted(push.folder.glob("*.safetensors"))
        assert [int(file.name.split("-")[1]) for file in files] == list(range(1, len(files) + 1))
        found = {}
        for file in files:
            part = load_file(file)
            assert not part.keys() & found.keys()
            found |= part
        assert found.keys() == tensors.keys()
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype
            assert (found[name].shape, found[name].tobytes()) == (array.shape, array.tobytes())
        assert (push.folder / "config.json").read_text() == '{"a": 1}'
        push.remove()
        assert not push.folder.exists()
        root.close()


def test_an_unfinished_push_leaves_nothing(tmp_path):
    root = StageRoot(tmp_path, "x")
    tensors = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
    push = root.begin(Weights(version=1, model_digest="m", tensors=tensors).manifest, {})
    push.put(tensors["a"])
    push.remove()
    assert [entry.name for entry in root.path.iterdir()] == ["lock"]
    root.close()


def test_a_closed_root_is_the_next_bridges_and_an_open_one_nobody_elses(tmp_path):
    root = StageRoot(tmp_path, "x")
    with pytest.raises(ValueError, match="expected one that no other bridge uses"):
        StageRoot(tmp_path, "x")
    StageRoot(tmp_path, "y").close()
    root.close()
    StageRoot(tmp_path, "x").close()
