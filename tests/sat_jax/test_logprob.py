"""Chunked token log-probs against an obvious float64 twin, and the memory that they promise to save."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.logprob import token_logp, token_scores
from sat_jax.mesh import MeshConfig, make_mesh, sharding

B, T, D, V = 3, 5, 16, 37


def twin(hidden_BTD, head_DV, target_BT, temperature):
    """Log-softmax of the whole row, in float64."""
    logit_BTV = np.asarray(hidden_BTD, np.float64) @ np.asarray(head_DV, np.float64) / temperature
    logit_BTV -= logit_BTV.max(axis=-1, keepdims=True)
    logp_BTV = logit_BTV - np.log(np.exp(logit_BTV).sum(axis=-1, keepdims=True))
    picked_BT = np.take_along_axis(logp_BTV, np.asarray(target_BT)[..., None], axis=-1)[..., 0]
    return picked_BT, -(np.exp(logp_BTV) * logp_BTV).sum(axis=-1), np.exp(logp_BTV), logp_BTV


def twin_gradients(hidden_BTD, head_DV, target_BT, temperature, dlogp_BT, dentropy_BT):
    """The same two gradients, written out."""
    _, entropy_BT, p_BTV, logp_BTV = twin(hidden_BTD, head_DV, target_BT, temperature)
    dlogit_BTV = np.asarray(dlogp_BT)[..., None] * (np.eye(head_DV.shape[1])[np.asarray(target_BT)] - p_BTV)
    dlogit_BTV -= np.asarray(dentropy_BT)[..., None] * p_BTV * (logp_BTV + entropy_BT[..., None])
    dlogit_BTV /= temperature
    dhidden_BTD = dlogit_BTV @ np.asarray(head_DV, np.float64).T
    return dhidden_BTD, np.einsum("btd,btv->dv", np.asarray(hidden_BTD, np.float64), dlogit_BTV)


def problem(seed, scale=0.3):
    random = np.random.default_rng(seed)
    hidden_BTD = jnp.asarray(random.normal(size=(B, T, D)), jnp.float32)
    head_DV = jnp.asarray(random.normal(size=(D, V)) * scale, jnp.float32)
    target_BT = jnp.asarray(random.integers(0, V, (B, T)))
    return hidden_BTD, head_DV, target_BT, jnp.asarray(random.normal(size=(2, B, T)), jnp.float32)


@functools.partial(jax.jit, static_argnames="chunk")
def score_and_gradients(hidden_BTD, head_DV, target_BT, dlogp_BT, dentropy_BT, temperature, chunk):
    score = functools.partial(token_logp, target_BT=target_BT, temperature=temperature, chunk=chunk)
    outputs, pull_back = jax.vjp(score, hidden_BTD, head_DV)
    return *outputs, *pull_back((dlogp_BT, dentropy_BT))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([5, 36, 37, None]), st.floats(0.3, 3.0))
def test_values_and_gradients_equal_the_whole_rows_at_any_chunk_and_temperature(seed, chunk, temperature):
    hidden_BTD, head_DV, target_BT, (dlogp_BT, dentropy_BT) = problem(seed)
    got = score_and_gradients(hidden_BTD, head_DV, target_BT, dlogp_BT, dentropy_BT, temperature, chunk)
    logp_BT, entropy_BT, *got_gradients = got
    wanted_BT, wanted_entropy_BT, _, _ = twin(hidden_BTD, head_DV, target_BT, np.float32(temperature))
    np.testing.assert_allclose(logp_BT, wanted_BT, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy_BT, wanted_entropy_BT, rtol=1e-6, atol=2e-6)
    wanted = twin_gradients(hidden_BTD, head_DV, target_BT, temperature, dlogp_BT, dentropy_BT)
    for mine, reference in zip(got_gradients, wanted, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-6, atol=1e-6 * np.abs(reference).max())


@pytest.mark.parametrize("which", [0, 1])
def test_one_result_alone_is_differentiated_like_both_with_the_other_at_zero(which):
    hidden_BTD, head_DV, target_BT, pulls = problem(6)

    def alone(hidden_BTD, head_DV):
        return (token_logp(hidden_BTD, head_DV, target_BT, chunk=8)[which] * pulls[which]).sum()

    got = jax.jit(jax.grad(alone, (0, 1)))(hidden_BTD, head_DV)
    zeroed = [pull if index == which else np.zeros_like(pull) for index, pull in enumerate(pulls)]
    for mine, reference in zip(got, twin_gradients(hidden_BTD, head_DV, target_BT, 1.0, *zeroed), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-6, atol=1e-6 * np.abs(reference).max())


def products(function, *arguments):
    """Matrix products in a function's program, those in a loop once."""
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general[")


def test_known_scores_are_given_back_with_the_gradient_for_one_product_less():
    hidden_BTD, head_DV, target_BT, (dlogp_BT, dentropy_BT) = problem(7)
    target_BT = target_BT.at[0, 0].set(V)  # stays NaN
    dlogp_BT, dentropy_BT = dlogp_BT.at[0, 0].set(0), dentropy_BT.at[0, 0].set(0)
    known = token_scores(hidden_BTD, head_DV, target_BT, temperature=0.7, chunk=8)

    def pulled(hidden_BTD, head_DV, known):
        score = functools.partial(token_scores, target_BT=target_BT, temperature=0.7, chunk=8, known=known)
        scores, pull_back = jax.vjp(score, hidden_BTD, head_DV)
        zero_BT = jnp.zeros_like(dlogp_BT)
        pulls = dataclasses.replace(scores, logp_BT=dlogp_BT, entropy_BT=dentropy_BT, normaliser_BT=zero_BT)
        return scores, pull_back(pulls)

    scores, gradients = jax.jit(pulled)(hidden_BTD, head_DV, known)
    _, wanted = jax.jit(pulled)(hidden_BTD, head_DV, None)
    chex.assert_trees_all_equal(scores, known)
    chex.assert_trees_all_close(gradients, wanted, rtol=1e-5, atol=1e-6)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients)
    assert products(pulled, hidden_BTD, head_DV, None) == 4
    assert products(pulled, hidden_BTD, head_DV, known) == 3
    moved = dataclasses.replace(known, logp_BT=known.logp_BT - 1)
    np.testing.assert_array_equal(jax.jit(pulled)(hidden_BTD, head_DV, moved)[0].logp_BT, known.logp_BT - 1)
    with pytest.raises(ValueError, match=r"normaliser_BT: expected axis T of size 5"):
        token_scores(
            hidden_BTD, head_DV, target_BT, known=dataclasses.replace(known, normaliser_BT=known.logp_BT[:, 1:])
        )


