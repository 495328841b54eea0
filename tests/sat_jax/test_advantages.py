import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.advantages import (
    AdvantageConfig,
    OverlongConfig,
    group_advantages,
    informative_groups,
    overlong_penalty,
)

REWARDS = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=5).map(np.array)


def test_values_worked_by_hand():
    # mean 0.5, sample std sqrt((4 * 0.25) / 3) = 0.57735
    (row,) = group_advantages(np.array([[1.0, 0.0, 1.0, 0.0]]), AdvantageConfig())
    assert row == pytest.approx([0.8660239, -0.8660239, 0.8660239, -0.8660239], abs=1e-6)
    assert row.dtype == np.float32


def test_without_std_only_the_mean_is_taken_off():
    (row,) = group_advantages(np.array([[3.0, 0.0, 0.0]]), AdvantageConfig(std="none"))
    assert row.tolist() == [2, -1, -1]


def test_leave_one_out_compares_with_the_others():
    (row,) = group_advantages(np.array([[3.0, 0.0, 0.0]]), AdvantageConfig(std="none", baseline="leave_one_out"))
    assert row.tolist() == [3, -1.5, -1.5]


def test_batch_std_is_one_number_for_all_groups():
    reward_PM = np.array([[1.0, 0.0], [3.0, 1.0]])
    expected = (reward_PM - reward_PM.mean(1, keepdims=True)) / (reward_PM.std(ddof=1) + 1e-6)
    assert group_advantages(reward_PM, AdvantageConfig(std="batch")) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1e6])
def test_a_group_without_differences_is_exactly_0(std, reward):
    # 0.1 * 7 / 7 is not 0.1 in binary: a rounding difference over epsilon would be an advantage.
    reward_PM = np.array([[reward] * 7, [0.0, 1.0] + [0.5] * 5])
    advantage_PM = group_advantages(reward_PM, AdvantageConfig(std=std))
    assert np.all(advantage_PM[0] == 0)
    assert np.any(advantage_PM[1] != 0)


def test_epsilon_0_divides_nothing_by_0():
    assert np.all(group_advantages(np.ones((1, 3)), AdvantageConfig(epsilon=0)) == 0)


def test_groups_of_unequal_sizes_come_as_lists():
    rows = group_advantages([[1, 0], [1, 0, 0, 1]], AdvantageConfig())
    assert [row.shape for row in rows] == [(2,), (4,)]
    assert rows[0] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=2e-6)


def test_no_groups_give_no_advantages():
    assert group_advantages([], AdvantageConfig()) == []
    assert group_advantages(np.zeros((0, 4)), AdvantageConfig()).size == 0


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"rewards of group 1: expected at least 2 members .* got shape \(1,\)"):
        group_advantages([[1, 0], [1]], AdvantageConfig())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=r"reward: expected a finite number, got (nan|inf) \(group 1, member 2\)"):
        group_advantages(np.array([[0, 1, 0], [1, 0, bad]]), AdvantageConfig())


@pytest.mark.parametrize(
    ("field", "value"), [("std", "sample"), ("baseline", "median"), ("epsilon", -1), ("tolerance", math.nan)]
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        AdvantageConfig(**{field: value})


def test_presets_carry_their_authors_scaling():
    assert AdvantageConfig.for_objective("dr_grpo").std == "none"
    assert AdvantageConfig.for_objective("dppo").std == "none"
    assert AdvantageConfig.for_objective("sat_grpo") == AdvantageConfig()
    with pytest.raises(ValueError, match="did you mean dr_grpo"):
        AdvantageConfig.for_objective("drgrpo")


@settings(max_examples=40, deadline=None)
@given(REWARDS, st.sampled_from(["group", "none"]), st.floats(-5, 5, width=32))
def test_advantages_sum_to_0_and_ignore_a_common_shift(reward_PM, std, shift):
    config = AdvantageConfig(std=std, tolerance=1e-4)
    advantage_PM = group_advantages(reward_PM, config)
    assert advantage_PM.sum(1) == pytest.approx(0, abs=1e-4)
    spread = np.ptp(reward_PM, axis=1)
    clear = (spread > 1e-3) | (spread == 0)
    assert group_advantages(reward_PM + shift, config)[clear] == pytest.approx(advantage_PM[clear], abs=1e-3)


def test_dynamic_sampling_keeps_groups_that_differ():
    assert informative_groups([[1, 1], [0, 1, 0], [0.1, 0.1, 0.1]]).tolist() == [False, True, False]


def test_overlong_ramp_by_hand():
    config = OverlongConfig(max_length=100, cache=20, factor=0.5)
    assert overlong_penalty(np.array([10, 80, 85, 90, 100, 500]), config).tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]


@pytest.mark.parametrize("fields", [{"cache": 0}, {"cache": 30000}, {"factor": -1.0}])
def test_bad_overlong_settings_are_named(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}: expected"):
        OverlongConfig(**fields)
