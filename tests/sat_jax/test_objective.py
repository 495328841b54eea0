"""Values worked by hand, agreement with the twins, bad input. The laws are in test_objective_laws.py."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.objective import (
    METHODS,
    ObjectiveConfig,
    batch_threshold,
    denominator,
    first_nonfinite,
    mismatch,
    policy_loss,
    preset_names,
)
from tests.reference import objective_twin as twin
from tests.reference.batches import measured, one_row, random_example, with_batch
from tests.reference.objective_runner import loss_and_gradient, metrics

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
METRIC_NAMES = {
    *(
        "mismatch/mean",
        "mismatch/abs_mean",
        "mismatch/abs_max",
        "mismatch/k1",
        "mismatch/k3",
        "mismatch/ess",
        "mismatch/mult_prob_error",
    ),
    *("sat/threshold", "sat/gate_rate", "sat/radius_low", "sat/radius_high", "sat/factor_min"),
    *("sat/effective_low", "sat/effective_high", "sat/active_low", "sat/active_high"),
    *("clip/fraction", "clip/newly", "gate/dropped", "weight/mean", "lag/mean", "lag/max", "tokens", "sequences"),
}


@pytest.mark.parametrize(
    ("position", "advantage", "surrogate", "gradient"),
    [(-1, -1.0, -0.938462, 0.0), (-1, 1.0, 0.860708, 1.0), (-2, 1.0, 1.061538, 0.0), (-2, -1.0, -1.161834, 1.0)],
)
def test_the_papers_vector_in_value_and_gradient(position, advantage, surrogate, gradient):
    # 17 zeros, +0.10, +0.15, -0.15; the advantage of one token alone is not 0, so the loss is its surrogate / N.
    advantage_T = np.zeros(20, np.float32)
    advantage_T[position] = advantage
    example = one_row([0.0] * 17 + [0.10, 0.15, -0.15], advantage_T)
    config = ObjectiveConfig.preset("sat_grpo", aggregation="token_mean")
    loss, gradient_BT = loss_and_gradient(example, config)
    seen = metrics(example, config)
    position += 20
    assert -20 * float(loss) == pytest.approx(surrogate, abs=2e-6)
    ratio = math.exp(float(example.logp_BT[0, position]) + 1)
    assert -20 * float(gradient_BT[0, position]) == pytest.approx(gradient * ratio * advantage, abs=2e-6)
    assert np.count_nonzero(gradient_BT) == (gradient != 0)
    assert seen["sat/threshold"] == pytest.approx(0.10, abs=1e-7)
    assert seen["sat/gate_rate"] == pytest.approx(0.10)
    assert seen["sat/factor_min"] == pytest.approx(0.307692, abs=1e-6)
    assert seen["sat/radius_low"] == pytest.approx(0.193077, abs=1e-6)
    assert seen["sat/radius_high"] == pytest.approx(0.193077, abs=1e-6)
    assert seen["sat/effective_high"] == pytest.approx(0.105171, abs=1e-6)
    assert seen["clip/newly"] == pytest.approx(0.05 if gradient == 0 else 0)
    assert seen["clip/fraction"] == pytest.approx(0.05 if gradient == 0 else 0)


@pytest.mark.parametrize("name", twin.names())
def test_a_preset_equals_its_twin_in_value_and_gradient(name):
    # Barely drifted, drifted, and far enough out for every limit to matter.
    for seed, spread in enumerate([0.02, 0.3, 1.5]):
        example = random_example(seed, spread=spread)
        loss, gradient_BT = loss_and_gradient(example, ObjectiveConfig.preset(name))
        expected = twin.loss(name, example, example.logp_BT.astype(np.float64))
        assert loss == pytest.approx(expected, abs=1e-6, rel=2e-6)
        assert gradient_BT == pytest.approx(twin.gradient(name, example), abs=2e-6, rel=2e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "sat_grpo", "sat_gspo", "gspo_token"])
def test_every_aggregation_equals_its_twin(name, aggregation):
    example = random_example(11)
    loss, gradient_BT = loss_and_gradient(example, ObjectiveConfig.preset(name, aggregation=aggregation))
    assert loss == pytest.approx(twin.loss(name, example, example.logp_BT.astype(np.float64), aggregation), abs=1e-6)
    assert gradient_BT == pytest.approx(twin.gradient(name, example, aggregation), abs=2e-6)


def test_every_preset_has_a_twin_and_reports_the_same_metrics():
    assert sorted(preset_names()) == twin.names()
    example = random_example(3)
    for name in preset_names():
        config = ObjectiveConfig.preset(name)
        assert config.aggregation == twin.default_aggregation(name)
        report = jax.eval_shape(
            functools.partial(policy_loss, config=config), example.logp_BT, example.batch, prox_logp_BT=example.logp_BT
        )
        assert set(report.metrics) == METRIC_NAMES
        assert next(method for method in METHODS if method.name == name).extra_forward == config.needs_proximal


def test_aggregations_by_hand():
    # Two sequences of one row with 1 and 3 active tokens, ratio 1: S = A = 1 and 2.
    segment_BT = np.zeros((3, 16), int)
    segment_BT[0, :5] = [1, 1, 2, 2, 2]
    mask_BT = np.zeros((3, 16), bool)
    mask_BT[0, 1:5] = True
    example = with_batch(one_row([0.0], 0.0), segment_BT=segment_BT, loss_mask_BT=mask_BT)
    example = with_batch(example, behavior_logp_BT=example.logp_BT, advantage_BT=segment_BT.astype(np.float32))
    expected = {"token_mean": 7 / 4, "seq_mean_token_mean": 3 / 2, "seq_mean_token_sum_norm": 7 / 20}
    for aggregation, value in expected.items():
        fields = {"norm_length": 10} if aggregation == "seq_mean_token_sum_norm" else {}
        config = ObjectiveConfig.preset("grpo", aggregation=aggregation, **fields)
        assert -loss_and_gradient(example, config)[0] == pytest.approx(value, rel=1e-6)
        assert float(denominator(example.batch, config)) == (4 if aggregation == "token_mean" else 2)


def test_a_sequence_without_active_tokens_is_not_counted():
    example = one_row([0.0] * 4, 1.0, mask=[False, False, True, True])
    segment_BT = np.zeros((3, 16), np.int32)
    segment_BT[0, :4] = [1, 1, 2, 2]
    example = with_batch(example, segment_BT=segment_BT)
    assert loss_and_gradient(example, ObjectiveConfig())[0] == pytest.approx(-1)
    assert metrics(example, ObjectiveConfig())["sequences"] == 1


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_reference_term_is_its_twin_and_adds_its_gradient(kind):
    example = random_example(2)
    fields = {"aggregation": "token_mean", "kl_kind": kind}
    plain, plain_gradient_BT = loss_and_gradient(example, ObjectiveConfig.preset("grpo", **fields))
    with_kl, gradient_BT = loss_and_gradient(example, ObjectiveConfig.preset("grpo", kl_coef=0.5, **fields))
    seen = metrics(example, ObjectiveConfig.preset("grpo", **fields))
    mask_BT = example.batch.loss_mask_BT
    logp, ref = example.logp_BT[mask_BT].astype(float), example.ref_logp_BT[mask_BT].astype(float)
    mean = np.mean([twin.reference_kl(kind, *pair) for pair in zip(logp, ref, strict=True)])
    assert seen["kl/reference"] == pytest.approx(mean, abs=1e-6)
    assert with_kl - plain == pytest.approx(0.5 * mean, abs=1e-6)
    slope = {"k1": np.ones_like(logp), "k2": logp - ref, "k3": 1 - np.exp(ref - logp)}[kind]
    expected_BT = np.zeros_like(gradient_BT)
    expected_BT[mask_BT] = 0.5 * slope / mask_BT.sum()
    assert gradient_BT - plain_gradient_BT == pytest.approx(expected_BT, abs=1e-6)


def test_the_importance_factor_multiplies_the_reference_term():
    example = one_row([0.3, -0.2], 0.0)
    example = dataclasses.replace(example, ref_logp_BT=example.logp_BT - np.float32(0.1))
    config = ObjectiveConfig.preset("grpo", kl_coef=1.0, kl_kind="k2", kl_importance=True)
    expected = (math.exp(0.3) + math.exp(-0.2)) / 2 * 0.005
    assert loss_and_gradient(example, config)[0] == pytest.approx(expected, rel=1e-5)


def test_mismatch_metrics_are_of_the_token_ratio_also_for_sequences():
    seen = metrics(one_row([0.4, -0.2, 0.1, -0.1], 1.0), ObjectiveConfig.preset("sat_gspo"))
    d = np.array([0.4, -0.2, 0.1, -0.1])
    assert seen["mismatch/mean"] == pytest.approx(0.05, abs=1e-6)
    assert seen["mismatch/abs_mean"] == pytest.approx(0.2, abs=1e-6)
    assert seen["mismatch/abs_max"] == pytest.approx(0.4, abs=1e-6)
    assert seen["mismatch/k1"] == pytest.approx(-0.05, abs=1e-6)
    assert seen["mismatch/k3"] == pytest.approx(np.mean(np.exp(d) - 1 - d), abs=1e-6)
    assert seen["mismatch/ess"] == pytest.approx(np.exp(d).sum() ** 2 / (4 * np.exp(2 * d).sum()), abs=1e-6)
    assert seen["mismatch/mult_prob_error"] == pytest.approx(np.exp(np.abs(d)).mean(), abs=1e-6)
    assert seen["sat/threshold"] == pytest.approx(0.05, abs=1e-6)


def test_the_loss_without_a_denominator_divides_by_its_own():
    example = random_example(5)
    for aggregation in AGGREGATIONS:
        config = ObjectiveConfig.preset("grpo", aggregation=aggregation)
        loss = jax.jit(functools.partial(policy_loss, config=config))(example.logp_BT, example.batch).loss
        assert float(loss) == pytest.approx(float(loss_and_gradient(example, config)[0]), rel=1e-6)


def test_lag_metrics_see_active_tokens_only():
    seen = metrics(one_row([0.0] * 3, 1.0, lag=[3, 5, 100], mask=[True, True, False]), ObjectiveConfig())
    assert (seen["lag/mean"], seen["lag/max"], seen["tokens"]) == (4, 5, 2)


def test_a_gate_and_a_weight_are_reported():
    example = one_row([0.0, 2.0, 0.0, 0.0], 1.0)
    assert metrics(example, ObjectiveConfig.preset("icepop_mask"))["gate/dropped"] == pytest.approx(1 / 4)
    assert metrics(example, ObjectiveConfig.preset("tis"))["weight/mean"] == pytest.approx((3 + 2.0) / 4)


def test_mismatch_is_the_score_in_the_objectives_unit():
    example = one_row([0.4, -0.2, 0.1, np.nan], 1.0, mask=[True, True, True, False])
    token_BT = mismatch(example.logp_BT, example.batch, ObjectiveConfig.preset("sat_grpo"))
    sequence_BT = mismatch(example.logp_BT, example.batch, ObjectiveConfig.preset("sat_gspo"))
    assert np.asarray(token_BT)[0, :5] == pytest.approx([0.4, -0.2, 0.1, 0, 0], abs=1e-6)
    assert np.asarray(sequence_BT)[0, :5] == pytest.approx([0.1, 0.1, 0.1, 0, 0], abs=1e-6)


def test_gates_follow_what_was_measured_and_not_the_live_log_probs():
    # Live, the drift is 0.15; measured, it was 0.05 against q = 0.02. The radius is that of 0.05.
    example = one_row([0.0, 0.0, 0.15], 1.0)
    seen_BT = np.zeros((3, 16), np.float32)
    seen_BT[0, 2] = 0.05
    seen_before = measured(seen_BT, np.float32(0.02))
    seen = metrics(example, ObjectiveConfig.preset("sat_grpo"), seen_before)
    assert seen["sat/threshold"] == pytest.approx(0.02)
    assert seen["sat/factor_min"] == pytest.approx(1 / (1 + 2.5**2), rel=1e-5)
    assert seen["clip/newly"] == pytest.approx(1 / 3, rel=1e-5)


def test_the_microbatch_scope_takes_its_own_threshold():
    example = one_row([0.01, 0.02, 0.15], 1.0)
    seen_before = measured(example.logp_BT + 1, np.float32(0.001))
    config = ObjectiveConfig.preset("sat_grpo", quantile_scope="microbatch", quantile=0.5)
    assert metrics(example, config, seen_before)["sat/threshold"] == pytest.approx(0.02)


def test_far_log_ratios_stay_finite_and_keep_pulling_back():
    example = one_row([60.0, -60.0], -1.0)
    loss, gradient_BT = loss_and_gradient(example, ObjectiveConfig())
    assert math.isfinite(loss)
    assert gradient_BT[0, 0] == pytest.approx(math.exp(20) / 2, rel=1e-5)
    assert gradient_BT[0, 1] == 0
    assert all(math.isfinite(value) for value in metrics(example, ObjectiveConfig()).values())


@pytest.mark.parametrize("name", preset_names())
def test_without_active_tokens_loss_and_gradient_are_0_and_it_shows(name):
    example = random_example(0)
    example = with_batch(example, loss_mask_BT=np.zeros((3, 16), bool))
    loss, gradient_BT = loss_and_gradient(example, ObjectiveConfig.preset(name))
    assert loss == 0
    assert np.all(gradient_BT == 0)


@pytest.mark.parametrize("name", ["sat_grpo", "m2po", "m2po_mask", "sapo"])
def test_metrics_without_active_tokens_are_finite(name):
    example = with_batch(random_example(0), loss_mask_BT=np.zeros((3, 16), bool))
    seen = metrics(example, ObjectiveConfig.preset(name))
    assert seen["tokens"] == 0
    assert seen["sequences"] == 0
    assert all(math.isfinite(value) for value in seen.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logp_BT", "behavior_logp_BT", "advantage_BT", "prox_logp_BT", "ref_logp_BT"])
@pytest.mark.parametrize("name", ["sat_grpo", "ppo", "dppo", "sapo", "opsm"])
def test_a_number_that_is_not_finite_at_an_active_position_is_never_hidden(name, where, bad):
    example = random_example(1)
    row, position = np.argwhere(example.batch.loss_mask_BT)[7]
    owner = example if hasattr(example, where) else example.batch
    spoilt_BT = getattr(owner, where).copy()
    spoilt_BT[row, position] = bad
    if owner is example:
        spoilt = dataclasses.replace(example, **{where: spoilt_BT})
    else:
        spoilt = with_batch(example, **{where: spoilt_BT})
    loss, _ = loss_and_gradient(spoilt, ObjectiveConfig.preset(name))
    assert math.isnan(loss)
    message = first_nonfinite(
        spoilt.logp_BT, spoilt.batch, prox_logp_BT=spoilt.prox_logp_BT, ref_logp_BT=spoilt.ref_logp_BT
    )
    assert message is not None
    assert f"{where}: expected a finite number" in message
    assert f"row {row}, position {position}" in message


def test_first_nonfinite_is_silent_when_all_is_finite_or_masked():
    example = random_example(1)
    logp_BT = np.where(example.batch.loss_mask_BT, example.logp_BT, np.nan)
    assert first_nonfinite(logp_BT, example.batch) is None


def test_m2pos_bound_by_hand():
    # Nine outward tokens at 0.01 and one at 1: 9e-4 + tau^2 = 10 * 0.04. The inward ones (far out) do not enter.
    mismatch_BT = jnp.array([[0.01] * 9 + [1.0] + [5.0] * 3, [-2.0] * 13])
    advantage_BT = jnp.array([[1.0] * 10 + [-1.0] * 3, [1.0] * 13])
    config = ObjectiveConfig.preset("m2po")
    tau = float(batch_threshold(mismatch_BT, jnp.ones((2, 13), bool), advantage_BT, config))
    assert tau == pytest.approx(math.sqrt(0.4 - 9e-4), rel=1e-5)
    within = float(batch_threshold(0.1 * mismatch_BT, jnp.ones((2, 13), bool), advantage_BT, config))
    assert math.exp(within) == pytest.approx(1e5, rel=1e-5)


def test_m2pos_mask_keeps_what_stays_within_the_budget_and_at_least_the_smallest():
    config, everywhere = ObjectiveConfig.preset("m2po_mask"), jnp.ones((1, 4), bool)
    # Squares 0.01, 0.01, 0.09, 1: the mean of the first three is 0.0367, of all 0.2775.
    cut = float(batch_threshold(jnp.array([[0.1, -0.1, 0.3, -1.0]]), everywhere, jnp.ones((1, 4)), config))
    assert 0.3 <= cut < 1.0
    alone = float(batch_threshold(jnp.array([[0.9, -0.5, 0.7, 2.0]]), everywhere, jnp.ones((1, 4)), config))
    assert alone == 0.5


def test_an_unknown_preset_lists_the_known_and_suggests():
    with pytest.raises(
        ValueError, match=r"objective preset: expected one of ppo, .*sat_gspo, got 'sat-grpo'; did you mean sat_grpo"
    ):
        ObjectiveConfig.preset("sat-grpo")


def test_an_unknown_field_lists_the_known():
    with pytest.raises(ValueError, match=r"objective grpo: expected fields among .*eps_high.*, got eps_clip"):
        ObjectiveConfig.preset("grpo", eps_clip=0.2)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("grpo", "quantile", 0.95),
        ("gspo", "exponent", 3.0),
        ("ppo", "dual_cap", 4.0),
        ("cispo", "eps_high", 0.3),
        ("sapo", "eps_low", 0.1),
        ("sat_grpo", "gate_high", 0.1),
        ("trm_mean_k3", "gate_low", 0.1),
        ("tis_pg", "weight_high", 2.0),
        ("sat_gspo", "norm_length", 100.0),
        ("sat_grpo", "m2_budget", 0.1),
        ("m2po", "quantile", 0.5),
    ],
)
def test_a_field_that_the_preset_does_not_use_is_refused(name, field, value):
    with pytest.raises(ValueError, match=rf"objective {name}: expected fields that it uses \(.*\), got {field}"):
        ObjectiveConfig.preset(name, **{field: value})


def test_an_exchanged_link_brings_its_fields():
    config = ObjectiveConfig.preset("dapo", radii="sat", quantile=0.95, threshold_max=0.1)
    assert (config.sat.quantile, config.sat.threshold_max, config.eps_high) == (0.95, 0.1, 0.28)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mismatch": "word"}, "mismatch: expected one of token, sequence, sequence_token, got 'word'"),
        ({"aggregation": "mean"}, "aggregation: expected one of"),
        ({"eps_low": 0.0}, "eps_low: expected a number in"),
        ({"eps_high": 1.0}, "eps_high: expected a number in"),
        ({"quantile": 1.0}, "quantile: expected a number in"),
        ({"kl_coef": -1.0}, "kl_coef: expected a finite number >= 0"),
        ({"kl_coef": math.nan}, "kl_coef: expected"),
        ({"surrogate": "dual_clip", "dual_cap": 1.0}, "dual_cap: expected a number > 1"),
        ({"surrogate": "cispo", "cispo_high": 0.5}, "cispo_high: expected a number > 1"),
        ({"surrogate": "cispo", "cispo_low": 1.0}, "cispo_low: expected a number in"),
        ({"surrogate": "sapo", "tau_negative": 0.0}, "tau_negative: expected a finite number > 0"),
        ({"gate": "opsm"}, "gate_high: expected a limit for gate opsm, got None"),
        ({"gate": "mis", "gate_high": 2.0}, "gate_low: expected a limit for gate mis, got None"),
        ({"gate": "mis", "gate_low": 2.0, "gate_high": 1.0}, "gate_low: expected 0 <= gate_low < gate_high"),
        ({"gate": "dppo_tv", "gate_low": 0.0, "gate_high": 1.0}, "gate_low: expected a number > 0 for gate dppo_tv"),
        ({"gate": "opsm", "gate_high": 0.0}, "gate_high: expected a number > 0"),
        ({"anchor": "proximal", "weight": "tis"}, "weight_high: expected a limit for weight tis, got None"),
        ({"anchor": "proximal", "weight": "tis", "weight_low": 3.0, "weight_high": 2.0}, "weight_low: expected"),
        ({"weight": "tis", "weight_high": 2.0}, "anchor: expected proximal or interpolated with weight tis"),
        ({"radii": "sat", "surrogate": "cispo"}, "radii: expected fixed with surrogate cispo"),
        ({"radii": "sat", "anchor": "proximal"}, "anchor: expected behavior with radii sat"),
        ({"radii": "sat", "gate": "m2po_mask", "gate_high": 0.1}, "gate: expected another than m2po_mask"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**fields)


def test_missing_inputs_are_named_with_their_remedy():
    example = random_example(0)
    with pytest.raises(ValueError, match=r"prox_logp_BT: expected the trainer's log-probs .* choose anchor behavior"):
        policy_loss(example.logp_BT, example.batch, ObjectiveConfig.preset("decoupled_ppo"))
    with pytest.raises(ValueError, match=r"ref_logp_BT: expected .* \(kl_coef 0.1\), got None"):
        policy_loss(example.logp_BT, example.batch, ObjectiveConfig.preset("grpo", kl_coef=0.1))
    unversioned = dataclasses.replace(example.batch, lag_BT=None)
    with pytest.raises(ValueError, match="lag_BT: expected the lag of every token"):
        policy_loss(example.logp_BT, unversioned, ObjectiveConfig.preset("a3po"))


def test_shapes_that_contradict_their_names_are_refused():
    example = random_example(0)
    config = ObjectiveConfig()
    with pytest.raises(ValueError, match=r"segment_BT: expected axis T"):
        policy_loss(example.logp_BT[:, :-1], example.batch, config)
    with pytest.raises(ValueError, match="ref_logp_BT: expected axis T"):
        policy_loss(example.logp_BT, example.batch, config, ref_logp_BT=example.logp_BT[:, :-1])
    with pytest.raises(ValueError, match="threshold: expected 0 axes"):
        policy_loss(example.logp_BT, example.batch, config, measured=measured(example.logp_BT, np.zeros(2)))
    with pytest.raises(ValueError, match="advantage_BT: expected the shape of mismatch and mask"):
        batch_threshold(jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros((2, 2)), config)
