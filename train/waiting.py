"""Waiting for somebody else's progress: under one lock, with a deadline that starts anew at every sign of life.

Whoever waits says what for. A failure of the thread that was to bring it is raised in place of the wait.
"""

import threading
import time
from collections.abc import Callable


class Waiting:
    """A lock, a condition and a clock; the buffers share its behaviour and hold their content under its lock."""

    def __init__(self, deadline: float) -> None:
        """Makes one that nobody waits at.

        Args:
          deadline: seconds without progress after which a wait is an error.
        """
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.deadline = deadline
        self.waited = 0.0
        self._last_progress = time.monotonic()
        self._error: BaseException | None = None

    def note(self) -> None:
        """Something happened: the deadline starts anew and whoever waits looks again. The lock is held."""
        self._last_progress = time.monotonic()
        self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """What is waited for will not come: every present and later wait raises this error (the first one given)."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool], late: Callable[[], str]) -> None:
        """Blocks until `ready`; the lock is held, and given up meanwhile.

        Raises:
          TimeoutError: no progress for the deadline; with the text of `late`.
          BaseException: what `fail` was given.
        """
        began = time.monotonic()
        self._last_progress = max(self._last_progress, began)
        try:
            while True:
                if self._error is not None:
                    raise self._error
                if ready():
                    return
                left = self._last_progress + self.deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(late())
                self.changed.wait(left)
        finally:
            self.waited += time.monotonic() - began
