"""What each rematerialisation policy computes twice, counted in the traced program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from sat_jax.model import Policy, PolicyConfig
from sat_jax.model.config import REMAT

LENGTH = 1040  # two blocks of the chunked attention


def count(jaxpr, primitive):
    """How often a primitive stands in a jaxpr and in its loops and calls."""
    own = sum(equation.primitive.name == primitive for equation in jaxpr.eqns)
    return own + sum(count(inner, primitive) for e in jaxpr.eqns for inner in jaxprs_in_params(e.params))


def gradient_program(remat):
    policy = nnx.eval_shape(lambda: Policy(PolicyConfig.tiny(remat=remat)))
    graph, params = nnx.split(policy, nnx.Param)
    token_BT = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)

    def loss(params, token_BT):
        hidden_BTD, _ = nnx.merge(graph, params)(token_BT, jnp.ones_like(token_BT), token_BT)
        return hidden_BTD.sum()

    return jax.make_jaxpr(jax.grad(loss))(params, token_BT).jaxpr


@pytest.fixture(scope="module")
def programs():
    return {remat: gradient_program(remat) for remat in REMAT}


def test_keeping_attention_saves_its_second_forward_pass_and_nothing_else(programs):
    # One loop over key blocks forward, one backward; the experts' loops are the same in all.
    loops = {remat: count(program, "while") for remat, program in programs.items()}
    assert loops["full"] == loops["attention"] + 1
    assert loops["attention"] == loops["projections"]


def test_keeping_projections_saves_four_products_more(programs):
    products = {remat: count(program, "dot_general") for remat, program in programs.items()}
    assert products["attention"] - products["projections"] == 4
    assert products["full"] > products["attention"]
    assert products["projections"] > products["none"]
