"""An xprof trace of some steps: what the devices did, by the step's named rooms. Read it with xprof or TensorBoard."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

# Below a run's folder.
FOLDER = "profile"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Which steps are traced.

    Attributes:
      first, last: versions that the traced steps lead to, both included; the first steps compile, so take later ones.
    """

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "ProfileConfig":
        """Reads "10:12".

        Raises:
          ValueError: it is not two numbers of at least 1, ascending.
        """
        match = re.fullmatch(r"(\d+):(\d+)", text)
        first, last = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"--profile: expected FIRST:LAST, two steps from 1, ascending, got {text!r}; such as 10:12"
            )
        return cls(first=first, last=last)

    def check(self, steps: int) -> None:
        """Raises ValueError if a run of so many steps never comes to the first of these."""
        if self.first > steps:
            raise ValueError(
                f"--profile: expected steps of the run, which has {steps}, got {self.first}:{self.last}; "
                "take earlier ones"
            )


class Profiler:
    """Starts and stops the trace at the edges of steps."""

    def __init__(self, config: ProfileConfig | None, folder: Path, tell: Callable[[str, str], None]) -> None:
        """Takes what is traced; None = nothing.

        Args:
          config: which steps.
          folder: of the run; the trace goes into `profile/` there.
          tell: is told what became of it, as `Report.event`.
        """
        self._config = config
        self._folder = folder / FOLDER
        self._tell = tell
        self._began: int | None = None  # the first step of the trace that is being made
        self._version = 0

    @contextlib.contextmanager
    def step(self, version: int) -> Iterator[None]:
        """Around a step, which xprof knows by the version that it leads to; `version` is the trainer's before it."""
        self._at(version)
        with jax.profiler.StepTraceAnnotation("train", step_num=version + 1):
            yield
        self._version = version + 1
        if self._config is not None and self._version == self._config.last:
            self.stop()

    def _at(self, version: int) -> None:
        if self._config is None or self._began is not None:
            return
        if self._config.first <= version + 1 <= self._config.last:
            jax.profiler.start_trace(str(self._folder))
            self._began, self._version = version + 1, version

    def missed(self, version: int) -> None:
        """Tells it if all of the steps were made before this run, or part of one, began at `version`."""
        config = self._config
        if config is not None and config.last <= version:
            self._tell("warning", f"--profile {config.first}:{config.last}: the run goes on from {version}; no trace")

    def stop(self) -> None:
        """Writes the trace, if one is being made."""
        if self._began is None:
            return
        first, self._began = self._began, None
        jax.profiler.stop_trace()
        steps = f"steps {first} to {self._version}" if self._version >= first else f"a part of step {first}"
        self._tell("profile", f"a trace of {steps} is in {self._folder}; read it with `xprof --logdir {self._folder}`")


@contextlib.contextmanager
def profiling(
    config: ProfileConfig | None, folder: Path, version: int, tell: Callable[[str, str], None]
) -> Iterator[Profiler]:
    """A profiler whose trace is written also when the run ends in the middle of it; `version` is the run's now."""
    profiler = Profiler(config, folder, tell)
    profiler.missed(version)
    try:
        yield profiler
    finally:
        profiler.stop()
