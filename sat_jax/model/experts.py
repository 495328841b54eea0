"""The experts' feed-forward: dispatch, blocked matrix products, combine. Drops no token, whatever the skew.

Choices (a token and a slot) are sorted by expert and every expert's rows are padded to whole blocks, so one block meets
one expert. A loop runs over the blocks that hold rows: its trip count is data, every shape in it is static, and no
array is larger than the tokens themselves.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from sat_jax.mesh import spec
from sat_jax.shapes import check_shapes

# Logical axes of the weights, in the order of their names.
UP_AXES = ("expert", "width", "expert_hidden")
DOWN_AXES = ("expert", "expert_hidden", "width")
# An id that no shard holds.
_NOWHERE = -(2**30)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """SwiGLU experts: down(silu(gate x) * up x)."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The rows of the blocks, one after the other."""

    choice: jax.Array  # token * K + slot; rows that fill up a block repeat a choice of its expert
    filled: jax.Array  # False where a row only fills up
    expert_of_block: jax.Array
    blocks: jax.Array  # how many blocks hold rows


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: a power of two near half an expert's fair share of the choices, within 16 and 256.

    Smaller blocks pad less, larger ones run fewer iterations; measured on CPU, where 64 is best for decoding 256 slots
    over 4 experts and 256 for training on 3072 tokens.
    """
    half_share = max(1, choices // (2 * experts))
    return min(256, max(16, 1 << (half_share.bit_length() - 1)))


def apply_experts(
    x_ND: jax.Array, ids_NK: jax.Array, weight_NK: jax.Array, used_N: jax.Array, weights: ExpertWeights, mesh: Mesh
) -> jax.Array:
    """Every token through its K experts, summed with its weights.

    A token's experts are summed in the order of their ids, whatever their slots, and its rows meet no other token's: on
    CPU its bits depend on nothing but itself and the number of tokens. Products are taken in the type of `x_ND` and
    accumulated in float32: over experts, over shards, and in the weights' gradients.

    On a mesh, tokens are gathered over `expert`, every shard runs its own experts on all of them, and the sums are
    scattered back. No collective is inside the loop, whose trip count differs between shards.

    Args:
      x_ND: tokens, float32 or bfloat16.
      ids_NK: experts of each token, int32; an id outside 0 .. E - 1 contributes nothing.
      weight_NK: float32.
      used_N: bool; where False the token has no experts: its output is 0 and it costs nothing.
      weights: the experts, any float type.
      mesh: where they live; tokens are cut over data, fsdp and expert.

    Returns:
      out_ND, in the type of `x_ND`.

    Raises:
      ValueError: an argument's shape contradicts its suffix.
    """
    check_shapes(
        x_ND=x_ND,
        ids_NK=ids_NK,
        weight_NK=weight_NK,
        used_N=used_N,
        gate_EDF=weights.gate_EDF,
        up_EDF=weights.up_EDF,
        down_EFD=weights.down_EFD,
    )
    ids_NK = jnp.where(used_N[:, None], ids_NK, _NOWHERE)
    if mesh.size == 1:
        return _local(x_ND, ids_NK, weight_NK, weights).astype(x_ND.dtype)
    tokens, up, down = spec("batch", "unsharded"), spec(*UP_AXES), spec(*DOWN_AXES)
    sharded = jax.shard_map(
        _shard, mesh=mesh, in_specs=(tokens, tokens, tokens, up, up, down), out_specs=tokens, check_vma=False
    )
    return sharded(x_ND, ids_NK, weight_NK, weights.gate_EDF, weights.up_EDF, weights.down_EFD)


def _shard(
    x_nD: jax.Array,
    ids_nK: jax.Array,
    weight_nK: jax.Array,
    gate_edf: jax.Array,
    up_edf: jax.Array,
    down_efd: jax.Array,
) -> jax.Array:
    """One device's part: its experts, on the tokens of all shards of `expert`."""
    gather = functools.partial(lax.all_gather, tiled=True)
    x_ND, ids_NK, weight_NK = (gather(array, "expert", axis=0) for array in (x_nD, ids_nK, weight_nK))
    # Gathered in float32, so that the gradients on the way back are summed in float32 too.
    weights = ExpertWeights(
        gate_EDF=gather(gate_edf, "fsdp", axis=1),
        up_EDF=gather(up_edf, "fsdp", axis=1),
        down_EFD=gather(down_efd, "fsdp", axis=2),
    )
    local_NK = ids_NK - lax.axis_index("expert") * gate_edf.shape[0]
    out_ND = lax.psum(_local(x_ND, local_NK, weight_NK, weights), "tensor")
    return lax.psum_scatter(out_ND, "expert", scatter_dimension=0, tiled=True).astype(x_nD.dtype)


