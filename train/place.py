"""Host microbatches -> the mesh, rows cut along its batch axes. Of several processes each puts its own rows there."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sat_jax.mesh import batch_sharding
from sat_jax.types import RoutingTrace, TokenBatch


def place(microbatches: Sequence[TokenBatch], mesh: Mesh) -> tuple[TokenBatch, ...]:
    """Puts host microbatches on the mesh, their rows cut along its batch axes; every process holds all of them."""
    shardings = _shardings(mesh)
    if mesh.is_multi_process:  # what is on the host stays there, but for the process's own rows
        return tuple(jax.tree.map(_own_shards, micro, shardings) for micro in microbatches)
    return tuple(jax.device_put(micro, shardings) for micro in microbatches)


def place_part(microbatches: Sequence[TokenBatch], mesh: Mesh) -> tuple[TokenBatch, ...]:
    """As `place`, of microbatches of which every process holds its own rows alone, equally many."""
    return tuple(
        jax.tree.map(
            lambda leaf, sharding: jax.make_array_from_process_local_data(sharding, leaf), micro, _shardings(mesh)
        )
        for micro in microbatches
    )


def _own_shards(leaf: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _shardings(mesh: Mesh) -> TokenBatch:
    row, routed = batch_sharding(mesh), batch_sharding(mesh, leading=1)
    names = [field.name for field in dataclasses.fields(TokenBatch) if field.name != "trace"]
    trace: Any = RoutingTrace(experts_LBTK=routed, present_BT=row)  # type: ignore[arg-type]
    return TokenBatch(**dict.fromkeys(names, row), trace=trace)  # type: ignore[arg-type]


def check_rows(mesh: Mesh, rows: int) -> None:
    """Of several processes, each must feed rows of its own, equally many.

    Raises:
      ValueError: an axis that does not cut the rows reaches over processes.
    """
    fed: set[tuple[int, int]] = set()
    for device, index in batch_sharding(mesh).devices_indices_map((rows,)).items():
        start, stop, _ = index[0].indices(rows)
        fed |= {(device.process_index, row) for row in range(start, stop)}
    counts = Counter(process for process, _ in fed)
    if sum(counts.values()) != rows or len(set(counts.values())) > 1:
        raise ValueError(
            f"mesh: expected every process's devices to hold rows of their own, equally many, got {dict(counts)} of "
            f"{rows} rows by process; make mesh.tensor a divisor of a process's devices"
        )
