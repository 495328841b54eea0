"""Statistics per sequence of packed rows, spread back over its positions.

A sequence is a (row, segment) pair. Everything here costs O(B * T) whatever the packing, and a sequence's numbers are
summed from its own positions only, so that a neighbour in the row cannot reach them, not even by rounding.
"""

import jax
import jax.numpy as jnp


def sequence_sum(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum over each position's own sequence, at every position of it; differentiable.

    Args:
      value_BT: what to sum; already 0 where a position does not count.
      segment_BT: sequence ids of the row, int32 in [0, T].

    Returns:
      sum_BT, in `value_BT`'s dtype.
    """
    return jax.vmap(_row_sum)(value_BT, segment_BT)


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

    def of_row(active_T: jax.Array, segment_T: jax.Array) -> jax.Array:
        positions = segment_T.shape[0] + 1
        return jnp.sum(jax.ops.segment_max(active_T.astype(jnp.int32), segment_T, positions) > 0, dtype=jnp.int32)

    return jnp.sum(jax.vmap(of_row)(active_BT, segment_BT), dtype=jnp.int32)


def _row_sum(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(value_T, segment_T, segment_T.shape[0] + 1)[segment_T]


def _row_max(value_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    return jax.ops.segment_max(value_T, segment_T, segment_T.shape[0] + 1)[segment_T]
