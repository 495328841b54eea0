import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.trust_region import tail_threshold
from tests.reference.runs import make_header, make_metrics, make_rows
from train.alarms import ALARM, LEVELS, WARNING, Level, Watch, levels_for, spans, too_few_sequences


def level(**changes):
    fields = {"metric": "x", "bad": "above", "level": 1.0, "meaning": "m.", "remedy": "r.", "source": "s"}
    return Level(**(fields | changes))


def raised_at(levels, values, quiet=20):
    watch = Watch(levels, quiet=quiet)
    return [step for step, value in enumerate(values) if watch.update({"x": value})]


def test_a_healthy_run_raises_nothing():
    watch = Watch(levels_for(make_header()))
    assert [raised for version in range(1, 100) for raised in watch.update(make_metrics(version))] == []
    assert spans(levels_for(make_header()), list(make_rows(99))) == []


@pytest.mark.parametrize(
    ("metric", "value", "severity"),
    [
        ("mismatch/abs_mean", 0.031, WARNING),
        ("mismatch/k3", 2.9e-3, WARNING),
        ("mismatch/k1", 0.11, WARNING),
        ("mismatch/mult_prob_error", 1.06, WARNING),
        ("mismatch/ess", 0.29, WARNING),
        ("routing/missing", 1e-6, ALARM),
        ("reward/zero_std", 1.0, ALARM),
        ("tokens", 0.0, ALARM),
        ("lag/max", 8.0, ALARM),
    ],
)
def test_a_value_past_its_level_is_raised_at_once_with_value_meaning_and_remedy(metric, value, severity):
    watch = Watch(levels_for(make_header()))
    (raised,) = watch.update(make_metrics(1) | {metric: value})
    (rule,) = (each for each in levels_for(make_header()) if each.metric == metric)
    assert raised.severity == severity
    assert raised.text == f"{rule.text()}: got {value:.4g}. {rule.meaning} {rule.remedy}"


@pytest.mark.parametrize("side", ["sat/active_low", "sat/active_high"])
def test_sat_off_on_a_side_is_raised_when_most_of_five_steps_have_it_off(side):
    rules = [rule for rule in LEVELS if rule.metric == side]
    watch = Watch(rules)
    # Off, on, off, on: two of four say nothing; the fifth makes it three of five.
    said = [bool(watch.update({side: value})) for value in (0.0, 1.0, 0.0, 1.0, 0.0)]
    assert said == [False, False, False, False, True]


def test_a_threshold_of_zero_is_raised_only_on_most_steps():
    rules = [rule for rule in LEVELS if rule.metric == "sat/threshold"]
    half = Watch(rules)
    assert not any(half.update({"sat/threshold": 0.1 * (step % 2)}) for step in range(60))
    most = Watch(rules)
    said = [bool(most.update({"sat/threshold": 0.0})) for _ in range(30)]
    assert said.index(True) == 19
    assert sum(said) == 1


def test_recompiling_steps_are_raised_and_a_flat_count_is_not():
    rules = [rule for rule in LEVELS if rule.metric == "compiles"]
    assert not any(Watch(rules).update({"compiles": 14.0}) for _ in range(60))
    watch = Watch(rules)
    assert any(watch.update({"compiles": float(step)}) for step in range(30))


def test_a_bad_value_is_raised_again_only_after_enough_good_steps():
    assert raised_at([level()], [2.0] * 50) == [0]
    assert raised_at([level()], [2.0, *[0.0] * 2, 2.0], quiet=3) == [0]
    assert raised_at([level()], [2.0, *[0.0] * 3, 2.0], quiet=3) == [0, 4]


@pytest.mark.parametrize(
    ("bad", "at", "expected"),
    [
        ("above", (0.9, 1.0, 1.1), (False, False, True)),
        ("at least", (0.9, 1.0, 1.1), (False, True, True)),
        ("below", (0.9, 1.0, 1.1), (True, False, False)),
        ("at most", (0.9, 1.0, 1.1), (True, True, False)),
    ],
)
def test_a_level_says_which_side_is_bad_and_whether_it_is_bad_itself(bad, at, expected):
    assert tuple(bool(Watch([level(bad=bad)]).update({"x": value})) for value in at) == expected


