"""The plan of a config on a topology: every program of an optimizer step compiled, and the whole step priced."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sat_jax.mesh import make_mesh
from sat_jax.model import PolicyConfig
from train.abstract import abstract_batch, abstract_state
from train.config import RunConfig
from train.plan.advice import Advice, advise, enough
from train.plan.load import Load, loads, pairs
from train.plan.memory import Host, Resident, host, logits_bytes, resident, saved_bytes, shard_bytes, visiting
from train.plan.price import Cost, Program, cost, need, runs, useful_of_step
from train.plan.programs import Where, compile_program, open_cache
from train.plan.rules import rules_of
from train.plan.topology import Chip, open_topology
from train.plan.useful import forward_flops
from train.plan.walk import walk
from train.setup import make_problem
from train.state import TrainState
from train.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is asked beside the config.

    Attributes:
      topology: such as "v5p:4x4x4".
      cache: folder of compiled programs' figures; None = none.
      network: bytes a second between trainer and fleet, above 0.
      rollout_tokens: sampled by the whole fleet, a second, above 0; None = not known.
      response_tokens: mean of a completion; None = a quarter of the longest.
      largest: whether to look for the largest microbatch that fits, which compiles again.
    """

    topology: str
    cache: Path | None = None
    network: float = 12.5e9
    rollout_tokens: float | None = None
    response_tokens: int | None = None
    largest: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a rate that nothing can be divided by, before anything is compiled."""
        for name, rate, unit in (
            ("--network", self.network / 1e9, "GB/s"),
            ("--rollout-tokens-per-s", self.rollout_tokens, "tokens a second"),
        ):
            if rate is not None and not 0.0 < rate < math.inf:
                raise ValueError(f"{name}: expected a number of {unit} above 0, got {rate:g}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How sampling, pushing and training keep up with each other, at mean lengths.

    Attributes:
      publish_seconds: of one push over the network.
      rollout_seconds: that the fleet samples for one step; None = its rate is not known.
      needed_tokens: a second that the fleet must sample to keep the trainer busy; None = step time not known.
      hidden_lag: the smallest `schedule.lag` at which sampling and pushing hide behind training; None = not known, 0 =
        none: the fleet is slower than the trainer.
    """

    publish_seconds: float
    rollout_seconds: float | None
    needed_tokens: float | None
    hidden_lag: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a config needs on a topology. Bytes and FLOPs are those of one device unless said otherwise.

    Attributes:
      config, topology: names.
      chip: its figures.
      devices: how many.
      mesh: sizes by axis.
      parameters: of the policy, all of them.
      loads: of a step, at mean and worst lengths.
      resident: what outlives a program, at worst lengths.
      programs: in the order of a step.
      saved, logits: by hand, of the fullest program's temporaries: what the backward pass finds saved (None = not
        estimated), and one chunk of logits.
      costs: at mean and worst lengths, balanced and skewed routing.
      host: at worst lengths.
      pace: at mean lengths.
      largest_rows: of a microbatch that fits, and whether it was compiled; None = not even one a device, or not known.
      advice: when the step does not fit: what to set, largest first.
    """

    config: str
    topology: str
    chip: Chip
    devices: int
    mesh: dict[str, int]
    parameters: int
    loads: tuple[Load, Load]
    resident: Resident
    programs: tuple[Program, ...]
    saved: int | None
    logits: int
    costs: tuple[Cost, ...]
    host: Host
    pace: Pace
    largest_rows: tuple[int, bool] | None
    advice: tuple[Advice, ...]

    @property
    def fullest(self) -> Program:
        """The program during which most is needed; one that was refused before any other."""
        return max(self.programs, key=lambda program: (program.compiled.memory is None, program.need))

    @property
    def available(self) -> int | None:
        """Bytes of a device, as its compiler said or as the table has them; None = not known."""
        said = [program.compiled.available for program in self.programs if program.compiled.available]
        return said[0] if said else self.chip.memory

    @property
    def fits(self) -> bool:
        """Whether every program compiled and the fullest moment fits; without a known limit, whether all compiled."""
        compiled = all(program.compiled.memory is not None for program in self.programs)
        return compiled and (self.available is None or self.fullest.need <= self.available)

    @property
    def spare(self) -> float | None:
        """Share of the memory that is left at the fullest moment, negative where it does not fit."""
        return None if self.available is None else 1 - self.fullest.need / self.available

    def cost(self, case: str, routing: str) -> Cost:
        """The cost of a case."""
        return next(one for one in self.costs if (one.case, one.routing) == (case, routing))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """A config on a mesh, traced."""

    config: RunConfig
    policy: PolicyConfig
    mesh: Mesh
    chip: Chip
    state: TrainState
    micro: Any
    loads: tuple[Load, Load]
    traced: dict[str, jax.stages.Traced]


def make_plan(config: RunConfig, options: PlanOptions, say: Callable[[str], None]) -> Plan:
    """Compiles and prices a config's optimizer step.

    Args:
      config: the run.
      options: the topology, and what else is asked.
      say: progress, a line each.

    Raises:
      ValueError: an unknown topology, a config that its mesh does not divide, or a cache that cannot be written.
    """
    topology = open_topology(options.topology)
    open_cache(options.cache)
    mesh = make_mesh(config.mesh, topology.devices)
    seen = _trace(config, mesh, topology.chip, loads(config, options.response_tokens))
    where = Where(topology=topology.name, kind=topology.chip.kind, shape=dict(mesh.shape), cache=options.cache)
    held = resident(seen.state, seen.micro, config, seen.loads[1])
    output = _score_bytes(seen)
    programs = []
    for name, traced in seen.traced.items():
        compiled = compile_program(name, traced, where, say)
        programs.append(Program(name=name, compiled=compiled, need=need(name, compiled, held, output)))
    costs = _costs(seen, tuple(programs))
    beside = host(seen.state, seen.policy, config, seen.loads[1], topology.host_devices)
    plan = Plan(
        config=config.name,
        topology=topology.name,
        chip=topology.chip,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        parameters=seen.policy.num_parameters(),
        loads=seen.loads,
        resident=held,
        programs=tuple(programs),
        saved=saved_bytes(seen.policy, _positions(config), mesh.shape["tensor"]),
        logits=logits_bytes(seen.policy, _positions(config), mesh.shape["fsdp"] * mesh.shape["expert"]),
        costs=costs,
        host=beside,
        pace=_pace(seen, costs[0], beside.published, options),
        largest_rows=None,
        advice=(),
    )
    plan = dataclasses.replace(plan, largest_rows=_largest(plan, seen, where, options.largest, say))
    return plan if plan.fits else dataclasses.replace(plan, advice=_advice(plan, seen))


def policy_of(config: RunConfig) -> PolicyConfig:
    """The architecture, from a checkpoint's config.json, or with the vocabulary of the run's own data."""
    if config.policy.path:
        return config.policy.build(vocab_size=1, max_positions=config.batch.row_length)
    return make_problem(config).policy


def _trace(config: RunConfig, mesh: Mesh, chip: Chip, cases: tuple[Load, Load]) -> _Traced:
    policy, optimizer = policy_of(config), config.optim.transformation()
    graph, state = abstract_state(policy, optimizer, mesh, config.optim.moments_memory)
    micro = abstract_batch(policy, config.batch.rows, config.batch.row_length, mesh)
    step = Step(graph, optimizer, config.objective.config, config.sampling.temperature, state)
    traced = step.trace(state, micro, max(case.microbatches for case in cases))
    return _Traced(
        config=config,
        policy=policy,
        mesh=mesh,
        chip=chip,
        state=state,
        micro=micro,
        loads=cases,
        traced=traced,
    )


def _positions(config: RunConfig) -> int:
    """Positions of one device and microbatch."""
    return config.batch.rows * config.batch.row_length // config.mesh.batch_shards


def _score_bytes(seen: _Traced) -> int:
    """What scoring every microbatch of the longest step returns: log-probs, entropies, agreement and routes."""
    if "score" not in seen.traced:
        return 0
    one = shard_bytes(seen.micro.trace) + 3 * shard_bytes(seen.micro.behavior_logp_BT)
    return one * seen.loads[1].microbatches


def _costs(seen: _Traced, programs: tuple[Program, ...]) -> tuple[Cost, ...]:
    objective = seen.config.objective.config
    scored = objective.needs_reference + objective.needs_proximal
    names = tuple(seen.traced)
    costs = []
    for load in seen.loads:
        times = runs(names, load.microbatches, scored)
        forward = sum(forward_flops(seen.policy, load, pairs(load, seen.mesh).useful).values())
        made = tuple(name for name in names if times[name])
        useful = useful_of_step(forward, made, scored) / seen.mesh.size
        for routing in ("balanced", "skewed") if seen.policy.moe_layers else ("balanced",):
            rules = rules_of(load, seen.policy, seen.mesh, skewed=routing == "skewed")
            parts = {
                program.name: (
                    times[program.name],
                    walk(seen.traced[program.name].jaxpr, seen.mesh.size, rules),
                    program.compiled,
                )
                for program in programs
            }
            costs.append(cost(routing, load, useful, parts, seen.chip))
    return tuple(costs)


def _pace(seen: _Traced, mean: Cost, published: int, options: PlanOptions) -> Pace:
    load = seen.loads[0]
    push = published / options.network
    sampled = load.sequences * load.response
    rollout = None if options.rollout_tokens is None else sampled / options.rollout_tokens
    lag = None
    if rollout is not None and mean.seconds is not None:
        # A window of n steps is sampled, and then a push is made, while the window before it is trained.
        lag = 0 if rollout >= mean.seconds else max(1, -int(-push // (mean.seconds - rollout)))
    return Pace(
        publish_seconds=push,
        rollout_seconds=rollout,
        needed_tokens=None if mean.seconds is None else sampled / mean.seconds,
        hidden_lag=lag,
    )


def _largest(
    plan: Plan, seen: _Traced, where: Where, confirm: bool, say: Callable[[str], None]
) -> tuple[int, bool] | None:
    """Rows of the largest microbatch: temporaries are thought to grow with the rows; one program confirms it."""
    fullest, available = plan.fullest, plan.available
    if fullest.compiled.memory is None or available is None:
        return None
    shards, rows = seen.config.mesh.batch_shards, seen.config.batch.rows
    own = max(1, fullest.compiled.memory.peak - fullest.compiled.memory.argument)
    each = own * shards / rows  # of one row a device
    fitting = int((available - (fullest.need - own)) // each)
    while fitting >= 1:
        if not confirm or fitting * shards == rows:
            return fitting * shards, fitting * shards == rows
        say(f"largest microbatch: trying {fitting * shards} rows")
        batch = dataclasses.replace(seen.config.batch, rows=fitting * shards)
        config = dataclasses.replace(seen.config, batch=batch)
        other = _trace(config, seen.mesh, seen.chip, (loads(config, seen.loads[0].response)))
        name = fullest.name if fullest.name in other.traced else "gradient"
        compiled = compile_program(name, other.traced[name], where, say)
        held = resident(other.state, other.micro, config, other.loads[1])
        if compiled.memory is not None and need(name, compiled, held, _score_bytes(other)) <= available:
            return fitting * shards, True
        fitting -= 1
    return None


def _advice(plan: Plan, seen: _Traced) -> tuple[Advice, ...]:
    fullest, available = plan.fullest, plan.available
    memory = fullest.compiled.memory
    own = fullest.compiled.required if memory is None else memory.peak - memory.argument
    missing = 0 if available is None else fullest.need - available
    # With the moments elsewhere `apply` has slices of them; by then it may need more than what is fullest now.
    apply = next((program.need for program in plan.programs if program.name == "apply"), 0)
    hosted = min(plan.resident.optimizer, fullest.need - apply + plan.resident.optimizer - visiting(seen.state))
    return enough(advise(seen.config, seen.policy, plan.resident, own, hosted), missing)
