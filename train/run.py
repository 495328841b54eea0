"""What a run is made of, built in order and taken down in reverse; and what happens at a window's edge.

The loop's thread is the only one that launches computations. Two more threads talk to the fleet: `collect` (samples
come in) and `publish` (weights go out); a failure of either reaches the loop at its next wait.
"""

import contextlib
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rollout_bridge import Fleet
from sat_jax.mesh import make_mesh, platform
from sat_jax.model import PolicyConfig
from train.books import joint_entry, joint_snapshot, joint_stats, own_part
from train.checkpoint import Checkpoints, Cut, Identity
from train.compiles import CompileCounter
from train.config import RunConfig
from train.engines import attach_fleet, deal_endpoints, run_name
from train.finite import require_finite
from train.flow import BatchWise, Flow, open_flow
from train.groups import Group
from train.host_memory import keep_freed_memory
from train.ledger_log import LedgerLog
from train.minibatches import Minibatch, Preparation
from train.place import check_rows
from train.preemption import Preempted, Preemption
from train.profiling import ProfileConfig
from train.publish import Publisher
from train.reference import Reference
from train.report import Report
from train.rewards import open_verifier, verifier_metrics
from train.run_folder import SUMMARY, read_json
from train.setup import Problem, assembly, evaluate_held_out, header, make_problem, make_publisher, make_samples
from train.side_report import SideReport
from train.staleness import BoundedSchedule, Schedule
from train.start import start_or_restore
from train.state import TrainState
from train.step import Batch, Step, StepReport
from train.store import open_checkpoints
from train.team import Alone, Team, shared
from train.watchdog import Watchdog

T = TypeVar("T")


__all__ = ["Minibatch", "Options", "Run", "open_run", "require_finite"]


