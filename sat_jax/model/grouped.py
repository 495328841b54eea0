"""Experts by grouped matrix products (megablox), chunk by chunk of the sorted choices. For TPU.

`lax.ragged_dot` is not used: its weight gradient multiplies every row with every local expert. A loop runs over as many
chunks as the load fills, so nothing is dropped and only one chunk's intermediate values exist at a time. Megablox
leaves the rows behind the last group as it found them, NaN perhaps: every product is masked before it is used.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from sat_jax.model.dispatch import (
    ExpertGrads,
    ExpertKernel,
    ExpertWeights,
    Routed,
    add_rows,
    cast_weights,
    expert_zeros,
    stable_order,
    swiglu_gradients,
    take_rows,
)

# Rows, contracted and produced columns of a tile with two-byte operands: what compiles for v5e and v5p.
_TILE = (512, 1024, 768)
# A chunk's rows: fewer hold less memory, more add the experts' gradient up less often.
_CHUNK_MIN, _CHUNK_MAX = 128, 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sorted:
    """The choices by expert, as many as whole chunks hold, and where each expert's begin and end."""

    choice: jax.Array
    start_E: jax.Array
    end_E: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Rows of one chunk: their choices, how many belong to each expert, and which are rows at all."""

    choice: jax.Array
    size_E: jax.Array
    filled: jax.Array


def chunk_rows(choices: int, experts: int) -> int:
    """Rows of a chunk: a power of two near the fair load of four experts, within 128 and 65,536.

    At 16 held experts that is a quarter of a balanced load (5.3 GiB of temporaries a layer of Qwen3-30B-A3B instead of
    8.9 with the whole load at once).

    Args:
      choices: tokens times slots.
      experts: over which these choices spread.
    """
    wanted = max(1, 4 * choices // experts)
    return min(_CHUNK_MAX, max(_CHUNK_MIN, 1 << (wanted.bit_length() - 1)))


def tile_rows(rows: int) -> int:
    """Rows of a tile of a chunk's products; a tile that two experts share is run for both."""
    return min(_TILE[0], rows)


def grouped_kernel(*, interpret: bool = False) -> ExpertKernel:
    """The kernel.

    Args:
      interpret: run the Pallas kernels step by step in plain JAX, on any platform; for tests.
    """
    return ExpertKernel(
        rows=chunk_rows,
        forward=functools.partial(_forward, interpret),
        backward=functools.partial(_backward, interpret),
    )


