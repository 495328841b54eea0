"""The TPU's way to run experts, its Pallas kernels interpreted on CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model.blocked import BLOCKED
from sat_jax.model.dispatch import ExpertWeights, Routed
from sat_jax.model.experts import run_experts
from sat_jax.model.grouped import chunk_rows, grouped_kernel

TOKENS, WIDTH, HIDDEN, EXPERTS, SLOTS = 160, 16, 24, 8, 2
INTERPRETED = grouped_kernel(interpret=True)


def routed(seed, routing):
    """Tokens that choose evenly, or all of them the same two experts, which fills several chunks of two experts."""
    draw = np.random.default_rng(seed)
    score = draw.random((TOKENS, EXPERTS))
    score[:, :SLOTS] += routing == "one"
    ids = np.argsort(-score, -1)[:, :SLOTS].astype(np.int32)
    ids[draw.random(TOKENS) < 0.1] = -5  # padding
    return Routed(
        x_ND=jnp.asarray(draw.normal(size=(TOKENS, WIDTH)), jnp.float32),
        ids_NK=jnp.asarray(ids),
        weight_NK=jnp.asarray(draw.random((TOKENS, SLOTS)), jnp.float32),
    )


def weights(seed):
    draw = np.random.default_rng(seed)
    shapes = {"gate_EDF": (WIDTH, HIDDEN), "up_EDF": (WIDTH, HIDDEN), "down_EFD": (HIDDEN, WIDTH)}
    return ExpertWeights(**{k: jnp.asarray(draw.normal(0, 0.3, (EXPERTS, *s)), jnp.float32) for k, s in shapes.items()})


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(mesh, kernel, tokens, held):
    pull_ND = jnp.asarray(np.random.default_rng(9).normal(size=tokens.x_ND.shape), jnp.float32)

    def loss(x_ND, weight_NK, held):
        out_ND, executed = run_experts(mesh, kernel, Routed(x_ND=x_ND, ids_NK=tokens.ids_NK, weight_NK=weight_NK), held)
        return (out_ND * pull_ND).sum(), (out_ND, executed)

    (_, seen), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(tokens.x_ND, tokens.weight_NK, held)
    return seen, grads


@pytest.mark.parametrize("routing", ["even", "one"])
@pytest.mark.parametrize("axes", [{}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_grouped_products_equal_blocked_ones_also_for_experts_without_tokens(axes, routing):
    mesh = make_mesh(MeshConfig(**axes)) if axes else one_device_mesh()
    ours = value_and_gradients(mesh, INTERPRETED, routed(0, routing), weights(1))
    theirs = value_and_gradients(one_device_mesh(), BLOCKED, routed(0, routing), weights(1))
    np.testing.assert_allclose(ours[0][0], theirs[0][0], rtol=1e-5, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    if routing == "one":
        for leaf in jax.tree.leaves(ours[1][2]):
            np.testing.assert_array_equal(leaf[SLOTS:], 0)


def test_a_load_of_several_chunks_is_run_whole_and_one_of_none_not_at_all():
    # Eight experts share 320 choices: chunks of 128 rows; two experts hold all of them, so three chunks run.
    assert chunk_rows(TOKENS * SLOTS, EXPERTS) == 128
    tokens = routed(2, "one")
    useful = int((tokens.ids_NK >= 0).sum())
    (_, executed), _ = value_and_gradients(one_device_mesh(), INTERPRETED, tokens, weights(3))
    assert useful <= int(executed[0]) <= useful + 2 * 128
    nobody = Routed(x_ND=tokens.x_ND, ids_NK=jnp.full_like(tokens.ids_NK, -1), weight_NK=tokens.weight_NK)
    (out_ND, executed), grads = value_and_gradients(one_device_mesh(), INTERPRETED, nobody, weights(3))
    assert int(executed[0]) == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((out_ND, grads)))


def test_a_chunk_is_the_fair_load_of_four_experts():
    assert chunk_rows(262_144 * 8, 128) == 65_536
    assert chunk_rows(4096 * 8, 128) == 1024
    assert chunk_rows(64, 8) == 128
    assert chunk_rows(2**30, 8) == 65_536
