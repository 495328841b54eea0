"""SIGTERM: the step is finished or the wait abandoned, the cut saved, exit code 75.

A signal may come in the middle of an update whose buffers are donated, or while a lock is held. So there it only leaves
a mark, and the loop leaves at the step's end; a wait is ended by making it raise at its own next look.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

PREEMPTED = 75  # EX_TEMPFAIL: start the same command again


class Preempted(SystemExit):
    """The scheduler asked for the machine back."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


class Preemption:
    """Turns SIGTERM into `Preempted` at a moment that suits the loop.

    Outside `held` that is any moment: nothing but the last cut counts while a run starts or ends.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = False
        self._cancel: Callable[[BaseException], None] | None = None

    def install(self) -> None:
        """Takes SIGTERM over; from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, a signal leaves a mark, for `leave_if_asked`, and ends a wait that was declared by `waiting`."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextlib.contextmanager
    def waiting(self, cancel: Callable[[BaseException], None]) -> Iterator[None]:
        """Declares a wait.

        Args:
          cancel: makes the wait raise what it is given; called from the signal's handler.
        """
        self._cancel = cancel
        try:
            self.leave_if_asked()  # also what came before the line above
            yield
        finally:
            self._cancel = None

    def ask(self) -> None:
        """Another process of the run is wanted back: this one leaves with it. From any thread; it never raises."""
        self.asked = True
        cancel = self._cancel
        if cancel is not None:
            cancel(Preempted())

    def leave_if_asked(self) -> None:
        """Raises `Preempted` if a signal came meanwhile."""
        if self.asked:
            raise Preempted

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self._cancel is not None:
            self._cancel(Preempted())
        elif not self._held:
            raise Preempted
