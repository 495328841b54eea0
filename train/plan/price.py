"""What a whole optimizer step costs: memory at its fullest moment, FLOPs, bytes on the links, at least how long."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from train.plan.collectives import summed
from train.plan.load import Load
from train.plan.memory import Resident
from train.plan.programs import Compiled
from train.plan.topology import Chip
from train.plan.useful import GRADIENT
from train.plan.walk import Work

# During these there is no gradient yet.
_BEFORE_GRADIENT = ("denominator", "mismatch", "threshold", "score")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One compiled program of the step.

    Attributes:
      name: as `Step.trace` names it.
      compiled: memory and collectives.
      need: bytes a device while it runs, everything else that lives then included.
    """

    name: str
    compiled: Compiled
    need: int


def need(name: str, compiled: Compiled, resident: Resident, score_bytes: int) -> int:
    """Bytes a device while a program runs: its own peak, and what lives beside its arguments.

    Args:
      name: of the program.
      compiled: its memory, or what it wanted.
      resident: what lives, at the load that is asked about.
      score_bytes: of what scoring all microbatches returns, which lives until the last one is scored.
    """
    if compiled.memory is None:
        return compiled.required + resident.between
    alive = resident.between if name in _BEFORE_GRADIENT else resident.all
    if name == "score":
        alive += score_bytes
    # The gradient of the first microbatch comes out of its program, so its peak counts it already.
    if name == "gradient":
        alive -= resident.accumulator
    return compiled.memory.peak + max(0, alive - compiled.memory.argument)


def runs(names: tuple[str, ...], microbatches: int, scored: int) -> dict[str, int]:
    """How often each program runs in a step.

    Args:
      names: of all programs.
      microbatches: of the step.
      scored: how many times a microbatch is scored: once for the reference, once for a proximal anchor.
    """
    several = microbatches > 1
    times = {
        "denominator": microbatches if several else 0,
        "mismatch": microbatches if several else 0,
        "threshold": int(several),
        "score": microbatches * scored,
        "gradient": 1,
        "accumulate": microbatches - 1,
        "apply": 1,
        "metrics": 1,
    }
    return {name: times[name] for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A step at one load and routing, by the busiest device.

    Attributes:
      case: "mean" or "worst", of lengths.
      routing: "balanced" or "skewed".
      useful: FLOPs that the mathematics asks for, a device's share.
      executed: FLOPs, by room.
      links: bytes that a device sends, by kind of collective and axes.
      seconds: at least; None where the chip's figures are not known or a program does not fit.
      binding: what takes most of that time: compute, memory, links or host (the link to its memory).
      by_binding: seconds of each alone.
    """

    case: str
    routing: str
    useful: float
    executed: Mapping[str, float]
    links: Mapping[str, float]
    seconds: float | None
    binding: str
    by_binding: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Executed by useful FLOPs."""
        return sum(self.executed.values()) / self.useful


def cost(
    routing: str,
    load: Load,
    useful: float,
    parts: Mapping[str, tuple[int, Work, Compiled]],
    chip: Chip,
) -> Cost:
    """Adds up the programs of a step; each is bound by what takes it longest, with everything else hidden behind.

    Args:
      routing: for the record.
      load: of the step.
      useful: FLOPs of a device's share.
      parts: by program: how often it runs, one run's work, memory and collectives.
      chip: its speeds.
    """
    executed: defaultdict[str, float] = defaultdict(float)
    links: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, float] = defaultdict(float)
    known = chip.flops is not None and chip.memory_bandwidth is not None and chip.link_bandwidth is not None
    seconds = 0.0
    for times, work, compiled in parts.values():
        sent = summed(compiled.collectives)
        for room, flops in work.flops.items():
            executed[room] += times * flops
        for (kind, axes), count in sent.items():
            links[f"{kind} over {' x '.join(axes) or 'other groups'}"] += times * count
        known = known and (compiled.memory is not None or not times)
        hosted = times * _hosted(compiled)
        known = known and (chip.host_bandwidth is not None or not hosted)
        if chip.flops and chip.memory_bandwidth and chip.link_bandwidth:
            own = {
                "compute": times * work.total / chip.flops,
                "memory": times * _moved(work, compiled) / chip.memory_bandwidth,
                "links": times * sum(sent.values()) / chip.link_bandwidth,
            }
            if hosted and chip.host_bandwidth:
                own["host"] = hosted / chip.host_bandwidth
            for name, took in own.items():
                spent[name] += took
            seconds += max(own.values())
    return Cost(
        case=load.case,
        routing=routing,
        useful=useful,
        executed=dict(executed),
        links=dict(sorted(links.items(), key=lambda item: -item[1])),
        seconds=seconds if known else None,
        binding=max(spent, key=spent.__getitem__) if known else "",
        by_binding=dict(spent) if known else {},
    )


def _moved(work: Work, compiled: Compiled) -> float:
    """Bytes between a chip and its memory: of its products, or at least its arguments in and results out."""
    own = 0
    if (memory := compiled.memory) is not None:
        # What visits from the host is written there once and read once, as is what leaves.
        own = memory.argument + memory.output + memory.host_argument + memory.host_output
    return max(work.bytes, float(own))


def _hosted(compiled: Compiled) -> int:
    """Bytes between a chip and its host, of the busier way: the link has both at once."""
    return 0 if compiled.memory is None else max(compiled.memory.host_argument, compiled.memory.host_output)


def useful_of_step(forward: float, names: tuple[str, ...], scored: int) -> float:
    """FLOPs of a step by hand: the passes that its programs make over the whole batch.

    Args:
      forward: of one forward pass over all microbatches.
      names: of the step's programs.
      scored: see `runs`.
    """
    return forward * (GRADIENT + scored + ("mismatch" in names))
