"""Statistics per sequence of packed rows, spread back over its positions.

A sequence is a (row, segment) pair. Everything here costs O(B * T) whatever the packing, and a sequence's numbers are
summed from its own positions only, so that a neighbour in the row cannot reach them, not even by rounding.

Sums are scattered in chunks of columns: a scatter wants row and segment of each of its elements, eight bytes, and a
chunk's are few. Columns and not rows, because rows may lie on different devices. Counts, which rounding cannot reach,
are added up in blocks of 32 positions before they are scattered, wherever no block holds more than two sequences.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from sat_jax.order_statistic import count

# A row of T positions has ids in [0, T]; saying so spares a third of the time on a CPU.
_IN_BOUNDS = "promise_in_bounds"
_CHUNK = 256
_BLOCK = 32


@jax.custom_vjp
def sequence_sum(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum over each position's own sequence, at every position of it; differentiable.

    Args:
      value_BT: what to sum; already 0 where a position does not count.
      segment_BT: sequence ids of the row, int32 in [0, T].

    Returns:
      sum_BT, in `value_BT`'s dtype.
    """
    return _spread(_sums(value_BT, segment_BT), segment_BT, value_BT)


def _sequence_sum_forward(value_BT: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sequence_sum(value_BT, segment_BT), segment_BT


def _sequence_sum_backward(segment_BT: jax.Array, slope_BT: jax.Array) -> tuple[jax.Array, None]:
    # Summing and spreading is its own transpose; derived, it would be two scatters and twice the time.
    return sequence_sum(slope_BT, segment_BT), None


sequence_sum.defvjp(_sequence_sum_forward, _sequence_sum_backward)


def sequence_max(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Maximum over each position's own sequence, at every position of it. Arguments as in `sequence_sum`."""
    return jax.vmap(_row_max)(value_BT, segment_BT)


@jax.custom_vjp
def sequence_mean(value_BT: jax.Array, active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Mean over the active positions of each position's sequence; 0 where it has none. Differentiable.

    Args:
      value_BT: what to average; already 0 where inactive.
      active_BT: bool; what counts.
      segment_BT: sequence ids of the row.

    Returns:
      mean_BT, at every position of the sequence.
    """
    return _means(value_BT, _counts(active_BT, segment_BT), segment_BT)


def _sequence_mean_forward(
    value_BT: jax.Array, active_BT: jax.Array, segment_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    count_BS = _counts(active_BT, segment_BT)
    return _means(value_BT, count_BS, segment_BT), (count_BS, segment_BT)


def _sequence_mean_backward(kept: tuple[jax.Array, jax.Array], slope_BT: jax.Array) -> tuple[jax.Array, None, None]:
    return _means(slope_BT, *kept), None, None


sequence_mean.defvjp(_sequence_mean_forward, _sequence_mean_backward)


def active_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of active positions of each position's sequence, int16 or int32: the smallest that holds T."""
    count_BS = _counts(active_BT, segment_BT)
    return _spread(count_BS, segment_BT, active_BT.astype(count_BS.dtype))


def sequence_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of sequences with at least one active position, scalar int32."""
    has_BS = _counts(active_BT, segment_BT) > 0
    return count(has_BS[:, 1:]) + count(has_BS[:, :1])  # T and one, so that the T fold evenly


def _counts(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Active positions of every sequence, by row and segment id, [B, T + 1]."""
    rows, length = active_BT.shape
    kind = jnp.int16 if length <= jnp.iinfo(jnp.int16).max else jnp.int32
    if length % _BLOCK:
        return _sums(active_BT, segment_BT, kind)
    first_BN, last_BN = segment_BT[:, ::_BLOCK], segment_BT[:, _BLOCK - 1 :: _BLOCK]
    at_first_BN = rest_BN = jnp.zeros_like(first_BN)
    two_BN = jnp.ones_like(first_BN, bool)
    for place in range(_BLOCK):
        here_BN, counts_BN = segment_BT[:, place::_BLOCK], active_BT[:, place::_BLOCK]
        of_first_BN = here_BN == first_BN
        at_first_BN += of_first_BN & counts_BN
        rest_BN += ~of_first_BN & counts_BN
        two_BN &= of_first_BN | (here_BN == last_BN)

    def blockwise() -> jax.Array:
        count_BS = jnp.zeros((rows, length + 1), kind)
        count_BS = jax.vmap(_add)(count_BS, at_first_BN.astype(kind), first_BN)
        return jax.vmap(_add)(count_BS, rest_BN.astype(kind), last_BN)

    return lax.cond(jnp.all(two_BN), blockwise, lambda: _sums(active_BT, segment_BT, kind))


def _means(value_BT: jax.Array, count_BS: jax.Array, segment_BT: jax.Array) -> jax.Array:
    return _spread(_sums(value_BT, segment_BT) / jnp.maximum(count_BS, 1), segment_BT, value_BT)


def _sums(value_BT: jax.Array, segment_BT: jax.Array, kind: DTypeLike | None = None) -> jax.Array:
    """Sum of every sequence, by row and segment id, [B, T + 1]; in `kind`, or as the values are."""
    length = value_BT.shape[1]
    kind = value_BT.dtype if kind is None else kind
    start_BS = jnp.zeros((value_BT.shape[0], length + 1), kind)

    def add(sum_BS: jax.Array, first: jax.Array | int, width: int) -> jax.Array:
        part_BT = lax.dynamic_slice_in_dim(value_BT, first, width, axis=1).astype(kind)
        return jax.vmap(_add)(sum_BS, part_BT, lax.dynamic_slice_in_dim(segment_BT, first, width, axis=1))

    return _chunked(add, start_BS, length)


def _chunked(turn: Callable[[jax.Array, jax.Array | int, int], jax.Array], carry: jax.Array, length: int) -> jax.Array:
    """`carry` after a turn (carry, first column, width) for every chunk of columns."""
    if length >= _CHUNK:
        carry = lax.fori_loop(0, length // _CHUNK, lambda index, carry: turn(carry, index * _CHUNK, _CHUNK), carry)
    rest = length % _CHUNK
    return turn(carry, length - rest, rest) if rest else carry


def _add(sum_S: jax.Array, value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return sum_S.at[segment_T].add(value_T, mode=_IN_BOUNDS)


def _spread(value_BS: jax.Array, segment_BT: jax.Array, buffer_BT: jax.Array) -> jax.Array:
    """Every position's own sequence's value, written over a `buffer_BT` that nobody needs any more.

    In chunks too, or all gathers of a program share one index of eight bytes a position.
    """
    length = segment_BT.shape[1]

    def gather(spread_BT: jax.Array, first: jax.Array | int, width: int) -> jax.Array:
        part_BT = jax.vmap(_gather)(value_BS, lax.dynamic_slice_in_dim(segment_BT, first, width, axis=1))
        return lax.dynamic_update_slice_in_dim(spread_BT, part_BT, first, axis=1)

    return _chunked(gather, buffer_BT, length)


def _row_max(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return _gather(jax.ops.segment_max(value_T, segment_T, segment_T.shape[0] + 1, mode=_IN_BOUNDS), segment_T)


def _gather(value_S: jax.Array, segment_T: jax.Array) -> jax.Array:
    return value_S.at[segment_T].get(mode=_IN_BOUNDS)
