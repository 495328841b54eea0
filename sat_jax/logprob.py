"""Log-prob of a given token and entropy of its distribution, the vocabulary in chunks.

A row of logits at V = 151,936 is 600 KB; those of a batch do not fit. Here a chunk of columns is multiplied, folded
into a running logsumexp and forgotten; the backward pass multiplies it again. Only normaliser and entropy are kept.
So log-probs with their gradient take four products where logits written out take three. Where the same weights have
scored the same tokens before, as when a batch is measured before its gradients, those `TokenScores` spare one of them.

On a mesh the head is cut along its vocabulary. Shards of `tensor` score their own columns and add up; what the batch
axes hold is gathered and its gradient scattered back chunk by chunk, so that no device ever has a whole head.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import Mesh

from sat_jax.mesh import gather_over, scatter_over, spec, sum_over
from sat_jax.shapes import check_shapes
from sat_jax.types import TokenScores

# A chunk of logits holds about this many float32 (64 MiB), within these widths: narrower starves a matrix unit, wider
# gains nothing. Widths are whole tiles of a matrix unit.
_CHUNK_ELEMENTS = 2**24
_CHUNK_MIN, _CHUNK_MAX, _TILE = 1024, 8192, 128
# Stands for minus infinity, but its differences and products stay finite (0 * inf would be NaN).
_LOWEST = float(jnp.finfo(jnp.float32).min) / 2
# Over which a chunk of columns is gathered; the rest of the vocabulary's axes is `tensor`.
_GATHERED = ("fsdp", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layout:
    """How the head is cut.

    Attributes:
      chunk: columns that one device contributes to a step of the loop.
      mesh: None on one device.
    """

    chunk: int
    mesh: Mesh | None

    @property
    def gathered(self) -> int:
        """Devices that contribute to a step."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in _GATHERED)


