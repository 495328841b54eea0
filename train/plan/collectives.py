"""Collectives of a compiled program, from its text: kind, mesh axes, bytes, and how often they run.

XLA's text is no interface; `tests/train/plan/test_collectives.py` pins what is read of it: computations, loops with a
constant bound, replica groups in their three spellings, and result types.
"""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+|f8\w+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations=\{|true_computation|false_computation)=?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OP = re.compile(r'op_name="([^"]*)"')
# TPU's compiler writes some reduce-scatters as a fusion of this name, of an all-reduce and a slice of it. They run as
# any other: their fusions and plain reduce-scatters name the same emitter, `SingleInputAllReduceScatterFusion`.
_SCATTER = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Of one kind, over the same mesh axes, of one place in the program's source.

    Attributes:
      kind: as XLA calls it, e.g. "all-gather".
      axes: mesh axes that it runs over, e.g. ("fsdp",); empty where its groups are not along axes.
      shards: devices of a group.
      times: runs in one execution of the program.
      bytes: of the whole array of one group, in one run: what an all-gather gives, what a reduce-scatter takes.
      place: tail of the source's name.
      at_least: it is inside a loop whose trip count is data; `times` counts one trip.
    """

    kind: str
    axes: tuple[str, ...]
    shards: int
    times: int
    bytes: int
    place: str
    at_least: bool

    @property
    def wire_bytes(self) -> float:
        """What a device sends in one execution of the program, in rings: (n - 1) / n of the array, twice for a sum."""
        if self.kind == "collective-permute":
            return float(self.times * self.bytes)
        passes = 2 if self.kind == "all-reduce" else 1
        return self.times * self.bytes * passes * (self.shards - 1) / self.shards


def collectives(text: str, shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """Reads a compiled program.

    Args:
      text: `Compiled.as_text()`.
      shape: sizes of the mesh by axis, in the order of its devices.

    Returns:
      Largest on the wire first.
    """
    computations, entry = _computations(text)
    found = [_collective(*run, shape) for run in _runs(computations, entry, 1, False)]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.wire_bytes))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    name, entry = None, ""
    for line in text.splitlines():
        if (begun := _COMPUTATION.match(line)) and "=" not in line.split("(", 1)[0]:
            name = begun.group(1)
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":  # a kernel's metadata has lines that begin with braces
            name = None
        elif name is not None:
            computations[name].append(line)
    return computations, entry


def _runs(
    computations: Mapping[str, Sequence[str]], name: str, times: int, at_least: bool
) -> Iterator[tuple[str, str, int, bool]]:
    """Computation and line of every collective, with the product of the trip counts around it."""
    for line in computations.get(name, ()):
        if loop := _WHILE.search(line):
            trips = _trips(line, computations.get(loop.group(1), ()))
            yield from _runs(computations, loop.group(2), times * (trips or 1), at_least or trips is None)
            # The condition runs once more than the body; what it sums is a flag.
            yield from _runs(computations, loop.group(1), times * (trips or 1), at_least or trips is None)
            continue
        if _COLLECTIVE.search(line):
            yield name, line, times, at_least
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        for other in called:
            yield from _runs(computations, other, times, at_least)


def _trips(line: str, condition: Sequence[str]) -> int | None:
    """How often a loop runs: as the text says, or the constant below which its counter stays; None = data decides."""
    if known := _KNOWN.search(line):
        return int(known.group(1))
    constants = {
        match.group(1): int(match.group(2))
        for text in condition
        if (match := re.search(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", text))
    }
    for text in condition:
        compared = re.search(r"ROOT .*compare\(.*?%([\w.\-]+)\), direction=LT", text)
        if compared and compared.group(1) in constants:
            return constants[compared.group(1)]
    return None


def _collective(within: str, line: str, times: int, at_least: bool, shape: Mapping[str, int]) -> Collective | None:
    match = _COLLECTIVE.search(line)
    assert match is not None, "the caller looked"
    result, kind, started = match.groups()
    group = _group(line, math.prod(shape.values()))
    if len(group) < 2:
        return None
    sizes = [_bytes(*array) for array in _ARRAY.findall(result)]
    # An asynchronous start's result holds what goes in, too; the whole array is the larger one.
    whole = max(sizes, default=0) if started and kind != "all-reduce" else sum(sizes)
    if kind == "reduce-scatter":
        whole *= len(group)
    elif kind == "all-reduce" and within.startswith(_SCATTER):
        kind = "reduce-scatter"
    op = _OP.search(line)
    return Collective(
        kind=kind,
        axes=_axes(group, shape),
        shards=len(group),
        times=times,
        bytes=whole,
        place="/".join(op.group(1).split("/")[-4:]) if op else "",
        at_least=at_least,
    )


def _bytes(kind: str, sizes: str) -> int:
    bits = 8 if kind == "pred" else 16 if kind == "bf16" else int(re.findall(r"\d+", kind)[0])
    return math.prod(map(int, sizes.split(","))) * bits // 8 if sizes else bits // 8


def _group(line: str, devices: int) -> tuple[int, ...]:
    """The devices of the first group, by their places in the mesh."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed.group(1).split(",")))
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return int(pairs.group(1)), int(pairs.group(2))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        varied = re.findall(r"'([^']+)'", named.group(2))
        places = itertools.product(*(range(size) if axis in varied else (0,) for axis, size in sizes.items()))
        return tuple(int(np.ravel_multi_index(place, tuple(sizes.values()))) for place in places)
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        order = np.arange(devices).reshape([int(size) for size in counted.group(3).split(",")])
        if counted.group(4):
            order = order.transpose([int(axis) for axis in counted.group(4).split(",")])
        return tuple(int(place) for place in order.reshape(int(counted.group(1)), int(counted.group(2)))[0])
    return tuple(range(devices))


def _axes(group: Sequence[int], shape: Mapping[str, int]) -> tuple[str, ...]:
    places = np.array(np.unravel_index(np.array(group), tuple(shape.values())))
    varied = [len(set(row.tolist())) > 1 for row in places]
    axes = tuple(axis for axis, varies in zip(shape, varied, strict=True) if varies)
    return axes if math.prod(shape[axis] for axis in axes) == len(group) else ()


def summed(found: Sequence[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes that a device sends, by kind and axes, largest first."""
    total: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for one in found:
        total[one.kind, one.axes] += one.wire_bytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))
