"""The optimizer's moments in the host's memory: a slice at a time comes to the devices, is updated and goes back.

Parameters and gradients stay where they are. A program that is given all moments at once has them on the device at
once: XLA starts every copy as soon as it may, and of a 30B `apply` on a v5p 7.8 GiB were temporaries. A loop over
slices cannot run ahead of itself, and then 0.2 GiB are.

On a CPU "host" is a memory of its own by name, under `jit` too, and the same path runs, but it is the same RAM: nothing
is saved there. The numbers are those of moments on the device, there bit for bit but for fused multiply-adds: which
sums of a program are rounded once is the compiler's affair.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

DEVICE, HOST = "device", "host"
_PINNED = "pinned_host"
# Of one device's part of a group's parameters, and of each of their moments: much for PCIe, little for any memory.
_SLICE_BYTES = 2**26

Leaves = tuple[jax.Array, ...]
# (params, opt_state, gradients) -> (params, opt_state), for all parameters or for some of them.
Advance = Callable[[Any, Any, Any], tuple[Any, Any]]


def in_memory(opt_state: Any, shardings: Any, memory: str) -> Any:
    """Shardings of an optimizer state with its moments in that memory; its counters stay on the device.

    Args:
      opt_state: arrays or shapes.
      shardings: of its leaves.
      memory: `DEVICE` or `HOST`.
    """
    if memory == DEVICE:
        return shardings

    def place(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(_PINNED) if leaf.ndim else sharding

    return jax.tree.map(place, opt_state, shardings)


def is_hosted(leaf: Any) -> bool:
    """Whether an array, or a shape with its sharding, is in the host's memory."""
    return getattr(leaf.sharding, "memory_kind", None) == _PINNED


def memory_of(opt_state: Any) -> str:
    """Where the moments are."""
    return HOST if any(is_hosted(leaf) for leaf in jax.tree.leaves(opt_state)) else DEVICE


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are updated together.

    Attributes:
      members: by their place among the leaves of all parameters.
      cuts: slices of their first axis, which visit the device one after another.
    """

    members: tuple[int, ...]
    cuts: int


def grouped(params: Any) -> tuple[Group, ...]:
    """The stacked layers, a few at a time; what is small, or has a first axis that the mesh cuts, whole.

    Args:
      params: arrays or shapes, with shardings.
    """
    stacks: dict[int, list[int]] = {}
    sizes = []
    for place, leaf in enumerate(jax.tree.leaves(params)):
        shard = leaf.sharding.shard_shape(leaf.shape)
        sizes.append(math.prod(shard) * leaf.dtype.itemsize)
        # The last two axes are tiled: of bfloat16, TPU's compiler refuses to cut single rows out of a tile.
        if leaf.ndim > 2 and shard[0] == leaf.shape[0]:
            stacks.setdefault(shard[0], []).append(place)
    found = []
    for length, members in stacks.items():
        least = min(length, -(-sum(sizes[place] for place in members) // _SLICE_BYTES))
        cuts = next(n for n in range(max(1, least), length + 1) if length % n == 0)
        if cuts > 1:
            found.append(Group(members=tuple(members), cuts=cuts))
    sliced = {place for group in found for place in group.members}
    return (Group(members=tuple(p for p in range(len(sizes)) if p not in sliced), cuts=1), *found)


def streamed(
    advance: Advance, groups: Sequence[Group], params: nnx.State, opt_state: Any, gradients: nnx.State
) -> tuple[nnx.State, Any]:
    """What `advance` makes of all parameters, with no more than a slice of a group's moments on a device at a time.

    Args:
      advance: treats every element by itself, and the counters alike whatever parameters they come with.
      groups: of the parameters (`grouped`).
      params: on the device.
      opt_state: an optax state over them, its moments in the host's memory.
      gradients: on the device.
    """
    nodes, outer = jax.tree.flatten(opt_state, is_leaf=_is_moment)
    places = [place for place, node in enumerate(nodes) if _is_moment(node)]

    def state_of(moments: Sequence[Any]) -> Any:
        return outer.unflatten(_with(nodes, places, moments))

    def some(params: Leaves, moments: tuple[Leaves, ...], gradients: Leaves) -> tuple[Leaves, tuple[Leaves, ...]]:
        here = jax.device_put(moments, jax.memory.Space.Device)
        stepped, advanced = advance(params, state_of(here), gradients)
        found = outer.flatten_up_to(advanced)
        return stepped, jax.device_put(tuple(found[place] for place in places), jax.memory.Space.Host)

    leaves, structure = jax.tree.flatten(params)
    slopes = jax.tree.leaves(gradients)
    held = [jax.tree.leaves(nodes[place]) for place in places]
    for group in groups:

        def of(arrays: list[jax.Array], members: tuple[int, ...] = group.members) -> Leaves:
            return tuple(arrays[member] for member in members)

        update = some if group.cuts == 1 else functools.partial(_by_slices, some, group.cuts)
        stepped, moved = update(of(leaves), tuple(of(arrays) for arrays in held), of(slopes))
        for arrays, new in zip((leaves, *held), (stepped, *moved), strict=True):
            for member, array in zip(group.members, new, strict=True):
                arrays[member] = array
    # No parameter at all still counts the step.
    counted = outer.flatten_up_to(advance((), state_of([()] * len(places)), ())[1])
    whole = [jax.tree.structure(nodes[p]).unflatten(arrays) for p, arrays in zip(places, held, strict=True)]
    return structure.unflatten(leaves), outer.unflatten(_with(counted, places, whole))


def _with(nodes: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The nodes with others in those places."""
    exchanged = dict(zip(places, others, strict=True))
    return [exchanged.get(place, node) for place, node in enumerate(nodes)]


def _by_slices(
    some: Callable[..., Any], cuts: int, params: Leaves, moments: tuple[Leaves, ...], gradients: Leaves
) -> Any:
    length = params[0].shape[0] // cuts

    def body(index: jax.Array, carry: Any) -> Any:
        def take(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, index * length, length)

        def put(array: jax.Array, part: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(array, part, index * length, 0)

        return jax.tree.map(put, carry, some(*jax.tree.map(take, (*carry, gradients))))

    return lax.fori_loop(0, cuts, body, (params, moments))


def _is_moment(node: Any) -> bool:
    """Whether a part of an optax state has a leaf for every parameter."""
    return isinstance(node, nnx.State)
