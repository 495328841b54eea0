"""Value and gradient of our presets against verl's own functions, on the same random numbers: `make test-peers`.

verl has one sequence a row. Where its loss is `-sg[ratio] A log pi`, only gradients are compared: values differ by a
detached factor of no meaning.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

from sat_jax.objective import ObjectiveConfig, policy_loss
from sat_jax.types import TokenBatch
from tests.reference.batches import token_batch

pytestmark = pytest.mark.peers

SHAPE = (8, 48)
SEEDS = range(5)


@functools.cache
def program(config: ObjectiveConfig) -> Any:
    def loss(logp_BT: jax.Array, batch: TokenBatch, prox_BT: jax.Array, reference_BT: jax.Array) -> jax.Array:
        return policy_loss(logp_BT, batch, config, prox_logp_BT=prox_BT, ref_logp_BT=reference_BT).loss

    return jax.jit(jax.value_and_grad(loss))


class Numbers:
    """One random batch in both worlds; heavy-tailed mismatch, masks of every density, a row without a token."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.mask_BT = rng.random(SHAPE) < rng.random((SHAPE[0], 1))
        self.mask_BT[0] = False
        self.behavior_BT = np.float32(-rng.exponential(1.0, SHAPE) - 0.05)
        self.logp_BT = np.float32(np.minimum(self.behavior_BT + 0.15 * rng.standard_t(3, SHAPE), -0.01))
        self.prox_BT = np.float32(np.minimum(self.logp_BT + 0.08 * rng.standard_t(3, SHAPE), -0.01))
        self.reference_BT = np.float32(np.minimum(self.logp_BT + 0.3 * rng.normal(size=SHAPE), -0.01))
        self.advantage_BT = np.float32(np.repeat(rng.normal(size=(SHAPE[0], 1)), SHAPE[1], axis=1))

    def ours(self, config: ObjectiveConfig) -> tuple[float, np.ndarray]:
        batch = token_batch(
            segment_BT=np.ones(SHAPE),
            loss_mask_BT=self.mask_BT,
            behavior_logp_BT=self.behavior_BT,
            advantage_BT=self.advantage_BT,
            lag_BT=np.zeros(SHAPE),
        )

        value, gradient = program(config)(self.logp_BT, batch, self.prox_BT, self.reference_BT)
        return float(value), np.asarray(gradient)

    def theirs(self, name: str, old_BT: np.ndarray, aggregation: str, weight: Any = None, **fields: Any) -> Any:
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
        logp = torch.tensor(self.logp_BT, requires_grad=True)
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=torch.tensor(old_BT),
            log_prob=logp,
            advantages=torch.tensor(self.advantage_BT),
            response_mask=torch.tensor(self.mask_BT, dtype=torch.float32),
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=weight,
        )
        loss.backward()
        assert logp.grad is not None
        return float(loss.detach()), logp.grad.numpy()


