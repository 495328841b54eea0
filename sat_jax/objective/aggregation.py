"""The fifth link: from a value per token to a scalar, over one global denominator."""

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.sequences import active_count, sequence_count
from sat_jax.order_statistic import count, folded_sum
from sat_jax.shapes import check_shapes
from sat_jax.types import TokenBatch


def denominator(batch: TokenBatch, config: ObjectiveConfig) -> jax.Array:
    """What this microbatch adds to the loss's denominator: active tokens, or sequences with an active token.

    The caller sums it over the microbatches of an optimizer batch and hands the sum to every `policy_loss`; then the
    microbatch losses add up to the loss of the whole batch. Gates do not change it: a dropped token still counts.

    Args:
      batch: a microbatch.
      config: for its aggregation.

    Returns:
      Scalar float32 >= 0; may be 0 (it is clamped at 1 where it divides).
    """
    check_shapes(loss_mask_BT=batch.loss_mask_BT, segment_BT=batch.segment_BT)
    if config.aggregation == "token_mean":
        return count(jnp.asarray(batch.loss_mask_BT, bool)).astype(jnp.float32)
    return sequence_count(batch.loss_mask_BT, batch.segment_BT).astype(jnp.float32)


def aggregate(
    value_BT: jax.Array, batch: TokenBatch, config: ObjectiveConfig, total: jax.Array, finite: jax.Array
) -> jax.Array:
    """Weighted sum over active tokens, divided by the global denominator.

    Args:
      value_BT: per token, float32; finite garbage where inactive.
      batch: for mask and segments.
      config: for its aggregation.
      total: the global denominator (sum of `denominator` over the optimizer batch).
      finite: scalar bool; whether everything that went into `value_BT` is finite.

    Returns:
      Scalar float32; NaN, with a gradient of 0, unless `finite`.
    """
    if config.aggregation == "seq_mean_token_mean":
        value_BT = value_BT / jnp.maximum(active_count(batch.loss_mask_BT, batch.segment_BT), 1)
    if config.aggregation == "seq_mean_token_sum_norm":
        value_BT = value_BT / config.norm_length
    return _guarded_sum(jnp.where(batch.loss_mask_BT, value_BT, 0), finite) / jnp.maximum(total, 1)


@jax.custom_vjp
def _guarded_sum(value_BT: jax.Array, finite: jax.Array) -> jax.Array:
    """The sum, or NaN where an input was not finite: a clamp, a gate or a clipped branch could have swallowed it.

    As a branch the sum is compiled by itself. Fused with what precedes it, it would be vectorised differently in every
    method, and a method of strength zero would differ from its base in the last bit.
    """
    return lax.cond(finite, folded_sum, lambda value_BT: jnp.full((), jnp.nan, value_BT.dtype), value_BT)


def _guarded_sum_forward(value_BT: jax.Array, finite: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _guarded_sum(value_BT, finite), (finite, jnp.zeros_like(value_BT))


def _guarded_sum_backward(kept: tuple[jax.Array, jax.Array], slope: jax.Array) -> tuple[jax.Array, None]:
    finite, zero_BT = kept
    return zero_BT + jnp.where(finite, slope, 0), None


_guarded_sum.defvjp(_guarded_sum_forward, _guarded_sum_backward)