@dataclasses.dataclass
class Run:
    """A run in progress.

    Attributes:
      config, folder: what, and where.
      problem: data, tokenizer, verifier.
      schedule: which version samples what.
      mesh, graph, policy: where the policy lives, its static part, its architecture.
      state: of the trainer.
      step: the compiled functions.
      reference: of the k3 term, or None.
      preparation: how groups become minibatches.
      fleet, flow, publisher, checkpoints, report, ledger, watchdog, preemption, team: see their modules; of several
        processes the first alone has a ledger to write.
      compiles: programs compiled so far.
      counters: figures that go on over a restart.
      record: whether every step's batch is saved.
      minibatches: what is left of the present batch; empty at a window's edge.
    """

    config: RunConfig
    folder: Path
    problem: Problem
    schedule: Schedule | BoundedSchedule
    mesh: Mesh
    graph: nnx.GraphDef
    policy: PolicyConfig
    state: TrainState
    step: Step
    reference: Reference | None
    identity: Identity
    preparation: Preparation
    fleet: Fleet
    flow: Flow
    publisher: Publisher
    checkpoints: Checkpoints
    report: Report | SideReport
    ledger: LedgerLog | None
    watchdog: Watchdog
    preemption: Preemption
    team: Team
    compiles: CompileCounter
    counters: dict[str, float]
    record: bool
    minibatches: deque[Minibatch] = dataclasses.field(default_factory=deque)
    _seen: dict[str, float] = dataclasses.field(default_factory=dict)
    _owes_push: bool = False
    _rewards: list[float] = dataclasses.field(default_factory=list)
    _noted: Callable[[], None] = lambda: None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def phase(self, name: str, *, watched: bool = True) -> Iterator[None]:
        """A part of the loop: timed for the report, named in a trace, and watched by the watchdog.

        What waits for the fleet is not watched: its deadlines count from the last sign of life, and it may take long.
        """
        watch = self.watchdog.doing(f"{name} at version {self.state.version}") if watched else contextlib.nullcontext()
        with self.report.phase(name), jax.profiler.TraceAnnotation(name), watch:
            yield

    def take(self) -> Sequence[Group]:
        """The groups of the next batch, of several processes this one's; a preemption ends the wait.

        They are taken once every process has its own: none takes what another one's preemption would lose.
        """
        buffer, version = self.flow.buffer, self.state.version
        count = self.step_groups * self.schedule.minibatches
        groups = self._together(f"the groups of step {version}", lambda: buffer.choose(count, version))
        buffer.hand_over(groups)
        return groups

    @property
    def step_groups(self) -> int:
        """Groups that this process has in an optimizer step."""
        return self.team.share.part(self.schedule.groups_per_step, "batch.groups_per_step")

    def _together(self, what: str, wait: Callable[[], T]) -> T:
        def own() -> T:
            with self.preemption.waiting(self.flow.buffer.fail):
                return wait()

        return self.team.together(what, own)

    def leave_if_asked(self) -> None:
        """Raises `Preempted` if this process, or any other one of the run, is wanted back."""
        if any(self.team.exchange("asked to stop", self.preemption.asked)):
            raise Preempted

    def begin(self) -> None:
        """Makes the fleet serve the version that the schedule asks for, and asks it for the first groups."""
        objective = self.config.objective
        if objective.config.needs_proximal and self.schedule.minibatches == 1:
            self.report.event(
                "warning",
                f"{objective.preset} compares the policy with itself before the batch's first step; with "
                "batch.minibatches = 1 that ratio is always one: set it to 2 or more, or choose another preset",
            )
        with self.phase("publish", watched=False):
            # A run that was killed between its last step and its last evaluation has the latter still to make.
            if self.state.version < self.config.steps or not shared(self.team, "summary", self._summarised()):
                self.publisher.start(self.state, self.committed)
                self.publisher.finish()

    def prepare(self, groups: Sequence[Group], version: int) -> Iterator[Minibatch]:
        """Cuts the groups of a batch into its minibatches; `version` is the trainer's at the first of them."""
        return self.preparation.minibatches(groups, version, self.state.params)

    def reference_logps(self, batch: Batch) -> tuple[jax.Array, ...] | None:
        """Log-probs under the frozen reference, or None without one."""
        return None if self.reference is None else self.reference.logps(self.step, batch)

    def at_edge(self, version: int) -> None:
        """What the end of a window or batch asks for: a checkpoint when due, and the publication of what samples next.

        Args:
          version: of the trainer.
        """
        if not self.schedule.is_edge(version):
            return
        with self.phase("collect", watched=False):
            self._together(f"what older versions than {version} sample", lambda: self.flow.settle(version))
        if self.schedule.due(version, self.config.checkpoint.every) or version == self.config.steps:
            self.save()
        self._owes_push |= self.schedule.publishes(version)
        # An evaluation is of this very version; any other push may wait while the one before it is under way.
        if self._evaluates(version) or (self._owes_push and self._may_push(version)):
            self._owes_push = False
            with self.phase("publish", watched=False):
                self.publisher.start(self.state, self.committed)

    def _may_push(self, version: int) -> bool:
        said = self.team.exchange("a push", [self.publisher.busy, self.flow.hurries(version)])
        return not any(busy for busy, _ in said) or any(hurries for _, hurries in said)

    def save(self) -> None:
        """Saves a cut of this moment, unless there is one."""
        version = self.state.version
        if shared(self.team, "the newest cut", self.checkpoints.latest()) == version:
            return
        self.write()  # a run that goes on from this cut has no other chance to
        with self.phase("checkpoint"), self._lock:
            snapshot = joint_snapshot(self.team, self.flow.buffer.snapshot(), self.step_groups)
            if self.ledger is not None:
                self.ledger.append(version, snapshot.entry)
            rewards, self._rewards = self._rewards, []
            self.checkpoints.save(
                Cut(
                    identity=self.identity,
                    state=self.state,
                    buffer=snapshot,
                    counters=dict(self.counters),
                    score=float(np.mean(rewards)) if rewards else None,
                )
            )

    def leave(self) -> None:
        """Saves what a preemption would lose, where the mode can: bounded, between batches, at any version."""
        if not (isinstance(self.flow, BatchWise) or self.minibatches):
            self.save()
        self.settle()

    def settle(self) -> None:
        """Waits until the last cut is whole."""
        with self.phase("checkpoint"):
            self.checkpoints.settle()

    def committed(self, version: int) -> None:
        """In the publishing thread, once the fleet serves `version`: evaluates if due, then asks for groups.

        Of several processes the first one evaluates, on its own engines.
        """
        evaluates = self._evaluates(version) and self.team.share.process == 0
        if isinstance(self.flow, BatchWise) and evaluates:
            self._evaluate(version)
        self.flow.served(version)
        if not isinstance(self.flow, BatchWise) and evaluates:
            self._evaluate(version)  # beside the training samples: nothing waits for it

    @functools.cached_property
    def _learning_rate(self) -> Callable[[int], jax.Array]:
        return jax.jit(self.config.optim.learning_rate())  # operation by operation it took a twentieth of a small step

    def note(self, version: int, done: StepReport, minibatch: Minibatch) -> None:
        """Takes down what a step did, for `write`, and checks that no prompt is lost or counted twice.

        Raises:
          ValueError: the ledger does not add up.
        """
        assembled = minibatch.stats
        stats = joint_stats(self.team, self.flow.buffer.stats())
        published = self.publisher.published()
        with self._lock:
            seen, self._seen = self._seen, {}
        metrics = {
            **done.metrics,
            **assembled.metrics(),
            **stats.metrics(),
            **verifier_metrics(self.problem.verifier),
            **(published.metrics() if published else {}),
            **seen,
            "learning_rate": float(self._learning_rate(version - 1)),
            "compiles": float(self.compiles.count),
            "lag/masked": float(minibatch.masked),
        }
        self._rewards.append(assembled.reward_mean)
        entry = joint_entry(self.team, self.flow.buffer.entry(), self.step_groups)
        if self.ledger is not None:
            self.ledger.append(version, entry)
        self.checkpoints.raise_failed()
        samples = self.flow.collector.samples()
        self._noted = functools.partial(self.report.write, version, metrics, samples, assembled.lags)

    def write(self) -> None:
        """Records the step that was noted last, once."""
        write, self._noted = self._noted, lambda: None
        write()

    def finish(self) -> None:
        """Waits for the last evaluation and the last cut, and writes the summary."""
        self.publisher.finish()
        self.settle()
        if self._summarised():
            return
        sides: dict[str, dict[str, float]] = {"before": {}, "after": {}}
        for name, value in self.counters.items():
            side, _, figure = name.partition("/")
            if side in sides:
                sides[side][figure] = value
        prompts = len(self.problem.evaluation)
        facts = {"compilations": f"{self.compiles.count} programs in {self.compiles.seconds:.0f} s, by the trainer"}
        self.report.write_summary({"prompts": prompts, **sides, "facts": facts})

    def _summarised(self) -> bool:
        """Whether the folder says already how this run ended."""
        return self.state.version == self.config.steps and read_json(self.folder / SUMMARY) is not None

    def _evaluates(self, version: int) -> bool:
        if not self.problem.evaluation:
            return False
        first_or_last = version in (0, self.config.steps)
        return first_or_last or self.schedule.due(version, self.config.eval.every)

    def _evaluate(self, version: int) -> None:
        result = evaluate_held_out(self.config, self.problem, self.fleet, self.flow.buffer.progress)
        side = {0: "before", self.config.steps: "after"}.get(version)
        with self._lock:
            self._seen |= result.metrics()
            if side is not None:
                self.counters |= {
                    f"{side}/eval/sampled_accuracy": result.sampled,
                    f"{side}/eval/greedy_accuracy": result.greedy,
                    f"{side}/entropy": result.entropy,
                }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is run, beside its config; none of it changes what is computed.

    Attributes:
      console: whether to show it.
      record: whether to save every step's batch.
      preemption: where SIGTERM is heard of.
      profile: steps of which a trace is written; None = none.
      team: the processes of the run.
    """

    console: bool = True
    record: bool = False
    profile: ProfileConfig | None = None
    preemption: Preemption = dataclasses.field(default_factory=Preemption)
    team: Team = dataclasses.field(default_factory=Alone)


@contextlib.contextmanager
def open_run(config: RunConfig, folder: Path, options: Options) -> Iterator[Run]:
    """Builds a run: restores the newest cut of the folder, or makes version 0. Everything is closed on the way out."""
    team, share = options.team, options.team.share
    first = share.process == 0
    config, place_of = deal_endpoints(config, share), folder if first else folder / f"process-{share.process}"
    with contextlib.ExitStack() as stack:
        problem = make_problem(config)
        stack.enter_context(open_verifier(problem.verifier))
        compiles = stack.enter_context(CompileCounter())
        mesh = make_mesh(config.mesh)
        keep_freed_memory(platform(mesh))
        check_rows(mesh, config.batch.rows)
        report = stack.enter_context(
            Report(folder, header(config, problem, mesh, folder), console=options.console)
            if first
            else SideReport(team.tell)
        )
        team.on_event(report.event)
        place_of.mkdir(exist_ok=True)
        watchdog = stack.enter_context(Watchdog(place_of, config.watchdog.seconds, report.event))
        checkpoints = stack.enter_context(open_checkpoints(folder, config))
        name = shared(team, "the run's name", run_name(folder))
        engines = stack.enter_context(attach_fleet(config, problem, place_of, report.event, run=name))
        start = start_or_restore(config, problem, folder, mesh, checkpoints, report)
        ledger = None
        if first:
            ledger = stack.enter_context(contextlib.closing(LedgerLog(folder, start.cut.state.version)))
        samples = make_samples(config, problem, engines.fleet)
        part = own_part(start.cut.buffer, share)
        flow = stack.enter_context(open_flow(config, problem, samples, engines.describe, part, share))
        team.on_lost(flow.buffer.fail)
        # Before the flow is closed, so that a stream that waits for an engine ends.
        stack.callback(engines.fleet.close)
        step = Step(start.graph, start.optimizer, config.objective.config, config.sampling.temperature, start.cut.state)
        preparation = Preparation(
            config=config, assembly=assembly(config, problem, share), step=step, mesh=mesh, team=team, tell=report.event
        )
        yield Run(
            config=config,
            folder=folder,
            problem=problem,
            schedule=config.plan,
            mesh=mesh,
            graph=start.graph,
            policy=problem.policy,
            state=start.cut.state,
            step=step,
            reference=start.reference,
            identity=start.cut.identity,
            preparation=preparation,
            fleet=engines.fleet,
            flow=flow,
            publisher=make_publisher(config, problem, start.graph, engines.fleet, flow.buffer.fail),
            checkpoints=checkpoints,
            report=report,
            ledger=ledger,
            watchdog=watchdog,
            preemption=options.preemption,
            team=team,
            compiles=compiles,
            counters=dict(start.cut.counters),
            record=options.record,
        )
