"""Log-prob of a given token and entropy of its distribution, the vocabulary in chunks.

A row of logits at V = 151,936 is 600 KB; those of a batch do not fit. Here a chunk of columns is multiplied, folded
into a running logsumexp and forgotten; the backward pass multiplies it again. Only normaliser and entropy are kept.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.shapes import check_shapes

# A chunk of logits holds about this many float32 (256 MiB), within these widths: narrower starves a matrix unit, wider
# gains nothing. Widths are whole tiles of a matrix unit.
_CHUNK_ELEMENTS = 2**26
_CHUNK_MIN, _CHUNK_MAX, _TILE = 1024, 8192, 128
# Stands for minus infinity, but its differences and products stay finite (0 * inf would be NaN).
_LOWEST = float(jnp.finfo(jnp.float32).min) / 2


def token_logp(
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores tokens under softmax(hidden @ head / temperature); no [.., V] array exists when V is large.

    Differentiable in `hidden_BTD` and `head_DV`, through both results; `temperature` gets no gradient. Products are
    taken in the dtype of `hidden_BTD` (the head is cast chunk by chunk) and accumulated in float32, and so is the
    head's gradient before it is cast to the head's dtype: pass a float32 head to keep it.

    Args:
      hidden_BTD: final hidden states, float32 or bfloat16.
      head_DV: output projection, float32 or bfloat16.
      target_BT: token ids, integers; an id outside [0, V) gives NaN, so that it cannot pass unseen.
      temperature: positive scalar, may be traced; the logits are divided by it, as the sampler does.
      chunk: vocabulary columns at a time; None chooses by B * T.

    Returns:
      (logp_BT, entropy_BT), nats, float32: log-prob of the target, <= 0, and entropy, >= 0, both of the
      tempered distribution.

    Raises:
      ValueError: shapes disagree, or a Python `temperature` or `chunk` is not positive.

    Source: online softmax (arXiv 1805.02867); d entropy / d logit_v = -p_v (log p_v + entropy).
    """
    sizes = check_shapes(hidden_BTD=hidden_BTD, head_DV=head_DV, target_BT=target_BT)
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(f"temperature: expected a positive number, got {temperature}; score greedy tokens at 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1 vocabulary column, got {chunk}")
    chunk = min(chunk or _chunk_width(sizes["B"] * sizes["T"]), sizes["V"])
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    return _score(hidden_BTD, head_DV, target_BT, temperature, chunk)


def _chunk_width(tokens: int) -> int:
    width = _CHUNK_ELEMENTS // max(tokens, 1) // _TILE * _TILE
    return min(max(width, _CHUNK_MIN), _CHUNK_MAX)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _score(hidden_BTD, head_DV, target_BT, temperature, chunk):
    return _forward(hidden_BTD, head_DV, target_BT, temperature, chunk)[0]


def _forward(hidden_BTD, head_DV, target_BT, temperature, chunk):
    vocabulary = head_DV.shape[1]

    def fold(carry, index):
        top_BT, mass_BT, moment_BT, picked_BT = carry
        logit_BTV, _, column_V, fresh_V = _logits(hidden_BTD, head_DV, temperature, index, chunk)
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
    carry = _each_chunk(fold, (jnp.full_like(zero_BT, _LOWEST), zero_BT, zero_BT, zero_BT), vocabulary, chunk)
    top_BT, mass_BT, moment_BT, picked_BT = carry
    in_vocabulary_BT = (target_BT >= 0) & (target_BT < vocabulary)
    # min: rounding must not report a probability above one.
    logp_BT = jnp.minimum((picked_BT - top_BT) - jnp.log(mass_BT), 0)
    logp_BT = jnp.where(in_vocabulary_BT, logp_BT, jnp.nan)
    # The moment is that of logits below their maximum: entropy = log(mass) - E[logit - max].
    entropy_BT = jnp.maximum(jnp.log(mass_BT) - moment_BT / mass_BT, 0)
    kept = (hidden_BTD, head_DV, target_BT, temperature, top_BT + jnp.log(mass_BT), entropy_BT)
    return (logp_BT, entropy_BT), kept


def _backward(chunk, kept, cotangents):
    hidden_BTD, head_DV, target_BT, temperature, normaliser_BT, entropy_BT = kept
    dlogp_BT, dentropy_BT = cotangents

    def fold(carry, index):
        dhidden_BTD, dhead_DV = carry
        logit_BTV, part_DV, column_V, fresh_V = _logits(hidden_BTD, head_DV, temperature, index, chunk)
        logp_BTV = logit_BTV - normaliser_BT[..., None]
        p_BTV = jnp.exp(logp_BTV)
        dlogit_BTV = dlogp_BT[..., None] * ((column_V == target_BT[..., None]) - p_BTV)
        dlogit_BTV -= dentropy_BT[..., None] * p_BTV * (logp_BTV + entropy_BT[..., None])
        dlogit_BTV = jnp.where(fresh_V, dlogit_BTV / temperature, 0).astype(hidden_BTD.dtype)
        dhidden_BTD += jnp.einsum("btv,dv->btd", dlogit_BTV, part_DV, preferred_element_type=jnp.float32)
        dpart_DV = jnp.einsum("btd,btv->dv", hidden_BTD, dlogit_BTV, preferred_element_type=jnp.float32)
        start = column_V[0]  # columns of an earlier chunk get zero added
        dpart_DV += lax.dynamic_slice_in_dim(dhead_DV, start, chunk, axis=1)
        return (dhidden_BTD, lax.dynamic_update_slice_in_dim(dhead_DV, dpart_DV, start, axis=1)), None

    zeros = (jnp.zeros(hidden_BTD.shape, jnp.float32), jnp.zeros(head_DV.shape, jnp.float32))
    dhidden_BTD, dhead_DV = _each_chunk(fold, zeros, head_DV.shape[1], chunk)
    return dhidden_BTD.astype(hidden_BTD.dtype), dhead_DV.astype(head_DV.dtype), None, jnp.zeros_like(temperature)


_score.defvjp(_forward, _backward)


def _logits(hidden_BTD, head_DV, temperature, index, chunk):
    """One chunk of logits, its part of the head, its column numbers, and which of them no earlier chunk held.

    The last chunk is shifted back so that it ends at V; what it shares with its predecessor is not fresh.
    """
    start = jnp.minimum(index * chunk, head_DV.shape[1] - chunk)
    part_DV = lax.dynamic_slice_in_dim(head_DV, start, chunk, axis=1).astype(hidden_BTD.dtype)
    logit_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, part_DV, preferred_element_type=jnp.float32) / temperature
    column_V = start + jnp.arange(chunk)
    return logit_BTV, part_DV, column_V, column_V >= index * chunk


def _each_chunk(fold, carry, vocabulary, chunk):
    count = -(-vocabulary // chunk)
    if count == 1:  # a small vocabulary needs no loop, which XLA then fuses with its surroundings
        return fold(carry, 0)[0]
    return lax.scan(fold, carry, jnp.arange(count))[0]
