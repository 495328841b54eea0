"""Causal attention within segments by the splash kernel, for TPU.

Splash skips blocks above the diagonal but only masks those of other segments: a row of eight sequences would cost eight
times its useful work. Here the blocks that share no segment are taken out of its block masks, which are data.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

_LANES = 128
_BLOCK = 512


def block_size(length: int) -> int:
    """Positions of a block: 512, or what a shorter row fills, in whole lanes of 128."""
    return min(_BLOCK, -(-length // _LANES) * _LANES)


def splash_attention(
    q_BTHC: jax.Array,
    k_BTGC: jax.Array,
    v_BTGC: jax.Array,
    segment_BT: jax.Array,
    block: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention of every query to the earlier keys of its segment and itself; anything finite for padding.

    The output and its logsumexp are named "attention" for a rematerialisation policy.

    Args:
      q_BTHC: queries; H is a multiple of G.
      k_BTGC: keys.
      v_BTGC: values.
      segment_BT: int32, 0 = padding; the numbers of a row ascend.
      block: positions of a block, a multiple of 128; see `block_size`.
      interpret: run the kernel step by step in plain JAX, on any platform; for tests.
    """
    length, heads, channels = q_BTHC.shape[1:]
    padded = -(-length // block) * block

    def rows_of(array: jax.Array) -> jax.Array:
        """[B, T, n, C] to [B, n, padded T, C]."""
        return jnp.pad(array, ((0, 0), (0, padded - length), (0, 0), (0, 0))).swapaxes(1, 2)

    segment_BT = _number_padding(jnp.pad(segment_BT, ((0, 0), (0, padded - length))), block)
    mask = masks.MultiHeadMask([masks.CausalMask((padded, padded))] * heads)
    whole = splash.make_splash_mha_single_device(
        mask,
        block_sizes=_blocks(block),
        residual_checkpoint_name="attention",
        interpret=interpret,
    )

    def row(of: tuple[jax.Array, ...]) -> Any:
        q, k, v, segment_T = of
        kernel = prune(whole, segment_T, block)
        return kernel(q, k, v, segment_ids=splash.SegmentIds(segment_T, segment_T))

    scaled = (q_BTHC.astype(jnp.float32) / math.sqrt(channels)).astype(q_BTHC.dtype)
    attended = lax.map(row, (rows_of(scaled), rows_of(k_BTGC), rows_of(v_BTGC), segment_BT))
    return attended.swapaxes(1, 2)[:, :length]


def prune(kernel: splash.SplashAttentionKernel, segment_T: jax.Array, block: int) -> splash.SplashAttentionKernel:
    """The kernel without the blocks whose queries and keys share no segment.

    Args:
      kernel: of one row, unsharded.
      segment_T: numbers of the segments, of padding too; every position equals itself, so each diagonal block stays.
      block: positions of a block in all its passes.
    """
    blocks = segment_T.reshape(-1, block)
    low, high = blocks.min(1), blocks.max(1)
    shared = (low[:, None] <= high) & (low <= high[:, None])

    def keep(info: Any, axis: int) -> Any:
        """`data_next` names the block that a step reads along `axis`; that one's bit decides."""
        every_head = jnp.broadcast_to(shared, (info.block_mask.shape[0], *shared.shape))
        bit = jnp.take_along_axis(every_head, info.data_next.astype(jnp.int32), axis)
        return info._replace(block_mask=jnp.where(bit, info.block_mask, 0).astype(info.block_mask.dtype))

    return splash.SplashAttentionKernel(
        keep(kernel.fwd_mask_info, 2),
        keep(kernel.dq_mask_info, 2),
        keep(kernel.dkv_mask_info, 1),
        **kernel.kwargs,
    )


def _blocks(size: int) -> splash.BlockSizes:
    """Square blocks of one size in all three passes (the fused backward pass would hold T / size copies of dq)."""
    return splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )


def _number_padding(segment_BT: jax.Array, block: int) -> jax.Array:
    """Gives the padding of each block a number of its own, behind all others: it attends to that block alone."""
    own = 2**30 + jnp.arange(segment_BT.shape[1]) // block
    return jnp.where(segment_BT == 0, own, segment_BT).astype(jnp.int32)
