"""The experts' feed-forward on a mesh: tokens to the shards that hold their experts, products, sums back.

Drops no token, whatever the skew. How one device runs the experts that it holds is the kernel's matter: `blocked` on
CPU and GPU, `grouped` on TPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sat_jax.mesh import gather_over, platform, scatter_over, spec, sum_over
from sat_jax.model.blocked import BLOCKED
from sat_jax.model.dispatch import ExpertGrads, ExpertKernel, ExpertWeights, Routed
from sat_jax.model.exchange import exchange_backward, exchange_forward
from sat_jax.model.grouped import GROUPED
from sat_jax.shapes import check_shapes

# Logical axes of the weights, in the order of their names.
UP_AXES = ("expert", "width", "expert_hidden")
DOWN_AXES = ("expert", "expert_hidden", "width")
# An id that no shard holds.
_NOWHERE = -(2**30)
_TOKENS = spec("batch", "unsharded")
_HELD: Any = ExpertWeights(gate_EDF=spec(*UP_AXES), up_EDF=spec(*UP_AXES), down_EFD=spec(*DOWN_AXES))  # type: ignore[arg-type]


def kernel_of(mesh: Mesh) -> ExpertKernel:
    """The kernel for the mesh's platform."""
    return GROUPED if platform(mesh) == "tpu" else BLOCKED


def apply_experts(
    x_ND: jax.Array, ids_NK: jax.Array, weight_NK: jax.Array, used_N: jax.Array, weights: ExpertWeights, mesh: Mesh
) -> jax.Array:
    """Every token through its K experts, summed with its weights.

    A token's experts are summed in the order of their ids, whatever their slots, and its rows meet no other token's: on
    CPU its bits depend on nothing but itself and the number of tokens. Products are taken in the type of `x_ND` and
    accumulated in float32: over experts, over shards, and in the weights' gradients.

    On a mesh, tokens are gathered over `expert`, every shard runs its own experts on all of them, and the sums are
    scattered back; beyond K shards tokens are sent where they are wanted instead (`exchange`). No collective is inside
    a kernel's loop, whose trip count differs between shards.

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
    routed = Routed(x_ND=x_ND, ids_NK=ids_NK, weight_NK=weight_NK)
    out_ND, _ = run_experts(mesh, kernel_of(mesh), routed, weights)
    return out_ND


def run_experts(
    mesh: Mesh, kernel: ExpertKernel, routed: Routed, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
    """What `apply_experts` does, by a given kernel, and how much work it was.

    Args:
      mesh: where the experts live.
      kernel: how a device runs those that it holds.
      routed: the tokens; ids counted from the mesh's first expert.
      weights: the experts.

    Returns:
      out_ND, in the type of the tokens; and the rows that each device's products ran over, counted in its loop, int32,
      in the order of the mesh (the useful ones are N * K in all for each shard of `tensor`).
    """
    result: Any = _run(mesh, kernel, routed, weights)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(mesh: Mesh, kernel: ExpertKernel, routed: Routed, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
    rows = _step_rows(mesh, kernel, routed, weights)
    if mesh.size == 1:
        out_ND, executed = kernel.forward(rows, routed, weights)
        return out_ND.astype(routed.x_ND.dtype), executed[None]
    sharded = jax.shard_map(
        functools.partial(_shard_forward, kernel, rows),
        mesh=mesh,
        in_specs=(_TOKENS, _HELD),
        out_specs=(_TOKENS, PartitionSpec(mesh.axis_names)),
        check_vma=False,
    )
    return sharded(routed, weights)


def _forward(mesh: Mesh, kernel: ExpertKernel, routed: Routed, weights: ExpertWeights) -> tuple[Any, Any]:
    return _run(mesh, kernel, routed, weights), (routed, weights)


def _backward(mesh: Mesh, kernel: ExpertKernel, saved: Any, grads: tuple[jax.Array, Any]) -> tuple[Any, ...]:
    routed, weights = saved
    rows = _step_rows(mesh, kernel, routed, weights)
    if mesh.size == 1:
        dx_ND, dweight_NK, dweights = kernel.backward(rows, routed, weights, grads[0])
    else:
        sharded = jax.shard_map(
            functools.partial(_shard_backward, kernel, rows),
            mesh=mesh,
            in_specs=(_TOKENS, _HELD, _TOKENS),
            out_specs=(_TOKENS, _TOKENS, _HELD),
            check_vma=False,
        )
        dx_ND, dweight_NK, dweights = sharded(routed, weights, grads[0])
    no_ids: Any = np.zeros(routed.ids_NK.shape, jax.dtypes.float0)
    drouted = Routed(x_ND=dx_ND.astype(routed.x_ND.dtype), ids_NK=no_ids, weight_NK=dweight_NK)
    return drouted, jax.tree.map(lambda grad, of: grad.astype(of.dtype), dweights, weights)


_run.defvjp(_forward, _backward)


def _step_rows(mesh: Mesh, kernel: ExpertKernel, routed: Routed, weights: ExpertWeights) -> int:
    # Devices of one group see the same tokens, once these are gathered over `expert`.
    groups = mesh.shape["data"] * mesh.shape["fsdp"]
    return kernel.rows(routed.ids_NK.size // groups, weights.gate_EDF.shape[0])


def _shard_forward(
    kernel: ExpertKernel, rows: int, routed: Routed, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
    """One device's part: its experts, on the tokens of all shards of `expert`."""
    dtype = routed.x_ND.dtype
    whole = _gather_weights(weights, dtype)
    if _exchanges(routed):
        out_nD, executed = exchange_forward(kernel, rows, routed, whole)
        return sum_over(out_nD, "tensor").astype(dtype), executed[None]
    out_ND, executed = kernel.forward(rows, _gather_tokens(routed, weights), whole)
    return _sum_over_experts(out_ND).astype(dtype), executed[None]


