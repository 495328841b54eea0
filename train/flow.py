"""How groups come in, by mode: what a run's loop asks of either, and what it need not know about the other."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from rollout_bridge import FleetOptions
from rollout_bridge.dispatch import most_together
from train.buffer import Buffer, BufferSnapshot
from train.collect import Collector, Samples
from train.config import RunConfig
from train.setup import Problem
from train.share import Share
from train.staleness import BoundedSchedule, Schedule
from train.stream import StreamCollector, Task
from train.stream_buffer import StreamBuffer, StreamSettings


@dataclasses.dataclass(frozen=True)
class BatchWise:
    """A window is sampled as a whole by the version that the schedule says; of several processes each its share."""

    schedule: Schedule
    buffer: Buffer
    collector: Collector
    share: Share = dataclasses.field(default_factory=Share)

    def served(self, version: int) -> None:
        """The fleet serves `version` now: asks for what it is to sample."""
        self.collector.request(self.share.own(self.schedule.tickets_of_version(version)), version)

    def settle(self, version: int) -> None:
        """Waits for what older versions have to sample before `version` may go out."""
        self.buffer.wait(self.share.own(self.schedule.tickets_before_publish(version)))

    def hurries(self, version: int) -> bool:
        """Whether `version` must go out now, even if that waits for an earlier push: the schedule says which serves."""
        return True


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Groups stream in as they finish; the schedule has this process's part of a step's groups."""

    schedule: BoundedSchedule
    buffer: StreamBuffer
    collector: StreamCollector

    def served(self, version: int) -> None:
        """The fleet serves `version` now: more may be admitted."""
        self.buffer.serve(version)

    def settle(self, version: int) -> None:
        """Nothing is waited for: every token is judged by its own version."""

    def hurries(self, version: int) -> bool:
        """Whether the next steps would want for a newer version: then an earlier push is waited for."""
        served = self.buffer.served
        behind = served is None or version - served >= self.schedule.max_lag
        return behind or not self.buffer.ready(self.schedule.batch_groups)


Flow = BatchWise | Bounded


@contextlib.contextmanager
def open_flow(
    config: RunConfig,
    problem: Problem,
    samples: Samples,
    describe: Callable[[], str],
    snapshot: BufferSnapshot,
    share: Share,
) -> Iterator[Flow]:
    """The buffer and the threads that fill it, restored from a cut's.

    Args:
      config, problem: the run's.
      samples: the fleet, or rollouts by code over it; the fleet is to be closed before this is, so that a thread that
        waits for an engine ends.
      describe: says how the engines are, for errors about waiting.
      snapshot: of the cut, this process's part.
      share: which process of the run this is.
    """
    plan = config.plan
    with contextlib.ExitStack() as stack:
        if isinstance(plan, Schedule):
            if snapshot.ledger.out:
                raise ValueError(
                    f"checkpoint: expected no prompt in flight at a window's edge, got {len(snapshot.ledger.out)}; it "
                    "is of a bounded run: resume it with schedule.mode = bounded"
                )
            buffer = Buffer(max_lag=plan.max_lag, deadline=config.rollout.deadline, describe=describe, share=share)
            buffer.restore(snapshot)
            collector = Collector(samples, problem.data, problem.tokenizer, problem.verifier, buffer, problem.collect)
            stack.enter_context(collector)
            flow = BatchWise(plan, buffer, collector, share)
        else:
            flow = _open_bounded(config, problem, samples, describe, share)
            flow.buffer.restore(snapshot)
            stack.enter_context(flow.collector)
        yield flow


def _open_bounded(
    config: RunConfig, problem: Problem, samples: Samples, describe: Callable[[], str], share: Share
) -> Bounded:
    schedule, plan = config.schedule, config.plan
    assert isinstance(plan, BoundedSchedule), "the caller looks"
    groups = share.part(plan.groups_per_step, "batch.groups_per_step")
    plan = dataclasses.replace(plan, groups_per_step=groups)
    settings = StreamSettings(
        too_old=schedule.too_old,
        zero_std=schedule.zero_std,
        resample_rounds=schedule.resample_rounds,
        attempts=schedule.attempts,
        together=most_together(problem.collect.group_size, problem.collect.max_new_tokens),
    )
    buffer = StreamBuffer(plan, settings, deadline=config.rollout.deadline, describe=describe, share=share)
    streams = FleetOptions().max_streams * max(len(config.rollout.endpoints), 1)
    task = Task(
        data=problem.data,
        tokenizer=problem.tokenizer,
        verifier=problem.verifier,
        settings=problem.collect,
        request_deadline=schedule.request_deadline,
        samplers=min(streams, (plan.max_lag + 1) * plan.groups_per_step),
    )
    return Bounded(plan, buffer, StreamCollector(samples, task, buffer))
