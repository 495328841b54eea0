import jax
import numpy as np
import pytest
from flax import nnx

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.model.hf import export_tensors
from train.export import Export, is_local, whole
from train.state import init_policy

CONFIG = PolicyConfig.tiny(width=32, head_dim=8, experts=4, expert_hidden=32)


@pytest.fixture(scope="module")
def params():
    return init_policy(CONFIG, 0, make_mesh(MeshConfig(data=2, fsdp=2, expert=2)))[1]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_exchange_on_devices_gives_the_bits_of_a_copy_by_shards(params, dtype):
    dtype = None if dtype is None else jax.numpy.dtype(dtype)
    export = Export(CONFIG, dtype)
    expected = dict(export_tensors(params, CONFIG, dtype))
    assert is_local(params)
    by_shards = dict(export.tensors(params))
    exchanged = {path: export._leaf(path, array) for path, array in export._arrays(params).items()}
    assert by_shards.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(by_shards[name].view(np.uint8), tensor.view(np.uint8), err_msg=name)
    for path, leaf in nnx.to_flat_state(params):
        found = exchanged[tuple(map(str, path))]
        wanted = np.asarray(leaf.get_raw_value())
        np.testing.assert_array_equal(found, wanted if dtype is None else wanted.astype(dtype), err_msg=str(path))


def test_an_exchange_holds_one_layer_whole_and_no_leaf(params):
    lowered = Export(CONFIG, jax.numpy.bfloat16).lower(params)
    assert lowered.keys() == {".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)}
    program = lowered["layers.gate_EDF"]
    (out,) = jax.tree.leaves(program.out_info)
    assert out.shape == (CONFIG.experts, CONFIG.width, CONFIG.expert_hidden)
    text = program.compile().as_text()
    leaf = f"[{CONFIG.layers},{CONFIG.experts},{CONFIG.width},{CONFIG.expert_hidden}]"
    assert text is not None
    assert "all-gather" in text
    assert leaf not in text


def test_what_this_process_sees_is_copied_as_it_is():
    tree = {"a": np.arange(3), "b": jax.numpy.ones(2)}
    assert is_local(tree)
    found = whole(tree)
    np.testing.assert_array_equal(found["a"], tree["a"])
    np.testing.assert_array_equal(found["b"], [1, 1])
