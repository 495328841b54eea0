"""Checksums of arrays that lie in parts on several processes; whoever holds which part, the sum is the same.

A Fletcher sum over the array's bytes in its own order: words, and words times their places, both modulo 2^64. Of a part
it is the part's contribution, and contributions add up. It finds what damages files: flipped bits, lost or swapped
blocks; it is no defence against intent.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_AT_ONCE = 2**24  # words
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
    if part.ndim > 1 and part.size > _AT_ONCE and len(part) > 1:  # the words are copied: not all of them at once
        start = index[0].indices(shape[0])[0]
        pieces = (
            _part(part[n : n + 1], (slice(start + n, start + n + 1), *index[1:]), shape) for n in range(len(part))
        )
        return functools.reduce(np.add, pieces)
    sums = np.ascontiguousarray(part).view(_WORDS[part.dtype.itemsize]).astype(np.uint64).reshape(part.shape)
    weighted = sums  # by places counted from 1: the first word counts as well
    stride = 1
    for axis in reversed(range(len(shape))):
        start = index[axis].indices(shape[axis])[0]
        before = np.arange(start, start + part.shape[axis], dtype=np.uint64) * np.uint64(stride)
        with np.errstate(over="ignore"):  # modulo 2^64, of scalars too
            weighted = weighted.sum(-1, dtype=np.uint64) + (sums * before).sum(-1, dtype=np.uint64)
        sums = sums.sum(-1, dtype=np.uint64)
        stride *= shape[axis]
    return np.array([sums, weighted], np.uint64)


def _added_up(sums: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils  # of no use to one process

    halves = sums.view(np.uint32)  # JAX has no 64 bits by default
    return multihost_utils.process_allgather(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)
