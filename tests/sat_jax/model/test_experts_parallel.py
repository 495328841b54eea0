"""128 experts, eight a token, on eight devices: how much work there is, that nothing is dropped, and what is held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model.blocked import BLOCKED
from sat_jax.model.dispatch import ExpertWeights, Routed
from sat_jax.model.experts import run_experts

TOKENS, WIDTH, HIDDEN, EXPERTS, SLOTS = 8192, 16, 16, 128, 8
MESH = make_mesh(MeshConfig(expert=8))
_run = jax.jit(run_experts, static_argnums=(0, 1))


def routed(score_NE):
    """Tokens that choose their eight highest scores, weighted at random."""
    draw = np.random.default_rng(1)
    return Routed(
        x_ND=jnp.asarray(draw.normal(size=(len(score_NE), WIDTH)), jnp.float32),
        ids_NK=jnp.asarray(np.argsort(-score_NE, -1)[:, :SLOTS], jnp.int32),
        weight_NK=jnp.asarray(draw.random((len(score_NE), SLOTS)), jnp.float32),
    )


def weights():
    draw = np.random.default_rng(2)
    shapes = {"gate_EDF": (WIDTH, HIDDEN), "up_EDF": (WIDTH, HIDDEN), "down_EFD": (HIDDEN, WIDTH)}
    return ExpertWeights(**{k: jnp.asarray(draw.normal(0, 0.3, (EXPERTS, *s)), jnp.float32) for k, s in shapes.items()})


def balanced():
    return np.random.default_rng(0).random((TOKENS, EXPERTS))


def on_one_shard():
    """Only the first 16 experts, which one of eight devices holds, are ever chosen."""
    return np.where(np.arange(EXPERTS) < 16, 1, 0) + balanced()


@pytest.mark.parametrize("axes", [{"expert": 8}, {"fsdp": 2, "expert": 4}, {"expert": 4, "tensor": 2}], ids=str)
def test_balanced_routing_runs_at_most_15_percent_more_rows_than_are_useful(axes):
    _, executed = _run(make_mesh(MeshConfig(**axes)), BLOCKED, routed(balanced()), weights())
    useful = TOKENS * SLOTS * axes.get("tensor", 1)  # every shard of `tensor` runs its part of each row
    assert useful <= int(executed.sum()) <= 1.15 * useful


def test_a_load_on_one_device_is_run_whole():
    tokens = routed(on_one_shard())
    out_ND, executed = _run(MESH, BLOCKED, tokens, weights())
    assert int(executed[0]) >= TOKENS * SLOTS
    np.testing.assert_array_equal(executed[1:], 0)
    expected_ND, _ = _run(one_device_mesh(), BLOCKED, tokens, weights())
    np.testing.assert_allclose(out_ND, expected_ND, rtol=1e-5, atol=1e-5)


def sizes_of(jaxpr):
    """Elements of every value that is computed in a jaxpr or inside its loops and calls."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(out.aval.shape)) for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_of(inner)


def test_no_value_holds_every_expert_of_every_token():
    def loss(x_ND, weight_NK, held):
        tokens = Routed(x_ND=x_ND, ids_NK=routed(balanced()).ids_NK, weight_NK=weight_NK)
        return run_experts(MESH, BLOCKED, tokens, held)[0].sum()

    tokens = routed(balanced())
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(tokens.x_ND, tokens.weight_NK, weights())
    sizes = list(sizes_of(jaxpr.jaxpr))
    assert max(sizes) >= TOKENS * WIDTH  # the walk reached the arrays of all tokens
    assert max(sizes) < TOKENS * (EXPERTS // 8) * WIDTH
