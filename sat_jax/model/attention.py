"""Attention: under any mask (decoding), and causal within the segments of packed rows (training)."""

import math

import jax
import jax.numpy as jnp

from sat_jax.shapes import check_shapes

# From here on attention runs over blocks of queries, so that no [T, T] array exists.
_WHOLE_ROW = 1024
_QUERY_BLOCK = 512


def attend(q_BTHC: jax.Array, k_BSGC: jax.Array, v_BSGC: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention under a mask; softmax in float32.

    Args:
      q_BTHC: queries; H is a multiple of G, query head h reads key/value head h // (H / G).
      k_BSGC: keys.
      v_BSGC: values.
      visible_BTS: bool; what each query sees, at least one position.

    Returns:
      attended_BTHC, in the type of `q_BTHC`.
    """
    sizes = check_shapes(q_BTHC=q_BTHC, k_BSGC=k_BSGC, v_BSGC=v_BSGC, visible_BTS=visible_BTS)
    q = q_BTHC.reshape(*q_BTHC.shape[:2], sizes["G"], -1, sizes["C"])
    score = jnp.einsum("btgrc,bsgc->bgrts", q, k_BSGC, preferred_element_type=jnp.float32)
    score = jnp.where(visible_BTS[:, None, None], score / math.sqrt(sizes["C"]), -jnp.inf)
    weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
    attended = jnp.einsum("bgrts,bsgc->btgrc", weight, v_BSGC, preferred_element_type=jnp.float32)
    return attended.reshape(q_BTHC.shape).astype(q.dtype)


def packed_attention(q_BTHC: jax.Array, k_BTGC: jax.Array, v_BTGC: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Causal attention within each segment of packed rows.

    Rows longer than 1024 go block by block of queries, each recomputed in the backward pass, so memory is linear in T.

    Args:
      q_BTHC: queries.
      k_BTGC: keys.
      v_BTGC: values.
      segment_BT: int32; a position sees the earlier positions of its own segment and itself.
    """
    sizes = check_shapes(q_BTHC=q_BTHC, k_BTGC=k_BTGC, v_BTGC=v_BTGC, segment_BT=segment_BT)
    length = sizes["T"]
    place_T = jnp.arange(length)

    def block(q, segment, place):
        causal = place[:, None] >= place_T
        return attend(q, k_BTGC, v_BTGC, causal & (segment[:, :, None] == segment_BT[:, None, :]))

    if length <= _WHOLE_ROW:
        return block(q_BTHC, segment_BT, place_T)
    blocks = -(-length // _QUERY_BLOCK)
    # Queries that fill up the last block repeat the last one and are cut off again.
    place = jnp.minimum(jnp.arange(blocks * _QUERY_BLOCK), length - 1).reshape(blocks, _QUERY_BLOCK)
    attended = jax.lax.map(jax.checkpoint(lambda at: block(q_BTHC[:, at], segment_BT[:, at], at)), place)
    return jnp.moveaxis(attended, 0, 1).reshape(sizes["B"], -1, sizes["H"], sizes["C"])[:, :length]
