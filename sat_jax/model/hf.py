"""Parameters under their Hugging Face names: for files, and for pushes over the wire. Reads and writes weight files.

One table says which leaf of the policy is which tensor; shapes follow from the axes in the leaves' names. Hugging Face
stores a linear map as [out, in], one tensor a layer and expert; the policy stacks layers and experts, as [in, out].
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sat_jax.model.config import PolicyConfig
from sat_jax.model.policy import Policy

_FILE_BYTES = 4 * 2**30
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

# Gives a rectangle of a named tensor.
_Reader = Callable[[str, tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the policy and its tensors: `inward` leading axes are the input of a linear map, 0 = stored as is."""

    path: tuple[str, ...]
    name: str
    inward: int

    @property
    def stacked(self) -> str:
        """The letters that number tensors (layer, expert) rather than elements."""
        return ("L" if "{layer}" in self.name else "") + ("E" if "{expert}" in self.name else "")

    @property
    def axes(self) -> str:
        """The letters of one tensor, in the policy's order."""
        letters = self.path[-1].rsplit("_", 1)[-1]
        return letters.removeprefix("E") if "E" in self.stacked else letters


_LAYER, _EXPERT = "model.layers.{layer}.", "model.layers.{layer}.mlp.experts.{expert}."
_LEAVES = (
    _Leaf(("embedding_VD",), "model.embed_tokens.weight", 0),
    _Leaf(("layers", "query_DHC"), _LAYER + "self_attn.q_proj.weight", 1),
    _Leaf(("layers", "key_DGC"), _LAYER + "self_attn.k_proj.weight", 1),
    _Leaf(("layers", "value_DGC"), _LAYER + "self_attn.v_proj.weight", 1),
    _Leaf(("layers", "output_HCD"), _LAYER + "self_attn.o_proj.weight", 2),
    _Leaf(("layers", "query_norm_C"), _LAYER + "self_attn.q_norm.weight", 0),
    _Leaf(("layers", "key_norm_C"), _LAYER + "self_attn.k_norm.weight", 0),
    _Leaf(("layers", "router_DE"), _LAYER + "mlp.gate.weight", 1),
    _Leaf(("layers", "gate_EDF"), _EXPERT + "gate_proj.weight", 1),
    _Leaf(("layers", "up_EDF"), _EXPERT + "up_proj.weight", 1),
    _Leaf(("layers", "down_EFD"), _EXPERT + "down_proj.weight", 1),
    _Leaf(("layers", "attention_norm_D"), _LAYER + "input_layernorm.weight", 0),
    _Leaf(("layers", "feed_norm_D"), _LAYER + "post_attention_layernorm.weight", 0),
    _Leaf(("final_norm_D",), "model.norm.weight", 0),
    _Leaf(("unembedding_DV",), "lm_head.weight", 1),
)


def tensor_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape, in the order of `export_tensors`."""
    return {name: _shape(leaf, config) for leaf in _leaves(config) for name, _ in _names(leaf, config)}


def export_tensors(
    params: "Policy | nnx.State", config: PolicyConfig, dtype: Any = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Copies parameters to the host, tensor by tensor.

    Launches no computation on a device, only transfers, so it may run in a background thread; the parameters must not
    be donated before the iterator is exhausted. Holds one leaf (all layers of one kind) at a time.

    Args:
      params: the policy, or its state of parameters.
      config: its architecture.
      dtype: "float32" or "bfloat16" to convert; None = as stored.

    Yields:
      Name and a fresh C-contiguous array, in the order of `tensor_shapes`.

    Raises:
      ValueError: a parameter has shards that this process cannot see.
    """
    state = nnx.state(params, nnx.Param) if isinstance(params, Policy) else params
    variables = dict(nnx.to_flat_state(state))
    for leaf in _leaves(config):
        host = _host_view(leaf, variables[leaf.path].get_raw_value())
        wanted = host.dtype if dtype is None else jnp.dtype(dtype)
        for name, position in _names(leaf, config):
            tensor = host[position]
            if leaf.inward:
                tensor = tensor.reshape(math.prod(tensor.shape[: leaf.inward]), -1).T
            yield name, np.array(tensor, dtype=wanted, order="C", copy=True)


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
        _check_names(shapes, tensors.keys(), "the mapping")
        for name, shape in shapes.items():
            _check_shape(name, shape, tensors[name].shape)
    fetch = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor = fetch(name)
        _check_shape(name, shapes[name], tensor.shape)
        return tensor[index]

    return _build(config, read, mesh, param_dtype)