def _forward(interpret: bool, rows: int, routed: Routed, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
    choices = _sort(routed.ids_NK, weights.gate_EDF.shape[0], rows)
    cast = cast_weights(weights, routed.x_ND.dtype)
    x_ND, flat_weight, slots = routed.x_ND, routed.weight_NK.reshape(-1), routed.weight_NK.shape[1]

    def run(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_ND, executed = carry
        chunk = _chunk(choices, number, rows)
        product = functools.partial(_product, chunk, interpret)
        x = jnp.where(chunk.filled, take_rows(x_ND, chunk.choice // slots), 0)
        hidden = jax.nn.silu(product(x, cast.gate_EDF)) * product(x, cast.up_EDF)
        y = product(hidden.astype(x.dtype), cast.down_EFD) * take_rows(flat_weight, chunk.choice)[:, None]
        out_ND = add_rows(out_ND, chunk.choice // slots, chunk.filled[:, 0], y)
        return out_ND, executed + _executed(chunk.size_E, tile_rows(rows))

    start = (jnp.zeros(x_ND.shape, jnp.float32), jnp.int32(0))
    with jax.named_scope("expert_chunks"):  # by this name `plan` knows how often it runs
        return lax.fori_loop(0, -(-choices.end_E[-1] // rows), run, start)


def _backward(
    interpret: bool,
    rows: int,
    routed: Routed,
    weights: ExpertWeights,
    out_grad_ND: jax.Array,
) -> ExpertGrads:
    choices = _sort(routed.ids_NK, weights.gate_EDF.shape[0], rows)
    dtype = routed.x_ND.dtype
    cast, out_grad_ND = cast_weights(weights, dtype), out_grad_ND.astype(dtype)
    x_ND, flat_weight, slots = routed.x_ND, routed.weight_NK.reshape(-1), routed.weight_NK.shape[1]

    def run(number: jax.Array, grads: ExpertGrads) -> ExpertGrads:
        dx_ND, dweight, dweights = grads
        chunk = _chunk(choices, number, rows)
        product = functools.partial(_product, chunk, interpret)
        outer = functools.partial(_outer, chunk, interpret)
        token = chunk.choice // slots
        x = jnp.where(chunk.filled, take_rows(x_ND, token), 0)
        out_grad = jnp.where(chunk.filled, take_rows(out_grad_ND, token), 0)
        scale = take_rows(flat_weight, chunk.choice)[:, None]

        gate, up = product(x, cast.gate_EDF), product(x, cast.up_EDF)
        from_down = product(out_grad, cast.down_EFD, transposed=True)
        dgate, dup, dscale, hidden = swiglu_gradients(gate, up, from_down, scale)
        dgate, dup, hidden = dgate.astype(dtype), dup.astype(dtype), hidden.astype(dtype)
        dx = product(dgate, cast.gate_EDF, transposed=True) + product(dup, cast.up_EDF, transposed=True)
        new = ExpertWeights(gate_EDF=outer(x, dgate), up_EDF=outer(x, dup), down_EFD=outer(hidden, out_grad))
        return (
            add_rows(dx_ND, token, chunk.filled[:, 0], dx),
            add_rows(dweight, chunk.choice, chunk.filled[:, 0], dscale),
            jax.tree.map(jnp.add, dweights, new),
        )

    zeros = (jnp.zeros(x_ND.shape, jnp.float32), jnp.zeros(flat_weight.shape, jnp.float32), expert_zeros(weights))
    with jax.named_scope("expert_chunks"):
        dx_ND, dweight, dweights = lax.fori_loop(0, -(-choices.end_E[-1] // rows), run, zeros)
    return dx_ND, dweight.reshape(routed.weight_NK.shape), dweights


def _sort(ids_NK: jax.Array, experts: int, rows: int) -> _Sorted:
    ids = ids_NK.reshape(-1)
    key = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    order = stable_order(key, experts + 1)
    size_E = (key[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    end_E = jnp.cumsum(size_E)
    return _Sorted(choice=jnp.pad(order, (0, -len(order) % rows)), start_E=end_E - size_E, end_E=end_E)


def _chunk(choices: _Sorted, number: jax.Array, rows: int) -> _Chunk:
    first = number * rows
    size_E = jnp.minimum(choices.end_E, first + rows) - jnp.maximum(choices.start_E, first)
    return _Chunk(
        choice=lax.dynamic_slice_in_dim(choices.choice, first, rows),
        size_E=jnp.maximum(size_E, 0),
        filled=(first + jnp.arange(rows) < choices.end_E[-1])[:, None],
    )


def _product(chunk: _Chunk, interpret: bool, left: jax.Array, right: jax.Array, transposed: bool = False) -> jax.Array:
    """Each row with its expert's matrix (or its transpose), float32; 0 where there is no row."""
    tiling = _tiling(len(left), left.dtype)
    out = gmm(left, right, chunk.size_E, jnp.float32, tiling, transpose_rhs=transposed, interpret=interpret)
    return jnp.where(chunk.filled, out, 0)


def _outer(chunk: _Chunk, interpret: bool, left: jax.Array, right: jax.Array) -> jax.Array:
    """The sum over each expert's rows of left^T right, float32; 0 for an expert without rows."""
    tiling = _tiling(len(left), left.dtype)
    return tgmm(left.T, right, chunk.size_E, jnp.float32, tiling, interpret=interpret)


def _tiling(rows: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    _, depth, width = _TILE
    return tile_rows(rows), depth * 2 // jnp.dtype(dtype).itemsize, width


def _executed(size_E: jax.Array, tile_rows: int) -> jax.Array:
    """Rows that the products of a chunk run over: a tile is visited once by every expert that has rows in it."""
    end_E = jnp.cumsum(size_E)
    tiles_E = -(-end_E // tile_rows) - (end_E - size_E) // tile_rows
    return jnp.where(size_E > 0, tiles_E, 0).sum() * tile_rows


GROUPED = grouped_kernel()
