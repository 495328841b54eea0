import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sat_jax.trust_region import (
    SatConfig,
    effective_radii,
    sat_radii,
    sides_active,
    tail_rank,
    tail_threshold,
)
from tests.reference import trust_region_twin as twin

SHAPE = (4, 16)
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e4, -3.0], np.float32)
THRESHOLD = jax.jit(tail_threshold, static_argnums=2)
RADII = jax.jit(sat_radii, static_argnums=2)
EFFECTIVE = jax.jit(effective_radii, static_argnums=1)


def vector_mismatch():
    """The vector of the paper's definition: 17 zeros, +0.10, +0.15, -0.15."""
    return jnp.array([[0.0] * 17 + [0.10, 0.15, -0.15]], jnp.float32)


def random_mismatch(seed, ties=True):
    """Heavy tails; with ties, also repeated values and exact zeros."""
    rng = np.random.default_rng(seed)
    mismatch_BT = (10 ** rng.uniform(-4, 0.5) * rng.standard_t(2, SHAPE)).astype(np.float32)
    if ties:
        mismatch_BT = np.where(rng.random(SHAPE) < 0.3, rng.choice(mismatch_BT.ravel()), mismatch_BT)
        mismatch_BT = np.where(rng.random(SHAPE) < 0.2, np.float32(0), mismatch_BT)
    return mismatch_BT, rng.random(SHAPE) < rng.choice([0.1, 0.7, 1.0])


SEEDS = st.integers(0, 2**32 - 1)
QUANTILES = st.sampled_from([0.5, 0.9, 0.95, 0.123, 0.999])


def test_the_papers_vector_to_six_digits():
    config = SatConfig()
    mismatch_BT = vector_mismatch()
    threshold = tail_threshold(mismatch_BT, jnp.ones_like(mismatch_BT, bool), config.quantile)
    radii = sat_radii(mismatch_BT, threshold, config)
    low_BT, high_BT = np.asarray(radii.low_BT), np.asarray(radii.high_BT)
    assert float(threshold) == np.float32(0.10)
    assert low_BT[0, -1] / 0.2 == pytest.approx(0.307692, abs=5e-7)
    assert high_BT[0, -2] / 0.2 == pytest.approx(0.307692, abs=5e-7)
    assert 1 + high_BT[0, -2] == pytest.approx(1.061538, abs=5e-7)
    assert 1 - low_BT[0, -1] == pytest.approx(0.938462, abs=5e-7)
    assert low_BT.mean() == pytest.approx(0.193077, abs=5e-7)
    assert high_BT.mean() == pytest.approx(0.193077, abs=5e-7)
    assert np.mean((low_BT < np.float32(0.2)) | (high_BT < np.float32(0.2))) == pytest.approx(0.10)


def test_the_threshold_does_not_interpolate():
    ten = jnp.arange(10, dtype=jnp.float32).reshape(1, 10)
    everywhere = jnp.ones((1, 10), bool)
    assert float(tail_threshold(ten, everywhere, 0.9)) == 8
    spiked = jnp.array([[0.0] * 8 + [1.0, 10.0]])
    assert float(tail_threshold(spiked, everywhere, 0.9)) == 1


def test_the_threshold_of_no_token_is_0():
    assert float(tail_threshold(jnp.full(SHAPE, jnp.nan), jnp.zeros(SHAPE, bool), 0.9)) == 0


def test_the_threshold_accepts_stacked_microbatches():
    mismatch_BT, mask_BT = random_mismatch(1)
    stacked = tail_threshold(jnp.reshape(mismatch_BT, (2, 2, 16)), jnp.reshape(mask_BT, (2, 2, 16)), 0.9)
    assert float(stacked) == twin.tail_threshold(mismatch_BT, mask_BT, 0.9)


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 3.4e38])
def test_the_threshold_is_exact_at_the_ends_of_float32(tiny):
    values = np.array([[tiny, 0.0, tiny, tiny]], np.float32)
    assert tail_threshold(jnp.asarray(values), jnp.ones((1, 4), bool), 0.9).item() == values[0, 0]