def _shard_backward(
    kernel: ExpertKernel, rows: int, routed: Routed, weights: ExpertWeights, out_grad_nD: jax.Array
) -> ExpertGrads:
    """Its gradients. Weights travel in the type of the products, their gradients back in float32."""
    whole, out_grad_nD = _gather_weights(weights, routed.x_ND.dtype), out_grad_nD.astype(routed.x_ND.dtype)
    if _exchanges(routed):
        *tokens, dweights = exchange_backward(kernel, rows, routed, whole, out_grad_nD)
        dx_nD, dweight_nK = (sum_over(grad, "tensor") for grad in tokens)
    else:
        out_grad_ND = gather_over(out_grad_nD, "expert")
        *tokens, dweights = kernel.backward(rows, _gather_tokens(routed, weights), whole, out_grad_ND)
        dx_nD, dweight_nK = (_sum_over_experts(grad) for grad in tokens)
    reduced = ExpertWeights(
        gate_EDF=scatter_over(dweights.gate_EDF, "fsdp", axis=1),
        up_EDF=scatter_over(dweights.up_EDF, "fsdp", axis=1),
        down_EFD=scatter_over(dweights.down_EFD, "fsdp", axis=2),
    )
    dweights = jax.tree.map(lambda grad: sum_over(grad, "data"), reduced)
    return dx_nD, dweight_nK, dweights


def _exchanges(routed: Routed) -> bool:
    """Whether tokens are sent where they are wanted: gathering them all moves more once the shards exceed the slots."""
    return lax.axis_size("expert") > routed.ids_NK.shape[1]


def _sum_over_experts(array: jax.Array) -> jax.Array:
    """Sums over the shards that hold other experts or another part of their width; each keeps its own tokens."""
    return sum_over(scatter_over(array, "expert"), "tensor")


def _gather_tokens(routed: Routed, weights: ExpertWeights) -> Routed:
    """The tokens of all shards of `expert`, their ids counted from this shard's first expert."""
    whole = jax.tree.map(lambda array: gather_over(array, "expert"), routed)
    first = lax.axis_index("expert") * weights.gate_EDF.shape[0]
    return dataclasses.replace(whole, ids_NK=whole.ids_NK - first)


def _gather_weights(weights: ExpertWeights, dtype: jnp.dtype) -> ExpertWeights:
    """This shard's experts at full width."""

    def gather(weight: jax.Array, axis: int) -> jax.Array:
        return gather_over(weight.astype(dtype), "fsdp", axis)

    return ExpertWeights(
        gate_EDF=gather(weights.gate_EDF, 1), up_EDF=gather(weights.up_EDF, 1), down_EFD=gather(weights.down_EFD, 2)
    )
