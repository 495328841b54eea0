"""What runs on a GPU equals what runs on the CPU of the same process (make gpu-check)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.logprob import token_logp
from sat_jax.mesh import MeshConfig, make_mesh, platform
from sat_jax.model.attention import packed_attention
from sat_jax.model.dispatch import ExpertWeights, Routed
from sat_jax.model.experts import kernel_of, run_experts

pytestmark = pytest.mark.gpu


def both(function):
    """The function's result on the GPU and on the CPU; it takes the mesh it runs on."""
    results = []
    for kind in ("gpu", "cpu"):
        mesh = make_mesh(MeshConfig(), jax.devices(kind)[:1])
        assert platform(mesh) == kind
        with jax.default_device(jax.devices(kind)[0]), jax.default_matmul_precision("highest"):
            results.append(jax.tree.map(np.asarray, jax.jit(functools.partial(function, mesh))()))
    return results


def close(pair, tolerance):
    for got, expected in zip(*map(jax.tree.leaves, pair), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * max(1e-6, np.abs(expected).max()))


@pytest.mark.parametrize("chosen", [8, 2], ids=["every expert", "six empty experts"])
def test_experts_and_their_gradients_also_where_no_token_goes(chosen):
    draw = np.random.default_rng(0)
    shapes = {"gate_EDF": (64, 32), "up_EDF": (64, 32), "down_EFD": (32, 64)}
    held = {n: draw.normal(0, 0.3, (8, *shape)).astype(np.float32) for n, shape in shapes.items()}
    x_ND = draw.normal(size=(1000, 64)).astype(np.float32)
    ids_NK = np.argsort(draw.random((1000, chosen)), -1)[:, :2].astype(np.int32)
    weight_NK = draw.random((1000, 2)).astype(np.float32)

    def gradients(mesh):
        def loss(x_ND, weight_NK, held):
            routed = Routed(x_ND=x_ND, ids_NK=jnp.asarray(ids_NK), weight_NK=weight_NK)
            return (run_experts(mesh, kernel_of(mesh), routed, ExpertWeights(**held))[0] ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(jnp.asarray(x_ND), jnp.asarray(weight_NK), held)

    pair = both(gradients)
    close(pair, 1e-4)
    for leaf in jax.tree.leaves(pair[0][1][2]):
        np.testing.assert_array_equal(leaf[chosen:], 0)


def test_attention_of_long_packed_rows():
    draw = np.random.default_rng(1)
    q, k, v = (draw.normal(size=(2, 2048, n, 64)).astype(np.float32) for n in (4, 2, 2))
    segment_BT = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], 512, axis=1).astype(np.int32)

    def gradients(mesh):
        weight_BT = (segment_BT != 0)[:, :, None, None]
        loss = lambda q, k, v: ((packed_attention(q, k, v, jnp.asarray(segment_BT), mesh) * weight_BT) ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(*map(jnp.asarray, (q, k, v)))

    close(both(gradients), 1e-4)


def test_token_log_probs_and_their_gradients():
    draw = np.random.default_rng(2)
    hidden_BTD = draw.normal(size=(2, 100, 64)).astype(np.float32)
    head_DV = draw.normal(0, 0.2, (64, 5000)).astype(np.float32)
    target_BT = draw.integers(0, 5000, (2, 100)).astype(np.int32)

    def gradients(mesh):
        def loss(hidden_BTD, head_DV):
            logp_BT, entropy_BT = token_logp(hidden_BTD, head_DV, jnp.asarray(target_BT), chunk=1024, mesh=mesh)
            return logp_BT.sum() + entropy_BT.sum()

        return jax.value_and_grad(loss, (0, 1))(jnp.asarray(hidden_BTD), jnp.asarray(head_DV))

    close(both(gradients), 1e-4)