@settings(max_examples=100, deadline=None)
@given(SEEDS, QUANTILES)
def test_the_threshold_is_the_order_statistic_bit_for_bit(seed, quantile):
    mismatch_BT, mask_BT = random_mismatch(seed)
    assert float(THRESHOLD(mismatch_BT, mask_BT, quantile)) == twin.tail_threshold(mismatch_BT, mask_BT, quantile)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_what_is_masked_has_no_influence_on_the_threshold(seed):
    mismatch_BT, mask_BT = random_mismatch(seed)
    garbage_BT = np.random.default_rng(seed).choice(GARBAGE, SHAPE)
    replaced_BT = np.where(mask_BT, mismatch_BT, garbage_BT)
    assert THRESHOLD(replaced_BT, mask_BT, 0.9) == THRESHOLD(mismatch_BT, mask_BT, 0.9)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_the_threshold_ignores_order_and_sign(seed):
    mismatch_BT, mask_BT = random_mismatch(seed)
    rng = np.random.default_rng(seed)
    order = rng.permutation(mismatch_BT.size)
    shuffled_BT = (mismatch_BT * rng.choice([-1, 1], SHAPE)).ravel()[order].reshape(SHAPE).astype(np.float32)
    shuffled_mask_BT = mask_BT.ravel()[order].reshape(SHAPE)
    assert THRESHOLD(shuffled_BT, shuffled_mask_BT, 0.9) == THRESHOLD(mismatch_BT, mask_BT, 0.9)


def test_the_threshold_of_a_sharded_batch_is_the_same_and_gathers_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(0)
    mismatch_BT = rng.standard_t(2, (8, 64)).astype(np.float32)
    mask_BT = rng.random((8, 64)) < 0.7
    arrays = jax.device_put(mismatch_BT, sharding), jax.device_put(mask_BT, sharding)
    compiled = jax.jit(tail_threshold, static_argnums=2).lower(*arrays, 0.9).compile()
    assert float(compiled(*arrays)) == twin.tail_threshold(mismatch_BT, mask_BT, 0.9)
    text = compiled.as_text() or ""
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**31 - 1), st.sampled_from([0.9, 0.95, 0.5, 0.1, 0.123456, 0.999999, 0.7]))
def test_the_rank_is_exact_up_to_the_largest_counts(active, quantile):
    assert int(tail_rank(jnp.int32(active), quantile)) == math.ceil(Fraction(str(quantile)) * active)


def test_the_rank_follows_the_decimal_that_was_written():
    # In binary 0.7 * 10 is 7.000000000000001 after some roundings and 0.1 + 0.2 is not 0.3.
    assert int(tail_rank(jnp.int32(10), 0.7)) == 7
    assert int(tail_rank(jnp.int32(10), 0.1 + 0.2)) == 3


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_quantile_outside_0_and_1_is_refused(quantile):
    with pytest.raises(ValueError, match="quantile: expected a number in \\(0, 1\\)"):
        tail_threshold(jnp.zeros(SHAPE), jnp.ones(SHAPE, bool), quantile)
    with pytest.raises(ValueError, match="quantile"):
        SatConfig(quantile=quantile)


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match=r"mask_BT: expected the mismatch's shape \(4, 16\), got \(4, 15\)"):
        tail_threshold(jnp.zeros(SHAPE), jnp.ones((4, 15), bool), 0.9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("eps_low", value) for value in (0.0, 1.0, -0.2, math.nan)),
        *(("eps_high", value) for value in (0.0, 1.0, 2.0)),
        *(("exponent", value) for value in (0.0, -2.0, math.inf, math.nan)),
        *(("threshold_min", value) for value in (0.0, -1.0, math.nan)),
        ("threshold_max", 0.0),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        SatConfig(**{field: value})


def test_a_minimum_above_the_maximum_is_refused():
    with pytest.raises(ValueError, match="threshold_min: expected at most threshold_max"):
        SatConfig(threshold_min=0.2, threshold_max=0.1)