def test_three_tokens_by_hand():
    head_DV = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    for chunk in (1, 2, 3):
        logp_BT, entropy_BT = token_logp(jnp.ones((1, 1, 1)), head_DV, jnp.array([[1]]), chunk=chunk)
        np.testing.assert_allclose(logp_BT, [[np.log(0.25)]], rtol=1e-6)
        np.testing.assert_allclose(entropy_BT, [[1.5 * np.log(2)]], rtol=1e-6)  # 0.5 * 1 bit + 2 * 0.25 * 2 bits
        tempered_BT, _ = token_logp(jnp.ones((1, 1, 1)), head_DV, jnp.array([[1]]), temperature=0.5, chunk=chunk)
        np.testing.assert_allclose(tempered_BT, [[np.log(0.0625 / 0.375)]], rtol=1e-6)  # probabilities squared


def test_temperature_is_traced_without_a_new_program():
    hidden_BTD, head_DV, target_BT, _ = problem(0)
    traces = []

    @jax.jit
    def score(temperature):
        traces.append(temperature)
        return token_logp(hidden_BTD, head_DV, target_BT, temperature=temperature)[0]

    results = [score(jnp.float32(temperature)) for temperature in (0.7, 1.0, 1.3)]
    assert len(traces) == 1
    assert not np.array_equal(results[0], results[1])


def test_logits_far_from_zero_stay_exact():
    hidden_BTD, head_DV, target_BT, _ = problem(1, scale=30.0)  # logits of some hundreds
    logp_BT, entropy_BT = token_logp(hidden_BTD, head_DV, target_BT, chunk=7)
    wanted_BT, wanted_entropy_BT, _, _ = twin(hidden_BTD, head_DV, target_BT, 1.0)
    np.testing.assert_allclose(logp_BT, wanted_BT, rtol=1e-6, atol=1e-4)  # 1e-4 = float32 spacing of the logits
    np.testing.assert_allclose(entropy_BT, wanted_entropy_BT, rtol=1e-3, atol=1e-4)
    assert (logp_BT <= 0).all()
    assert (entropy_BT >= 0).all()


