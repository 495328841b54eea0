import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.mesh import MeshConfig, make_mesh
from train import digest as module
from train.digest import digest, digests


def scramble(value):
    """MurmurHash3's finalizer in Python's integers."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)


def by_hand(array):
    sums = []
    for seed in (0x9E3779B9, 0x85EBCA6B):
        total = 0
        for place, value in np.ndenumerate(array.view(np.uint32)):
            mixed = scramble(int(value) ^ seed)
            for axis, index in enumerate(place):
                mixed = scramble((mixed + index * (2 * axis + 0x9E3779B1)) & 0xFFFFFFFF)
            total += mixed
        sums.append(f"{total & 0xFFFFFFFF:08x}")
    return "".join(sums)


def test_it_is_what_its_words_say():
    array = np.array([[1.5, -0.0, np.nan], [3.0, 1e-40, np.inf]], np.float32)
    assert digest(array) == f"{by_hand(array)} float32[2, 3]"
    assert digest(np.zeros((0, 3), np.float32)) == "0" * 16 + " float32[0, 3]"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_on_any_mesh_and_on_the_host_it_is_the_same(dtype, monkeypatch):
    monkeypatch.setattr(module, "_SLICE_BYTES", 100)
    host = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 6, 4)) * 3).astype(dtype))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    specs = {"whole": PartitionSpec(), "cut": PartitionSpec("data", "fsdp", "tensor"), "other": PartitionSpec("tensor")}
    placed = {name: jax.device_put(host, NamedSharding(mesh, spec)) for name, spec in specs.items()}
    placed["hosted"] = jax.device_put(host, NamedSharding(mesh, specs["cut"], memory_kind="pinned_host"))
    assert set(digests(placed).values()) == {digest(host)}
    assert digests({"scalar": jnp.asarray(host[0, 0, 0])})["scalar"] == digest(host[0, 0, 0])


@given(st.integers(0, 23), st.integers(1, 2**32 - 1), st.integers(0, 22))
def test_a_changed_bit_and_two_values_exchanged_are_seen(place, change, other):
    bits = np.arange(24, dtype=np.uint32).reshape(4, 6) * 2654435761
    changed = bits.copy()
    changed.flat[place] ^= np.uint32(change)
    assert digest(changed.view(np.float32)) != digest(bits.view(np.float32))
    exchanged = bits.copy()
    exchanged.flat[[other, other + 1]] = exchanged.flat[[other + 1, other]]
    assert digest(exchanged.view(np.float32)) != digest(bits.view(np.float32))


def test_shape_and_type_belong_to_it():
    zeros = np.zeros(6, np.float32)
    assert len({digest(zeros), digest(zeros.reshape(2, 3)), digest(zeros.view(np.int32))}) == 3


def test_eight_bytes_an_element_are_refused():
    with pytest.raises(ValueError, match="expected 1, 2 or 4 bytes an element, got complex64"):
        digests({"x": jnp.zeros(3, jnp.complex64)})
