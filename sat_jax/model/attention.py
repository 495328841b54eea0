"""Attention: under any mask (decoding), and causal within the segments of packed rows (training)."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from sat_jax.mesh import platform, spec
from sat_jax.model.chunked_attention import chunked_attention, first_key_block
from sat_jax.model.splash import block_size, splash_attention
from sat_jax.shapes import check_shapes

# Rows up to this length are attended whole on CPU and GPU: one product, whose [T, T] scores are small.
_WHOLE_ROW = 1024
_BLOCK = 512


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


def packed_attention(
    q_BTHC: jax.Array, k_BTGC: jax.Array, v_BTGC: jax.Array, segment_BT: jax.Array, mesh: Mesh
) -> jax.Array:
    """Causal attention within each segment of packed rows, on the mesh's devices.

    On TPU by the splash kernel. Elsewhere rows of at most 1024 positions are attended whole, and longer ones by chunks.
    The memory of both kernels is linear in T, and they skip blocks that share no segment (see `attention_pairs`).
    For a rematerialisation policy the result is named "attention".

    Args:
      q_BTHC: queries.
      k_BTGC: keys.
      v_BTGC: values.
      segment_BT: int32; 0 = padding, whose output is finite and means nothing; a position sees the earlier positions of
        its own segment and itself.
      mesh: where the arrays live: rows cut as a batch, heads over `tensor`.

    Returns:
      attended_BTHC, in the type of `q_BTHC`.

    Raises:
      ValueError: an argument's shape contradicts its suffix.
    """
    sizes = check_shapes(q_BTHC=q_BTHC, k_BTGC=k_BTGC, v_BTGC=v_BTGC, segment_BT=segment_BT)
    if platform(mesh) == "tpu":
        kernel = functools.partial(splash_attention, block=block_size(sizes["T"]))
    elif sizes["T"] <= _WHOLE_ROW:
        place_T = jnp.arange(sizes["T"])
        causal = place_T[:, None] >= place_T
        visible_BTS = causal & (segment_BT[:, :, None] == segment_BT[:, None, :])
        return checkpoint_name(attend(q_BTHC, k_BTGC, v_BTGC, visible_BTS), "attention")
    else:
        kernel = functools.partial(chunked_attention, block=_BLOCK)
    if mesh.size == 1:
        return kernel(q_BTHC, k_BTGC, v_BTGC, segment_BT)
    heads, row = spec("batch", "unsharded", "heads", "unsharded"), spec("batch", "unsharded")
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=(heads, heads, heads, row), out_specs=heads, check_vma=False)
    return sharded(q_BTHC, k_BTGC, v_BTGC, segment_BT)


def attention_block(length: int, mesh: Mesh) -> int:
    """Positions of the blocks of queries and keys in which rows of this length are attended on the mesh's devices."""
    if platform(mesh) == "tpu":
        return block_size(length)
    return length if length <= _WHOLE_ROW else _BLOCK


def attention_pairs(segment_BT: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Pairs of a query and a key: those that see each other, and those that `packed_attention` multiplies.

    Args:
      segment_BT: int32, 0 = padding; every segment contiguous.
      mesh: where attention would run.

    Returns:
      (useful, executed), scalars, float32; per head and pass. Their quotient is what the packing and the blocks cost.
    """
    sizes = check_shapes(segment_BT=segment_BT)
    rows, length = sizes["B"], sizes["T"]
    place_T = jnp.arange(length)
    fresh_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start_BT = jax.lax.cummax(jnp.where(fresh_BT, place_T, 0), axis=1)
    seen_BT = jnp.where(segment_BT != 0, place_T - start_BT + 1, 0)
    on_tpu = platform(mesh) == "tpu"
    if length <= _WHOLE_ROW and not on_tpu:
        executed = jnp.float32(rows * length * length)
    else:
        block = attention_block(length, mesh)
        padded_BT = jnp.pad(segment_BT, ((0, 0), (0, -length % block)))
        visited = jnp.arange(padded_BT.shape[1] // block) + 1 - first_key_block(padded_BT, block)
        # The kernel for TPU runs a block of padding against itself, the other one skips it.
        executed = (jnp.maximum(visited, 1) if on_tpu else visited).sum(dtype=jnp.float32) * block * block
    return seen_BT.sum(dtype=jnp.float32), executed