def load(
    path: "str | os.PathLike[str]",
    config: PolicyConfig | None = None,
    mesh: Mesh | None = None,
    param_dtype: Any = "float32",
) -> Policy:
    """Reads a Hugging Face folder (`config.json` and safetensors, in one file or in several), slice by slice.

    Args:
      path: the folder.
      config: the architecture; None = that of its `config.json`.
      mesh: where the policy lives; None = one device.
      param_dtype: type to store the parameters in.

    Raises:
      ValueError: no readable config or weights; or tensors are missing, unexpected or misshapen, each named.
    """
    folder = Path(path)
    config = PolicyConfig.from_hf(folder) if config is None else config
    shapes = tensor_shapes(config)
    with contextlib.ExitStack() as stack:
        slices = _open_all(folder, stack)
        _check_names(shapes, slices.keys(), str(folder))
        for name, shape in shapes.items():
            _check_shape(name, shape, tuple(slices[name].get_shape()))
        return _build(config, lambda name, index: slices[name][index], mesh, param_dtype)


def save(policy: Policy, path: "str | os.PathLike[str]", dtype: Any = None) -> None:
    """Writes a Hugging Face folder; `load` gives the same bits back. The folder appears whole or not at all.

    Args:
      policy: what to write.
      path: the folder; it must not exist, or be empty.
      dtype: "float32" or "bfloat16" to convert; None = as stored.

    Raises:
      ValueError: the folder exists and holds something.
      OSError: the disk refuses.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"weights: expected a new or empty folder, got one that holds something ({folder}); remove it")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        stored = _write_files(export_tensors(policy, policy.config, dtype), partial)
        hf = policy.config.to_hf() | {"torch_dtype": stored}
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _leaves(config: PolicyConfig) -> tuple[_Leaf, ...]:
    return _LEAVES[:-1] if config.tie_embeddings else _LEAVES


def _sizes(config: PolicyConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.width,
        "L": config.layers,
        "H": config.query_heads,
        "G": config.kv_heads,
        "C": config.head_dim,
        "E": config.experts,
        "F": config.expert_hidden,
    }


def _shape(leaf: _Leaf, config: PolicyConfig) -> tuple[int, ...]:
    sizes = _sizes(config)
    shape = [sizes[letter] for letter in leaf.axes]
    if not leaf.inward:
        return tuple(shape)
    return math.prod(shape[leaf.inward :]), math.prod(shape[: leaf.inward])


def _names(leaf: _Leaf, config: PolicyConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The leaf's tensors with their place along the stacked axes."""
    sizes = _sizes(config)
    for position in itertools.product(*(range(sizes[letter]) for letter in leaf.stacked)):
        yield _name(leaf, position), position


def _name(leaf: _Leaf, position: tuple[int, ...]) -> str:
    return leaf.name.format(**dict(zip(("layer", "expert"), position, strict=False)))


