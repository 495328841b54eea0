import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.estimates import interval, majority, paired_difference, pass_at_k


def test_pass_at_k_worked_by_hand():
    # 4 samples, 2 right, k = 2: 1 - C(2,2)/C(4,2) = 5/6; 1 right: 1 - C(3,2)/C(4,2) = 1/2.
    assert pass_at_k([2, 1, 0, 4], 4, 2) == pytest.approx([5 / 6, 1 / 2, 0, 1])
    assert pass_at_k([2, 1], 4, 1) == pytest.approx([1 / 2, 1 / 4])  # pass@1 is avg@n
    assert pass_at_k([1, 0], 4, 4) == pytest.approx([1, 0])


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_binomial_formula(sizes):
    n, c, k = sizes
    assert pass_at_k([c], n, k)[0] == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_pass_at_k_has_no_bias():
    rng = np.random.default_rng(0)
    right = rng.binomial(8, 0.3, 40_000).tolist()
    assert pass_at_k(right, 8, 4).mean() == pytest.approx(1 - 0.7**4, abs=0.005)


def test_pass_at_k_stays_exact_where_factorials_overflow():
    assert pass_at_k([1], 5000, 2500)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(("right", "k"), [([1], 0), ([1], 5), ([5], 1), ([-1], 1)])
def test_counts_that_cannot_be_are_refused(right, k):
    with pytest.raises(ValueError, match="pass@k: expected"):
        pass_at_k(right, 4, k)


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9"], [True, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),  # no answer has no vote
        ([None, None], [False, False], 0.0),
        ([], [], 0.0),
        (["7", "7", "7"], [True, True, False], 1.0),  # one answer, judged differently
    ],
)
def test_majority_worked_by_hand(answers, right, share):
    assert majority(answers, right) == pytest.approx(share)


def test_an_interval_holds_the_mean_and_is_a_function_of_its_seed():
    values = np.random.default_rng(1).binomial(16, 0.4, 30) / 16
    found = interval(values, seed=3)
    assert found.mean == pytest.approx(values.mean())
    assert found.low < found.mean < found.high
    assert interval(values, seed=3) == found
    assert interval(np.ones(5), seed=0).low == interval(np.ones(5), seed=0).high == 1.0
    with pytest.raises(ValueError, match="expected at least one problem, got none"):
        interval(np.zeros(0), seed=0)


def test_the_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    covered = paired_covered = 0
    trials = 200
    for trial in range(trials):
        chance_P = rng.beta(1.0, 1.0, 60)  # problems drawn from a population of mean 1/2
        better_P = np.clip(chance_P + 0.1, 0, 1)
        one, other = rng.binomial(8, better_P) / 8, rng.binomial(8, chance_P) / 8
        found = interval(other, seed=trial)
        covered += found.low <= 0.5 <= found.high
        # Of Beta(1, 1) + 0.1 clipped at 1: the mean gain is 0.1 - 0.1^2 / 2.
        gain = paired_difference(one, other, seed=trial)
        paired_covered += gain.low <= 0.095 <= gain.high
    # 95 % of 200, within three standard errors (and the percentile bootstrap's own shortfall at 60 problems).
    assert 0.89 <= covered / trials <= 0.99
    assert 0.89 <= paired_covered / trials <= 0.99


def test_pairing_is_narrower_than_two_intervals_where_problems_differ():
    rng = np.random.default_rng(3)
    chance_P = np.repeat([0.05, 0.95], 30)
    one, other = rng.binomial(16, chance_P) / 16, rng.binomial(16, chance_P) / 16
    paired, alone = paired_difference(one, other, seed=0), interval(one, seed=0)
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="expected the same problems, got 60 and 59"):
        paired_difference(one, other[:-1], seed=0)
