import math

import pytest

from tests.reference.runs import make_rows
from train.outcome import changes, check_summary, edge_window

SUMMARY = {
    "prompts": 400,
    "before": {"eval/sampled_accuracy": 0.5, "eval/greedy_accuracy": 1.0, "entropy": 0.6},
    "after": {"eval/sampled_accuracy": 0.8, "eval/greedy_accuracy": 0.9, "entropy": 0.2},
}


def test_the_figures_before_and_after_are_shown_with_their_change():
    texts = [change.texts() for change in changes(SUMMARY, [])]
    # Two standard errors of 0.5 and 0.8 over 400 prompts: 2 sqrt(.25/400) = 0.05 and 2 sqrt(.16/400) = 0.04.
    assert texts == [
        ("held-out accuracy, sampled", "0.500 ± 0.050", "0.800 ± 0.040", "+0.300"),
        ("held-out accuracy, greedy", "1.000 ± 0.000", "0.900 ± 0.030", "-0.100"),
        ("entropy, nats per token", "0.600", "0.200", "-0.400"),
    ]


def test_reward_is_the_mean_of_the_first_and_last_steps():
    rows = [{"version": v, "reward/mean": float(v)} for v in range(1, 101)]
    (reward,) = changes(None, rows)
    assert reward.label == "training reward (first and last 20 steps)"
    assert (reward.before, reward.after) == (10.5, 90.5)


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (1, 1), (7, 1), (8, 2), (79, 19), (80, 20), (5000, 20)])
def test_the_first_and_last_steps_never_overlap_by_more_than_one(steps, window):
    assert edge_window(steps) == window


def test_a_summary_overrides_what_the_log_says():
    rows = list(make_rows(40))
    (reward, *_rest) = changes({"before": {"reward/mean": 0.1}, "after": {"reward/mean": 0.9}}, rows)
    assert (reward.label, reward.before, reward.after) == ("training reward", 0.1, 0.9)


def test_a_run_that_was_stopped_shows_what_it_has():
    texts = [change.texts() for change in changes({"prompts": 512, "before": SUMMARY["before"]}, list(make_rows(1)))]
    assert ("held-out accuracy, greedy", "1.000 ± 0.000", "-", "") in texts
    assert texts[0][0] == "training reward (first and last step)"


def test_no_steps_and_no_summary_have_no_outcome():
    assert changes(None, []) == []


def test_values_that_were_not_finite_are_left_out_of_a_mean():
    rows = [{"version": 1, "reward/mean": None}, {"version": 2, "reward/mean": 0.5}]
    (reward,) = changes(None, rows)
    assert (reward.before, reward.after) == (None, 0.5)


def test_further_figures_follow_under_their_own_names():
    found = changes({"before": {"eval/pass_at_8": 0.25}, "after": {"eval/pass_at_8": 0.5}}, [])
    assert [change.texts() for change in found] == [("eval/pass_at_8", "0.250", "0.500", "+0.250")]


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"befor": {}}, "summary: expected the keys prompts, before, after, facts, got befor"),
        ({"after": {"entropy": math.nan}}, "summary: expected a finite number as entropy, got nan"),
        ({"before": {"entropy": "low"}}, "summary: expected a finite number as entropy, got 'low'"),
    ],
)
def test_a_wrong_summary_is_refused(summary, message):
    with pytest.raises(ValueError, match=message):
        check_summary(summary)
