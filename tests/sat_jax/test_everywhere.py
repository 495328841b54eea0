"""Whole arrays on every device: the very bits, whatever the mesh, by one gather."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sat_jax.everywhere
from sat_jax.everywhere import everywhere, total, value_everywhere
from sat_jax.mesh import MeshConfig, batch_sharding, make_mesh, one_device_mesh, spec

MESHES = ({"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "expert": 2, "tensor": 2})
B, T = 8, 3
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def arrays(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "words": draw.integers(-(2**31), 2**31 - 1, (B, T, 2)).astype(np.int32),
        "floats": draw.normal(size=(B, T)).astype(np.float32),
        "mask": draw.random((B, 2 * T)) < 0.5,
        "row": np.arange(B, dtype=np.int32),
    }


def placed(tree, mesh):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, batch_sharding(mesh)), tree)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_function_sees_the_very_bits_of_all_rows_in_their_order(axes):
    mesh = make_mesh(MeshConfig(**axes))
    own = arrays()
    own["floats"].view(np.int32)[0] = [0x7FC12345, -(2**31), 1]  # a NaN with a payload, -0, the least positive one
    own["nothing"] = None
    scalar = jnp.float32(0.25)

    def look(tree):
        whole, scalar = tree
        return whole | {"floats": jax.lax.bitcast_convert_type(whole["floats"], jnp.int32), "scalar": scalar}

    seen = jax.jit(functools.partial(everywhere, look, mesh))((placed(own, mesh), scalar))
    assert seen.pop("nothing") is None
    assert seen.pop("scalar") == scalar
    own["floats"] = own["floats"].view(np.int32)
    for name, array in seen.items():
        assert array.dtype == own[name].dtype
        assert array.sharding.is_fully_replicated
        np.testing.assert_array_equal(array, own[name])


def skewed(value_BT, tree):
    """Every row's slope hangs on all rows."""
    share_BT = jax.nn.softmax(value_BT.reshape(-1)).reshape(value_BT.shape)
    picked_BT = jnp.where(tree["mask"][:, :T], share_BT * tree["floats"], 0)
    return picked_BT.sum(), {"largest": jnp.abs(value_BT).max()}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_value_and_gradient_are_those_of_one_device(axes):
    value_BT = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)

    def run(mesh):
        def loss(value_BT, tree):
            value, found = value_everywhere(skewed, mesh, 2 * value_BT, tree)
            return 3 * value, found

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return run(placed(value_BT, mesh), placed(arrays(), mesh))

    mesh = make_mesh(MeshConfig(**axes))
    got, wanted = run(mesh), run(one_device_mesh())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, wanted)
    assert np.abs(got[1]).max() > 0.01
    assert got[1].sharding.is_equivalent_to(batch_sharding(mesh), 2)


def test_one_gather_moves_it_all_and_the_gradient_needs_nothing_more():
    mesh = make_mesh(MeshConfig(data=8))
    loss = jax.grad(lambda value_BT, tree: value_everywhere(skewed, mesh, value_BT, tree)[0])
    text: Any = jax.jit(loss).lower(*placed((np.ones((B, T), np.float32), arrays()), mesh)).compile().as_text()
    found = [line for line in text.splitlines() if any(f" {kind}(" in line for kind in KINDS)]
    assert len(found) == 1
    assert " all-gather(" in found[0]


@pytest.mark.parametrize(("most", "sums"), [(9, [15, 20]), (6, [6, 9, 20]), (0, [6, 9, 20])])
def test_what_is_small_is_summed_together_and_nothing_else(monkeypatch, most, sums):
    monkeypatch.setattr(sat_jax.everywhere, "_TOGETHER", most)
    mesh, draw = make_mesh(MeshConfig(data=2), jax.devices()[:2]), np.random.default_rng(0)
    shapes = {"a": (2, 3), "b": {"c": (9,)}, "d": (4, 5)}
    own = jax.tree.map(
        lambda shape: draw.integers(-9, 9, (2, *shape)).astype(np.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )

    def local(tree):
        return total(jax.tree.map(lambda leaf: leaf[0], tree))

    summed = jax.shard_map(local, mesh=mesh, in_specs=spec("batch"), out_specs=spec(), check_vma=False)
    jax.tree.map(lambda mine, all_: np.testing.assert_array_equal(mine, all_.sum(0)), jax.jit(summed)(own), own)
    found = [e for e in jax.make_jaxpr(summed)(own).eqns[0].params["jaxpr"].eqns if "psum" in e.primitive.name]
    assert sorted(var.aval.size for one in found for var in one.outvars) == sums