def token_logp(
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    chunk: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores tokens under softmax(hidden @ head / temperature): log-probs and entropies of `token_scores`, which see.

    Returns:
      (logp_BT, entropy_BT), nats, float32.
    """
    scores = token_scores(hidden_BTD, head_DV, target_BT, temperature=temperature, chunk=chunk, mesh=mesh)
    return scores.logp_BT, scores.entropy_BT


def token_scores(  # noqa: PLR0913 (three arrays, and how they are to be taken)
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    known: TokenScores | None = None,
) -> TokenScores:
    """Scores tokens under softmax(hidden @ head / temperature); no [.., V] array exists when V is large.

    Differentiable in `hidden_BTD` and `head_DV`, through log-probs and entropies; `temperature` gets no gradient.
    Products are taken in the dtype of `hidden_BTD` (the head is cast chunk by chunk) and accumulated in float32, and so
    is the head's gradient, over tokens and over devices, before it is cast to the head's dtype: pass a float32 head to
    keep it.

    Args:
      hidden_BTD: final hidden states, float32 or bfloat16.
      head_DV: output projection, float32 or bfloat16.
      target_BT: token ids, integers; an id outside [0, V) gives NaN, so that it cannot pass unseen.
      temperature: positive scalar, may be traced; the logits are divided by it, as the sampler does.
      chunk: vocabulary columns at a time; None chooses by B * T.
      mesh: where rows are cut as a batch and the head along its vocabulary, both evenly; None = one device.
      known: what the same call gave before. It is returned as it is, with this call's gradient, and nothing is
        multiplied before the backward pass. The gradient is only as right as the normaliser is that of these logits: of
        two programs compiled apart it is, but for rounding.

    Returns:
      Scores of the tempered distribution.

    Raises:
      ValueError: shapes disagree, or a Python `temperature` or `chunk` is not positive.

    Source: online softmax (arXiv 1805.02867); d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    sizes = check_shapes(hidden_BTD=hidden_BTD, head_DV=head_DV, target_BT=target_BT)
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(f"temperature: expected a positive number, got {temperature}; score greedy tokens at 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1 vocabulary column, got {chunk}")
    if known is not None:
        check_shapes(target_BT=target_BT, **dataclasses.asdict(known))
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    known = lax.stop_gradient(known)
    if mesh is None or mesh.size == 1:
        width = min(chunk or chunk_width(sizes["B"] * sizes["T"]), sizes["V"])
        return _score(_Layout(chunk=width, mesh=None), hidden_BTD, head_DV, target_BT, temperature, known)
    held = sizes["V"] // math.prod(mesh.shape[axis] for axis in ("tensor", *_GATHERED))
    local_tokens = sizes["B"] * sizes["T"] // math.prod(mesh.shape[axis] for axis in ("data", *_GATHERED))
    gathered = _Layout(chunk=1, mesh=mesh).gathered
    width = min(-(-(chunk or chunk_width(local_tokens)) // gathered), held)
    return _score(_Layout(chunk=width, mesh=mesh), hidden_BTD, head_DV, target_BT, temperature, known)


def chunk_width(tokens: int) -> int:
    """Columns of the vocabulary that one step multiplies for so many tokens of a device, before the mesh's rounding."""
    width = _CHUNK_ELEMENTS // max(tokens, 1) // _TILE * _TILE
    return min(max(width, _CHUNK_MIN), _CHUNK_MAX)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(layout: _Layout, *arguments: Any) -> Any:
    return _forward_values(layout, *arguments)


def _forward_values(layout, hidden_BTD, head_DV, target_BT, temperature, known):
    if known is not None:
        return known
    local = functools.partial(_forward_local, layout)
    if layout.mesh is not None:
        hidden, head, row = _specs()
        local = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(hidden, head, row, spec()), out_specs=(row,) * 3, check_vma=False
        )
    logp_BT, entropy_BT, normaliser_BT = local(hidden_BTD, head_DV, target_BT, temperature)
    in_vocabulary_BT = (target_BT >= 0) & (target_BT < head_DV.shape[1])
    logp_BT = jnp.where(in_vocabulary_BT, logp_BT, jnp.nan)
    return TokenScores(logp_BT=logp_BT, entropy_BT=entropy_BT, normaliser_BT=normaliser_BT)


def _forward(layout, *arguments):
    arguments = jax.tree.map(lambda primal: primal.value, arguments, is_leaf=lambda a: isinstance(a, CustomVJPPrimal))
    scores = _forward_values(layout, *arguments)
    return scores, (*arguments, scores)


def _backward(layout, kept, cotangents):
    hidden_BTD, head_DV, target_BT, temperature, known, scores = kept
    # Where nobody asks for the entropy's gradient, as in training, what it takes beside the products is left out.
    dlogp_BT, dentropy_BT = (
        None if isinstance(cotangent, SymbolicZero) else cotangent
        for cotangent in (cotangents.logp_BT, cotangents.entropy_BT)
    )
    local = functools.partial(_backward_local, layout)
    if layout.mesh is not None:
        hidden, head, row = _specs()
        rows = jax.tree.map(lambda _: row, (scores, dlogp_BT, dentropy_BT))
        local = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(hidden, head, row, spec(), *rows),
            out_specs=(hidden, head),
            check_vma=False,
        )
    dhidden_BTD, dhead_DV = local(hidden_BTD, head_DV, target_BT, temperature, scores, dlogp_BT, dentropy_BT)
    nothing = jax.tree.map(jnp.zeros_like, (temperature, known))
    return dhidden_BTD.astype(hidden_BTD.dtype), dhead_DV.astype(head_DV.dtype), None, *nothing


_score.defvjp(_forward, _backward, symbolic_zeros=True)


def _specs() -> tuple[Any, Any, Any]:
    """Of hidden states, head, and an array of positions."""
    return (
        spec("batch", "unsharded", "unsharded"),
        spec("unsharded", "vocabulary"),
        spec("batch", "unsharded"),
    )


def _forward_local(layout, hidden_BTD, head_DV, target_BT, temperature):
    """Log-prob, entropy and normaliser of one device's rows."""

    def fold(carry, index):
        top_BT, mass_BT, moment_BT, picked_BT = carry
        logit_BTV, _, column_V, fresh_V = _logits(layout, hidden_BTD, head_DV, temperature, index)
        logit_BTV = jnp.where(fresh_V, logit_BTV, _LOWEST)
        peak_BT = jnp.maximum(top_BT, logit_BTV.max(axis=-1))
        shift_BT = top_BT - peak_BT
        centred_BTV = logit_BTV - peak_BT[..., None]
        weight_BTV = jnp.exp(centred_BTV)
        moment_BT = jnp.exp(shift_BT) * (moment_BT + shift_BT * mass_BT) + (weight_BTV * centred_BTV).sum(axis=-1)
        mass_BT = jnp.exp(shift_BT) * mass_BT + weight_BTV.sum(axis=-1)
        hit_BTV = fresh_V & (column_V == target_BT[..., None])
        picked_BT = picked_BT + jnp.where(hit_BTV, logit_BTV, 0).sum(axis=-1)
        return (peak_BT, mass_BT, moment_BT, picked_BT), None

    zero_BT = jnp.zeros(target_BT.shape, jnp.float32)
    carry = (jnp.full_like(zero_BT, _LOWEST), zero_BT, zero_BT, zero_BT)
    carry = _each_chunk(fold, carry, head_DV.shape[1], layout.chunk)
    top_BT, mass_BT, moment_BT, picked_BT = carry if layout.mesh is None else _add_up(*carry)
    # min: rounding must not report a probability above one.
    logp_BT = jnp.minimum((picked_BT - top_BT) - jnp.log(mass_BT), 0)
    # The moment is that of logits below their maximum: entropy = log(mass) - E[logit - max].
    entropy_BT = jnp.maximum(jnp.log(mass_BT) - moment_BT / mass_BT, 0)
    return logp_BT, entropy_BT, top_BT + jnp.log(mass_BT)


def _add_up(top_BT, mass_BT, moment_BT, picked_BT):
    """Joins what the shards of `tensor` found in their columns."""
    peak_BT = lax.pmax(top_BT, "tensor")
    shift_BT = top_BT - peak_BT
    moment_BT = jnp.exp(shift_BT) * (moment_BT + shift_BT * mass_BT)
    mass_BT = jnp.exp(shift_BT) * mass_BT
    return peak_BT, *(sum_over(part_BT, "tensor") for part_BT in (mass_BT, moment_BT, picked_BT))


def _backward_local(layout, *kept_and_cotangents):
    """Gradients of one device's rows and columns, float32; a cotangent that is None is zero."""
    hidden_BTD, head_DV, target_BT, temperature, scores, dlogp_BT, dentropy_BT = kept_and_cotangents

    def fold(carry, index):
        dhidden_BTD, dhead_DV = carry
        logit_BTV, part_DV, column_V, fresh_V = _logits(layout, hidden_BTD, head_DV, temperature, index)
        logp_BTV = logit_BTV - scores.normaliser_BT[..., None]
        p_BTV = jnp.exp(logp_BTV)
        dlogit_BTV = jnp.zeros_like(p_BTV)
        if dlogp_BT is not None:
            dlogit_BTV += dlogp_BT[..., None] * ((column_V == target_BT[..., None]) - p_BTV)
        if dentropy_BT is not None:
            dlogit_BTV -= dentropy_BT[..., None] * p_BTV * (logp_BTV + scores.entropy_BT[..., None])
        dlogit_BTV = jnp.where(fresh_V, dlogit_BTV / temperature, 0).astype(hidden_BTD.dtype)
        dhidden_BTD += jnp.einsum("btv,dv->btd", dlogit_BTV, part_DV, preferred_element_type=jnp.float32)
        dpart_DV = jnp.einsum("btd,btv->dv", hidden_BTD, dlogit_BTV, preferred_element_type=jnp.float32)
        if layout.gathered > 1:
            dpart_DV = scatter_over(dpart_DV, _GATHERED, axis=1)
        start = _start(layout, head_DV, index)  # columns of an earlier chunk get zero added
        dpart_DV += lax.dynamic_slice_in_dim(dhead_DV, start, layout.chunk, axis=1)
        return (dhidden_BTD, lax.dynamic_update_slice_in_dim(dhead_DV, dpart_DV, start, axis=1)), None

    zeros = (jnp.zeros(hidden_BTD.shape, jnp.float32), jnp.zeros(head_DV.shape, jnp.float32))
    dhidden_BTD, dhead_DV = _each_chunk(fold, zeros, head_DV.shape[1], layout.chunk)
    if layout.mesh is None:
        return dhidden_BTD, dhead_DV
    return sum_over(dhidden_BTD, "tensor"), sum_over(dhead_DV, "data")


def _logits(layout, hidden_BTD, head_DV, temperature, index):
    """One chunk of logits, its part of the head, its column numbers, and which of them no earlier chunk held.

    The last chunk is shifted back so that it ends at V; what it shares with its predecessor is not fresh.
    """
    held, start = head_DV.shape[1], _start(layout, head_DV, index)
    part_DV = lax.dynamic_slice_in_dim(head_DV, start, layout.chunk, axis=1).astype(hidden_BTD.dtype)
    column_V = start + jnp.arange(layout.chunk)
    fresh_V = column_V >= index * layout.chunk
    if layout.mesh is not None:
        # Every device gives the same columns of its own part; `tensor` counts the parts first, then fsdp, then expert.
        part_DV = gather_over(part_DV, _GATHERED, axis=1)
        first = (lax.axis_index("tensor") * layout.gathered + jnp.arange(layout.gathered)) * held
        column_V = (first[:, None] + column_V).reshape(-1)
        fresh_V = jnp.tile(fresh_V, layout.gathered)
    logit_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, part_DV, preferred_element_type=jnp.float32) / temperature
    return logit_BTV, part_DV, column_V, fresh_V


def _start(layout, head_DV, index):
    return jnp.minimum(index * layout.chunk, head_DV.shape[1] - layout.chunk)


def _each_chunk(fold, carry, vocabulary, chunk):
    count = -(-vocabulary // chunk)
    if count == 1:  # a small vocabulary needs no loop, which XLA then fuses with its surroundings
        return fold(carry, 0)[0]
    return lax.scan(fold, carry, jnp.arange(count))[0]