def test_bfloat16_products_are_accumulated_and_differentiated_in_float32():
    hidden_BTD, head_DV, target_BT, (dlogp_BT, dentropy_BT) = problem(2)
    rough_BTD, rough_DV = jnp.asarray(hidden_BTD, jnp.bfloat16), jnp.asarray(head_DV, jnp.bfloat16)
    got = score_and_gradients(rough_BTD, head_DV, target_BT, dlogp_BT, dentropy_BT, 1.0, 8)
    logp_BT, entropy_BT, dhidden_BTD, dhead_DV = got
    assert logp_BT.dtype == entropy_BT.dtype == jnp.float32
    wanted_BT, wanted_entropy_BT, _, _ = twin(rough_BTD, rough_DV, target_BT, 1.0)  # rounded operands, exact sums
    np.testing.assert_allclose(logp_BT, wanted_BT, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy_BT, wanted_entropy_BT, rtol=1e-6, atol=2e-6)
    assert (dhidden_BTD.dtype, dhead_DV.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = twin_gradients(rough_BTD, rough_DV, target_BT, 1.0, dlogp_BT, dentropy_BT)
    np.testing.assert_allclose(dhead_DV, wanted[1], atol=4e-3 * np.abs(wanted[1]).max())
    assert (np.asarray(dhead_DV).view(np.uint32) & 0xFFFF).any()  # not float32 that went through bfloat16


def test_an_id_outside_the_vocabulary_is_nan_and_leaves_its_neighbours_alone():
    hidden_BTD, head_DV, target_BT, _ = problem(3)
    clean_BT, _ = token_logp(hidden_BTD, head_DV, target_BT, chunk=8)
    target_BT = target_BT.at[0, 0].set(-1).at[1, 1].set(V)
    logp_BT, _ = token_logp(hidden_BTD, head_DV, target_BT, chunk=8)
    outside_BT = (target_BT < 0) | (target_BT >= V)
    assert np.isnan(logp_BT[outside_BT]).all()
    np.testing.assert_array_equal(logp_BT[~outside_BT], clean_BT[~outside_BT])


def test_wrong_arguments_are_named():
    hidden_BTD, head_DV, target_BT, _ = problem(4)
    with pytest.raises(ValueError, match=r"head_DV: expected axis D of size 16"):
        token_logp(hidden_BTD, head_DV[1:], target_BT)
    with pytest.raises(ValueError, match=r"temperature: expected a positive number, got 0"):
        token_logp(hidden_BTD, head_DV, target_BT, temperature=0)
    with pytest.raises(ValueError, match=r"chunk: expected at least 1"):
        token_logp(hidden_BTD, head_DV, target_BT, chunk=0)


@pytest.mark.parametrize("chunk", [None, 12])
@pytest.mark.parametrize(
    "axes", [{"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 4}], ids=str
)
def test_a_head_cut_along_its_vocabulary_scores_and_learns_the_same(axes, chunk):
    # Eight rows and 72 columns; with chunks of 12 columns over all devices the last one overlaps its predecessor.
    random = np.random.default_rng(5)
    hidden_BTD, head_DV = (jnp.asarray(random.normal(0, 0.5, size), jnp.float32) for size in ((8, T, D), (D, 72)))
    target_BT = jnp.asarray(random.integers(0, 72, (8, T))).at[0, 0].set(72).at[7, 1].set(-1)
    pulls = [
        jnp.where((target_BT < 0) | (target_BT > 71), 0, jnp.asarray(random.normal(size=(8, T)))) for _ in range(2)
    ]

    def gradients(hidden_BTD, head_DV, mesh, known=None):
        def score(hidden_BTD, head_DV):
            scores = token_scores(hidden_BTD, head_DV, target_BT, temperature=0.7, chunk=chunk, mesh=mesh, known=known)
            return scores.logp_BT, scores.entropy_BT

        outputs, pull_back = jax.vjp(score, hidden_BTD, head_DV)
        return *outputs, *pull_back(tuple(pull.astype(jnp.float32) for pull in pulls))

    mesh = make_mesh(MeshConfig(**axes))
    placed = jax.device_put(head_DV, sharding(mesh, "unsharded", "vocabulary"))
    got = jax.jit(functools.partial(gradients, mesh=mesh))(hidden_BTD, placed)
    assert got[3].sharding.is_equivalent_to(placed.sharding, 2)
    wanted = gradients(hidden_BTD, head_DV, None)
    known = token_scores(hidden_BTD, placed, target_BT, temperature=0.7, chunk=chunk, mesh=mesh)
    again = jax.jit(functools.partial(gradients, mesh=mesh))(hidden_BTD, placed, known=known)
    for mine, spared, reference in zip(got, again, wanted, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(spared, reference, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_vocabulary_costs_a_fraction_of_its_logits(dtype):
    tokens, width, vocabulary = 1024, 256, 151_936
    arguments = (
        jax.ShapeDtypeStruct((1, tokens, width), dtype),
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    loss = lambda hidden_BTD, head_DV, target_BT: token_logp(hidden_BTD, head_DV, target_BT)[0].sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()  # nothing of this size is run
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < tokens * vocabulary * 4 / 5  # a fifth of the logits
