"""Digests of arrays, taken where the arrays are: the same whatever mesh or number of processes holds them.

Every element's bits are mixed with its place and summed modulo 2^32, twice with different seeds. Sums of integers
depend on no order, so each device sums what it holds and only two numbers travel; no array is gathered or read by the
host. Any one changed element changes both sums; a chance match of more has probability 2^-64. No protection against
intent.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from train.moments import is_hosted

_SEEDS = (0x9E3779B9, 0x85EBCA6B)
# Of an array on the host, how much is put on a device at a time.
_SLICE_BYTES = 2**26


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """The digest of every array, by name: 16 hexadecimal digits and the shape and type.

    All processes that hold a part of them must call this together, from the thread that launches computations.

    Args:
      arrays: of 1, 2 or 4 bytes an element.
    """
    hosted = {name for name, array in arrays.items() if is_hosted(array)}
    sums = _sums_of_all({name: array for name, array in arrays.items() if name not in hosted})
    # What lives in the host's memory visits the devices one by one: all of it need not fit there.
    sums |= {name: _sums_of_hosted(arrays[name]) for name in sorted(hosted)}
    sums = jax.device_get(sums)
    return {name: _text(sums[name], array.shape, array.dtype) for name, array in arrays.items()}


def digest(array: np.ndarray) -> str:
    """The digest of an array on the host, read in slices: what `digests` gives for the same values.

    Args:
      array: of 1, 2 or 4 bytes an element.
    """
    if array.ndim == 0:
        return _text(np.asarray(_sums(jnp.asarray(array), 0)), array.shape, array.dtype)
    step = max(_SLICE_BYTES // max(array[:1].nbytes, 1), 1)
    total = np.zeros(len(_SEEDS), np.uint32)
    for start in range(0, len(array), step):
        total += np.asarray(_sums_jit(array[start : start + step], start))
    return _text(total, array.shape, array.dtype)


def _text(sums: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> str:
    return "".join(f"{int(value):08x}" for value in sums) + f" {np.dtype(dtype).name}{list(shape)}"


def _sums(array: jax.Array, first: jax.Array | int) -> jax.Array:
    """The sums, one a seed; `first` is the place of the first element on axis 0."""
    bits = _bits(array)
    return jnp.stack([jnp.sum(_mixed(bits, first, seed), dtype=jnp.uint32) for seed in _SEEDS])


_sums_jit = jax.jit(_sums)
_sums_of_hosted = jax.jit(lambda array: _sums(jax.device_put(array, jax.memory.Space.Device), 0))
_sums_of_all = jax.jit(lambda arrays: {name: _sums(array, 0) for name, array in arrays.items()})


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize
    if width not in (1, 2, 4):
        raise ValueError(f"digest: expected 1, 2 or 4 bytes an element, got {array.dtype}")
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    return lax.bitcast_convert_type(array, kind).astype(jnp.uint32)


def _mixed(bits: jax.Array, first: jax.Array | int, seed: int) -> jax.Array:
    """Bits and place of every element, mixed axis by axis: a 30B leaf has more elements than 32 bits can number."""
    mixed = _scramble(bits ^ jnp.uint32(seed))
    for axis in range(bits.ndim):
        place = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        if axis == 0:
            place += jnp.asarray(first, jnp.uint32)
        mixed = _scramble(mixed + place * jnp.uint32(2 * axis + 0x9E3779B1))
    return mixed


def _scramble(value: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit depends on every other (the finalizer of MurmurHash3)."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
