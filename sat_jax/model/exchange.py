"""Experts on more shards than a token has slots: tokens go only where their experts are, by all-to-all.

Gathering gives every shard all tokens: `shards - 1` copies of each, where at most K are needed. Here a token is sent to
each shard that holds an expert of its, in rounds of fixed size; there are as many rounds as the fullest pair of shards
needs, the same number on every device, so nothing is dropped and no device waits for one that has stopped.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.mesh import AXES
from sat_jax.model.dispatch import (
    ExpertGrads,
    ExpertKernel,
    ExpertWeights,
    Routed,
    add_rows,
    expert_zeros,
    take_rows,
)

_AXIS = "expert"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sending:
    """Which tokens go to each shard: their numbers first in each row, how many, and in how many rounds."""

    token: jax.Array
    count: jax.Array
    rounds: jax.Array


def exchange_forward(
    kernel: ExpertKernel, rows: int, routed: Routed, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
    """One device's tokens through the experts of all shards; inside `shard_map`.

    Args:
      kernel: how a device runs the experts that it holds.
      rows: of one step of the kernel's loop.
      routed: this device's tokens; ids counted from the mesh's first expert.
      weights: the experts that this device holds, at full width.

    Returns:
      out_ND, float32, without what other shards of `tensor` add; and how many rows this device ran, int32.
    """
    size = _round_size(routed)
    sending = _sending(routed, weights, size)

    def send(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_ND, executed = carry
        token, filled = _of_round(sending, number, size)
        came, ran = kernel.forward(rows, _received(routed, weights, token, filled), weights)
        back = _swap(came.reshape(*token.shape, -1))
        return add_rows(out_ND, token.reshape(-1), filled.reshape(-1), _flat(back)), executed + ran

    start = (jnp.zeros(routed.x_ND.shape, jnp.float32), jnp.int32(0))
    with jax.named_scope("exchange_rounds"):  # by this name `plan` knows how often it runs
        return lax.fori_loop(0, sending.rounds, send, start)


def exchange_backward(
    kernel: ExpertKernel, rows: int, routed: Routed, weights: ExpertWeights, out_grad_ND: jax.Array
) -> ExpertGrads:
    """The gradients of `exchange_forward`, float32, likewise without what other shards of `tensor` add.

    Args:
      kernel, rows, routed, weights: as `exchange_forward` took them.
      out_grad_ND: of this device's tokens.
    """
    size = _round_size(routed)
    sending = _sending(routed, weights, size)

    def send(number: jax.Array, grads: ExpertGrads) -> ExpertGrads:
        dx_ND, dweight_NK, dweights = grads
        token, filled = _of_round(sending, number, size)
        out_grad = _swap(jnp.where(filled[..., None], take_rows(out_grad_ND, token), 0))
        dx, dweight, new = kernel.backward(rows, _received(routed, weights, token, filled), weights, _flat(out_grad))
        place, real = token.reshape(-1), filled.reshape(-1)
        dx, dweight = (_flat(_swap(grad.reshape(*token.shape, -1))) for grad in (dx, dweight))
        return (
            add_rows(dx_ND, place, real, dx),
            add_rows(dweight_NK, place, real, dweight),
            jax.tree.map(jnp.add, dweights, new),
        )

    zeros = (*(jnp.zeros(a.shape, jnp.float32) for a in (routed.x_ND, routed.weight_NK)), expert_zeros(weights))
    with jax.named_scope("exchange_rounds"):
        return lax.fori_loop(0, sending.rounds, send, zeros)


def _round_size(routed: Routed) -> int:
    """Tokens that a device sends to another in one round: what a balanced routing sends at most on average."""
    count, slots = routed.ids_NK.shape
    return max(1, -(-count * slots // lax.axis_size(_AXIS)))


def _sending(routed: Routed, weights: ExpertWeights, size: int) -> _Sending:
    shards, held = lax.axis_size(_AXIS), weights.gate_EDF.shape[0]
    shard = jnp.arange(shards)
    # An id outside the experts belongs to no shard.
    wanted = (jnp.floor_divide(routed.ids_NK, held)[None] == shard[:, None, None]).any(-1)  # [shards, N]
    count = wanted.sum(-1, dtype=jnp.int32)
    token = jnp.argsort(~wanted, axis=-1, stable=True).astype(jnp.int32)
    token = jnp.pad(token, ((0, 0), (0, -token.shape[1] % size)))
    # The same everywhere, also between groups of devices that do not talk to each other.
    rounds = lax.pmax(-(-count.max() // size), AXES)
    return _Sending(token=token, count=count, rounds=rounds)


def _of_round(sending: _Sending, number: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """[shards, size]: the tokens that go to each shard, and which of these places are in use."""
    first = number * size
    token = lax.dynamic_slice_in_dim(sending.token, first, size, axis=1)
    return token, first + jnp.arange(size) < sending.count[:, None]


def _received(routed: Routed, weights: ExpertWeights, token: jax.Array, filled: jax.Array) -> Routed:
    """What all devices send to this one, ids counted from its first expert; an empty place has no expert here."""
    held = weights.gate_EDF.shape[0]

    def swap(array: jax.Array, empty: Any) -> jax.Array:
        return _flat(_swap(jnp.where(filled[..., None], take_rows(array, token), empty)))

    ids_NK = swap(routed.ids_NK, -1 - held * lax.axis_size(_AXIS)) - lax.axis_index(_AXIS) * held
    return Routed(x_ND=swap(routed.x_ND, 0), ids_NK=ids_NK, weight_NK=swap(routed.weight_NK, 0))


def _swap(array: jax.Array) -> jax.Array:
    """Row s goes to shard s; row s comes from shard s."""
    return lax.all_to_all(array, _AXIS, split_axis=0, concat_axis=0)


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(-1, array.shape[-1])
