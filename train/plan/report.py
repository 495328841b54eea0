"""A plan, as text and as one JSON object."""

import dataclasses
import json
from typing import Any

from train.plan.plan import Plan
from train.plan.price import Cost, Program

_GIB = 2**30
_TERA = 1e12


def as_json(plan: Plan) -> str:
    """Every figure of a plan: bytes, seconds and FLOPs of one device unless the name says otherwise."""
    programs = [
        {
            "name": program.name,
            "need": program.need,
            **{key: value for key, value in _plain(program.compiled).items() if key != "collectives"},
        }
        for program in plan.programs
    ]
    costs = [
        {**_plain(cost), "ratio": cost.ratio, "mfu_bound": _mfu(plan, cost), "executed_total": _total(cost)}
        for cost in plan.costs
    ]
    fields = {**_plain(plan), "programs": programs, "costs": costs}
    fields |= {"fits": plan.fits, "spare": plan.spare, "available": plan.available, "fullest": plan.fullest.name}
    return json.dumps(fields, indent=1)


def _plain(record: Any) -> dict[str, Any]:
    return dataclasses.asdict(record)


def as_text(plan: Plan) -> str:
    """The plan for people, the verdict last."""
    blocks = (_head(plan), _memory(plan), _programs(plan), _flops(plan), _links(plan), _beside(plan), _verdict(plan))
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    lines = [
        f"{plan.config} on {plan.topology}: {plan.devices} x {plan.chip.name} ({plan.chip.source}), mesh {mesh}",
        f"policy: {plan.parameters / 1e9:.2f} B parameters",
    ]
    for load in plan.loads:
        lines.append(
            f"step, {load.case} lengths: {load.sequences} sequences of {load.prompt} + {load.response} tokens, "
            f"{load.per_row} a row, {load.microbatches} microbatches of {load.rows} x {load.row_length}, "
            f"fill {load.fill:.2f}"
        )
    return lines


def _memory(plan: Plan) -> list[str]:
    held, fullest = plan.resident, plan.fullest
    lines = ["memory of one device, GiB"]
    for name in ("parameters", "optimizer", "accumulator", "reference", "routes", "tokens", "scores"):
        lines.append(f"  {name:<14}{_gib(getattr(held, name))}")
    if (memory := fullest.compiled.memory) is not None:
        lines.append(f"  {'temporaries':<14}{_gib(memory.peak - memory.argument)}  of {fullest.name}, the fullest")
    if plan.saved is not None:
        lines.append(f"    by hand: {_gib(plan.saved).strip()} saved for the backward pass")
    lines.append(f"    by hand: {_gib(plan.logits).strip()} of logits, one chunk")
    available = "not known" if plan.available is None else _gib(plan.available).strip()
    return [*lines, f"  {'needed':<14}{_gib(fullest.need)}  of {available}"]


def _programs(plan: Plan) -> list[str]:
    lines = [f"  {'program':<12}{'argument':>10}{'temporary':>10}{'peak':>10}{'needed':>10}{'compiled':>10}"]
    for program in plan.programs:
        lines.append(f"  {program.name:<12}{_sizes(program)}{program.compiled.seconds:>8.0f} s")
    return ["programs, GiB of one device (needed: with all that lives beside it)", *lines]


def _sizes(program: Program) -> str:
    memory = program.compiled.memory
    if memory is None:
        return f"{'does not fit: wanted':>30}{program.compiled.required / _GIB:>10.2f}"
    return "".join(f"{n / _GIB:>10.2f}" for n in (memory.argument, memory.temporary, memory.peak, program.need))


def _flops(plan: Plan) -> list[str]:
    lines = [
        "a step, by the busiest device: T = 1e12 FLOPs of matrix products",
        "  lengths routing       useful  executed  ratio   seconds  MFU <=  bound by",
    ]
    for cost in plan.costs:
        seconds = f"{'-':>10}" if cost.seconds is None else f"{cost.seconds:>10.1f}"
        mfu = _mfu(plan, cost)
        bound = f"{'-':>8}" if mfu is None else f"{mfu:>8.2f}"
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost.by_binding.items())
        lines.append(
            f"  {cost.case:<8}{cost.routing:<10}{cost.useful / _TERA:>8.1f} T{_total(cost) / _TERA:>8.1f} T"
            f"{cost.ratio:>7.2f}{seconds}{bound}  {cost.binding or '-'} ({spent or 'speeds not known'})"
        )
    mean = plan.cost("mean", "balanced")
    rooms = sorted(mean.executed.items(), key=lambda item: -item[1])
    lines.append("  mean, balanced: " + ", ".join(f"{room} {flops / _TERA:.1f} T" for room, flops in rooms if flops))
    return lines


def _links(plan: Plan) -> list[str]:
    links = plan.cost("mean", "balanced").links
    lines = [f"  {name:<44}{_gib(sent)}" for name, sent in links.items() if sent >= 2**20]
    return ["sent by a device in a step of mean lengths, GiB", *(lines or ["  nothing"])]


def _beside(plan: Plan) -> list[str]:
    host, pace = plan.host, plan.pace
    lines = [
        "beside the devices",
        *([f"  host: {_gib(host.moments).strip()} GiB of moments, for all devices of one"] if host.moments else []),
        f"  host: {_gib(host.step).strip()} GiB of completions a step at worst lengths, of them "
        f"{_gib(host.routes).strip()} of routes; queue {_gib(host.queue).strip()}",
        f"  checkpoint: {_gib(host.checkpoint).strip()} GiB",
        f"  push: {_gib(host.published).strip()} GiB in {pace.publish_seconds:.1f} s",
    ]
    if pace.needed_tokens is not None:
        lines.append(f"  fleet: {pace.needed_tokens:.0f} tokens a second keep the trainer busy at mean lengths")
    if pace.rollout_seconds is not None:
        said = {
            None: "not known",
            0: "none: the fleet is slower than the trainer, which waits",
        }.get(pace.hidden_lag, f"schedule.lag = {pace.hidden_lag}")
        lines.append(f"  sampling one step: {pace.rollout_seconds:.1f} s; hides behind training at {said}")
    if plan.largest_rows is not None:
        rows, compiled = plan.largest_rows
        how = "compiled" if compiled else "by the model, not compiled; --largest confirms"
        lines.append(f"  largest microbatch: {rows} rows ({how})")
    return lines


def _verdict(plan: Plan) -> list[str]:
    need = _gib(plan.fullest.need).strip()
    if plan.available is None:
        return [f"verdict: compiles; needs {need} GiB a device, whose memory is not known"]
    available = _gib(plan.available).strip()
    if plan.fits:
        return [f"verdict: fits: {need} of {available} GiB a device, {plan.spare:.0%} spare"]
    lines = [f"verdict: does not fit: {plan.fullest.name} needs {need} of {available} GiB a device"]
    for one in plan.advice:
        settings = " ".join(f"--set {setting}" for setting in one.settings)
        lines.append(f"  try {settings}: about {_gib(one.frees).strip()} GiB less; {one.why}")
    return lines


def _total(cost: Cost) -> float:
    return sum(cost.executed.values())


def _mfu(plan: Plan, cost: Cost) -> float | None:
    if cost.seconds is None or plan.chip.flops is None:
        return None
    return cost.useful / (plan.chip.flops * cost.seconds)


def _gib(count: float) -> str:
    return f"{count / _GIB:>8.2f}"
