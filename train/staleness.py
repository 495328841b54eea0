"""The schedule of a run, as pure arithmetic: which version samples what, and when versions are published.

Batch-wise (SAT, arXiv 2607.18722, figure 1) with lag n: steps are cut into windows of n. Window w is sampled by version
n * max(0, w - 1) while window w - 1 is trained, so its tokens are n to 2n - 1 steps old when they are used; the first
window has nothing before it and is 0 to n - 1 old. n = 0 is synchronous: every batch is sampled by the version that it
finds. A batch gives k optimizer steps (its minibatches), so a window holds whole batches.
"""

import dataclasses
from typing import Annotated, Literal

from train.strict_toml import Range, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How far sampling runs ahead of training.

    Attributes:
      mode: batch_wise: sample a window of `lag` steps while the window before it is trained.
      lag: n, optimizer steps between publications; 0 = synchronous.
    """

    mode: Literal["batch_wise"]
    lag: Annotated[int, Range(at_least=0)]

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
