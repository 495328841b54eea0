"""The first link: log-ratios of the active tokens, in the objective's unit and against its anchor."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.sequences import sequence_mean
from sat_jax.types import TokenBatch

# e^20 is 4.9e8: a ratio beyond it says nothing more, and its square still fits float32.
LOG_RATIO_BOUND = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratios:
    """Log-ratios, nats, float32, 0 where inactive.

    Attributes:
      logp_BT: log pi, differentiable.
      behavior_BT: log mu.
      token_BT: log pi - log mu of the token, detached.
      clipped_BT: log of the ratio that the surrogate bounds: pi / anchor in the objective's unit, differentiable.
      score_BT: log pi - log mu (prox in pi's place for a proximal anchor) in the objective's unit, detached: what
        batch statistics are taken of.
      correction_BT: log anchor - log mu of the token, detached; log pi - log mu where the anchor is mu itself.
      drift_BT: log pi - log anchor of the token, detached.
    """

    logp_BT: jax.Array
    behavior_BT: jax.Array
    token_BT: jax.Array
    clipped_BT: jax.Array
    score_BT: jax.Array
    correction_BT: jax.Array
    drift_BT: jax.Array

    def with_score(self, score_BT: jax.Array) -> "Ratios":
        """The same log-ratios, scored by what `measure` saw."""
        return dataclasses.replace(self, score_BT=score_BT)


def log_ratios(
    logp_BT: jax.Array, batch: TokenBatch, config: ObjectiveConfig, prox_logp_BT: jax.Array | None
) -> Ratios:
    """All log-ratios that any link needs.

    What is inactive is replaced *before* any arithmetic: a product with 0 afterwards would keep NaN, and the gradient
    of a masked exp would be NaN.
    """
    active_BT = batch.loss_mask_BT
    logp_BT = active_or_zero(logp_BT, active_BT)
    behavior_BT = active_or_zero(batch.behavior_logp_BT, active_BT)
    live_BT = lax.stop_gradient(logp_BT)
    token_BT = live_BT - behavior_BT
    if config.anchor == "behavior":
        anchor_BT, correction_BT = behavior_BT, token_BT
    elif config.anchor == "interpolated":
        anchor_BT = behavior_BT + interpolation(batch.lag_BT) * token_BT
        anchor_BT = active_or_zero(anchor_BT, active_BT)
        correction_BT = anchor_BT - behavior_BT
    else:
        assert prox_logp_BT is not None, "policy_loss refuses a proximal anchor without proximal log-probs"
        anchor_BT = lax.stop_gradient(active_or_zero(prox_logp_BT, active_BT))
        correction_BT = anchor_BT - behavior_BT
    scored_BT = correction_BT if config.anchor == "proximal" else token_BT
    return Ratios(
        logp_BT=logp_BT,
        behavior_BT=behavior_BT,
        token_BT=token_BT,
        clipped_BT=in_unit(logp_BT - anchor_BT, batch, config),
        score_BT=lax.stop_gradient(in_unit(scored_BT, batch, config)),
        correction_BT=correction_BT,
        drift_BT=live_BT - anchor_BT,
    )


def active_or_zero(value_BT: jax.Array, active_BT: jax.Array) -> jax.Array:
    """The value in float32 where active, else 0: whatever was there, and its gradient, is gone."""
    return jnp.where(active_BT, value_BT, 0).astype(jnp.float32)


def in_unit(log_ratio_BT: jax.Array, batch: TokenBatch, config: ObjectiveConfig) -> jax.Array:
    """The token log-ratio as it is, or its mean over the sequence's active tokens, at each of them.

    Source: GSPO (arXiv 2507.18071), equations 7 (sequence) and 14 (sequence value, token gradient).
    """
    if config.mismatch == "token":
        return log_ratio_BT
    mean_BT = sequence_mean(log_ratio_BT, batch.loss_mask_BT, batch.segment_BT)
    if config.mismatch == "sequence_token":
        mean_BT = lax.stop_gradient(mean_BT) + (log_ratio_BT - lax.stop_gradient(log_ratio_BT))
    return active_or_zero(mean_BT, batch.loss_mask_BT)


def interpolation(lag_BT: jax.Array) -> jax.Array:
    """A-3PO's share of log pi in log prox: (k - 1) / k for a token of lag k, 0 up to lag 1; float32 in [0, 1).

    Source: A-3PO (arXiv 2512.06547): the proximal policy is one version behind the live one.
    """
    lag_BT = jnp.maximum(lag_BT, 1).astype(jnp.float32)
    return (lag_BT - 1) / lag_BT


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    """Exp of a log-ratio held within +-20, with the gradient of exp at the held value.

    Inside the bound it is exp, bit for bit. Outside, a token's pull back towards mu keeps its full (bounded) strength
    where a plain clip would silence it.
    """
    held = lax.stop_gradient(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND) - log_ratio)
    return jnp.exp(log_ratio + held)
