import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.model import PolicyConfig
from sat_jax.model.router import route, top_k

CONFIG = PolicyConfig.tiny(experts=8, experts_per_token=3)
TOKENS = 16
_route = jax.jit(route, static_argnames="config")


def scores(seed):
    return np.random.default_rng(seed).normal(0, 2, (TOKENS, CONFIG.experts)).astype(np.float32)


def foreign(seed):
    """Distinct ids that have nothing to do with the scores."""
    return np.argsort(np.random.default_rng(seed + 1).random((TOKENS, CONFIG.experts)), -1)[:, :3].astype(np.uint8)


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def test_the_lowest_id_wins_a_tie():
    score = jnp.array([[0.0, 1.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0], [-0.0, 0.0, 0.0, -0.0, 5.0]])
    np.testing.assert_array_equal(top_k(score, 2)[:2], [[1, 2], [0, 1]])
    np.testing.assert_array_equal(top_k(score, 3)[2], [4, 0, 1])


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
@settings(max_examples=15, deadline=None)
def test_ties_go_to_the_lowest_id_among_many(seed, levels):
    # Scores of few values, so that ties are everywhere.
    score = np.random.default_rng(seed).integers(0, levels, (TOKENS, CONFIG.experts)).astype(np.float32)
    expected = np.argsort(-score, axis=-1, kind="stable")[:, :3]
    np.testing.assert_array_equal(_route(score, foreign(0), np.zeros(TOKENS, bool), config=CONFIG)[0], expected)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_a_free_row_takes_the_best_with_renormalised_softmax(seed):
    score = scores(seed)
    ids, weight, agreement = _route(score, foreign(seed), np.zeros(TOKENS, bool), config=CONFIG)
    expected = np.take_along_axis(softmax(score), np.asarray(ids), -1)
    np.testing.assert_array_equal(ids, np.argsort(-score, axis=-1, kind="stable")[:, :3])
    np.testing.assert_allclose(weight, expected / expected.sum(-1, keepdims=True), rtol=2e-6)
    np.testing.assert_array_equal(agreement, 1.0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_foreign_ids_are_used_and_renormalised_over_live_scores(seed):
    score, replayed = scores(seed), foreign(seed)
    ids, weight, agreement = _route(score, replayed, np.ones(TOKENS, bool), config=CONFIG)
    expected = np.take_along_axis(softmax(score), replayed.astype(np.int64), -1)
    live = np.argsort(-score, axis=-1, kind="stable")[:, :3]
    shared = [len(set(a) & set(b)) / 3 for a, b in zip(replayed.tolist(), live.tolist(), strict=True)]
    np.testing.assert_array_equal(ids, replayed)
    np.testing.assert_allclose(weight, expected / expected.sum(-1, keepdims=True), rtol=2e-6)
    np.testing.assert_allclose(agreement, shared, rtol=1e-6)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_replaying_its_own_choice_changes_no_bit(seed):
    score, absent, present = scores(seed), np.zeros(TOKENS, bool), np.ones(TOKENS, bool)
    free = _route(score, foreign(seed), absent, config=CONFIG)
    replayed = _route(score, np.asarray(free[0], np.uint8), present, config=CONFIG)
    for one, other in zip(free, replayed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_present_rows_are_replayed():
    score, replayed = scores(3), foreign(3)
    present = np.arange(TOKENS) % 3 == 0
    mixed = _route(score, replayed, present, config=CONFIG)
    free = _route(score, replayed, np.zeros(TOKENS, bool), config=CONFIG)
    forced = _route(score, replayed, np.ones(TOKENS, bool), config=CONFIG)
    for got, absent_row, present_row in zip(mixed, free, forced, strict=True):
        np.testing.assert_array_equal(got[present], present_row[present])
        np.testing.assert_array_equal(got[~present], absent_row[~present])


def test_without_renormalisation_the_weights_are_the_softmax_over_all():
    config = PolicyConfig.tiny(experts=8, experts_per_token=3, norm_topk=False)
    score, replayed = scores(4), foreign(4)
    _, weight, _ = _route(score, replayed, np.ones(TOKENS, bool), config=config)
    np.testing.assert_allclose(weight, np.take_along_axis(softmax(score), replayed.astype(np.int64), -1), rtol=2e-6)


@pytest.mark.parametrize("norm_topk", [True, False])
def test_the_router_learns_under_replay(norm_topk):
    config = PolicyConfig.tiny(experts=8, experts_per_token=3, norm_topk=norm_topk)
    score, replayed, present = scores(5), jnp.asarray(foreign(5)), jnp.ones(TOKENS, bool)
    pull = np.random.default_rng(6).normal(size=(TOKENS, 3)).astype(np.float32)
    gradient = jax.grad(lambda s: (route(s, replayed, present, config)[1] * pull).sum())(score)

    # By hand: d w_i / d z_j = w_i (1[i = j] - p_j), p the softmax over the used ids (renormalised) or over all.
    chosen = np.eye(8)[np.asarray(replayed)]
    p = softmax(np.where(chosen.any(1), score, -np.inf)) if norm_topk else softmax(score)
    weight = np.take_along_axis(p, np.asarray(replayed, np.int64), -1)
    expected = ((pull * weight)[:, :, None] * (chosen - p[:, None])).sum(1)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert (np.abs(gradient).sum(-1) > 1e-3).all()


def test_replayed_experts_of_vanishing_probability_have_finite_weights():
    score = np.zeros((1, 8), np.float32)
    score[0, :5] = 1000.0
    ids, weight, agreement = _route(score, np.array([[7, 6, 5]]), np.ones(1, bool), config=CONFIG)
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(agreement, 0.0)
    np.testing.assert_array_equal(ids, [[7, 6, 5]])


def test_a_trace_of_another_k_is_refused():
    with pytest.raises(ValueError, match=r"replayed_NK: expected K = 3, got 2"):
        route(jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.uint8), jnp.zeros(4, bool), CONFIG)