@settings(max_examples=60, deadline=None)
@given(SEEDS, QUANTILES)
def test_radii_are_the_twins_and_change_on_one_side_only(seed, quantile):
    mismatch_BT, mask_BT = random_mismatch(seed)
    config = SatConfig(eps_low=0.15, eps_high=0.3, quantile=quantile)
    threshold = THRESHOLD(mismatch_BT, mask_BT, quantile)
    radii = RADII(mismatch_BT, threshold, config)
    low_BT, high_BT = np.asarray(radii.low_BT), np.asarray(radii.high_BT)
    factors = np.array([twin.sat_factors(float(d), float(threshold)) for d in mismatch_BT.ravel()])
    assert low_BT.ravel() == pytest.approx(0.15 * factors[:, 0], rel=1e-6)
    assert high_BT.ravel() == pytest.approx(0.3 * factors[:, 1], rel=1e-6)
    gated_BT = (np.abs(mismatch_BT) > threshold) & (threshold > 0)
    low_gated_BT, high_gated_BT = low_BT != np.float32(0.15), high_BT != np.float32(0.3)
    assert np.array_equal(low_gated_BT, gated_BT & (mismatch_BT < 0))
    assert np.array_equal(high_gated_BT, gated_BT & (mismatch_BT > 0))
    assert np.all(low_BT[low_gated_BT] <= 0.5 * np.float32(0.15))
    assert np.all(high_BT[high_gated_BT] <= 0.5 * np.float32(0.3))


@settings(max_examples=40, deadline=None)
@given(SEEDS, QUANTILES)
def test_no_more_than_the_tail_is_gated(seed, quantile):
    mismatch_BT, mask_BT = random_mismatch(seed)
    threshold = THRESHOLD(mismatch_BT, mask_BT, quantile)
    radii = RADII(mismatch_BT, threshold, SatConfig(quantile=quantile))
    gated_BT = np.asarray((radii.low_BT < np.float32(0.2)) | (radii.high_BT < np.float32(0.2))) & mask_BT
    assert gated_BT.sum() <= math.floor((1 - Fraction(str(quantile))) * int(mask_BT.sum()))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(-3, 3))
def test_a_common_scale_leaves_the_factors_alone(seed, power):
    mismatch_BT, mask_BT = random_mismatch(seed)
    scale = np.float32(2.0**power)
    ends = []
    for scaled_BT in (mismatch_BT, mismatch_BT * scale):
        ends.append(RADII(scaled_BT, THRESHOLD(scaled_BT, mask_BT, 0.9), SatConfig()))
    assert np.array_equal(ends[0].low_BT, ends[1].low_BT)
    assert np.array_equal(ends[0].high_BT, ends[1].high_BT)


def test_a_tail_without_size_contracts_nothing():
    radii = sat_radii(jnp.array([[0.0, 0.5, -3.0, 1e9]]), jnp.float32(0), SatConfig())
    assert np.all(np.asarray(radii.low_BT) == np.float32(0.2))
    assert np.all(np.asarray(radii.high_BT) == np.float32(0.2))


def test_equal_mismatches_are_never_gated():
    mismatch_BT = jnp.full(SHAPE, 0.4)
    threshold = tail_threshold(mismatch_BT, jnp.ones(SHAPE, bool), 0.9)
    assert np.all(np.asarray(sat_radii(mismatch_BT, threshold, SatConfig()).high_BT) == np.float32(0.2))


def test_no_gradient_passes_through_threshold_or_radii():
    mismatch_BT, mask_BT = random_mismatch(5)

    def total(mismatch_BT):
        threshold = tail_threshold(mismatch_BT, mask_BT, 0.9)
        radii = sat_radii(mismatch_BT, threshold, SatConfig())
        return threshold + jnp.sum(radii.low_BT + radii.high_BT) + sum(effective_radii(threshold, SatConfig()))

    assert np.all(np.asarray(jax.grad(total)(jnp.asarray(mismatch_BT))) == 0)


