"""No wait without a name and an end: what a run is doing, for how long, and what happens when it does not move.

Python code that waits has deadlines of its own and raises. This is for what cannot be interrupted from within: a hung
computation, file system or library. The stacks of all threads are written into the run folder, and when that part has
still not moved after as long again the process ends; its cuts are whole, so the same command resumes it.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from rollout_bridge.errors import Retryable

STUCK = 70  # EX_SOFTWARE
STACKS = "stacks.txt"


def _end_process(said: str) -> None:
    sys.stderr.write(f"sat-jax: {said}\n")
    sys.stderr.flush()
    os._exit(STUCK)  # the thread that is stuck would keep an orderly exit waiting


class Watchdog:
    """A context manager around a run; `doing` names what the loop's thread does."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        tell: Callable[[str, str], None],
        end: Callable[[str], None] = _end_process,
    ) -> None:
        """Watches nothing yet.

        Args:
          folder: of the run; `stacks.txt` is appended to there.
          seconds: that one named part may take.
          tell: called with a kind and a text before the process ends, and when a part is late.
          end: ends the process; called with why.
        """
        self._path = folder / STACKS
        self._seconds = seconds
        self._tell = tell
        self._end = end
        self._lock = threading.Lock()
        self._parts: list[tuple[str, float]] = []
        self._dumped_for: tuple[str, float] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watch; a run that ends because something did not come leaves its stacks."""
        self._closing.set()
        self._thread.join()
        if isinstance(error, TimeoutError | Retryable):
            self.dump(str(error))
            error.add_note(f"what every thread was doing is in {self._path}")

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Names a part of the loop; within another one, that one's clock begins anew afterwards."""
        with self._lock:
            self._parts.append((name, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                self._parts.pop()
                if self._parts:
                    self._parts[-1] = (self._parts[-1][0], time.monotonic())

    def dump(self, why: str) -> None:
        """Writes the stack of every thread."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _watch(self) -> None:
        while not self._closing.wait(min(1.0, self._seconds / 4)):
            with self._lock:
                part = self._parts[-1] if self._parts else None
            if part is None:
                continue
            name, since = part
            took = time.monotonic() - since
            if took > 2 * self._seconds and self._dumped_for == part:
                said = (
                    f"{name}: expected an end within {2 * self._seconds:g} s, got none; the stacks are in {self._path}"
                )
                self._tell("stuck", said)
                self._end(f"error: {said}; start the same command again to resume")
                return
            if took > self._seconds and self._dumped_for != part:
                self._dumped_for = part
                said = f"{name}: expected an end within {self._seconds:g} s (watchdog.seconds), got none"
                self.dump(said)
                self._tell("stuck", f"{said}; the stacks are in {self._path}")
