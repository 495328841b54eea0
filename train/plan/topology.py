"""Machines by name: their chips' figures, and devices that a compiler takes for them without one being there."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies

_GIB = 2**30
_GB = 10**9
_TARGETS = Path(__file__).parent / "targets"
_CLOUD = "cloud.google.com/tpu/docs, system architecture"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One accelerator.

    Attributes:
      name: as in a topology's name.
      kind: tpu, cuda or cpu.
      dimensions: of its topologies, e.g. 3 for 4x4x4; 1 = a number of devices.
      memory: bytes that the compiler may give to a program; None = not known.
      flops: peak of bfloat16 products, a second; None = not known, and then so are times.
      memory_bandwidth: of its own memory, bytes a second.
      link_bandwidth: that it sends with along one axis of the interconnect, to both neighbours, bytes a second.
      host_bandwidth: to its host's memory, each way, bytes a second.
      source: of these numbers.
    """

    name: str
    kind: str
    dimensions: int
    memory: int | None
    flops: float | None
    memory_bandwidth: float | None
    link_bandwidth: float | None
    host_bandwidth: float | None
    source: str


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            # Memory is what libtpu 0.0.42 names as available when a program does not fit. The interconnect's figure is
            # the chip's total (1600, 4800, 3584 Gbit/s) over the axes of its torus (2, 3, 2). PCIe's is that of "How to
            # Scale Your Model" (jax-ml.github.io/scaling-book/tpus): "typically around 1.5e10" a chip, 32e9 on v6e.
            Chip(
                name="v5e",
                kind="tpu",
                dimensions=2,
                memory=int(15.75 * _GIB),
                flops=197e12,
                memory_bandwidth=819 * _GB,
                link_bandwidth=100 * _GB,
                host_bandwidth=15 * _GB,
                source=_CLOUD,
            ),
            Chip(
                name="v5p",
                kind="tpu",
                dimensions=3,
                memory=int(95.74 * _GIB),
                flops=459e12,
                memory_bandwidth=2765 * _GB,
                link_bandwidth=200 * _GB,
                host_bandwidth=15 * _GB,
                source=_CLOUD,
            ),
            Chip(
                name="v6e",
                kind="tpu",
                dimensions=2,
                memory=int(31.25 * _GIB),
                flops=918e12,
                memory_bandwidth=1640 * _GB,
                link_bandwidth=224 * _GB,
                host_bandwidth=32 * _GB,
                source=_CLOUD,
            ),
            Chip(
                name="h200",
                kind="cuda",
                dimensions=1,
                memory=150 * _GB,
                flops=989e12,
                memory_bandwidth=4800 * _GB,
                link_bandwidth=450 * _GB,  # NVLink 4: 900 GB/s both ways
                host_bandwidth=64 * _GB,  # PCIe 5: 128 GB/s both ways
                source="NVIDIA H200 data sheet (dense bfloat16)",
            ),
            Chip(
                name="cpu",
                kind="cpu",
                dimensions=1,
                memory=None,
                flops=None,
                memory_bandwidth=None,
                link_bandwidth=None,
                host_bandwidth=None,
                source="made-up devices of this machine",
            ),
        )
    }
)
_SHAPES = MappingProxyType({1: "N", 2: "NxN", 3: "NxNxN"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A machine.

    Attributes:
      name: such as "v5p:4x4x4", "v5e:8x8", "h200:8", "cpu:8".
      chip: of which all of its devices are.
      devices: in mesh order; of a topology that is not here they serve a compiler and nothing else.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]

    @property
    def host_devices(self) -> int:
        """Devices of one host."""
        return max(Counter(device.process_index for device in self.devices).values())


def parse(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Chip and extent of a topology's name, without asking a compiler.

    Raises:
      ValueError: unknown; lists what is known.
    """
    head, _, shape = name.partition(":")
    chip = CHIPS.get(head)
    if chip is None:
        known = ", ".join(f"{chip.name}:{_SHAPES[chip.dimensions]}" for chip in CHIPS.values())
        raise ValueError(f"topology: expected one of {known}, got {name!r}; v5p:4x4x4 is 64 chips")
    sizes = tuple(map(int, shape.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else ()
    if len(sizes) != chip.dimensions:
        raise ValueError(
            f"topology: expected {head}:{_SHAPES[chip.dimensions]} with numbers of at least 1, got {name!r}"
        )
    return chip, sizes


def open_topology(name: str) -> Topology:
    """The devices of a topology.

    Raises:
      ValueError: unknown, of a shape that does not exist, or its compiler is not installed.
    """
    chip, sizes = parse(name)
    if chip.kind == "cpu":
        return Topology(name=name, chip=chip, devices=_made_up(sizes[0]))
    try:
        devices = _tpu(name) if chip.kind == "tpu" else _cuda(chip, sizes[0])
    # Whatever a plugin raises: RuntimeError where it is missing, an XLA error for a shape that it does not build.
    except Exception as error:
        remedy = {
            "tpu": "install the extra `plan` (libtpu); v5p:4x4x4, v5e:8x8 and v6e:8x8 exist",
            "cuda": "install jax-cuda12-plugin and jax-cuda12-pjrt (no GPU is needed)",
        }[chip.kind]
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"topology {name!r}: expected one that its compiler builds, got: {first}; {remedy}") from error
    return Topology(name=name, chip=chip, devices=tuple(devices))


def _made_up(count: int) -> tuple[Any, ...]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"topology cpu:{count}: expected {count} devices, got {len(devices)}; set XLA_FLAGS to "
            f"--xla_force_host_platform_device_count={count} before JAX starts (sat-jax plan does)"
        )
    return tuple(devices[:count])


def _tpu(name: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def _cuda(chip: Chip, count: int) -> Any:
    target = (_TARGETS / f"{chip.name}.txtpb").read_text(encoding="utf-8")
    description = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target, topology=f"1x1x{count}"
    )
    return description.devices
