"""Statistics per sequence of packed rows, spread back over its positions.

A sequence is a (row, segment) pair. Everything here costs O(B * T) whatever the packing, and a sequence's numbers are
summed from its own positions only, so that a neighbour in the row cannot reach them, not even by rounding.
"""

import jax
import jax.numpy as jnp

# A row of T positions has ids in [0, T]; saying so spares a third of the time on a CPU.
_IN_BOUNDS = "promise_in_bounds"


@jax.custom_vjp
def sequence_sum(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum over each position's own sequence, at every position of it; differentiable.

    Args:
      value_BT: what to sum; already 0 where a position does not count.
      segment_BT: sequence ids of the row, int32 in [0, T].

    Returns:
      sum_BT, in `value_BT`'s dtype.
    """
    return jax.vmap(_row_sum)(value_BT, segment_BT)


def _sequence_sum_forward(value_BT: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sequence_sum(value_BT, segment_BT), segment_BT


def _sequence_sum_backward(segment_BT: jax.Array, slope_BT: jax.Array) -> tuple[jax.Array, None]:
    # Summing and spreading is its own transpose; derived, it would be two scatters and twice the time.
    return sequence_sum(slope_BT, segment_BT), None


sequence_sum.defvjp(_sequence_sum_forward, _sequence_sum_backward)


def sequence_max(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Maximum over each position's own sequence, at every position of it. Arguments as in `sequence_sum`."""
    return jax.vmap(_row_max)(value_BT, segment_BT)


def sequence_mean(value_BT: jax.Array, active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Mean over the active positions of each position's sequence; 0 where it has none.

    Args:
      value_BT: what to average; already 0 where inactive.
      active_BT: bool; what counts.
      segment_BT: sequence ids of the row.

    Returns:
      mean_BT, at every position of the sequence.
    """
    return sequence_sum(value_BT, segment_BT) / jnp.maximum(active_count(active_BT, segment_BT), 1)


def active_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of active positions of each position's sequence, int32."""
    return sequence_sum(active_BT.astype(jnp.int32), segment_BT)


def sequence_count(active_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Number of sequences with at least one active position, scalar int32."""
    active_BS = jax.vmap(_segment_sum)(active_BT.astype(jnp.int32), segment_BT)
    return jnp.sum(active_BS > 0, dtype=jnp.int32)


def _row_sum(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return _gather(_segment_sum(value_T, segment_T), segment_T)


def _row_max(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return _gather(jax.ops.segment_max(value_T, segment_T, segment_T.shape[0] + 1, mode=_IN_BOUNDS), segment_T)


def _segment_sum(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(value_T, segment_T, segment_T.shape[0] + 1, mode=_IN_BOUNDS)


def _gather(value_S: jax.Array, segment_T: jax.Array) -> jax.Array:
    return value_S.at[segment_T].get(mode=_IN_BOUNDS)
