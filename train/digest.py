"""Checksums of arrays that lie in parts on several processes; whoever holds which part, the sum is the same.

A Fletcher sum over the array's bytes in its own order: words, and words times their places, both modulo 2^64. Of a part
it is the part's contribution, and contributions add up. It finds what damages files: flipped bits, lost or swapped
blocks; it is no defence against intent.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def array_digests(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Digest of every array by its name; of several processes a collective, from the loop's thread.

    Args:
      arrays: on the host or on devices, in any sharding.
    """
    sums = np.zeros((len(arrays), 2), np.uint64)
    spread = False
    for place, array in enumerate(arrays.values()):
        local = not isinstance(array, jax.Array) or array.is_fully_addressable
        spread |= not local
        sums[place] = _whole(np.asarray(array)) if local else _own(array)
        if local and jax.process_index():
            sums[place] = 0  # every process has it: process 0 speaks for it
    if spread:
        sums = _added_up(sums)
    elif jax.process_index():
        sums = np.stack([_whole(np.asarray(array)) for array in arrays.values()])
    return {name: f"{array.dtype}:{a:016x}{b:016x}" for (name, array), (a, b) in zip(arrays.items(), sums, strict=True)}


def _whole(array: np.ndarray) -> np.ndarray:
    return _part(array, (slice(None),) * array.ndim, array.shape)


def _own(array: jax.Array) -> np.ndarray:
    total = np.zeros(2, np.uint64)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            total += _part(np.asarray(shard.data), shard.index, array.shape)
    return total


def _part(part: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    """uint64[2]: what a rectangle adds to the sums of an array of this shape."""
    if part.ndim > 1:
        first, stride = index[0].indices(shape[0])[0], math.prod(shape[1:])
        rows = np.stack([_part(row, index[1:], shape[1:]) for row in part])
        before = np.arange(first, first + len(part), dtype=np.uint64) * np.uint64(stride)
        return np.array([rows[:, 0].sum(), rows[:, 1].sum() + (before * rows[:, 0]).sum()], np.uint64)
    words = np.ascontiguousarray(part).view(_WORDS[part.dtype.itemsize]).astype(np.uint64).reshape(-1)
    first = index[0].indices(shape[0])[0] if shape else 0
    places = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)  # from 1: the first word counts as well
    return np.array([words.sum(), (words * places).sum()], np.uint64)


def _added_up(sums: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils  # of no use to one process

    halves = sums.view(np.uint32)  # JAX has no 64 bits by default
    return multihost_utils.process_allgather(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)
