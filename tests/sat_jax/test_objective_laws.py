"""What must hold for every input: the laws of ratio control, by hypothesis. Shapes are fixed; nothing recompiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sat_jax.metrics import merge, values
from sat_jax.objective import ObjectiveConfig, batch_threshold, mismatch, policy_loss, preset_names
from sat_jax.trust_region import effective_radii
from tests.reference.batches import Example, measured, random_example, random_segments, with_batch
from tests.reference.objective_runner import (
    LENGTH,
    ROWS,
    jitted_denominator,
    leaves,
    loss_and_gradient,
    metrics,
    metrics_as_merged,
)

EFFECTIVE = jax.jit(effective_radii, static_argnums=1)
SEEDS = st.integers(0, 2**32 - 1)
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e4, -1e4], np.float32)
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
EVERY = [(name, None) for name in preset_names()]
# Where the aggregation is exchanged, one method of each unit stands for the rest.
CROSSED = [(name, aggregation) for name in ("sat_grpo", "sat_gspo", "gspo_token") for aggregation in AGGREGATIONS]
COMBINATIONS = EVERY + [pair for pair in CROSSED if ObjectiveConfig.preset(pair[0]).aggregation != pair[1]]


def config_of(name, aggregation=None, **fields):
    return ObjectiveConfig.preset(name, **fields, **({"aggregation": aggregation} if aggregation else {}))


def assert_same(left, right, tolerance=1e-6):
    for one, other in zip(left, right, strict=True):
        assert one == pytest.approx(other, abs=tolerance, rel=tolerance)


def assert_identical(left, right):
    assert all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def mostly_fresh(seed):
    """A batch of which at least nine tenths have exactly pi = mu, the rest being far off: q = 0."""
    example = random_example(seed, spread=1.0)
    active = np.argwhere(example.batch.loss_mask_BT)
    chosen = np.random.default_rng(seed).permutation(active)[: len(active) // 10]
    drifted_BT = np.zeros((ROWS, LENGTH), bool)
    drifted_BT[chosen[:, 0], chosen[:, 1]] = True
    logp_BT = np.where(drifted_BT, example.logp_BT, example.batch.behavior_logp_BT)
    return dataclasses.replace(example, logp_BT=logp_BT.astype(np.float32))


# --- SAT ---


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([0.02, 0.1, 0.3]))
def test_sats_gradient_is_ppos_with_the_effective_radii(seed, spread):
    example = random_example(seed, spread=spread)
    config = config_of("sat_grpo", "token_mean")
    batch, mask_BT = example.batch, example.batch.loss_mask_BT
    threshold = metrics(example, config)["sat/threshold"]
    low, high = map(float, EFFECTIVE(jnp.float32(threshold), config.sat))
    drift_BT = example.logp_BT.astype(float) - batch.behavior_logp_BT
    ratio_BT, positive_BT = np.exp(drift_BT), batch.advantage_BT > 0
    clipped_BT = np.where(positive_BT, ratio_BT > 1 + high, ratio_BT < 1 - low)
    expected_BT = np.where(mask_BT & ~clipped_BT, -ratio_BT * batch.advantage_BT / mask_BT.sum(), 0)
    gap_BT = np.minimum(np.abs(drift_BT - np.log1p(high)), np.abs(drift_BT - np.log1p(-low)))
    on_a_kink_BT = gap_BT < 1e-5 * np.abs(drift_BT)
    _, gradient_BT = loss_and_gradient(example, config)
    assert np.where(on_a_kink_BT, 0, gradient_BT) == pytest.approx(np.where(on_a_kink_BT, 0, expected_BT), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(["grpo", "gspo"]))
def test_sat_is_never_above_its_base(seed, base):
    example = random_example(seed)
    fields = {"eps_low": 0.2, "eps_high": 0.2}
    sat, _ = loss_and_gradient(example, config_of(f"sat_{base}"))
    ppo, _ = loss_and_gradient(example, config_of(base, **fields))
    assert sat >= ppo - 1e-7


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_what_sat_keeps_ppo_keeps_and_what_it_newly_clips_is_counted(seed):
    example = random_example(seed)
    _, sat_BT = loss_and_gradient(example, config_of("sat_grpo"))
    _, ppo_BT = loss_and_gradient(example, config_of("grpo"))
    kept_BT, base_BT = sat_BT != 0, ppo_BT != 0
    assert not np.any(kept_BT & ~base_BT)
    assert np.array_equal(sat_BT[kept_BT], ppo_BT[kept_BT])
    newly = np.sum(base_BT & ~kept_BT) / max(example.batch.loss_mask_BT.sum(), 1)
    assert metrics(example, config_of("sat_grpo"))["clip/newly"] == pytest.approx(newly, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_without_a_tail_sat_is_its_base_bit_for_bit(aggregation, seed):
    example = mostly_fresh(seed)
    sat = loss_and_gradient(example, config_of("sat_grpo", aggregation))
    assert_identical(sat, loss_and_gradient(example, config_of("grpo", aggregation)))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_without_a_tail_sat_gspo_is_gspo_bit_for_bit(seed):
    example = mostly_fresh(seed)
    fresh = dataclasses.replace(example, logp_BT=example.batch.behavior_logp_BT)
    assert_identical(
        loss_and_gradient(fresh, config_of("sat_gspo")),
        loss_and_gradient(fresh, config_of("gspo", eps_low=0.2, eps_high=0.2)),
    )


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_at_most_the_tail_is_gated(seed):
    assert metrics(random_example(seed), config_of("sat_grpo"))["sat/gate_rate"] <= 0.1 + 1e-6


@pytest.mark.parametrize(("sequences", "fires"), [(5, False), (9, False), (10, True), (16, True)])
def test_sat_gspo_needs_ten_equal_sequences_to_fire(sequences, fires):
    # The tail above the 0.9 quantile holds a tenth of the *tokens*, and all tokens of a sequence have one score.
    batch = random_example(0).batch
    segment_BT = np.zeros((ROWS, LENGTH), np.int32)
    segment_BT[0, : min(sequences, 8) * 2] = np.repeat(np.arange(1, min(sequences, 8) + 1), 2)
    segment_BT[1, : max(sequences - 8, 0) * 2] = np.repeat(np.arange(1, max(sequences - 8, 0) + 1), 2)
    drift_BT = 0.01 * np.arange(1, ROWS * LENGTH + 1).reshape(ROWS, LENGTH)
    example = with_batch(random_example(0), segment_BT=segment_BT, loss_mask_BT=segment_BT > 0)
    example = dataclasses.replace(example, logp_BT=(batch.behavior_logp_BT + drift_BT).astype(np.float32))
    assert (metrics(example, config_of("sat_gspo"))["sat/gate_rate"] > 0) == fires


# --- strength zero ---

OPEN = float("inf")
STRENGTH_ZERO = {
    "icepop_mask": ("ppo", {"gate_low": 0.0, "gate_high": OPEN}),
    "kpop": ("ppo", {"gate_high": OPEN}),
    "mis": ("ppo", {"gate_low": 0.0, "gate_high": OPEN}),
    "geo_mask": ("ppo", {"gate_low": 0.0, "gate_high": OPEN}),
    "seq_clip": ("grpo", {"gate_low": 0.0, "gate_high": OPEN}),
    "dppo_clip": ("grpo", {"gate_low": 1.0, "gate_high": 1.0}),
    "m2po_mask": ("ppo", {"gate_high": OPEN}),
    "opsm": ("grpo", {"gate_high": OPEN}),
    "trm_max_k2": ("grpo", {"gate_high": OPEN}),
    "trm_mean_k3": ("grpo", {"gate_high": OPEN}),
    "dual_clip": ("grpo", {"dual_cap": OPEN}),
    "m2po": ("dapo", {"eps_low": 0.2, "eps_high": 0.28, "m2_budget": 1e30}),
    "sat_grpo": ("grpo", {"threshold_min": 1e30}),
}


@pytest.mark.parametrize("name", [name for name in STRENGTH_ZERO if name != "m2po"])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_strength_zero_is_the_base_bit_for_bit(name, seed):
    base, fields = STRENGTH_ZERO[name]
    example = random_example(seed)
    left = loss_and_gradient(example, config_of(name, "token_mean", **fields))
    assert_identical(left, loss_and_gradient(example, config_of(base, "token_mean")))


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_m2po_within_its_budget_clips_nothing(seed):
    example = random_example(seed)
    bounded = metrics(example, config_of("m2po", m2_budget=1e30))
    assert bounded["clip/fraction"] == 0


@pytest.mark.parametrize("name", ["tis", "tis_sequence", "icepop"])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_a_weight_of_a_policy_equal_to_mu_is_1(name, seed):
    example = random_example(seed)
    example = dataclasses.replace(example, prox_logp_BT=example.batch.behavior_logp_BT)
    left = loss_and_gradient(example, config_of(name, "token_mean"))
    assert_identical(left, loss_and_gradient(example, config_of("ppo", "token_mean")))


# --- one gradient at ratio 1 ---


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "ppo"])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_at_ratio_1_every_method_has_the_same_policy_gradient(name, seed):
    example = random_example(seed)
    fresh = example.batch.behavior_logp_BT
    example = dataclasses.replace(example, logp_BT=fresh, prox_logp_BT=fresh)
    config = config_of(name)
    _, gradient_BT = loss_and_gradient(example, config)
    _, ppo_BT = loss_and_gradient(example, config_of("ppo", config.aggregation))
    assert gradient_BT == pytest.approx(ppo_BT, abs=1e-6)


# --- identities between methods ---


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_gspo_and_gspo_token_agree_for_one_advantage_a_sequence(seed):
    example = random_example(seed, spread=2e-4)
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        left = loss_and_gradient(example, config_of("gspo", aggregation))
        assert_same(left, loss_and_gradient(example, config_of("gspo_token", aggregation)))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_gspo_token_differs_where_token_advantages_do(seed):
    example = random_example(seed, spread=1e-5)
    noise_BT = np.random.default_rng(seed).normal(size=(ROWS, LENGTH)).astype(np.float32)
    example = with_batch(example, advantage_BT=noise_BT)
    _, sequence_BT = loss_and_gradient(example, config_of("gspo"))
    _, token_BT = loss_and_gradient(example, config_of("gspo_token"))
    assert np.abs(sequence_BT - token_BT).max() > 1e-3


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_decoupled_ppo_with_prox_equal_to_mu_is_grpo_on_mu(seed):
    example = random_example(seed)
    example = dataclasses.replace(example, prox_logp_BT=example.batch.behavior_logp_BT)
    left = loss_and_gradient(example, config_of("decoupled_ppo", "token_mean"))
    assert_same(left, loss_and_gradient(example, config_of("grpo", "token_mean")))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_decoupled_ppo_in_the_first_step_is_truncated_importance_sampling(seed):
    # rho = 1, so r = rho w = w: the gradient is that of sg[r] A log pi.
    example = random_example(seed)
    example = dataclasses.replace(example, prox_logp_BT=example.logp_BT)
    _, left_BT = loss_and_gradient(example, config_of("decoupled_ppo", weight_high=OPEN))
    _, right_BT = loss_and_gradient(example, config_of("cispo", cispo_high=OPEN))
    assert left_BT == pytest.approx(right_BT, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_a3po_up_to_lag_1_is_grpo_on_mu(seed):
    example = random_example(seed)
    example = with_batch(example, lag_BT=np.minimum(example.batch.lag_BT, 1))
    left = loss_and_gradient(example, config_of("a3po", "token_mean"))
    assert_same(left, loss_and_gradient(example, config_of("grpo", "token_mean")))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_a3po_ignores_the_lag_of_prompts_and_padding(seed):
    example = random_example(seed)
    lag_BT = np.where(example.batch.loss_mask_BT, example.batch.lag_BT, -(2**31)).astype(np.int32)
    left = loss_and_gradient(with_batch(example, lag_BT=lag_BT), config_of("a3po"))
    assert_identical(left, loss_and_gradient(example, config_of("a3po")))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_truncation_at_infinity_is_importance_sampling_and_never_raises_a_weight(seed):
    example = random_example(seed)
    correction_BT = example.prox_logp_BT.astype(float) - example.batch.behavior_logp_BT
    mask_BT = example.batch.loss_mask_BT
    for cap in (1.0, 2.0, OPEN):
        mean = metrics(example, config_of("tis", weight_high=cap))["weight/mean"]
        assert mean == pytest.approx(np.minimum(np.exp(correction_BT), cap)[mask_BT].mean(), rel=1e-5)


def test_intervals_are_inclusive_and_are_of_prox_over_mu():
    example = random_example(0)
    behavior_BT = np.zeros((ROWS, LENGTH), np.float32)
    example = with_batch(example, behavior_logp_BT=behavior_BT, loss_mask_BT=np.ones((ROWS, LENGTH), bool))
    for log_ratio, inside in ((0.0, True), (-0.6, True), (-0.7, False), (1.6, True), (1.61, False)):
        prox_BT = np.full_like(behavior_BT, log_ratio)
        moved = dataclasses.replace(example, prox_logp_BT=prox_BT)
        assert metrics(moved, config_of("icepop_mask"))["gate/dropped"] == (0 if inside else 1)
        assert (metrics(moved, config_of("icepop"))["weight/mean"] > 0) == inside
    at_1 = config_of("icepop_mask", gate_low=0.5, gate_high=1.0)
    assert metrics(dataclasses.replace(example, prox_logp_BT=behavior_BT), at_1)["gate/dropped"] == 0


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_a_group_without_differences_has_no_policy_gradient(seed):
    example = with_batch(random_example(seed), advantage_BT=np.zeros((ROWS, LENGTH), np.float32))
    for name in ("sat_grpo", "sat_gspo", "dppo", "sapo"):
        loss, gradient_BT = loss_and_gradient(example, config_of(name))
        assert loss == 0
        assert np.all(gradient_BT == 0)


# --- what must not matter ---


@pytest.mark.parametrize("name", preset_names())
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_garbage_at_inactive_positions_changes_nothing(name, seed):
    example = random_example(seed)
    rng = np.random.default_rng(seed)

    def spoil(array_BT):
        return np.where(example.batch.loss_mask_BT, array_BT, rng.choice(GARBAGE, array_BT.shape)).astype(np.float32)

    spoilt = Example(
        batch=with_batch(
            example,
            behavior_logp_BT=spoil(example.batch.behavior_logp_BT),
            advantage_BT=spoil(example.batch.advantage_BT),
        ).batch,
        logp_BT=spoil(example.logp_BT),
        prox_logp_BT=spoil(example.prox_logp_BT),
        ref_logp_BT=spoil(example.ref_logp_BT),
    )
    config = config_of(name, kl_coef=0.1 if name == "sat_grpo" else 0.0)
    assert_identical(loss_and_gradient(spoilt, config), loss_and_gradient(example, config))


def test_garbage_in_what_was_measured_changes_nothing():
    example = random_example(6)
    config = config_of("sat_grpo")
    seen_BT = np.asarray(mismatch(example.logp_BT, example.batch, config))
    spoilt_BT = np.where(example.batch.loss_mask_BT, seen_BT, np.float32(np.nan))
    ends = [
        loss_and_gradient(example, config, measured(array_BT, np.float32(0.05))) for array_BT in (seen_BT, spoilt_BT)
    ]
    assert_identical(*ends)


def row_by_row(example):
    """A microbatch of each row: the batch with the other rows masked."""
    masks = [example.batch.loss_mask_BT & (np.arange(ROWS) == row)[:, None] for row in range(ROWS)]
    return [with_batch(example, loss_mask_BT=mask_BT) for mask_BT in masks]


def measure(parts, config):
    """As the trainer does: the scores of every microbatch, one statistic over all."""
    live = [part.prox_logp_BT if config.needs_proximal else part.logp_BT for part in parts]
    seen, threshold = _scores_and_threshold(live, [part.batch for part in parts], config)
    return [measured(seen_BT, threshold) for seen_BT in seen]


@functools.partial(jax.jit, static_argnums=2)
def _scores_and_threshold(live, batches, config):
    """Op by op this is seconds an example."""
    seen = [mismatch(logp_BT, batch, config) for logp_BT, batch in zip(live, batches, strict=True)]
    masks = jnp.stack([batch.loss_mask_BT for batch in batches])
    advantages = jnp.stack([batch.advantage_BT for batch in batches])
    return seen, batch_threshold(jnp.stack(seen), masks, advantages, config)


@pytest.mark.parametrize(("name", "aggregation"), COMBINATIONS)
@settings(max_examples=4, deadline=None)
@given(seed=SEEDS)
def test_microbatches_add_up_to_the_whole(name, aggregation, seed):
    example, config = random_example(seed), config_of(name, aggregation)
    whole = loss_and_gradient(example, config)
    parts = row_by_row(example)
    total = jnp.sum(jnp.stack([jitted_denominator(part.batch, config) for part in parts]))
    scored = measure(parts, config) if config.needs_measure else [None] * ROWS
    ends = [loss_and_gradient(part, config, one, total) for part, one in zip(parts, scored, strict=True)]
    assert_same((sum(loss for loss, _ in ends), sum(gradient_BT for _, gradient_BT in ends)), whole)


def repacked(example, seed):
    """The same sequences in other rows, at other places, in another order, with the place each token went to."""
    rng = np.random.default_rng(seed)
    batch = example.batch
    pieces = [
        (row, np.flatnonzero(batch.segment_BT[row] == segment))
        for row in range(ROWS)
        for segment in range(1, batch.segment_BT[row].max() + 1)
    ]
    order = rng.permutation(len(pieces))
    filled, count = np.zeros(ROWS, int), np.zeros(ROWS, int)
    source_BT, segment_BT = np.full((ROWS, LENGTH, 2), -1), np.zeros((ROWS, LENGTH), np.int32)
    for row, positions in sorted((pieces[index] for index in order), key=lambda piece: -len(piece[1])):
        fitting = np.flatnonzero(filled + len(positions) <= LENGTH)
        if fitting.size == 0:
            return None
        goal = rng.choice(fitting)
        start = filled[goal]
        count[goal] += 1
        segment_BT[goal, start : start + len(positions)] = count[goal]
        source_BT[goal, start : start + len(positions), 0] = row
        source_BT[goal, start : start + len(positions), 1] = positions
        filled[goal] += len(positions)
    taken_BT = source_BT[..., 0] >= 0
    rows_BT, columns_BT = source_BT[..., 0], source_BT[..., 1]

    def moved(array_BT):
        return np.where(taken_BT, array_BT[rows_BT, columns_BT], 0).astype(array_BT.dtype)

    other = Example(
        batch=with_batch(
            example,
            segment_BT=segment_BT,
            loss_mask_BT=moved(batch.loss_mask_BT),
            behavior_logp_BT=moved(batch.behavior_logp_BT),
            advantage_BT=moved(batch.advantage_BT),
            lag_BT=moved(batch.lag_BT),
        ).batch,
        logp_BT=moved(example.logp_BT),
        prox_logp_BT=moved(example.prox_logp_BT),
        ref_logp_BT=moved(example.ref_logp_BT),
    )
    return other, moved


@pytest.mark.parametrize(("name", "aggregation"), COMBINATIONS)
@settings(max_examples=6, deadline=None)
@given(seed=SEEDS)
def test_packing_order_and_padding_do_not_matter(name, aggregation, seed):
    example, config = random_example(seed), config_of(name, aggregation)
    found = repacked(example, seed)
    if found is None:
        return
    other, moved = found
    loss, gradient_BT = loss_and_gradient(example, config)
    other_loss, other_gradient_BT = loss_and_gradient(other, config)
    assert_same((other_loss, other_gradient_BT), (loss, moved(gradient_BT)))


def test_repacking_moves_sequences_at_all():
    moves = [repacked(random_example(seed), seed) for seed in range(20)]
    moved = [pair for pair in moves if pair is not None]
    assert len(moved) >= 10
    assert any(
        not np.array_equal(pair[0].batch.segment_BT, random_example(seed).batch.segment_BT)
        for seed, pair in enumerate(moves)
        if pair is not None
    )


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo", "m2po", "tis_sequence"])
def test_a_sharded_batch_gives_the_same_and_gathers_nothing(name):
    config = config_of(name)
    pieces = [random_example(seed) for seed in range(8)]
    example = jax.tree.map(lambda *rows: np.concatenate(rows, 1 if rows[0].ndim == 4 else 0), *map(leaves, pieces))
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))

    def spec(array):
        return NamedSharding(mesh, PartitionSpec(None, "data") if array.ndim == 4 else PartitionSpec("data"))

    sharded = jax.tree.map(lambda array: jax.device_put(array, spec(array)), example)

    @jax.jit
    def loss_gradient_metrics(example):
        def scalar(logp_BT):
            report = policy_loss(logp_BT, example[1], config, prox_logp_BT=example[2], ref_logp_BT=example[3])
            return report.loss, report.metrics

        return jax.value_and_grad(scalar, has_aux=True)(example[0])

    compiled = loss_gradient_metrics.lower(sharded).compile()
    (loss, seen), gradient_BT = compiled(sharded)
    (whole_loss, whole_seen), whole_gradient_BT = loss_gradient_metrics(example)
    assert_same((np.asarray(loss), np.asarray(gradient_BT)), (np.asarray(whole_loss), np.asarray(whole_gradient_BT)))
    assert values(seen) == pytest.approx(values(whole_seen), rel=1e-5, abs=1e-6)
    text = compiled.as_text() or ""
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


def test_metrics_of_microbatches_merge_to_those_of_the_whole():
    example, config = random_example(9), config_of("sat_grpo")
    parts = row_by_row(example)
    scored = measure(parts, config)
    seen = [metrics_as_merged(part, config, one) for part, one in zip(parts, scored, strict=True)]
    assert values(functools.reduce(merge, seen)) == pytest.approx(metrics(example, config), rel=1e-5, abs=1e-7)


def test_effective_radii_of_unequal_microbatches_are_weighted_by_tokens():
    config = config_of("sat_grpo", quantile_scope="microbatch")
    parts = [random_example(1, spread=0.01), random_example(2, spread=0.05)]
    parts[0] = with_batch(parts[0], loss_mask_BT=parts[0].batch.loss_mask_BT & (np.arange(LENGTH) % 3 == 0))
    seen = [metrics(part, config) for part in parts]
    tokens = sum(one["tokens"] for one in seen)
    expected = sum(one["sat/effective_low"] * one["tokens"] for one in seen) / tokens
    merged = values(merge(*(metrics_as_merged(part, config) for part in parts)))
    assert merged["sat/effective_low"] == pytest.approx(expected, rel=1e-5)
    assert seen[0]["sat/effective_low"] != pytest.approx(seen[1]["sat/effective_low"], rel=0.1)


def test_random_segments_are_contiguous_and_ascending():
    for seed in range(50):
        for row in random_segments(np.random.default_rng(seed), ROWS, LENGTH):
            steps = np.diff(row[row > 0])
            assert set(steps.tolist()) <= {0, 1}
            assert np.all(row[np.argmax(row == 0) :] == 0) or np.all(row > 0)
