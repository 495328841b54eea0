"""The fourth link: which tokens are dropped, and by what detached weight the rest are multiplied."""

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.ratio import Ratios, bounded_exp
from sat_jax.objective.sequences import sequence_max, sequence_mean, sequence_sum
from sat_jax.types import TokenBatch

# Keeps log(1 - p) finite for a token of probability 1 (the constant of verl and AReaL).
_TINY_PROBABILITY = 1e-8


def kept(
    ratios: Ratios, advantage_BT: jax.Array, batch: TokenBatch, threshold: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """Which tokens take part, bool; a dropped one still counts in the denominator.

    Args:
      ratios: log-ratios.
      advantage_BT: float32, 0 where inactive.
      batch: mask and segments.
      threshold: `batch_threshold`, for m2po_mask.
      config: which gate, and its limits.

    Returns:
      keep_BT; True everywhere without a gate.
    """
    keep_BT = _kept(ratios, advantage_BT, batch, threshold, config)
    return lax.stop_gradient(keep_BT)


def _kept(
    ratios: Ratios, advantage_BT: jax.Array, batch: TokenBatch, threshold: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    low, high = config.gate_limits
    if config.gate == "none":
        return jnp.ones_like(advantage_BT, bool)
    if config.gate in ("dppo_tv", "dppo_kl"):
        return _within_divergence(ratios, advantage_BT, config)
    if config.gate == "m2po_mask":
        return jnp.abs(ratios.score_BT) <= threshold
    if config.gate == "opsm":
        fall_BT = sequence_mean(-ratios.drift_BT, batch.loss_mask_BT, batch.segment_BT)
        return ~((advantage_BT < 0) & (fall_BT > high))
    statistic_BT = _statistic(ratios, batch, config.gate)
    if config.gate == "dis":
        return (statistic_BT > low) & (statistic_BT < high)
    return (statistic_BT >= low) & (statistic_BT <= high)


def _statistic(ratios: Ratios, batch: TokenBatch, gate: str) -> jax.Array:
    """The number that a two-sided or upper-bounded gate compares with its limits."""
    correction_BT, active_BT, segment_BT = ratios.correction_BT, batch.loss_mask_BT, batch.segment_BT
    if gate == "kpop":
        anchor_BT = ratios.behavior_BT + correction_BT
        forward_BT = bernoulli_kl(anchor_BT, ratios.behavior_BT)
        return jnp.maximum(forward_BT, bernoulli_kl(ratios.behavior_BT, anchor_BT))
    if gate == "mis":
        return bounded_exp(sequence_sum(correction_BT, segment_BT))
    if gate == "geo":
        return bounded_exp(sequence_mean(correction_BT, active_BT, segment_BT))
    if gate == "trm_max_k2":
        return sequence_max(correction_BT * correction_BT / 2, segment_BT)
    if gate == "trm_mean_k3":
        return sequence_mean(bounded_exp(correction_BT) - 1 - correction_BT, active_BT, segment_BT)
    return bounded_exp(correction_BT)


def _within_divergence(ratios: Ratios, advantage_BT: jax.Array, config: ObjectiveConfig) -> jax.Array:
    """DPPO: a token is dropped if the update would push it further out than the limit allows.

    Source: DPPO (arXiv 2602.04879), binary total variation and binary KL of the sampled token.
    """
    pi_BT, mu_BT = jnp.exp(ratios.behavior_BT + ratios.token_BT), jnp.exp(ratios.behavior_BT)
    rise_BT = pi_BT - mu_BT
    divergence_BT = jnp.abs(rise_BT)
    if config.gate == "dppo_kl":
        divergence_BT = bernoulli_kl(ratios.behavior_BT, ratios.behavior_BT + ratios.token_BT)
    largest_fall, largest_rise = config.gate_limits
    rising_BT = (rise_BT <= 0) | (divergence_BT <= largest_rise)
    falling_BT = (rise_BT >= 0) | (divergence_BT <= largest_fall)
    return jnp.where(advantage_BT > 0, rising_BT, falling_BT)


def bernoulli_kl(left_BT: jax.Array, right_BT: jax.Array) -> jax.Array:
    """KL between two Bernoulli distributions given as log-probs of the sampled token, nats, >= 0 up to rounding."""
    p_BT, q_BT = jnp.exp(left_BT), jnp.exp(right_BT)
    rest_BT = jnp.log((1 - p_BT + _TINY_PROBABILITY) / (1 - q_BT + _TINY_PROBABILITY))
    return p_BT * (left_BT - right_BT) + (1 - p_BT) * rest_BT


def weights(ratios: Ratios, batch: TokenBatch, config: ObjectiveConfig) -> jax.Array:
    """The detached factor anchor / mu of each token, truncated or cut; 1 without a weight.

    Source: TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"); IcePop
    (Ling team, "Small leak can sink a great ship").
    """
    if config.weight == "none":
        return jnp.ones_like(ratios.correction_BT)
    assert config.weight_high is not None, "checked by ObjectiveConfig"
    log_BT = ratios.correction_BT
    if config.weight == "tis_sequence":
        log_BT = sequence_sum(log_BT, batch.segment_BT)
    weight_BT = lax.stop_gradient(bounded_exp(log_BT))
    if config.weight == "icepop":
        inside_BT = (weight_BT >= config.weight_low) & (weight_BT <= config.weight_high)
        return jnp.where(inside_BT, weight_BT, 0)
    return jnp.clip(weight_BT, config.weight_low, config.weight_high)
