"""What a step says about its objective, as metrics that merge over microbatches, shards and steps."""

import dataclasses

import jax
import jax.numpy as jnp

from sat_jax.metrics import EffectiveShare, Max, Mean, Metrics, Min, Sum
from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.ratio import Ratios, bounded_exp
from sat_jax.objective.sequences import sequence_count
from sat_jax.objective.surrogate import clip_bound
from sat_jax.trust_region import effective_radii, sides_active
from sat_jax.types import ClipRadii, TokenBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """What each link of one `policy_loss` gave."""

    advantage_BT: jax.Array
    ratios: Ratios
    threshold: jax.Array
    radii: ClipRadii
    bounded_BT: jax.Array
    keep_BT: jax.Array
    weight_BT: jax.Array
    reference_BT: jax.Array | None


def loss_metrics(links: Links, batch: TokenBatch, config: ObjectiveConfig) -> Metrics:
    """All metrics of a loss; the same names for every method.

    Args:
      links: what the links gave.
      batch: masks, segments, lags.
      config: the method.

    Returns:
      Metrics by name. `mismatch/*` are of the *token* log-ratio log pi - log mu, also for sequence units. `sat/*`
      describe the contraction; without SAT they say what it would see: the threshold, nominal radii, gate rate 0.
      Everything is taken before gates and weights.
    """
    active_BT = batch.loss_mask_BT
    tokens = jnp.sum(active_BT, dtype=jnp.int32).astype(jnp.float32)
    sequences = sequence_count(active_BT, batch.segment_BT).astype(jnp.float32)
    metrics: Metrics = {
        **_mismatch_metrics(links.ratios.token_BT, active_BT, tokens),
        **_sat_metrics(links, active_BT, tokens, config),
        "clip/fraction": _mean(links.bounded_BT, active_BT, tokens),
        "gate/dropped": _mean(~links.keep_BT, active_BT, tokens),
        "weight/mean": _mean(links.weight_BT, active_BT, tokens),
        "lag/mean": _mean(batch.lag_BT, active_BT, tokens),
        "lag/max": Max(jnp.max(jnp.where(active_BT, batch.lag_BT, 0)).astype(jnp.float32)),
        "tokens": Sum(tokens),
        "sequences": Sum(sequences),
    }
    if links.reference_BT is not None:
        metrics["kl/reference"] = _mean(links.reference_BT, active_BT, tokens)
    return metrics


def _mean(value_BT: jax.Array, active_BT: jax.Array, tokens: jax.Array) -> Mean:
    return Mean(jnp.sum(jnp.where(active_BT, value_BT, 0).astype(jnp.float32)), tokens)


def _mismatch_metrics(token_BT: jax.Array, active_BT: jax.Array, tokens: jax.Array) -> Metrics:
    size_BT = jnp.abs(token_BT)
    ratio_BT = jnp.where(active_BT, bounded_exp(token_BT), 0)
    return {
        "mismatch/mean": _mean(token_BT, active_BT, tokens),
        "mismatch/abs_mean": _mean(size_BT, active_BT, tokens),
        "mismatch/abs_max": Max(jnp.max(size_BT)),
        "mismatch/k1": _mean(-token_BT, active_BT, tokens),
        "mismatch/k3": _mean(bounded_exp(token_BT) - 1 - token_BT, active_BT, tokens),
        "mismatch/mult_prob_error": _mean(bounded_exp(size_BT), active_BT, tokens),
        "mismatch/ess": EffectiveShare(jnp.sum(ratio_BT), jnp.sum(ratio_BT * ratio_BT), tokens),
    }


def _sat_metrics(links: Links, active_BT: jax.Array, tokens: jax.Array, config: ObjectiveConfig) -> Metrics:
    low_factor_BT, high_factor_BT = links.radii.low_BT / config.eps_low, links.radii.high_BT / config.eps_high
    factor_BT = jnp.minimum(low_factor_BT, high_factor_BT)
    nominal = jnp.float32(config.eps_low), jnp.float32(config.eps_high)
    sat = config.radii == "sat"
    low, high = effective_radii(links.threshold, config.sat) if sat else nominal
    low_on, high_on = sides_active(links.threshold, config.sat) if sat else (jnp.float32(0), jnp.float32(0))
    gated_BT = factor_BT < 1
    newly_BT = jnp.zeros_like(gated_BT)
    if config.clips:
        ratio_BT = bounded_exp(links.ratios.clipped_BT)
        fixed = ClipRadii(
            low_BT=jnp.full_like(ratio_BT, config.eps_low), high_BT=jnp.full_like(ratio_BT, config.eps_high)
        )
        newly_BT = links.bounded_BT & ~clip_bound(ratio_BT, links.advantage_BT, fixed)[1]
    return {
        "sat/threshold": Max(links.threshold),
        "sat/gate_rate": _mean(gated_BT, active_BT, tokens),
        "sat/radius_low": _mean(links.radii.low_BT, active_BT, tokens),
        "sat/radius_high": _mean(links.radii.high_BT, active_BT, tokens),
        "sat/factor_min": Min(jnp.min(jnp.where(active_BT, factor_BT, 1))),
        # Weighted by tokens: microbatches with thresholds of their own merge to what the average token sees.
        "sat/effective_low": Mean(low * tokens, tokens),
        "sat/effective_high": Mean(high * tokens, tokens),
        "sat/active_low": Mean(low_on * tokens, tokens),
        "sat/active_high": Mean(high_on * tokens, tokens),
        "clip/newly": _mean(newly_BT, active_BT, tokens),
    }