def _host_view(leaf: _Leaf, array: jax.Array) -> np.ndarray:
    if not array.is_fully_addressable:
        raise ValueError(f"{'.'.join(leaf.path)}: expected all shards in this process, got shards of other processes")
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
    leaves: dict[Any, _Leaf] = {leaf.path: leaf for leaf in _leaves(config)}
    dtype = jnp.dtype(param_dtype)

    def fill(path: Any, variable: nnx.Variable) -> nnx.Variable:
        struct = variable.get_raw_value()
        return variable.replace(
            jax.make_array_from_callback(
                struct.shape, struct.sharding, lambda index: _read_shard(leaves[path], struct.shape, index, read, dtype)
            )
        )

    filled = [(path, fill(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _read_shard(leaf: _Leaf, shape: tuple[int, ...], index: Any, read: _Reader, dtype: np.dtype) -> np.ndarray:
    """One device's part of a leaf, as a fresh array."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    stacked = len(leaf.stacked)
    inner, sizes = ranges[stacked:], shape[stacked:]
    if leaf.inward:
        rectangle = (_flat(inner[leaf.inward :], sizes[leaf.inward :]), _flat(inner[: leaf.inward], sizes))
    else:
        rectangle = tuple(slice(r.start, r.stop) for r in inner)
    local = np.empty([len(r) for r in ranges], dtype)
    for place in itertools.product(*(range(len(r)) for r in ranges[:stacked])):
        name = _name(leaf, tuple(r[i] for r, i in zip(ranges, place, strict=False)))
        tensor = read(name, rectangle)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"tensor {name}: expected a float type, got {tensor.dtype}")
        local[place] = (tensor.T if leaf.inward else tensor).reshape(local.shape[stacked:])
    return local


def _flat(ranges: list[range], sizes: tuple[int, ...]) -> slice:
    """The rectangle of axes as one slice of their flattened axis: only the first may be cut (see `sat_jax.mesh`)."""
    inner = math.prod(sizes[1 : len(ranges)])
    assert math.prod(len(r) for r in ranges[1:]) == inner, "an inner axis of a linear map is sharded"
    return slice(ranges[0].start * inner, ranges[0].stop * inner)


def _check_names(shapes: Mapping[str, Any], names: Any, where: str) -> None:
    missing = [name for name in shapes if name not in names]
    unexpected = [name for name in names if name not in shapes]
    if missing or unexpected:
        found = [
            f"{len(some)} {what} ({', '.join(some[:3])}{', ...' if len(some) > 3 else ''})"
            for some, what in ((missing, "missing"), (unexpected, "unexpected"))
            if some
        ]
        raise ValueError(f"tensors: expected exactly the model's {len(shapes)}, got {' and '.join(found)} ({where})")


def _check_shape(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    if tuple(got) != expected:
        raise ValueError(
            f"tensor {name}: expected shape {expected}, got {tuple(got)}; load with the model's own config"
        )


def _open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Lazy slices of every tensor in the folder."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).exists():
        mapped = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / file for file in sorted(set(mapped.values()))]
    if not files:
        raise ValueError(f"weights: expected safetensors files, got none ({folder})")
    slices = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="np"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"weights: expected a whole safetensors file, got: {error} ({file})") from error
        slices.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
    return slices


def _write_files(tensors: Iterator[tuple[str, np.ndarray]], folder: Path) -> str:
    """Writes at most 4 GiB a file, holding one file's tensors at a time; returns the type of the tensors."""
    file_of: dict[str, int] = {}
    held: dict[str, np.ndarray] = {}
    files = total = room = 0
    stored = ""
    for name, tensor in tensors:
        if tensor.nbytes > room:
            _write_part(folder, files, held)
            files, held, room = files + 1, {}, max(_FILE_BYTES, tensor.nbytes)
        held[name], file_of[name], stored = tensor, files, tensor.dtype.name
        room, total = room - tensor.nbytes, total + tensor.nbytes
    _write_part(folder, files, held)

    names = {n: f"model-{n:05}-of-{files:05}.safetensors" if files > 1 else _ONE_FILE for n in range(1, files + 1)}
    for number, file in names.items():
        os.replace(folder / f"{number}.part", folder / file)
    if files > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[number] for name, number in file_of.items()},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return stored


def _write_part(folder: Path, number: int, tensors: dict[str, np.ndarray]) -> None:
    if tensors:
        # Readers of PyTorch weights refuse a file that does not name its format.
        path = folder / f"{number}.part"
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"weights: expected to write {path}, got: {error}; free some space") from error
