import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.mesh import MeshConfig, make_mesh
from train import digest as room
from train.digest import array_digests


def digest(array):
    return array_digests({"x": array})["x"]


def test_a_value_worked_by_hand():
    # Words 1, 2, 3 at places 1, 2, 3: sum 6, weighted 1 + 4 + 9 = 14.
    assert digest(np.array([1, 2, 3], np.uint32)) == f"uint32:{6:016x}{14:016x}"
    assert digest(np.array([[1, 2], [3, 4]], np.int32)) == f"int32:{10:016x}{30:016x}"
    assert digest(np.float32(1)) == f"float32:{0x3F800000:016x}{0x3F800000:016x}"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_every_damage_of_a_file_changes_it(dtype):
    array = (10 * np.random.default_rng(0).normal(size=(6, 4, 8))).astype(dtype)
    swapped, zeroed, flipped = array.copy(), array.copy(), array.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    zeroed[2] = 0
    flipped.view(np.uint8).reshape(-1)[77] ^= 1
    assert len({digest(damaged) for damaged in (array, swapped, zeroed, np.roll(array, 1), flipped)}) == 5


@pytest.mark.parametrize("cut", [("data", None, "fsdp"), (None, ("data", "tensor"), None), (None, None, None)])
def test_the_parts_of_an_array_add_up_to_it_however_it_is_cut(cut):
    array = np.random.default_rng(1).normal(size=(4, 8, 6)).astype(np.float32)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*cut)))
    np.testing.assert_array_equal(room._own(spread), room._whole(array))
    assert digest(spread) == digest(array)


def test_names_and_scalars_keep_their_places():
    arrays = {"b": jnp.zeros(()), "a": np.ones(2, np.float32)}
    found = array_digests(arrays)
    assert list(found) == ["b", "a"]
    assert found["b"] != found["a"]
