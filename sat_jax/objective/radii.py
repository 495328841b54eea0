"""The second link: clip radii per token, and the batch statistic that they (or a gate) depend on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.objective.config import ObjectiveConfig
from sat_jax.order_statistic import count, folded_sum
from sat_jax.trust_region import sat_radii, tail_threshold
from sat_jax.types import ClipRadii

# The official M2PO opens its upper bound to 1e5 where the budget holds; the logarithm of that is its largest tau.
_M2PO_OPEN = 11.512925


def clip_radii(score_BT: jax.Array, threshold: jax.Array, config: ObjectiveConfig) -> ClipRadii:
    """Radii around 1 of the objective's ratio.

    Args:
      score_BT: log-ratio in the objective's unit, nats, detached.
      threshold: `batch_threshold` of the pool.
      config: which radii.

    Returns:
      Radii; constant for `fixed` and `m2po`.
    """
    if config.radii == "sat":
        return sat_radii(score_BT, threshold, config.sat)
    low, high = jnp.float32(config.eps_low), jnp.float32(config.eps_high)
    if config.radii == "m2po":
        low = jnp.maximum(-jnp.expm1(-threshold), low)
        high = jnp.maximum(jnp.expm1(threshold), high)
    return ClipRadii(low_BT=jnp.broadcast_to(low, score_BT.shape), high_BT=jnp.broadcast_to(high, score_BT.shape))


def batch_threshold(
    mismatch_BT: jax.Array, mask_BT: jax.Array, advantage_BT: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """The statistic that `Measured.threshold` carries for this objective.

    SAT, and for information every method without a statistic of its own: the tail threshold q. M2PO: its bound tau on
    the log-ratio of outward tokens. m2po_mask: the largest |log-ratio| kept.

    Args:
      mismatch_BT: score in the objective's unit (`mismatch`), nats; any shape, microbatches stacked in front.
      mask_BT: bool, same shape; what is active.
      advantage_BT: same shape; its sign matters to M2PO only.
      config: which statistic.

    Returns:
      Scalar float32 >= 0, nats; 0 when nothing is active (M2PO: open).

    Raises:
      ValueError: the shapes differ.
    """
    if not mismatch_BT.shape == mask_BT.shape == advantage_BT.shape:
        raise ValueError(
            f"advantage_BT: expected the shape of mismatch and mask {mismatch_BT.shape} and {mask_BT.shape}, "
            f"got {advantage_BT.shape}"
        )
    score_BT = lax.stop_gradient(jnp.where(mask_BT, mismatch_BT, 0)).astype(jnp.float32)
    if config.radii == "m2po":
        outward_BT = mask_BT & (score_BT * jnp.where(mask_BT, advantage_BT, 0) > 0)
        return _moment_bound(jnp.abs(score_BT), outward_BT, config.m2_budget)
    if config.gate == "m2po_mask":
        return _mean_square_cut(jnp.abs(score_BT), mask_BT, config.gate_limits[1])
    return tail_threshold(score_BT, mask_BT, config.quantile)


def _moment_bound(size_BT: jax.Array, outward_BT: jax.Array, budget: float) -> jax.Array:
    """The tau at which mean min(size^2, tau^2) over outward tokens meets the budget; open if it never exceeds it.

    Source: M2PO (arXiv 2510.01161), official `kpo_clip_harmful_tokens`.
    """
    outward = jnp.maximum(count(outward_BT), 1).astype(jnp.float32)
    size_BT = jnp.where(outward_BT, size_BT, 0)

    def exceeds(tau: jax.Array) -> jax.Array:
        capped_BT = jnp.minimum(size_BT, tau)
        return folded_sum(capped_BT * capped_BT) / outward > budget

    return jnp.minimum(_last_below(exceeds), _M2PO_OPEN)


def _mean_square_cut(size_BT: jax.Array, mask_BT: jax.Array, budget: float) -> jax.Array:
    """The largest size whose inclusion keeps the mean square of what is kept below the budget; at least the smallest.

    Source: AReaL `_apply_m2po_masking`: drop the largest squares until the mean of the rest is below.
    """
    size_BT = jnp.where(mask_BT, size_BT, jnp.inf)

    def reached(cut: jax.Array) -> jax.Array:
        # The mean square of what is kept reaches the budget where the sum of (square - budget) reaches 0.
        return folded_sum(jnp.where(size_BT <= cut, size_BT * size_BT - budget, 0)) >= 0

    # With nothing kept 0 >= 0 would stop the search below the smallest size.
    smallest = jnp.min(size_BT)
    cut = _last_below(lambda size: (size >= smallest) & reached(size))
    return jnp.where(jnp.any(mask_BT), jnp.maximum(cut, smallest), 0)


def _last_below(reached: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest finite float >= 0 at which a condition that once true stays true is false: bisection on bits."""

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        beyond = reached(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(beyond, low, middle), jnp.where(beyond, middle, high)

    low, _ = lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.int32(0x7F800000)))
    return lax.bitcast_convert_type(low, jnp.float32)
