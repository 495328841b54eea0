"""The finished groups of a cut, as an array that Orbax saves: of several processes each writes its own.

Any number of processes reads them back, and each then keeps those that belong to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.groups import Group, from_bytes, to_bytes


def pack_groups(groups: Sequence[Group]) -> tuple[Any, dict[str, Any]]:
    """The groups of this process as bytes, and what the cut says of them.

    Returns:
      uint8[bytes]; of P processes a collective, uint8[P, the longest], row p with process p.
    """
    packed = np.frombuffer(to_bytes(list(groups)), np.uint8)
    digest = xxhash.xxh3_128_hexdigest(packed.tobytes())
    if jax.process_count() == 1:
        return packed, {"bytes": packed.size, "digest": digest}
    from jax.experimental import multihost_utils

    own = np.frombuffer(packed.size.to_bytes(8, "little") + bytes.fromhex(digest), np.uint8)
    parts = [
        {"bytes": int.from_bytes(row[:8].tobytes(), "little"), "digest": row[8:].tobytes().hex()}
        for row in multihost_utils.process_allgather(own)
    ]
    row = np.zeros((1, max(part["bytes"] for part in parts)), np.uint8)
    row[0, : packed.size] = packed
    mesh = _one_each()
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("process")), row)
    return whole, {"bytes": row.size, "parts": parts}


def template(said: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """What to restore the bytes into: every process reads all of them."""
    several = "parts" in said
    shape = (len(said["parts"]), said["bytes"]) if several else (said["bytes"],)
    if jax.process_count() == 1 and not several:
        return jax.ShapeDtypeStruct(shape, np.uint8)
    return jax.ShapeDtypeStruct(shape, np.uint8, sharding=NamedSharding(_one_each(), PartitionSpec()))


def unpack_groups(array: Any, said: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups of all processes.

    Raises:
      ValueError: the bytes are not those that were saved.
    """
    host = np.asarray(array)
    rows, parts = (host, said["parts"]) if "parts" in said else (host[None], [said])
    groups: list[Group] = []
    for row, part in zip(rows, parts, strict=True):
        blob = row[: part["bytes"]].tobytes()
        if (digest := xxhash.xxh3_128_hexdigest(blob)) != part["digest"]:
            raise ValueError(f"expected groups of digest {part['digest']}, got {digest}")
        groups += from_bytes(blob)
    return tuple(sorted(groups, key=lambda group: group.ticket))


def _one_each() -> Mesh:
    """A device of every process's host: these bytes have no business in an accelerator's memory."""
    firsts: dict[int, Any] = {}
    for device in jax.devices("cpu"):
        firsts.setdefault(device.process_index, device)
    return Mesh(np.array([firsts[process] for process in sorted(firsts)], dtype=object), ("process",))
