"""Parameters under their Hugging Face names: for files, and for pushes over the wire.

`hf_names` says which leaf is which tensor, `hf_files` reads and writes files; this room moves numbers between them and
the policy, a piece at a time.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from sat_jax.model.config import PolicyConfig
from sat_jax.model.hf_files import WeightFolder, write_folder
from sat_jax.model.hf_names import (
    Layout,
    Leaf,
    Place,
    check_names,
    check_shape,
    find_tensors,
    leaves,
    tensor_name,
    tensor_names,
    tensor_parts,
    tensor_shapes,
)
from sat_jax.model.policy import Policy

__all__ = [
    "export_leaves",
    "export_tensors",
    "import_tensors",
    "load",
    "read_tensors",
    "save",
    "tensor_shapes",
]

# What the host fills of a shard at a time; the pieces before are on the device, but for a few that JAX lets go of late.
_PIECE_BYTES = 4 * 2**20

# Gives a rectangle of a named tensor of the per-expert layout.
_Reader = Callable[[str, tuple[slice, ...]], np.ndarray]


def export_tensors(
    params: "Policy | nnx.State", config: PolicyConfig, dtype: Any = None, layout: Layout = "per-expert"
) -> Iterator[tuple[str, np.ndarray]]:
    """Copies parameters to the host, tensor by tensor.

    Launches no computation on a device, only transfers, so it may run in a background thread; the parameters must not
    be donated before the iterator is exhausted. Holds one leaf (all layers of one kind) at a time; two if fused.

    Args:
      params: the policy, or its state of parameters.
      config: its architecture.
      dtype: "float32" or "bfloat16" to convert; None = as stored.
      layout: of the experts.

    Yields:
      Name and a fresh C-contiguous array; per expert, in the order of `tensor_shapes`.

    Raises:
      ValueError: a parameter has shards that this process cannot see.
    """
    state = nnx.state(params, nnx.Param) if isinstance(params, Policy) else params
    variables = dict(nnx.to_flat_state(state))
    return export_leaves(lambda path: _host_view(path, variables[path].get_raw_value()), config, dtype, layout)


def export_leaves(
    read: Callable[[tuple[str, ...]], np.ndarray],
    config: PolicyConfig,
    dtype: Any = None,
    layout: Layout = "per-expert",
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a policy whose leaves are read one by one, e.g. from a checkpoint.

    Args:
      read: gives the leaf at a path of the policy's state; it is asked once for each, in order.
      config: the architecture.
      dtype: "float32" or "bfloat16" to convert; None = as stored.
      layout: of the experts.

    Yields:
      As `export_tensors`.
    """
    where = {name: (leaf, position) for leaf in leaves(config) for name, position in tensor_names(leaf, config)}
    held: dict[tuple[str, ...], np.ndarray] = {}

    def fetch(name: str) -> np.ndarray:
        leaf, position = where[name]
        if leaf.path not in held:
            # Fused tensors alternate between two leaves; no other tensor comes back to one that it has left.
            if len(held) == (2 if layout == "fused" else 1):
                del held[next(iter(held))]
            held[leaf.path] = read(leaf.path)
        tensor = held[leaf.path][position]
        return tensor.reshape(math.prod(tensor.shape[: leaf.inward]), -1).T if leaf.inward else tensor

    return _arrange(fetch, config, dtype, layout)


