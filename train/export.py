"""Parameters on the host, for pushes and files: by own shards, or of several processes by an exchange on device.

Of several processes every one needs whole tensors for its own engines, and no host sees the others' shards. So the
devices exchange them: a layer of a leaf at a time is made whole on every device, in the type of the wire, and copied to
the host from there. What crosses is what the interconnect carries best, and no host collects or sends for the others.
A collective, so the loop's thread alone may do it, and every process has to.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.model import PolicyConfig
from sat_jax.model.hf import export_leaves, export_tensors
from sat_jax.model.hf_names import leaves

Path = tuple[str, ...]


def is_local(tree: Any) -> bool:
    """Whether this process sees all shards of every array; what is on the host is."""
    return all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


class Export:
    """The exchange; its programs are compiled once a leaf."""

    def __init__(self, config: PolicyConfig, dtype: Any = None) -> None:
        """Compiles nothing yet.

        Args:
          config: the architecture.
          dtype: of the tensors; None = as stored.
        """
        self._config = config
        self._dtype = dtype
        self._stacked = {leaf.path: bool(leaf.stacked) for leaf in leaves(config)}
        self._jitted: dict[NamedSharding, Any] = {}

    def tensors(self, params: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
        """Names and fresh arrays, as `sat_jax.model.hf.export_tensors` gives them.

        Where a process sees all shards this launches no computation, so that any thread may do it. Otherwise every
        process has to, in the loop's thread.
        """
        if is_local(params):
            return export_tensors(params, self._config, self._dtype)
        arrays = self._arrays(params)
        return export_leaves(lambda path: self._leaf(path, arrays[path]), self._config, self._dtype)

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """The program of every leaf's exchange, by the leaf's name, lowered but not compiled; shapes will do."""
        return {
            ".".join(path): self._program(array).lower(array, *self._index(path, 0))
            for path, array in self._arrays(params).items()
        }

    def _arrays(self, params: nnx.State) -> dict[Path, Any]:
        return {tuple(map(str, path)): variable.get_raw_value() for path, variable in nnx.to_flat_state(params)}

    def _leaf(self, path: Path, array: jax.Array) -> np.ndarray:
        if not self._stacked[path]:
            return _host(self._program(array)(array))
        dtype = array.dtype if self._dtype is None else self._dtype
        whole = np.empty(array.shape, dtype)
        ahead = self._program(array)(array, *self._index(path, 0))
        for layer in range(array.shape[0]):
            ready = ahead
            if layer + 1 < array.shape[0]:  # the next one crosses while this one is copied
                ahead = self._program(array)(array, *self._index(path, layer + 1))
            whole[layer] = _host(ready)
        return whole

    def _index(self, path: Path, layer: int) -> tuple[np.int32, ...]:
        return (np.int32(layer),) if self._stacked[path] else ()

    def _program(self, array: Any) -> Any:
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        if everywhere not in self._jitted:
            self._jitted[everywhere] = jax.jit(self._piece, out_shardings=everywhere)
        return self._jitted[everywhere]

    def _piece(self, array: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("export"):
            piece = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
            return piece if self._dtype is None else piece.astype(self._dtype)


def _host(array: jax.Array) -> np.ndarray:
    return np.asarray(array.addressable_data(0))


def whole(tree: Any) -> Any:
    """A tree of arrays on the host, whole; of several processes a collective, as `Export`."""
    # Imported here: it is of no use to one process.
    from jax.experimental import multihost_utils

    def gather(leaf: Any) -> np.ndarray:
        return np.asarray(leaf) if is_local(leaf) else multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(gather, tree)
