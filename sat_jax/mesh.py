"""The device mesh, and the one table from logical axes to its axes.

Every sharded array says its axes in logical words ("width", "expert"); what they mean on a machine is decided here and
nowhere else. Contracts: an axis is used once per array, and every sharded size divides.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "tensor")

# Batch rows are spread over every axis but `tensor`. The embedding is cut along its vocabulary and never along its
# width: cutting the width makes XLA replicate the residual stream ("Involuntary full rematerialization").
LOGICAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data", "fsdp", "expert"),
        "vocabulary": ("tensor", "fsdp", "expert"),
        "width": ("fsdp",),
        "heads": ("tensor",),
        "expert": ("expert",),
        "expert_hidden": ("tensor",),
        "unsharded": (),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices.

    Attributes:
      data: copies of the model.
      fsdp: shards of each parameter's width, gathered where used.
      expert: shards of the experts.
      tensor: shards of attention heads, of the experts' hidden width and of the vocabulary that a token is scored on.

    Raises:
      ValueError: a size is below 1.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh.{axis}: expected an integer of at least 1, got {size!r}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return self.data, self.fsdp, self.expert, self.tensor

    @property
    def batch_shards(self) -> int:
        """Parts that a batch's rows are cut into: data * fsdp * expert."""
        return self.data * self.fsdp * self.expert


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the four axes, partitioned automatically (`AxisType.Auto`).

    Args:
      config: sizes.
      devices: devices in mesh order, e.g. those of a compile-only topology; None = all of this run, in the order that
        suits their interconnect.

    Raises:
      ValueError: the sizes' product is not the number of devices.
    """
    available = jax.device_count() if devices is None else len(devices)
    wanted = math.prod(config.shape)
    if wanted != available:
        sizes = " * ".join(f"{axis} {size}" for axis, size in zip(AXES, config.shape, strict=True))
        raise ValueError(
            f"mesh: expected {sizes} = {available} devices, got {wanted}; "
            f"change a size, e.g. data = {available} and the others 1"
        )
    types = (AxisType.Auto,) * len(AXES)
    if devices is None:
        return jax.make_mesh(config.shape, AXES, axis_types=types)
    return Mesh(np.asarray(devices, dtype=object).reshape(config.shape), AXES, axis_types=types)


def one_device_mesh() -> Mesh:
    """The first local device under the four axis names."""
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are: "cpu", "gpu" or "tpu". Kernels are chosen by it, for a mere topology too."""
    return mesh.devices.flat[0].platform.replace("cuda", "gpu").replace("rocm", "gpu")


def spec(*logical: str) -> PartitionSpec:
    """The partition of an array whose axes are these logical ones.

    Raises:
      ValueError: an unknown logical axis, or two that would use one mesh axis.
    """
    owner: dict[str, str] = {}
    for name in logical:
        if name not in LOGICAL:
            raise ValueError(f"logical axis: expected one of {', '.join(LOGICAL)}, got {name!r}")
        for axis in LOGICAL[name]:
            if axis in owner:
                raise ValueError(
                    f"partition of ({', '.join(logical)}): expected each mesh axis once, got {axis!r} for both "
                    f"{owner[axis]!r} and {name!r}; leave one of them unsharded"
                )
            owner[axis] = name
    parts = [LOGICAL[name] for name in logical]
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in parts))


def sharding(mesh: Mesh, *logical: str) -> NamedSharding:
    """The sharding on `mesh` of an array whose axes are these logical ones."""
    return NamedSharding(mesh, spec(*logical))


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """The sharding of an array whose axis number `leading` is the batch row (0 for `_BT`, 1 for `_LBTK`)."""
    return sharding(mesh, *("unsharded",) * leading, "batch")


def constrain(array: jax.Array, mesh: Mesh, *logical: str) -> jax.Array:
    """Pins the sharding of an intermediate value; on a mesh of one device there is nothing to pin."""
    if mesh.size == 1:
        return array
    return jax.lax.with_sharding_constraint(array, sharding(mesh, *logical))


def check_divides(mesh: Mesh, logical: str, **sizes: int) -> None:
    """Checks that sizes are divisible by the shards of a logical axis.

    Args:
      mesh: the mesh.
      logical: what the sizes are cut along.
      **sizes: by the name under which the user knows them.

    Raises:
      ValueError: names the size, the mesh axes and what would divide.
    """
    axes = LOGICAL[logical]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for name, size in sizes.items():
        if size % shards:
            cut = " * ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
            fitting = ", ".join(str(n) for n in range(1, min(size, 4096) + 1) if size % n == 0)
            raise ValueError(
                f"{name}: expected a multiple of {shards} (mesh: {cut}), got {size}; "
                f"use a mesh with {' * '.join(axes)} one of {fitting}, or {name} = {-(-size // shards) * shards}"
            )


def gather_over(array: jax.Array, axes: str | tuple[str, ...], axis: int = 0) -> jax.Array:
    """Within `shard_map`: the parts of all devices along mesh axes, one after the other along `axis`.

    This and the two below leave an array alone where the axes hold one device: a CPU would run such a collective.
    """
    return array if lax.axis_size(axes) == 1 else lax.all_gather(array, axes, axis=axis, tiled=True)


def scatter_over(array: jax.Array, axes: str | tuple[str, ...], axis: int = 0) -> jax.Array:
    """Within `shard_map`: this device's part along `axis` of the sum over mesh axes."""
    return array if lax.axis_size(axes) == 1 else lax.psum_scatter(array, axes, scatter_dimension=axis, tiled=True)


def sum_over(array: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Within `shard_map`: the sum over mesh axes."""
    return array if lax.axis_size(axes) == 1 else lax.psum(array, axes)
