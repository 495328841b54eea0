"""The schedule of a run, as pure arithmetic: which version samples what, and when versions are published.

Batch-wise (SAT, arXiv 2607.18722, figure 1) with lag n: steps are cut into windows of n. Window w is sampled by version
n * max(0, w - 1) while window w - 1 is trained, so its tokens are n to 2n - 1 steps old when they are used; the first
window has nothing before it and is 0 to n - 1 old. n = 0 is synchronous: every batch is sampled by the version that it
finds. A batch gives k optimizer steps (its minibatches), so a window holds whole batches.

Bounded: a prompt is admitted when its tokens, all sampled by the version that serves or a later one, will not be older
than max_lag when its turn comes; and every group is looked at again when it is used.
"""

import dataclasses
from typing import Annotated, Literal

from train.strict_toml import Range, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How far sampling runs ahead of training; `mode` says which of the other keys are read.

    Attributes:
      mode: batch_wise: sample a window of `lag` steps while the window before it is trained; bounded: groups stream in.
      lag: batch_wise: n, optimizer steps between publications; 0 = synchronous.
      max_lag: bounded: the oldest that a token may be, steps, when its prompt is admitted and when it is trained on.
      publish_every: bounded: optimizer steps between publications.
      in_flight: bounded: what a publication does to running requests: finish: they end on the old weights; retract:
        they go on under the new ones; abort: they return what they have and are continued from there.
      too_old: bounded: a group with a token beyond max_lag is thrown away and sampled again (reissue), or kept with
        those tokens masked (mask).
      zero_std: bounded: keep, or drop groups of equal rewards, which have no gradient, and sample others.
      resample_rounds: bounded: how often a batch's prompts may be dropped for that before such groups are kept.
      request_deadline: bounded: seconds after which a request is cut short; finished members are kept, the others
        asked for again.
      attempts: bounded: of one prompt, after which it is dropped.
    """

    mode: Literal["batch_wise", "bounded"]
    lag: Annotated[int, Range(at_least=0)]
    max_lag: Annotated[int, Range(at_least=0)] = 4
    publish_every: Annotated[int, Range(at_least=1)] = 1
    in_flight: Literal["finish", "retract", "abort"] = "retract"
    too_old: Literal["reissue", "mask"] = "reissue"
    zero_std: Literal["keep", "drop"] = "keep"
    resample_rounds: Annotated[int, Range(at_least=0)] = 2
    request_deadline: Annotated[float, Range(above=0)] = 60.0
    attempts: Annotated[int, Range(at_least=1)] = 8

    def __post_init__(self) -> None:
        check_fields(self, "schedule")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The batch-wise schedule of a run. Step s turns version s into version s + 1; tickets number prompts.

    Attributes:
      lag: n, a multiple of `minibatches`.
      steps: optimizer steps of the run, a multiple of `minibatches`; the last window is cut short where n does not
        divide them.
      groups_per_step: P, tickets that a step takes.
      minibatches: k, optimizer steps of a batch.
    """

    lag: int
    steps: int
    groups_per_step: int
    minibatches: int = 1

    def __post_init__(self) -> None:
        for name, least in (("lag", 0), ("steps", 1), ("groups_per_step", 1), ("minibatches", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"schedule.{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("lag", "steps"):
            if getattr(self, name) % self.minibatches:
                raise ValueError(
                    f"{name}: expected a multiple of batch.minibatches = {self.minibatches}, so that a batch is not "
                    f"cut by a publication, got {getattr(self, name)}"
                )

    @property
    def window_steps(self) -> int:
        """Steps of a window: n, and those of one batch when synchronous."""
        return self.lag or self.minibatches

    @property
    def max_lag(self) -> int:
        """The oldest that a token can be when it is used: 2n - 1, and k - 1 when synchronous."""
        return 2 * self.lag - 1 if self.lag else self.minibatches - 1

    def sampled_by(self, step: int) -> int:
        """The version whose samples step `step` trains on: n * max(0, floor(step / n) - 1)."""
        window = step // self.window_steps
        return self.window_steps * (window if self.lag == 0 else max(0, window - 1))

    def tickets_of_step(self, step: int) -> range:
        """The tickets that step `step` takes."""
        return range(step * self.groups_per_step, (step + 1) * self.groups_per_step)

    def tickets_of_version(self, version: int) -> range:
        """The tickets that `version` samples; empty where it samples nothing.

        Version 0 samples the first two windows, version n * k the window k + 1.
        """
        if version % self.window_steps:
            return range(0)
        if self.lag == 0:
            return self._tickets(version, version + self.minibatches)
        return self._tickets(version + self.lag if version else 0, version + 2 * self.lag)

    def tickets_before_publish(self, version: int) -> range:
        """The tickets that must have been sampled before `version` goes live: all that older versions sample."""
        return self._tickets(0, version + self.lag if version else 0)

    def publishes(self, version: int) -> bool:
        """Whether `version` is published: it samples something."""
        return len(self.tickets_of_version(version)) > 0

    def is_edge(self, version: int) -> bool:
        """Whether a window ends at `version` (the run's end included): where checkpoints are cut."""
        return version == self.steps or version % self.window_steps == 0

    def due(self, version: int, every: int) -> bool:
        """Whether something wanted every `every` steps is due at `version`, rounded up to the edge of a window.

        Args:
          version: after the step.
          every: steps; 0 = never.
        """
        if every == 0 or version == 0 or not self.is_edge(version):
            return False
        edge_before = (version - 1) // self.window_steps * self.window_steps
        return version // every > edge_before // every

    def _tickets(self, first_step: int, last_step: int) -> range:
        first, last = min(first_step, self.steps), min(last_step, self.steps)
        return range(first * self.groups_per_step, last * self.groups_per_step)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BoundedSchedule:
    """The bounded schedule of a run. Step s turns version s into version s + 1.

    Attributes:
      max_lag: the oldest that a token may be when it is trained on, steps.
      publish_every: steps between publications, a multiple of `minibatches`.
      steps: optimizer steps of the run, a multiple of `minibatches`.
      groups_per_step: P.
      minibatches: k, optimizer steps of a batch.
    """

    max_lag: int
    publish_every: int
    steps: int
    groups_per_step: int
    minibatches: int = 1

    def __post_init__(self) -> None:
        for name in ("publish_every", "steps"):
            value = getattr(self, name)
            if value < 1 or value % self.minibatches:
                raise ValueError(
                    f"{name}: expected a positive multiple of batch.minibatches = {self.minibatches}, so that a batch "
                    f"is not cut, got {value}"
                )
        if self.max_lag < self.publish_every - 1:
            raise ValueError(
                f"schedule.max_lag: expected at least schedule.publish_every - 1 = {self.publish_every - 1}, got "
                f"{self.max_lag}: the version that serves is that old before the next one goes out, and nothing could "
                "be admitted"
            )

    @property
    def batch_groups(self) -> int:
        """Groups of a batch: of one step, or of k."""
        return self.groups_per_step * self.minibatches

    def capacity(self, served: int, accepted: int, running: int) -> int:
        """How many more prompts may be admitted.

        The prompt behind `accepted + running` others is trained on by step (accepted + running) // P at the latest, and
        no token of it is of a version before the one that serves now.

        Args:
          served: version that the fleet serves.
          accepted: groups trained on or waiting for it; those that were dropped made room.
          running: prompts that are being sampled.

        Source: AReaL's staleness manager, with the version that serves in place of the trainer's: with slow
        publications the latter would admit prompts that are too old when they are used.
        """
        bound = min((served + self.max_lag + 1), self.steps) * self.groups_per_step
        return max(bound - accepted - running, 0)

    def publishes(self, version: int) -> bool:
        """Whether `version` is to be published."""
        return version < self.steps and version % self.publish_every == 0

    def is_edge(self, version: int) -> bool:
        """Whether a batch ends at `version`: where checkpoints may be cut."""
        return version % self.minibatches == 0

    def due(self, version: int, every: int) -> bool:
        """Whether something wanted every `every` steps is due at `version`, rounded up to the end of a batch."""
        if every == 0 or version == 0 or not self.is_edge(version):
            return False
        return version // every > (version - self.minibatches) // every
