"""An xprof trace of some steps: what the devices did, by the step's named rooms. Read it with xprof or TensorBoard."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
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


class Profiler:
    """Starts and stops the trace at the edges of steps."""

    def __init__(self, config: ProfileConfig | None, folder: Path) -> None:
        """Takes what is traced; None = nothing.

        Args:
          config: which steps.
          folder: of the run; the trace goes into `profile/` there.
        """
        self._config = config
        self._folder = folder / FOLDER
        self._tracing = False

    def at(self, version: int) -> None:
        """Between two steps: `version` is the trainer's before the next one."""
        if self._config is None:
            return
        if self._tracing and version >= self._config.last:
            self.stop()
        elif not self._tracing and self._config.first <= version + 1 <= self._config.last:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def stop(self) -> None:
        """Writes the trace, if one is being made."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


@contextlib.contextmanager
def profiling(config: ProfileConfig | None, folder: Path) -> Iterator[Profiler]:
    """A profiler whose trace is written also when the run ends in the middle of it."""
    profiler = Profiler(config, folder)
    try:
        yield profiler
    finally:
        profiler.stop()
