"""What every way to run experts shares: their weights, the order of choices, rows in and out of token arrays."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """SwiGLU experts: down(silu(gate x) * up x)."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """Tokens and where they go.

    Attributes:
      x_ND: tokens, float32 or bfloat16; products are taken in this type.
      ids_NK: experts of each token, int32, counted from the first that is held; one outside costs nothing.
      weight_NK: combine weights, float32.
    """

    x_ND: jax.Array
    ids_NK: jax.Array
    weight_NK: jax.Array


def stable_order(key: jax.Array, bound: int) -> jax.Array:
    """`argsort`, stable, of keys in [0, bound). Key and place packed in one word sort five times faster on CPU."""
    count = key.shape[0]
    if bound * count > 2**32:
        return jnp.argsort(key, stable=True).astype(jnp.int32)
    packed = key.astype(jnp.uint32) * np.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(packed) % np.uint32(count)).astype(jnp.int32)


def cast_weights(weights: ExpertWeights, dtype: jnp.dtype) -> ExpertWeights:
    """The weights in the type of the products."""
    return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def take_rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by an index that is in bounds by construction: checking it would double the cost on CPU."""
    return array.at[index].get(mode="promise_in_bounds")


def add_rows(total: jax.Array, index: jax.Array, filled: jax.Array, value: jax.Array) -> jax.Array:
    """Adds rows at distinct indices; those that only fill up go nowhere."""
    return total.at[jnp.where(filled, index, total.shape[0])].add(value, mode="drop")


# d tokens, d combine weights, d experts: all float32.
ExpertGrads = tuple[jax.Array, jax.Array, ExpertWeights]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """One way to run the experts that one device holds, on all tokens that it is given.

    Neither function contains a collective: their loops run as often as there is work, which differs between devices.

    Attributes:
      rows: `(choices, experts) -> rows` of one step of the loop, from the choices that `experts` experts share.
      forward: `(rows, routed, weights)` to out_ND, float32, and how many rows were run (scalar int32).
      backward: `(rows, routed, weights, out_grad_ND)` to, in float32, dx_ND, dweight_NK and the weights' gradient.
    """

    rows: Callable[[int, int], int]
    forward: Callable[[int, Routed, ExpertWeights], tuple[jax.Array, jax.Array]]
    backward: Callable[[int, Routed, ExpertWeights, jax.Array], ExpertGrads]


def expert_zeros(weights: ExpertWeights) -> ExpertWeights:
    """Where the weights' gradient is summed: float32."""
    return jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), weights)


def swiglu_gradients(
    gate: jax.Array, up: jax.Array, from_down: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of `scale * <from_down, silu(gate) * up>`, float32.

    Args:
      gate: pre-activations, [rows, F].
      up: what they gate, [rows, F].
      from_down: the output's gradient through the down projection, [rows, F].
      scale: combine weights, [rows, 1].

    Returns:
      Those of gate and up, [rows, F]; of the combine weights, [rows]; and the scaled hidden state, [rows, F].
    """
    sigmoid = jax.nn.sigmoid(gate)
    act = gate * sigmoid
    hidden = act * up
    dhidden = scale * from_down
    dgate = dhidden * up * (sigmoid + act * (1 - sigmoid))
    return dgate, dhidden * act, (from_down * hidden).sum(-1), scale * hidden
