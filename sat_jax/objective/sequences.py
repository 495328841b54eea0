"""Statistics per sequence of packed rows, spread back over its positions.

A sequence is a (row, segment) pair. Everything here costs O(B * T) whatever the packing, and a sequence's numbers are
summed from its own positions only, so that a neighbour in the row cannot reach them, not even by rounding.

A row is cut into blocks of 32 positions. A *turn* takes one sequence of every block, in the order of their ids: the
block's share of it is added up at once, and a number a block is scattered, not one a position, which on a CPU is five
times faster. There are as many turns as the fullest block has sequences: one or two in rows of long sequences. Sums are
held for a *window* of ids, an eighth of those that a row could have; rows seldom fill more than the first.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Saying that indices are in bounds spares a third of a scatter's time on a CPU.
_IN_BOUNDS = "promise_in_bounds"
_BLOCK = 32
_WORDS = _BLOCK // 4
_WINDOWS = 8
# No id is as large: nothing is left.
_DONE = 2**31 - 1


class _Turn(NamedTuple):
    """One sequence of every block: which id (`_DONE` = none), and its place in the window (the last = none)."""

    id_BN: jax.Array
    index_BN: jax.Array


@jax.custom_vjp
def sequence_sum(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum over each position's own sequence, at every position of it; differentiable.

    Args:
      value_BT: what to sum; already 0 where a position does not count.
      segment_BT: sequence ids of the row, int32 in [0, T].

    Returns:
      sum_BT, in `value_BT`'s dtype.
    """
    return _spread_over(value_BT, segment_BT, (value_BT,), lambda sum_BN: sum_BN)