def read_tensors(
    path: "str | os.PathLike[str]", config: PolicyConfig, dtype: Any = None, layout: Layout = "per-expert"
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a Hugging Face folder, in either layout, one at a time and without a device.

    Args:
      path: the folder.
      config: its architecture.
      dtype: "float32" or "bfloat16" to convert; None = as stored.
      layout: to give the experts in, whatever theirs is.

    Yields:
      As `export_tensors`.

    Raises:
      ValueError: as `load`.
    """
    with WeightFolder(Path(path)) as files:
        found = find_tensors(config, files.shapes, str(path))
        shapes = tensor_shapes(config)

        def fetch(name: str) -> np.ndarray:
            return _read(files, found[name], tuple(slice(0, size) for size in shapes[name]))

        yield from _arrange(fetch, config, dtype, layout)


def import_tensors(
    config: PolicyConfig,
    tensors: Mapping[str, np.ndarray] | Callable[[str], np.ndarray],
    mesh: Mesh | None = None,
    param_dtype: Any = "float32",
) -> Policy:
    """Builds a policy from named tensors; each device's shard is assembled from what it needs alone.

    Args:
      config: the architecture.
      tensors: the tensors by name, exactly those of `tensor_shapes`; or a function that gives one by name.
      mesh: where the policy lives; None = one device.
      param_dtype: type to store the parameters in.

    Raises:
      ValueError: tensors are missing, unexpected, misshapen or not of a float type; each is named.
    """
    shapes = tensor_shapes(config)
    if isinstance(tensors, Mapping):
        check_names(shapes, tensors.keys(), config, "the mapping")
        for name, shape in shapes.items():
            check_shape(name, shape, tensors[name].shape)
    fetch = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor = fetch(name)
        check_shape(name, shapes[name], tensor.shape)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"tensor {name}: expected a float type, got {tensor.dtype}")
        return tensor[index]

    return _build(config, read, mesh, param_dtype)


def load(
    path: "str | os.PathLike[str]",
    config: PolicyConfig | None = None,
    mesh: Mesh | None = None,
    param_dtype: Any = "float32",
) -> Policy:
    """Reads a Hugging Face folder (`config.json` and safetensors, in one file or in several), piece by piece.

    The experts may have either layout. Beyond the shards themselves the host holds a few pieces of 4 MiB.

    Args:
      path: the folder.
      config: the architecture; None = that of its `config.json`.
      mesh: where the policy lives; None = one device.
      param_dtype: type to store the parameters in.

    Raises:
      ValueError: no readable config or weights; or tensors are missing, unexpected, misshapen, given twice, of no float
        type, or hold NaN or infinity; the first ones are named.
    """
    folder = Path(path)
    config = PolicyConfig.from_hf(folder) if config is None else config
    with WeightFolder(folder) as files:
        found = find_tensors(config, files.shapes, str(folder))
        return _build(config, lambda name, index: _read(files, found[name], index), mesh, param_dtype)


def save(policy: Policy, path: "str | os.PathLike[str]", dtype: Any = None, layout: Layout = "per-expert") -> None:
    """Writes a Hugging Face folder; `load` gives the same bits back. The folder appears whole or not at all.

    Args:
      policy: what to write.
      path: the folder; it must not exist, or be empty.
      dtype: "float32" or "bfloat16" to convert; None = as stored.
      layout: of the experts; per-expert is what transformers itself writes.

    Raises:
      ValueError: the folder exists and holds something.
      OSError: the disk refuses.
    """
    write_folder(export_tensors(policy, policy.config, dtype, layout), policy.config.to_hf(), Path(path))


def _arrange(
    fetch: Callable[[str], np.ndarray], config: PolicyConfig, dtype: Any, layout: Layout
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a layout from those of the per-expert one."""
    shapes = tensor_shapes(config, layout)
    for name, parts in tensor_parts(config, layout).items():
        yield name, _gather([fetch(part) for part in parts], dtype).reshape(shapes[name])


def _gather(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    """The rows of all parts in fresh memory. A function of its own, so that no view outlives it and holds a leaf."""
    rows = sum(len(part) for part in parts)
    gathered = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype if dtype is None else jnp.dtype(dtype))
    return np.concatenate(parts, out=gathered, casting="same_kind")


def _read(files: WeightFolder, place: Place, index: tuple[slice, ...]) -> np.ndarray:
    if place.expert is None:
        return files.read(place.stored, index)
    rows, columns = index
    rows = slice(place.first_row + rows.start, place.first_row + rows.stop)
    return files.read(place.stored, (slice(place.expert, place.expert + 1), rows, columns))[0]


def _host_view(path: tuple[str, ...], array: jax.Array) -> np.ndarray:
    if not array.is_fully_addressable:
        raise ValueError(f"{'.'.join(path)}: expected all shards in this process, got shards of other processes")
    if len(array.sharding.device_set) == 1:
        return np.asarray(array)
    host = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            host[shard.index] = np.asarray(shard.data)
    return host


def _build(config: PolicyConfig, read: _Reader, mesh: Mesh | None, param_dtype: Any) -> Policy:
    abstract = nnx.eval_shape(lambda: Policy(config, nnx.Rngs(0), mesh))
    graph, state = nnx.split(abstract, nnx.Param)
    own: dict[Any, Leaf] = {leaf.path: leaf for leaf in leaves(config)}
    dtype = jnp.dtype(param_dtype)

    def fill(path: Any, variable: nnx.Variable) -> nnx.Variable:
        struct = variable.get_raw_value()
        leaf = own[path]
        read_piece = functools.partial(_read_piece, leaf, config, struct.shape, read, dtype)
        return variable.replace(_assemble(struct, _cut_order(leaf), dtype, read_piece))

    filled = [(path, fill(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _cut_order(leaf: Leaf) -> tuple[int, ...]:
    """A leaf's axes in the order in which its tensors lie in a file: stacked, then out, then in."""
    stacked, inward, axes = len(leaf.stacked), leaf.inward, len(leaf.stacked) + len(leaf.axes)
    return (*range(stacked), *range(stacked + inward, axes), *range(stacked, stacked + inward))


def _assemble(
    struct: Any,
    cut_order: tuple[int, ...],
    dtype: np.dtype,
    read_piece: Callable[[tuple[range, ...]], np.ndarray],
) -> jax.Array:
    """A sharded array whose shards grow on their devices, piece by piece; replicas are read once."""
    shape: tuple[int, ...] = struct.shape
    sharding: Any = struct.sharding
    holders: dict[tuple[range, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        own = tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))
        holders.setdefault(own, []).append(device)
    shards: list[jax.Array] = []
    for own, devices in holders.items():
        pieces = list(_pieces(own, cut_order, dtype.itemsize))
        shards += _grow(own, devices, dtype, pieces, read_piece)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _grow(
    own: tuple[range, ...],
    devices: list[Any],
    dtype: np.dtype,
    pieces: list[tuple[range, ...]],
    read_piece: Callable[[tuple[range, ...]], np.ndarray],
) -> list[jax.Array]:
    """One shard, on each of its devices."""
    if len(pieces) == 1:
        return [jax.device_put(read_piece(own), device) for device in devices]
    size = tuple(len(axis) for axis in own)
    # `jnp.zeros` for another device than the first makes them there and copies: twice the shard.
    empty = functools.partial(jnp.zeros, size, dtype)
    grown = [jax.jit(empty, out_shardings=SingleDeviceSharding(device))() for device in devices]
    for piece in pieces:
        host = read_piece(piece)
        start = tuple(np.int32(part.start - axis.start) for part, axis in zip(piece, own, strict=True))
        grown = [_write(shard, jax.device_put(host, next(iter(shard.devices()))), start) for shard in grown]
        jax.block_until_ready(grown)  # or pieces pile up on the host
    return grown


@functools.partial(jax.jit, donate_argnums=0)
def _write(shard: jax.Array, piece: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, start)


def _pieces(own: tuple[range, ...], cut_order: tuple[int, ...], itemsize: int) -> Iterator[tuple[range, ...]]:
    """Cuts a rectangle into pieces of bounded size, along the first axis of the order that can be cut."""
    size = itemsize * math.prod(len(axis) for axis in own)
    cut = next((number for number in cut_order if len(own[number]) > 1), None)
    if size <= _PIECE_BYTES or cut is None:
        yield own
        return
    axis = own[cut]
    step = max(1, _PIECE_BYTES * len(axis) // size)
    for first in range(0, len(axis), step):
        yield from _pieces((*own[:cut], axis[first : first + step], *own[cut + 1 :]), cut_order, itemsize)


def _read_piece(
    leaf: Leaf, config: PolicyConfig, shape: tuple[int, ...], read: _Reader, dtype: np.dtype, ranges: tuple[range, ...]
) -> np.ndarray:
    """A rectangle of a leaf, as a fresh array."""
    stacked = len(leaf.stacked)
    inner, sizes = ranges[stacked:], shape[stacked:]
    if leaf.inward:
        rectangle = (_flat(inner[leaf.inward :], sizes[leaf.inward :]), _flat(inner[: leaf.inward], sizes))
    else:
        rectangle = tuple(slice(r.start, r.stop) for r in inner)
    local = np.empty([len(r) for r in ranges], dtype)
    for place in itertools.product(*(range(len(r)) for r in ranges[:stacked])):
        position = tuple(r[i] for r, i in zip(ranges, place, strict=False))
        tensor = read(tensor_name(leaf, config, position), rectangle)
        local[place] = (tensor.T if leaf.inward else tensor).reshape(local.shape[stacked:])
    return local


def _flat(ranges: tuple[range, ...], sizes: tuple[int, ...]) -> slice:
    """The rectangle of axes as one slice of their flattened axis.

    Pieces are cut along the first axis that is longer than one; `sat_jax.mesh` shards no inner axis of a linear map.
    """
    cut = next((number for number, axis in enumerate(ranges) if len(axis) > 1), len(ranges))
    whole = all(len(axis) == size for axis, size in zip(ranges[cut + 1 :], sizes[cut + 1 :], strict=False))
    assert whole, "an inner axis of a linear map is sharded"
    first = 0
    for axis, size in zip(ranges, sizes, strict=False):
        first = first * size + axis.start
    return slice(first, first + math.prod(len(axis) for axis in ranges))
