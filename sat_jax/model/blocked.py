"""Experts block by block: one block of rows meets one expert. For CPU and GPU.

Choices (a token and a slot) are sorted by expert and every expert's rows are padded to whole blocks. A loop runs over
the blocks that hold rows: its trip count is data, every shape in it is static, and no array is larger than the tokens
themselves. An expert without rows has no block, so its gradient is the zero that it started from.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.model.dispatch import (
    ExpertGrads,
    ExpertKernel,
    ExpertWeights,
    Routed,
    add_rows,
    cast_weights,
    stable_order,
    swiglu_gradients,
    take_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The rows of the blocks, one after the other.

    Attributes:
      choice: token * K + slot of each row; rows that fill up a block repeat a choice of its expert.
      filled: False where a row only fills up.
      expert_of_block: the expert that a block meets.
      blocks: how many blocks hold rows, scalar.
    """

    choice: jax.Array
    filled: jax.Array
    expert_of_block: jax.Array
    blocks: jax.Array


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: a power of two near a quarter of an expert's fair share of the choices, within 16 and 256.

    Smaller blocks pad less (half a block an expert, so an eighth of the share), larger ones run fewer iterations. Below
    a share of 256 the iterations weigh more: half the share then, at most 64. Measured on CPU, where 64 is best for
    decoding 256 slots over 4 experts and 256 for training on 3072 tokens.

    Args:
      choices: tokens times slots.
      experts: over which these choices spread.
    """
    share = choices // experts
    wanted = max(1, share // 4, min(share // 2, 64))
    return min(256, max(16, 1 << round(math.log2(wanted))))


def plan_blocks(ids_NK: jax.Array, experts: int, rows: int) -> BlockPlan:
    """Sorts choices by expert and pads every expert's to whole blocks; ids outside 0 .. experts - 1 get no row."""
    choices = ids_NK.size
    ids = ids_NK.reshape(-1)
    key = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    order = stable_order(key, experts + 1)

    size = (key[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    first_choice = jnp.cumsum(size) - size
    needed = -(-size // rows)
    last_block = jnp.cumsum(needed)
    first_block = last_block - needed

    # Every expert may leave one block partly filled: that many blocks always suffice.
    number = jnp.arange(-(-choices // rows) + experts)
    expert = jnp.minimum((last_block <= number[:, None]).sum(1), experts - 1)
    rank = (number - first_block[expert])[:, None] * rows + jnp.arange(rows)
    place = first_choice[expert][:, None] + jnp.minimum(rank, size[expert][:, None] - 1)
    choice = take_rows(order, jnp.clip(place, 0, choices - 1))
    filled = rank < size[expert][:, None]
    return BlockPlan(
        choice=choice.reshape(-1), filled=filled.reshape(-1), expert_of_block=expert, blocks=last_block[-1]
    )


def _forward(rows: int, routed: Routed, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
    plan = plan_blocks(routed.ids_NK, weights.gate_EDF.shape[0], rows)
    both_EDF, down_EFD = _side_by_side(weights, routed.x_ND.dtype)
    x_ND, flat_weight, slots = routed.x_ND, routed.weight_NK.reshape(-1), routed.weight_NK.shape[1]

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_ND, executed = carry
        expert = plan.expert_of_block[number]
        choice, filled = _rows_of(plan, number, rows)
        x = take_rows(x_ND, choice // slots)
        gate, up = jnp.split(_dot(x, both_EDF[expert], 1, 0), 2, axis=1)
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        y = take_rows(flat_weight, choice)[:, None] * _dot(hidden, down_EFD[expert], 1, 0)
        return add_rows(out_ND, choice // slots, filled, y), executed + x.shape[0]

    with jax.named_scope("expert_blocks"):  # by this name `plan` knows how often it runs
        return lax.fori_loop(0, plan.blocks, block, (jnp.zeros(x_ND.shape, jnp.float32), jnp.int32(0)))


def _backward(
    rows: int,
    routed: Routed,
    weights: ExpertWeights,
    out_grad_ND: jax.Array,
) -> ExpertGrads:
    """Recomputes gate and up. d out / d weight = <out_grad down^T, hidden>, so down(hidden) is not needed again."""
    plan = plan_blocks(routed.ids_NK, weights.gate_EDF.shape[0], rows)
    dtype = routed.x_ND.dtype
    (both_EDF, down_EFD), out_grad_ND = _side_by_side(weights, dtype), out_grad_ND.astype(dtype)
    x_ND, flat_weight, slots = routed.x_ND, routed.weight_NK.reshape(-1), routed.weight_NK.shape[1]

    def block(number: jax.Array, grads: Any) -> Any:
        dx_ND, dweight, dboth_EDF, ddown_EFD = grads
        expert = plan.expert_of_block[number]
        choice, filled = _rows_of(plan, number, rows)
        x, scale = take_rows(x_ND, choice // slots), take_rows(flat_weight, choice)[:, None]
        # Without a gradient the rows that only fill up add nothing to the weights'.
        out_grad = jnp.where(filled[:, None], take_rows(out_grad_ND, choice // slots), 0)

        gate, up = jnp.split(_dot(x, both_EDF[expert], 1, 0), 2, axis=1)
        from_down = _dot(out_grad, down_EFD[expert], 1, 1)
        dgate, dup, dscale, hidden = swiglu_gradients(gate, up, from_down, scale)
        dboth, hidden = jnp.concatenate([dgate, dup], axis=1).astype(dtype), hidden.astype(dtype)
        return (
            add_rows(dx_ND, choice // slots, filled, _dot(dboth, both_EDF[expert], 1, 1)),
            add_rows(dweight, choice, filled, dscale),
            dboth_EDF.at[expert].add(_dot(x, dboth, 0, 0)),
            ddown_EFD.at[expert].add(_dot(hidden, out_grad, 0, 0)),
        )

    wide = [jnp.zeros(array.shape, jnp.float32) for array in (x_ND, flat_weight, both_EDF, down_EFD)]
    with jax.named_scope("expert_blocks"):
        dx_ND, dweight, dboth_EDF, ddown_EFD = lax.fori_loop(0, plan.blocks, block, tuple(wide))
    dgate_EDF, dup_EDF = jnp.split(dboth_EDF, 2, axis=2)
    dweights = ExpertWeights(gate_EDF=dgate_EDF, up_EDF=dup_EDF, down_EFD=ddown_EFD)
    return dx_ND, dweight.reshape(routed.weight_NK.shape), dweights


BLOCKED = ExpertKernel(rows=block_rows, forward=_forward, backward=_backward)


def _side_by_side(weights: ExpertWeights, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """In the type of the products: gate and up as one matrix [E, D, 2 F], whose product is one, and down."""
    cast = cast_weights(weights, dtype)
    return jnp.concatenate([cast.gate_EDF, cast.up_EDF], axis=2), cast.down_EFD


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Contracts one axis of each matrix; accumulates and returns float32."""
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _rows_of(plan: BlockPlan, block: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    start = block * rows
    return lax.dynamic_slice_in_dim(plan.choice, start, rows), lax.dynamic_slice_in_dim(plan.filled, start, rows)
