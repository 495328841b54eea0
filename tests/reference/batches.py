"""Random packed batches for the objective's tests: fixed shapes, so that nothing recompiles between examples."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from sat_jax.types import Measured, RoutingTrace, TokenBatch


def token_batch(*, segment_BT, loss_mask_BT, behavior_logp_BT, advantage_BT, lag_BT) -> TokenBatch:
    """A `TokenBatch` of what the objective reads; the rest is filler. NumPy leaves."""
    shape = np.shape(segment_BT)
    filler_BT: Any = np.zeros(shape, np.int32)
    trace: Any = {"experts_LBTK": np.zeros((1, *shape, 1), np.uint8), "present_BT": np.zeros(shape, bool)}
    read: Any = {
        "segment_BT": np.asarray(segment_BT, np.int32),
        "loss_mask_BT": np.asarray(loss_mask_BT, bool),
        "behavior_logp_BT": np.asarray(behavior_logp_BT, np.float32),
        "advantage_BT": np.asarray(advantage_BT, np.float32),
        "lag_BT": np.asarray(lag_BT, np.int32),
    }
    return TokenBatch(
        input_BT=filler_BT, target_BT=filler_BT, position_BT=filler_BT, trace=RoutingTrace(**trace), **read
    )


def measured(mismatch_BT: Any, threshold: Any) -> Measured:
    """A `Measured` of NumPy leaves."""
    return Measured(mismatch_BT=mismatch_BT, threshold=threshold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A batch and the log-probs that go with it; NumPy, float32, typed loosely as the code expects device arrays."""

    batch: TokenBatch
    logp_BT: Any
    prox_logp_BT: Any
    ref_logp_BT: Any


def random_segments(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Rows cut at random places into sequences, the last piece of most rows being padding."""
    segment_BT = np.zeros((rows, length), np.int32)
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, length), size=rng.integers(1, 5), replace=False))
        edges = [0, *cuts.tolist()] + ([length] if rng.random() < 0.3 else [])
        for index, (start, stop) in enumerate(itertools.pairwise(edges)):
            segment_BT[row, start:stop] = index + 1
    return segment_BT


def random_example(seed: int, *, rows: int = 3, length: int = 16, spread: float = 0.15) -> Example:
    """Sequences of random lengths, prompts masked, heavy-tailed mismatch, constant advantage within a sequence."""
    rng = np.random.default_rng(seed)
    segment_BT = random_segments(rng, rows, length)
    loss_mask_BT = (rng.random((rows, length)) < 0.75) & (segment_BT > 0)
    advantage_BT = np.zeros((rows, length), np.float32)
    for row in range(rows):
        for segment in range(1, segment_BT[row].max() + 1):
            advantage_BT[row, segment_BT[row] == segment] = rng.normal()
    behavior_logp_BT = -rng.exponential(1.0, (rows, length)) - 0.05
    # A token's probability cannot pass 1: the gates on probabilities would meet their smoothing constants there.
    logp_BT = np.minimum(behavior_logp_BT + spread * rng.standard_t(3, (rows, length)), -0.01)
    prox_logp_BT = np.minimum(logp_BT + 0.5 * spread * rng.standard_t(3, (rows, length)), -0.01)
    ref_logp_BT = logp_BT + 0.3 * rng.normal(size=(rows, length))
    return Example(
        batch=token_batch(
            segment_BT=segment_BT,
            loss_mask_BT=loss_mask_BT,
            behavior_logp_BT=behavior_logp_BT,
            advantage_BT=advantage_BT,
            lag_BT=rng.integers(0, 6, (rows, length)),
        ),
        logp_BT=logp_BT.astype(np.float32),
        prox_logp_BT=prox_logp_BT.astype(np.float32),
        ref_logp_BT=ref_logp_BT.astype(np.float32),
    )


def one_row(mismatch, advantage, *, mask=None, lag=None) -> Example:
    """One sequence, all active unless masked, mu = e^-1; padded to the usual shape by empty rows."""
    mismatch = np.asarray(mismatch, np.float32)
    width, length = len(mismatch), max(16, len(mismatch))

    def placed(values, fill=0):
        padded_BT = np.full((3, length), fill, np.float32)
        padded_BT[0, :width] = values
        return padded_BT

    active = np.ones(width, bool) if mask is None else np.asarray(mask, bool)
    logp_BT = placed(mismatch - 1)
    return Example(
        batch=token_batch(
            segment_BT=placed(1),
            loss_mask_BT=placed(active),
            behavior_logp_BT=placed(-1),
            advantage_BT=placed(advantage),
            lag_BT=placed(0 if lag is None else lag),
        ),
        logp_BT=logp_BT,
        prox_logp_BT=logp_BT,
        ref_logp_BT=logp_BT,
    )


def with_batch(example: Example, **fields) -> Example:
    """The same example with other batch fields."""
    return dataclasses.replace(example, batch=dataclasses.replace(example.batch, **fields))
