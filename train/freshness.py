"""Masks tokens that are too old, for the policy that keeps their group (`schedule.too_old = "mask"`)."""

import dataclasses

from train.assemble import Assembled


def mask_stale(assembled: Assembled, max_lag: int) -> tuple[Assembled, int]:
    """Takes tokens older than `max_lag` out of the loss.

    Args:
      assembled: host microbatches; their lags are the trainer's at this step.
      max_lag: steps.

    Returns:
      The batch with those tokens inactive, its counts without them, and how many they were.
    """
    stats = assembled.stats
    masked = sum(count for lag, count in stats.lags.items() if lag > max_lag)
    if not masked:
        return assembled, 0
    micros = tuple(
        dataclasses.replace(micro, loss_mask_BT=micro.loss_mask_BT & (micro.lag_BT <= max_lag))
        for micro in assembled.microbatches
    )
    kept = {lag: count for lag, count in stats.lags.items() if lag <= max_lag}
    return (
        dataclasses.replace(
            assembled, microbatches=micros, stats=dataclasses.replace(stats, lags=kept, tokens=stats.tokens - masked)
        ),
        masked,
    )