def test_clamps_bound_a_positive_threshold_and_leave_0_off():
    config = SatConfig(threshold_min=0.05, threshold_max=0.1)
    mismatch_BT = jnp.array([[0.08]])
    assert float(sat_radii(mismatch_BT, jnp.float32(0.01), config).high_BT[0, 0]) == pytest.approx(
        0.2 / (1 + (0.08 / 0.05) ** 2)
    )
    assert float(
        sat_radii(mismatch_BT, jnp.float32(0.5), SatConfig(threshold_max=0.04)).high_BT[0, 0]
    ) == pytest.approx(0.2 / (1 + 4))
    assert float(sat_radii(mismatch_BT, jnp.float32(0), config).high_BT[0, 0]) == np.float32(0.2)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    # Roots of e^d - 1 = 0.2 / (1 + (d / q)^2), solved in float64; algorithms of the upper side.
    [(0.001, 0.0058), (0.002, 0.0092), (0.005, 0.0167), (0.01, 0.026), (0.02, 0.040), (0.05, 0.070), (0.1, 0.105)],
)
def test_effective_upper_radii_of_the_table(threshold, expected):
    _, high = EFFECTIVE(jnp.float32(threshold), SatConfig())
    assert float(high) == pytest.approx(expected, rel=0.02)


@settings(max_examples=80, deadline=None)
@given(st.floats(-7, 1), st.sampled_from([SatConfig(), SatConfig(eps_low=0.1, eps_high=0.4, exponent=3.0)]))
def test_effective_radii_solve_their_equations(log_threshold, config):
    threshold = float(np.float32(10**log_threshold))
    low, high = map(float, EFFECTIVE(jnp.float32(threshold), config))

    def solve(gap):
        start, stop = 0.0, 50.0
        for _ in range(200):
            middle = (start + stop) / 2
            start, stop = (start, middle) if gap(middle) > 0 else (middle, stop)
        return max(start, threshold)

    def kernel(u):
        return 1 / (1 + (u / threshold) ** config.exponent)

    upper = solve(lambda u: math.expm1(u) - config.eps_high * kernel(u))
    lower = solve(lambda u: -math.expm1(-u) - config.eps_low * kernel(u))
    assert high == pytest.approx(min(math.expm1(upper), config.eps_high), rel=2e-6)
    assert low == pytest.approx(min(-math.expm1(-lower), config.eps_low), rel=2e-6)


def test_effective_radii_without_a_tail_are_nominal():
    low, high = effective_radii(jnp.float32(0), SatConfig(eps_low=0.1, eps_high=0.3))
    assert (float(low), float(high)) == (np.float32(0.1), np.float32(0.3))


@settings(max_examples=150, deadline=None)
@given(SEEDS, QUANTILES, st.booleans())
def test_sat_clips_exactly_where_ppo_with_the_effective_radii_does(seed, quantile, clamped):
    mismatch_BT, mask_BT = random_mismatch(seed)
    config = SatConfig(eps_low=0.2, eps_high=0.28, quantile=quantile, threshold_max=0.03 if clamped else None)
    threshold = THRESHOLD(mismatch_BT, mask_BT, quantile)
    low, high = map(float, EFFECTIVE(threshold, config))
    q = min(float(threshold), 0.03) if clamped else float(threshold)
    for mismatch in mismatch_BT[mask_BT].tolist():
        c_low, c_high = twin.sat_factors(mismatch, q)
        for sign, bound in ((1, math.log1p(high)), (-1, math.log1p(-low))):
            if abs(mismatch - bound) < 1e-5 * abs(bound):
                continue
            assert twin.clips(mismatch, sign, 0.2 * c_low, 0.28 * c_high) == twin.clips(mismatch, sign, low, high)


def test_sides_switch_off_where_the_fixed_clip_takes_over():
    config = SatConfig(eps_low=0.2, eps_high=0.2)
    cases = {0.0: (0, 0), 0.1: (1, 1), 0.1823: (1, 1), 0.1824: (1, 0), 0.2231: (1, 0), 0.2232: (0, 0), 3.0: (0, 0)}
    for threshold, expected in cases.items():
        assert tuple(map(float, sides_active(jnp.float32(threshold), config))) == expected
        low, high = EFFECTIVE(jnp.float32(threshold), config)
        # A side is inert exactly when its effective radius is the nominal one.
        assert (float(low) < np.float32(0.2), float(high) < np.float32(0.2)) == (expected[0] == 1, expected[1] == 1)
