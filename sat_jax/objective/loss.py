"""The objective put together: five links, one scalar, and what a run wants to know about it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sat_jax.objective import aggregation
from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.gates import kept, weights
from sat_jax.objective.radii import batch_threshold, clip_radii
from sat_jax.objective.ratio import Ratios, active_or_zero, in_unit, log_ratios
from sat_jax.objective.report import Links, loss_metrics
from sat_jax.objective.surrogate import kl_to_reference, surrogate
from sat_jax.order_statistic import every
from sat_jax.shapes import check_shapes
from sat_jax.types import LossReport, Measured, TokenBatch


def policy_loss(  # noqa: PLR0913 (the optional inputs are what methods differ in)
    logp_BT: jax.Array,
    batch: TokenBatch,
    config: ObjectiveConfig,
    *,
    measured: Measured | None = None,
    prox_logp_BT: jax.Array | None = None,
    ref_logp_BT: jax.Array | None = None,
    denominator: jax.Array | None = None,
) -> LossReport:
    """The loss of a microbatch under the configured method; pure, and differentiable in `logp_BT`.

    What stands at inactive positions (NaN included) has no influence, gradients included. Without an active token the
    loss and its gradient are 0 and the metric `tokens` is 0. A number that is not finite at an *active* position makes
    the loss NaN; `first_nonfinite` says where.

    Args:
      logp_BT: log pi of the targets, nats, float32.
      batch: tokens, masks, the engine's log-probs and advantages.
      config: the method (static under `jit`).
      measured: what `measure` saw. Radii and m2po_mask act on its mismatch, and on its threshold if the scope is
        `batch`; None = on this batch's own.
      prox_logp_BT: log-probs by the trainer before the batch's first step, nats; needed by a proximal anchor, ignored
        by the others; detached here.
      ref_logp_BT: log-probs under the frozen reference, nats; needed when kl_coef > 0, otherwise only reported.
      denominator: global denominator of the optimizer batch (the sum of `denominator` over its microbatches), scalar;
        None = this batch's own.

    Returns:
      Scalar float32 loss and mergeable metrics. Losses of microbatches add up to that of the whole.

    Raises:
      ValueError: shapes contradict their names, or the method lacks an input.
    """
    check_shapes(logp_BT=logp_BT, prox_logp_BT=prox_logp_BT, ref_logp_BT=ref_logp_BT, denominator=denominator)
    _check_batch(logp_BT, batch)
    _check_needs(batch, config, prox_logp_BT, ref_logp_BT)
    batch = dataclasses.replace(batch, loss_mask_BT=jnp.asarray(batch.loss_mask_BT, bool))
    active_BT = batch.loss_mask_BT
    advantage_BT = lax.stop_gradient(active_or_zero(batch.advantage_BT, active_BT))
    ratios = log_ratios(logp_BT, batch, config, prox_logp_BT)
    ratios, threshold = _measured_or_own(ratios, advantage_BT, batch, config, measured)

    radii = clip_radii(ratios.score_BT, threshold, config)
    surrogate_BT, bounded_BT = surrogate(ratios, advantage_BT, radii, config)
    keep_BT = kept(ratios, advantage_BT, batch, threshold, config)
    weight_BT = weights(ratios, batch, config)
    value_BT = jnp.where(keep_BT, surrogate_BT * weight_BT, 0)
    reference_BT = None
    if ref_logp_BT is not None:
        reference_BT = kl_to_reference(ratios, active_or_zero(ref_logp_BT, active_BT), config)
    if config.kl_coef > 0 and reference_BT is not None:
        value_BT = value_BT - config.kl_coef * reference_BT

    inputs = (logp_BT, batch.behavior_logp_BT, batch.advantage_BT, prox_logp_BT, ref_logp_BT)
    finite = _all_finite(active_BT, *(array for array in inputs if array is not None))
    total = aggregation.denominator(batch, config) if denominator is None else denominator
    loss = -aggregation.aggregate(value_BT, batch, config, total, finite)
    links = Links(
        advantage_BT=advantage_BT,
        ratios=ratios,
        threshold=threshold,
        radii=radii,
        bounded_BT=bounded_BT,
        keep_BT=keep_BT,
        weight_BT=weight_BT,
        reference_BT=reference_BT,
    )
    return LossReport(loss=loss, metrics=loss_metrics(links, batch, config))


def mismatch(logp_BT: jax.Array, batch: TokenBatch, config: ObjectiveConfig) -> jax.Array:
    """The detached score log pi - log mu in the objective's unit: what `measure` keeps for `update`.

    Args:
      logp_BT: log pi of the targets, nats.
      batch: masks, segments and the engine's log-probs.
      config: for its unit.

    Returns:
      mismatch_BT, nats, float32; 0 where inactive.

    Raises:
      ValueError: shapes contradict their names.
    """
    check_shapes(logp_BT=logp_BT, behavior_logp_BT=batch.behavior_logp_BT, loss_mask_BT=batch.loss_mask_BT)
    active_BT = batch.loss_mask_BT
    token_BT = active_or_zero(logp_BT, active_BT) - active_or_zero(batch.behavior_logp_BT, active_BT)
    return lax.stop_gradient(in_unit(token_BT, batch, config))


def first_nonfinite(
    logp_BT: jax.Array | np.ndarray,
    batch: TokenBatch,
    *,
    prox_logp_BT: jax.Array | None = None,
    ref_logp_BT: jax.Array | None = None,
) -> str | None:
    """Names the first active position at which an input of the loss is not finite. On the host, not under `jit`.

    Args:
      logp_BT: log pi of the targets.
      batch: masks, the engine's log-probs and advantages.
      prox_logp_BT: as given to `policy_loss`.
      ref_logp_BT: as given to `policy_loss`.

    Returns:
      A sentence with the array, the value, row and position; None when all is finite.
    """
    active_BT = np.asarray(batch.loss_mask_BT).astype(bool)
    arrays = {
        "logp_BT": logp_BT,
        "behavior_logp_BT": batch.behavior_logp_BT,
        "advantage_BT": batch.advantage_BT,
        "prox_logp_BT": prox_logp_BT,
        "ref_logp_BT": ref_logp_BT,
    }
    for name, array_BT in arrays.items():
        if array_BT is None:
            continue
        value_BT = np.asarray(array_BT)
        wrong = np.argwhere(active_BT & ~np.isfinite(value_BT))
        if wrong.size:
            row, position = (int(index) for index in wrong[0])
            return (
                f"{name}: expected a finite number at every active position, got {value_BT[row, position]} "
                f"(row {row}, position {position}; {len(wrong)} such positions in all)"
            )
    return None


def _check_batch(logp_BT: jax.Array, batch: TokenBatch) -> None:
    check_shapes(
        logp_BT=logp_BT,
        segment_BT=batch.segment_BT,
        loss_mask_BT=batch.loss_mask_BT,
        behavior_logp_BT=batch.behavior_logp_BT,
        advantage_BT=batch.advantage_BT,
        lag_BT=batch.lag_BT,
    )


def _check_needs(
    batch: TokenBatch, config: ObjectiveConfig, prox_logp_BT: jax.Array | None, ref_logp_BT: jax.Array | None
) -> None:
    if config.needs_proximal and prox_logp_BT is None:
        raise ValueError(
            "prox_logp_BT: expected the trainer's log-probs before the batch's first step (anchor proximal), got None; "
            "pass them, or choose anchor behavior"
        )
    if config.needs_reference and ref_logp_BT is None:
        raise ValueError(
            f"ref_logp_BT: expected log-probs under the frozen reference (kl_coef {config.kl_coef}), got None; pass "
            "them, or set kl_coef to 0"
        )
    if config.anchor == "interpolated" and batch.lag_BT is None:
        raise ValueError("lag_BT: expected the lag of every token (anchor interpolated), got None; record versions")


def _measured_or_own(
    ratios: Ratios,
    advantage_BT: jax.Array,
    batch: TokenBatch,
    config: ObjectiveConfig,
    measured: Measured | None,
) -> tuple[Ratios, jax.Array]:
    """The score that radii act on, and the statistic of its pool."""
    if measured is not None:
        check_shapes(mismatch_BT=measured.mismatch_BT, loss_mask_BT=batch.loss_mask_BT, threshold=measured.threshold)
        score_BT = lax.stop_gradient(active_or_zero(measured.mismatch_BT, batch.loss_mask_BT))
        ratios = ratios.with_score(score_BT)
        if config.quantile_scope == "batch":
            return ratios, lax.stop_gradient(measured.threshold)
    return ratios, batch_threshold(ratios.score_BT, batch.loss_mask_BT, advantage_BT, config)


def _all_finite(active_BT: jax.Array, *arrays_BT: jax.Array) -> jax.Array:
    finite_BT = jnp.ones_like(active_BT)
    for array_BT in arrays_BT:
        finite_BT &= jnp.isfinite(array_BT)
    return every(finite_BT | ~active_BT)