def agree(ours: tuple[float, np.ndarray], theirs: tuple[float, np.ndarray], *, values: bool = True) -> None:
    assert np.abs(theirs[1]).max() > 0
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    if values:
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("preset", "aggregation", "fields"),
    [
        ("grpo", "seq-mean-token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e6}),
        ("dapo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}),
        ("dual_clip", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    ],
)
def test_token_clipping_is_that_of_verl(preset, aggregation, fields, seed):
    numbers = Numbers(seed)
    theirs = numbers.theirs("vanilla", numbers.behavior_BT, aggregation, **fields)
    agree(numbers.ours(ObjectiveConfig.preset(preset)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_constant_length_divides_sums_as_in_verl(seed):
    numbers = Numbers(seed)
    theirs = numbers.theirs(
        "vanilla",
        numbers.behavior_BT,
        "seq-mean-token-sum-norm",
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=1e6,
    )
    agree(numbers.ours(ObjectiveConfig.preset("dr_grpo", norm_length=float(SHAPE[1]))), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", ["gspo", "gspo_token"])
def test_sequence_clipping_is_that_of_verl(preset, seed):
    """With an advantage constant in a response GSPO and its token form have one gradient (arXiv 2507.18071, eq. 17)."""
    numbers = Numbers(seed)
    theirs = numbers.theirs(
        "gspo", numbers.behavior_BT, "seq-mean-token-mean", clip_ratio_low=0.02, clip_ratio_high=0.03
    )
    agree(numbers.ours(ObjectiveConfig.preset(preset, eps_low=0.02, eps_high=0.03)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_that_of_verl(seed):
    numbers = Numbers(seed)
    theirs = numbers.theirs("sapo", numbers.behavior_BT, "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05)
    agree(numbers.ours(ObjectiveConfig.preset("sapo")), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_has_the_gradient_of_verl(seed):
    numbers = Numbers(seed)
    theirs = numbers.theirs("cispo", numbers.behavior_BT, "token-mean", clip_ratio_low=0.4, clip_ratio_high=0.3)
    agree(numbers.ours(ObjectiveConfig.preset("cispo", cispo_low=0.6, cispo_high=1.3)), theirs, values=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("preset", "name", "limit"), [("dppo", "dppo_tv", 0.05), ("dppo_kl", "dppo_kl", 0.01)])
def test_dppo_has_the_gradient_of_verl(preset, name, limit, seed):
    numbers = Numbers(seed)
    fields = {"clip_ratio": limit, "clip_ratio_low": limit, "clip_ratio_high": limit, "clip_ratio_c": 20.0}
    theirs = numbers.theirs(name, numbers.behavior_BT, "seq-mean-token-mean", **fields)
    config = ObjectiveConfig.preset(preset, gate_low=limit, gate_high=limit, aggregation="seq_mean_token_mean")
    agree(numbers.ours(config), theirs, values=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("preset", "level", "cap"), [("tis", "token", 2.0), ("tis_sequence", "sequence", 5.0)])
def test_truncated_importance_weights_are_those_of_verl(preset, level, cap, seed):
    numbers = Numbers(seed)
    mask = torch.tensor(numbers.mask_BT, dtype=torch.float32)
    log_ratio = torch.tensor(numbers.prox_BT - numbers.behavior_BT)
    weight, _ = compute_rollout_correction_weights(log_ratio, mask, rollout_is=level, rollout_is_threshold=cap)
    theirs = numbers.theirs(
        "vanilla",
        numbers.prox_BT,
        "seq-mean-token-mean",
        weight,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=1e6,
    )
    agree(numbers.ours(ObjectiveConfig.preset(preset)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("preset", "kind", "limits", "fields"),
    [
        ("mis", "seq_sum_k1", "0.5_2.0", {"gate_low": 0.5, "gate_high": 2.0}),
        ("geo_mask", "seq_mean_k1", "0.98_1.02", {"gate_low": 0.98, "gate_high": 1.02}),
        ("icepop_mask", "token_k1", "0.8_1.25", {"gate_low": 0.8, "gate_high": 1.25}),
    ],
)
def test_rejection_keeps_what_verl_keeps(preset, kind, limits, fields, seed):
    """verl drops what is rejected from the denominator too: gradients agree up to its ratio of counts."""
    numbers = Numbers(seed)
    mask = torch.tensor(numbers.mask_BT, dtype=torch.float32)
    log_ratio = torch.tensor(numbers.prox_BT - numbers.behavior_BT)
    kept, _ = compute_rollout_rejection_mask(log_ratio, mask, rollout_rs=kind, rollout_rs_threshold=limits)
    config = ObjectiveConfig.preset(preset, aggregation="token_mean", **fields)
    _, gradient_BT = numbers.ours(config)
    ungated = numbers.theirs(
        "vanilla", numbers.prox_BT, "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e6
    )
    np.testing.assert_allclose(gradient_BT, ungated[1] * kept.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_are_those_of_verl(kind, seed):
    numbers = Numbers(seed)
    logp = torch.tensor(numbers.logp_BT, requires_grad=True)
    mask = torch.tensor(numbers.mask_BT, dtype=torch.float32)
    penalty = kl_penalty(logp, torch.tensor(numbers.reference_BT), kind)
    mean = (penalty * mask).sum() / mask.sum()
    mean.backward()
    assert logp.grad is not None
    base = ObjectiveConfig.preset("dapo")
    with_kl = numbers.ours(ObjectiveConfig.preset("dapo", kl_coef=1.0, kl_kind=kind))
    without = numbers.ours(base)
    difference = (with_kl[0] - without[0], with_kl[1] - without[1])
    agree(difference, (float(mean.detach()), logp.grad.numpy()))