def _local(x_ND: jax.Array, ids_NK: jax.Array, weight_NK: jax.Array, weights: ExpertWeights) -> jax.Array:
    return _blocked(block_rows(ids_NK.size, weights.gate_EDF.shape[0]), x_ND, ids_NK, weight_NK, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(rows: int, x_ND: jax.Array, ids_NK: jax.Array, weight_NK: jax.Array, weights: ExpertWeights) -> jax.Array:
    return _forward(rows, x_ND, ids_NK, weight_NK, weights)[0]


def _forward(
    rows: int, x_ND: jax.Array, ids_NK: jax.Array, weight_NK: jax.Array, weights: ExpertWeights
) -> tuple[jax.Array, Any]:
    plan = _plan(ids_NK, weights.gate_EDF.shape[0], rows)
    cast = _cast(weights, x_ND.dtype)
    flat_weight, slots = weight_NK.reshape(-1), weight_NK.shape[1]

    def block(number: jax.Array, out_ND: jax.Array) -> jax.Array:
        expert = plan.expert_of_block[number]
        choice, filled = _rows_of(plan, number, rows)
        x = _take(x_ND, choice // slots)
        gate, up = _dot(x, cast.gate_EDF[expert], 1, 0), _dot(x, cast.up_EDF[expert], 1, 0)
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        y = _take(flat_weight, choice)[:, None] * _dot(hidden, cast.down_EFD[expert], 1, 0)
        return _add(out_ND, choice // slots, filled, y)

    out_ND = lax.fori_loop(0, plan.blocks, block, jnp.zeros(x_ND.shape, jnp.float32))
    return out_ND, (x_ND, weight_NK, weights, plan)


def _backward(rows: int, saved: Any, out_grad_ND: jax.Array) -> tuple[Any, ...]:
    """Recomputes gate and up. d out / d weight = <out_grad down^T, hidden>, so down(hidden) is not needed again."""
    x_ND, weight_NK, weights, plan = saved
    dtype = x_ND.dtype
    cast, out_grad_ND = _cast(weights, dtype), out_grad_ND.astype(dtype)
    flat_weight, slots = weight_NK.reshape(-1), weight_NK.shape[1]

    def block(number: jax.Array, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dx_ND, dweight, dgate_EDF, dup_EDF, ddown_EFD = grads
        expert = plan.expert_of_block[number]
        choice, filled = _rows_of(plan, number, rows)
        x, scale = _take(x_ND, choice // slots), _take(flat_weight, choice)[:, None]
        # Without a gradient the rows that only fill up add nothing to the weights'.
        out_grad = jnp.where(filled[:, None], _take(out_grad_ND, choice // slots), 0)

        gate, up = _dot(x, cast.gate_EDF[expert], 1, 0), _dot(x, cast.up_EDF[expert], 1, 0)
        sigmoid = jax.nn.sigmoid(gate)
        act = gate * sigmoid
        hidden = act * up
        from_down = _dot(out_grad, cast.down_EFD[expert], 1, 1)
        dhidden = scale * from_down
        dup = (dhidden * act).astype(dtype)
        dgate = (dhidden * up * (sigmoid + act * (1 - sigmoid))).astype(dtype)
        dx = _dot(dgate, cast.gate_EDF[expert], 1, 1) + _dot(dup, cast.up_EDF[expert], 1, 1)
        return (
            _add(dx_ND, choice // slots, filled, dx),
            _add(dweight, choice, filled, (from_down * hidden).sum(-1)),
            dgate_EDF.at[expert].add(_dot(x, dgate, 0, 0)),
            dup_EDF.at[expert].add(_dot(x, dup, 0, 0)),
            ddown_EFD.at[expert].add(_dot((scale * hidden).astype(dtype), out_grad, 0, 0)),
        )

    results = (x_ND, flat_weight, weights.gate_EDF, weights.up_EDF, weights.down_EFD)
    grads = lax.fori_loop(0, plan.blocks, block, tuple(jnp.zeros(of.shape, jnp.float32) for of in results))
    dx_ND, dweight, dgate, dup, ddown = (grad.astype(of.dtype) for grad, of in zip(grads, results, strict=True))
    dweights = ExpertWeights(gate_EDF=dgate, up_EDF=dup, down_EFD=ddown)
    return dx_ND, None, dweight.reshape(weight_NK.shape), dweights


_blocked.defvjp(_forward, _backward)


def _plan(ids_NK: jax.Array, experts: int, rows: int) -> _Plan:
    choices = ids_NK.size
    ids = ids_NK.reshape(-1)
    key = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    order = _stable_order(key, experts + 1)

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
    choice = _take(order, jnp.clip(place, 0, choices - 1))
    filled = rank < size[expert][:, None]
    return _Plan(choice=choice.reshape(-1), filled=filled.reshape(-1), expert_of_block=expert, blocks=last_block[-1])


def _stable_order(key: jax.Array, bound: int) -> jax.Array:
    """`argsort`, stable, of keys in [0, bound). Key and place packed in one word sort five times faster on CPU."""
    count = key.shape[0]
    if bound * count > 2**32:
        return jnp.argsort(key, stable=True).astype(jnp.int32)
    packed = key.astype(jnp.uint32) * np.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(packed) % np.uint32(count)).astype(jnp.int32)


def _cast(weights: ExpertWeights, dtype: jnp.dtype) -> ExpertWeights:
    return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Contracts one axis of each matrix; accumulates and returns float32."""
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by an index that is in bounds by construction: checking it would double the cost on CPU."""
    return array.at[index].get(mode="promise_in_bounds")


def _add(total: jax.Array, index: jax.Array, filled: jax.Array, value: jax.Array) -> jax.Array:
    """Adds rows at distinct indices; those that only fill up go nowhere."""
    return total.at[jnp.where(filled, index, total.shape[0])].add(value, mode="drop")


def _rows_of(plan: _Plan, block: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    start = block * rows
    return lax.dynamic_slice_in_dim(plan.choice, start, rows), lax.dynamic_slice_in_dim(plan.filled, start, rows)