def test_a_value_that_is_not_finite_is_an_alarm_and_judges_no_level():
    (raised,) = Watch([level()]).update({"x": None})
    assert raised.severity == ALARM
    assert raised.text.startswith("x: expected a finite number")


def test_an_absent_metric_raises_nothing():
    assert Watch(LEVELS).update({}) == []


def test_a_run_is_watched_only_for_what_it_can_show():
    metrics = {rule.metric for rule in levels_for(make_header(radii="fixed", replay=False, max_lag=None))}
    assert not {"sat/active_low", "sat/threshold", "routing/missing", "lag/max"} & metrics
    assert "mismatch/k3" in metrics


def test_a_run_sets_its_own_levels_and_only_known_ones():
    (rule,) = (r for r in levels_for(make_header(levels={"mismatch/k3": 0.5})) if r.metric == "mismatch/k3")
    assert rule.level == 0.5
    with pytest.raises(ValueError, match=r"alarm levels: expected one of mismatch/abs_mean, .*, got mismatch/k4"):
        levels_for(make_header(levels={"mismatch/k4": 0.5}))


def test_a_span_says_where_how_often_and_how_bad():
    rows = [{"version": v, "x": x} for v, x in enumerate([0.0, 3.0, 0.0, 5.0, 0.5, None], start=10)]
    (span,) = spans([level()], rows)
    assert (span.steps, span.of, span.first, span.last, span.worst) == (2, 5, 11, 13, 5.0)
    (span,) = spans([level(bad="below")], rows)
    assert (span.steps, span.worst) == (3, 0.0)


def test_alarms_come_before_warnings_and_the_frequent_before_the_rare():
    rows = [{"version": v, "x": 2.0, "y": 2.0 * (v > 3), "z": 2.0 * (v > 5)} for v in range(1, 7)]
    rules = [level(metric="z"), level(metric="x"), level(metric="y", severity=ALARM)]
    assert [span.level.metric for span in spans(rules, rows)] == ["y", "x", "z"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 2.0]), max_size=60), st.integers(1, 5), st.sampled_from([0.0, 0.5]))
def test_something_is_raised_exactly_when_a_span_exists(values, window, share):
    rule = level(window=window, share=share)
    rows = [{"version": v, "x": x} for v, x in enumerate(values, start=1)]
    assert bool(raised_at([rule], values)) == bool(spans([rule], rows))


def test_every_level_explains_itself():
    for rule in LEVELS:
        assert rule.meaning.endswith(".")
        assert rule.remedy.endswith(".")
        assert rule.source
        assert dataclasses.replace(rule, level=9.0) != rule


@pytest.mark.parametrize(
    ("each", "quantile", "scope", "needed", "pool"),
    [
        ((9,), 0.9, "batch", 10, 9),
        ((4, 5), 0.9, "batch", 10, 9),
        ((30, 9), 0.9, "microbatch", 10, 9),
        ((4,), 0.8, "batch", 5, 4),
    ],
)
def test_a_pool_in_which_sat_on_sequences_cannot_fire_is_said(each, quantile, scope, needed, pool):
    said = too_few_sequences(each, quantile, scope)
    assert said is not None
    assert f"at least {needed} sequences in a {scope} (quantile {quantile}), got {pool}:" in said
    assert ("set quantile_scope = batch" in said) == (sum(each) >= needed)


@pytest.mark.parametrize(
    ("each", "quantile", "scope"),
    [
        ((10,), 0.9, "batch"),
        ((5, 5), 0.9, "batch"),
        ((10, 30), 0.9, "microbatch"),
        ((5,), 0.8, "batch"),
        ((2,), 0.5, "batch"),
    ],
)
def test_a_pool_in_which_it_can_is_passed_over(each, quantile, scope):
    assert too_few_sequences(each, quantile, scope) is None


def test_the_pool_that_is_warned_of_is_one_in_which_no_token_is_beyond_the_threshold():
    for sequences in range(1, 15):
        mismatch_BT = np.repeat(np.arange(1.0, sequences + 1, dtype=np.float32), 7)[None]
        threshold = float(tail_threshold(jnp.asarray(mismatch_BT), jnp.ones_like(mismatch_BT, bool), 0.9))
        fires = bool((mismatch_BT > threshold).any())
        assert fires == (too_few_sequences((sequences,), 0.9, "batch") is None)
