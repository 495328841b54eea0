"""One exact order statistic of a large, possibly sharded array: no sort, no gather, a handful of counting passes.

Non-negative floats are ordered as their bit patterns are as integers, so the k-th smallest is found by narrowing a
bracket of integers. A pass counts at three pivots: two around where the answer should lie if the values in the bracket
were spread evenly, which shrinks it to about the square root of what it held, and the middle, which halves it whatever
the values are (ties, two scales). So a million values of a smooth distribution take 5 to 8 passes, and none takes more
than 32. A sharded array costs three scalar sums a pass.

Reductions here are *folded*: the last axis is cut into slices that are added elementwise before anything is summed.
XLA on a CPU vectorises that, and not the reduction itself: four to five times faster, the same integers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LARGEST_BITS = 0x7FFFFFFE
ABSENT_BITS = 0x7FFFFFFF
_SLICES = 16
# Three counts share an int32, ten bits each; two folds add at most 16 * 16 elements, so none overflows into the next.
_FIELD = 10
_FIELD_MASK = (1 << _FIELD) - 1
_HALF_AN_OCTAVE = 1 << 22
# A float below 2^31 whose conversion to int32 cannot overflow.
_LARGEST_OFFSET = 2147483392.0
# Width of the two pivots around the expected place, in standard deviations of a count.
_WIDTH = 1.5


class _Bracket(NamedTuple):
    """The answer lies in [low, high]; `below` elements are less than low, `up_to` at most high."""

    low: jax.Array
    high: jax.Array
    below: jax.Array
    up_to: jax.Array
    passes: jax.Array


def count(mask: jax.Array) -> jax.Array:
    """Number of true elements, scalar int32.

    Args:
      mask: bool, any shape of at least one axis.
    """
    return jnp.sum(_combine([part.astype(jnp.int32) for part in _slices(mask, fill=0)], jnp.add))


def every(mask: jax.Array) -> jax.Array:
    """Whether all elements are true, scalar bool.

    Args:
      mask: bool, any shape of at least one axis.
    """
    return jnp.all(_combine(_slices(mask, fill=1), jnp.logical_and))


def folded_sum(values: jax.Array) -> jax.Array:
    """Sum of all elements in their own type, over any shape of at least one axis."""
    return jnp.sum(_combine(_slices(values, fill=0), jnp.add))


def kth_smallest_bits(bits: jax.Array, rank: jax.Array, present: jax.Array) -> jax.Array:
    """The rank-th smallest of an array of bit patterns of non-negative floats.

    Args:
      bits: int32 in [0, 2^31 - 2], `ABSENT_BITS` where an element does not count; any shape of at least one axis.
      rank: 1-based, int32 in [1, present].
      present: how many elements count, int32.

    Returns:
      Scalar int32; meaningless if `present` is 0.
    """
    parts = _slices(bits, fill=ABSENT_BITS)
    guess = _guess(parts[len(parts) // 2])
    start = _Bracket(jnp.int32(0), jnp.int32(LARGEST_BITS), jnp.int32(0), present, jnp.int32(0))

    def unsettled(bracket: _Bracket) -> jax.Array:
        return (bracket.low < bracket.high) & (bracket.below != rank - 1) & (bracket.up_to != rank)

    def narrow(bracket: _Bracket) -> _Bracket:
        pivots = jnp.where(bracket.passes == 0, guess, _pivots(bracket, rank))
        pivots = jnp.clip(pivots, bracket.low, bracket.high - 1)
        return _narrowed(bracket, pivots, _counts(bits, pivots), rank)

    bracket = lax.while_loop(unsettled, narrow, start)
    return _extreme(bits, bracket, bracket.up_to == rank)


def _guess(sample: jax.Array) -> jax.Array:
    """Pivots of the first pass: zero, and half an octave to either side of twice the mean of a part of the array."""
    values = jnp.where(sample == ABSENT_BITS, 0, lax.bitcast_convert_type(sample, jnp.float32))
    mean = jnp.sum(values) / jnp.maximum(jnp.sum(sample != ABSENT_BITS, dtype=jnp.int32), 1)
    centre = lax.bitcast_convert_type(2 * mean, jnp.int32)
    return jnp.stack([jnp.int32(0), centre - _HALF_AN_OCTAVE, centre + _HALF_AN_OCTAVE])


def _pivots(bracket: _Bracket, rank: jax.Array) -> jax.Array:
    inside = (bracket.up_to - bracket.below).astype(jnp.float32)
    place = ((rank - bracket.below).astype(jnp.float32) - 0.5) / inside
    width = _WIDTH * jnp.sqrt(place * (1 - place) / inside)
    span = (bracket.high - bracket.low).astype(jnp.float32)
    offsets = jnp.stack([jnp.maximum(place - width, 0), jnp.minimum(place + width, 1), jnp.float32(0.5)]) * span
    offsets = jnp.minimum(offsets, _LARGEST_OFFSET).astype(jnp.int32)
    return bracket.low + jnp.minimum(offsets, bracket.high - bracket.low - 1)


def _counts(bits: jax.Array, pivots: jax.Array) -> list[jax.Array]:
    """How many elements are at most each of three pivots."""

    def packed(part: jax.Array) -> jax.Array:
        fields = [(part <= pivots[index]).astype(jnp.int32) << (_FIELD * index) for index in range(3)]
        return _combine(fields, jnp.add)

    once = _combine([packed(part) for part in _slices(bits, fill=ABSENT_BITS)], jnp.add)
    fields = _combine(_slices(once, fill=0), jnp.add)
    return [jnp.sum((fields >> (_FIELD * index)) & _FIELD_MASK) for index in range(3)]


def _narrowed(bracket: _Bracket, pivots: jax.Array, counts: list[jax.Array], rank: jax.Array) -> _Bracket:
    low, high, below, up_to, passes = bracket
    for pivot, at_most in zip(pivots, counts, strict=True):
        reached = at_most >= rank
        lower, raise_ = reached & (pivot < high), ~reached & (pivot >= low)
        high, up_to = jnp.where(lower, pivot, high), jnp.where(lower, at_most, up_to)
        low, below = jnp.where(raise_, pivot + 1, low), jnp.where(raise_, at_most, below)
    return _Bracket(low, high, below, up_to, passes + 1)


def _extreme(bits: jax.Array, bracket: _Bracket, take_largest: jax.Array) -> jax.Array:
    """The largest element up to `high`, or the smallest from `low`: one pass, by the sign."""

    def key(part: jax.Array) -> jax.Array:
        largest = jnp.where(part <= bracket.high, -part, ABSENT_BITS)
        return jnp.where(take_largest, largest, jnp.where(part >= bracket.low, part, ABSENT_BITS))

    found = jnp.min(_combine([key(part) for part in _slices(bits, fill=ABSENT_BITS)], jnp.minimum))
    return jnp.where(take_largest, -found, found)


def _slices(array: jax.Array, fill: int) -> list[jax.Array]:
    """Up to 16 equal slices of the last axis, which is padded with `fill` where they do not fit."""
    length = array.shape[-1]
    parts = min(_SLICES, max(1, length // _SLICES))
    width = -(-length // parts)
    if width * parts != length:
        padding = [(0, 0)] * (array.ndim - 1) + [(0, width * parts - length)]
        array = jnp.pad(array, padding, constant_values=fill)
    return [lax.slice_in_dim(array, part * width, (part + 1) * width, axis=-1) for part in range(parts)]


def _combine(parts: list[jax.Array], combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    folded = parts[0]
    for part in parts[1:]:
        folded = combine(folded, part)
    return folded