def _sequence_sum_forward(value_BT: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sequence_sum(value_BT, segment_BT), segment_BT


def _sequence_sum_backward(segment_BT: jax.Array, slope_BT: jax.Array) -> tuple[jax.Array, None]:
    # Summing and spreading is its own transpose.
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
    return _spread_over(
        value_BT, segment_BT, (value_BT, active_BT), lambda sum_BN, count_BN: sum_BN / jnp.maximum(count_BN, 1)
    )


def _sequence_mean_forward(
    value_BT: jax.Array, active_BT: jax.Array, segment_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return sequence_mean(value_BT, active_BT, segment_BT), (active_BT, segment_BT)


def _sequence_mean_backward(kept: tuple[jax.Array, jax.Array], slope_BT: jax.Array) -> tuple[jax.Array, None, None]:
    return sequence_mean(slope_BT, *kept), None, None


sequence_mean.defvjp(_sequence_mean_forward, _sequence_mean_backward)


def active_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of active positions of each position's sequence, int16 or int32: the smallest that holds T."""
    kind = _count_type(segment_BT.shape[1])
    return _spread_over(active_BT.astype(kind), segment_BT, (active_BT,), lambda count_BN: count_BN)


def sequence_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of sequences with at least one active position, scalar int32."""

    def window(count: jax.Array, first: jax.Array) -> jax.Array:
        (count_BW,) = _totals(segment_BT, first, (active_BT,))
        return count + jnp.sum(count_BW > 0, dtype=jnp.int32)

    return _windows(window, jnp.int32(0), segment_BT)


def _spread_over(
    buffer_BT: jax.Array,
    segment_BT: jax.Array,
    values_BT: tuple[jax.Array, ...],
    finish: Callable[..., jax.Array],
) -> jax.Array:
    """At every position what `finish` makes of its own sequence's totals, written over a buffer that nobody needs."""
    segment_BNP = _blocks(segment_BT)

    def window(spread_BNP: jax.Array, first: jax.Array) -> jax.Array:
        totals = _totals(segment_BT, first, values_BT)

        def turn(spread_BNP: jax.Array, now: _Turn) -> jax.Array:
            value_BN = finish(*(jax.vmap(_gather)(total_BW, now.index_BN) for total_BW in totals))
            return jnp.where(segment_BNP == now.id_BN[..., None], value_BN[..., None], spread_BNP)

        return _turns(turn, spread_BNP, segment_BT, first)

    spread_BNP = _windows(window, _blocks(buffer_BT), segment_BT)
    return spread_BNP.reshape(segment_BT.shape[0], -1)[:, : segment_BT.shape[1]]


def _totals(segment_BT: jax.Array, first: jax.Array, values_BT: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Of every sequence in the window from `first` on, per array: the sum, or of a bool array the true elements."""
    rows, length = segment_BT.shape
    kinds = [_count_type(length) if value_BT.dtype == bool else value_BT.dtype for value_BT in values_BT]

    def add(total_W: jax.Array, part_N: jax.Array, index_N: jax.Array) -> jax.Array:
        return total_W.at[index_N].add(part_N.astype(total_W.dtype), mode=_IN_BOUNDS)

    def turn(totals: tuple[jax.Array, ...], now: _Turn) -> tuple[jax.Array, ...]:
        parts = [_share(value_BT, segment_BT, now.id_BN) for value_BT in values_BT]
        return tuple(jax.vmap(add)(total, part, now.index_BN) for total, part in zip(totals, parts, strict=True))

    # The last place is of blocks that have had all their turns: it stays 0.
    start = tuple(jnp.zeros((rows, _window(length) + 1), kind) for kind in kinds)
    return _turns(turn, start, segment_BT, first)


def _share(value_BT: jax.Array, segment_BT: jax.Array, id_BN: jax.Array) -> jax.Array:
    """Per block, the sum over the positions of one sequence; of a bool array their number, int32."""
    if value_BT.dtype != bool:
        return _folded(lambda here, value: jnp.where(here == id_BN, value, 0), jnp.add, segment_BT, value_BT)
    own_BNP = (_blocks(segment_BT) == id_BN[..., None]) & _blocks(value_BT)
    if own_BNP.shape[2] != _BLOCK:
        return jnp.sum(own_BNP, axis=-1, dtype=jnp.int32)
    # Four bytes at a time, each a counter that cannot overflow.
    counters = lax.bitcast_convert_type(own_BNP.astype(jnp.uint8).reshape(*id_BN.shape, _WORDS, 4), jnp.int32)
    four_BN = functools.reduce(jnp.add, (counters[..., word] for word in range(_WORDS)))
    return (four_BN * 0x01010101) >> 24


def _windows(body: Callable[[Any, jax.Array], Any], carry: Any, segment_BT: jax.Array) -> Any:
    """`carry` after `body(carry, first id)` for every window that holds an id."""
    largest = jnp.max(_folded(lambda here: here, jnp.maximum, segment_BT))
    width = _window(segment_BT.shape[1])

    def step(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        carry, first = state
        return body(carry, first), first + width

    return lax.while_loop(lambda state: state[1] <= largest, step, (carry, jnp.int32(0)))[0]


def _turns(turn: Callable[[Any, _Turn], Any], carry: Any, segment_BT: jax.Array, first: jax.Array) -> Any:
    """`carry` after all turns of the window from `first` on."""
    width = _window(segment_BT.shape[1])

    def after(id_BN: jax.Array) -> jax.Array:
        next_BN = _folded(lambda here: jnp.where(here > id_BN, here, _DONE), jnp.minimum, segment_BT)
        return jnp.where(next_BN < first + width, next_BN, _DONE)

    def step(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        carry, id_BN = state
        return turn(carry, _Turn(id_BN, jnp.minimum(id_BN - first, width))), after(id_BN)

    rows, length = segment_BT.shape
    start_BN = after(jnp.full((rows, -(-length // min(_BLOCK, length))), first - 1))
    return lax.while_loop(lambda state: jnp.any(state[1] != _DONE), step, (carry, start_BN))[0]


def _folded(
    take: Callable[..., jax.Array], combine: Callable[[jax.Array, jax.Array], jax.Array], *arrays_BT: jax.Array
) -> jax.Array:
    """Per block, [B, N]: what `take` makes of its first positions, combined with that of its second ones, and so on.

    A reduction over a block's axis would first be given an array of all positions; this is one fused loop.
    """
    blocks = [_blocks(array_BT) for array_BT in arrays_BT]
    places = (take(*(block[..., place] for block in blocks)) for place in range(blocks[0].shape[2]))
    return functools.reduce(combine, places)


def _blocks(array_BT: jax.Array) -> jax.Array:
    """[B, N, P]; what fills up the last block is 0."""
    rows, length = array_BT.shape
    width = min(_BLOCK, length)
    filling = -length % width
    if filling:
        array_BT = jnp.pad(array_BT, [(0, 0), (0, filling)])
    return array_BT.reshape(rows, -1, width)


def _window(length: int) -> int:
    """How many of the ids 0 .. T a window holds."""
    return -(-(length + 1) // _WINDOWS)


def _count_type(length: int) -> Any:
    return jnp.int16 if length <= jnp.iinfo(jnp.int16).max else jnp.int32


def _row_max(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return _gather(jax.ops.segment_max(value_T, segment_T, segment_T.shape[0] + 1, mode=_IN_BOUNDS), segment_T)


def _gather(value_S: jax.Array, index_N: jax.Array) -> jax.Array:
    return value_S.at[index_N].get(mode=_IN_BOUNDS)
