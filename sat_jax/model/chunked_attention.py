"""Causal attention within segments by chunks with an online softmax, for CPU and GPU. No [T, T] array, in no pass.

A block of queries visits the blocks of keys from the first that shares a segment with it up to its own: other sequences
of a packed row cost nothing. Only the output and one logsumexp a query and head are kept for the backward pass, which
multiplies the scores again.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# Stands for minus infinity, but its differences stay finite.
_LOWEST = -1e30


def first_key_block(segment_BT: jax.Array, block: int) -> jax.Array:
    """The first block of keys that each block of queries visits; one past its own where it is padding alone.

    Two blocks may share a segment if the ranges of their numbers overlap, so rows whose numbers do not ascend are
    served too, only with more blocks.

    Args:
      segment_BT: int32, 0 = padding; T is a multiple of `block`.
      block: positions of a block.

    Returns:
      Int32, [B, T / block].
    """
    rows, length = segment_BT.shape
    blocks = segment_BT.reshape(rows, length // block, block)
    real = blocks != 0
    low = jnp.where(real, blocks, jnp.iinfo(jnp.int32).max).min(-1)
    high = jnp.where(real, blocks, -1).max(-1)
    shared = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    number = jnp.arange(length // block)
    return jnp.where(shared.any(-1), jnp.argmax(shared, -1), number + 1).astype(jnp.int32)


def chunked_attention(
    q_BTHC: jax.Array, k_BTGC: jax.Array, v_BTGC: jax.Array, segment_BT: jax.Array, block: int
) -> jax.Array:
    """Attention of every query to the earlier keys of its segment and itself; 0 for padding.

    Products are taken in the type of `q_BTHC` and accumulated in float32; so is the softmax. The output and its
    logsumexp are named "attention" for a rematerialisation policy.

    Args:
      q_BTHC: queries; H is a multiple of G.
      k_BTGC: keys.
      v_BTGC: values.
      segment_BT: int32, 0 = padding.
      block: positions of a block of queries and of keys.
    """
    rows, length, heads, channels = q_BTHC.shape
    groups, blocks = k_BTGC.shape[2], -(-length // block)

    def cut(array: jax.Array) -> jax.Array:
        """[B, T, ...] to [B, blocks, block, ...], padded."""
        padded = jnp.pad(array, ((0, 0), (0, blocks * block - length), *((0, 0),) * (array.ndim - 2)))
        return padded.reshape(rows, blocks, block, *array.shape[2:])

    q = cut(q_BTHC).reshape(rows, blocks, block, groups, heads // groups, channels)
    q = q.transpose(0, 1, 3, 4, 2, 5)  # row, block, G, heads of a group, position, C
    k, v = (cut(array).transpose(0, 1, 3, 2, 4) for array in (k_BTGC, v_BTGC))  # row, block, G, position, C
    segment = cut(segment_BT)
    first = first_key_block(segment.reshape(rows, -1), block)
    out: Any = _attend(q, k, v, segment, first)
    out = out.transpose(0, 1, 4, 2, 3, 5).reshape(rows, blocks * block, heads, channels)
    return out[:, :length]


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, first: jax.Array) -> jax.Array:
    return _forward(q, k, v, segment, first)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, first: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def row(of: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, segment, first = of
        return lax.map(lambda number: _forward_block(number, q, k, v, segment, first), jnp.arange(len(q)))

    out, mass = lax.map(row, (q, k, v, segment, first))
    out, mass = checkpoint_name(out, "attention"), checkpoint_name(mass, "attention")
    return out, (q, k, v, segment, first, out, mass)


def _forward_block(
    number: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One block of queries of one row: its output, and the logsumexp of its scores."""
    query = q[number]

    def fold(other: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, mass, total = carry
        score, seen = _scores(query, k[other], segment, number, other)
        peak = jnp.maximum(top, jnp.where(seen, score, _LOWEST).max(-1, keepdims=True))
        weight = jnp.where(seen, jnp.exp(score - peak), 0)
        shrink = jnp.exp(top - peak)
        total = shrink * total + _dot("grts,gsc->grtc", weight.astype(query.dtype), v[other])
        return peak, shrink * mass + weight.sum(-1, keepdims=True), total

    column = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    start = (column + _LOWEST, column, jnp.zeros(query.shape, jnp.float32))
    with jax.named_scope("attention_blocks"):  # by this name `plan` knows how often it runs
        top, mass, total = lax.fori_loop(first[number], number + 1, fold, start)
    mass = jnp.where(mass > 0, mass, 1)  # padding sees nothing
    return (total / mass).astype(query.dtype), (top + jnp.log(mass))[..., 0]


def _backward(saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, segment, first, out, mass = saved
    # d score = weight * (d weight - <grad, out>)
    inner = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def row(of: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, segment, first, grad, mass, inner = of

        def block(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[Any, jax.Array]:
            query = (q[number], grad[number], mass[number], inner[number])
            body = functools.partial(_backward_block, number, query, (k, v, segment))
            with jax.named_scope("attention_blocks"):
                dq, dk, dv = lax.fori_loop(
                    first[number], number + 1, body, (jnp.zeros(query[0].shape, jnp.float32), *carry)
                )
            return (dk, dv), dq.astype(q.dtype)

        zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
        (dk, dv), dq = lax.scan(block, zeros, jnp.arange(len(q)))
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    dq, dk, dv = lax.map(row, (q, k, v, segment, first, grad.astype(q.dtype), mass, inner))
    return dq, dk, dv, None, None


def _backward_block(
    number: jax.Array,
    query: tuple[jax.Array, ...],
    row: tuple[jax.Array, ...],
    other: jax.Array,
    carry: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Adds what one block of queries and one of keys give to the gradients of queries, keys and values."""
    q, grad, mass, inner = query
    k, v, segment = row
    dq, dk, dv = carry
    score, seen = _scores(q, k[other], segment, number, other)
    weight = jnp.where(seen, jnp.exp(score - mass[..., None]), 0)
    dweight = _dot("grtc,gsc->grts", grad, v[other])
    dscore = (weight * (dweight - inner[..., None]) / math.sqrt(q.shape[-1])).astype(q.dtype)
    return (
        dq + _dot("grts,gsc->grtc", dscore, k[other]),
        dk.at[other].add(_dot("grts,grtc->gsc", dscore, q)),
        dv.at[other].add(_dot("grts,grtc->gsc", weight.astype(q.dtype), grad)),
    )


_attend.defvjp(_forward, _backward)


def _scores(
    query: jax.Array, key: jax.Array, segment: jax.Array, number: jax.Array, other: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scaled scores of two blocks, float32, and which of them count."""
    score = _dot("grtc,gsc->grts", query, key) / math.sqrt(query.shape[-1])
    place = jnp.arange(segment.shape[1])
    # Within one block causality is a matter of place; an earlier block is seen whole.
    causal = (number > other) | (place[:, None] >= place)
    same = (segment[number][:, None] == segment[other]) & (segment[number][:, None] != 0)
    return score, causal & same


def _dot(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
