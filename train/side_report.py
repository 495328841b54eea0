"""What processes other than the first say of a run: nothing in its files, but events to process 0.

It takes the place of `train.report.Report` there.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from train.run_folder import SampleLine


class SideReport:
    """A context manager, as `Report`; only `event` is heard."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        """Takes where events go, with their kind and text."""
        self._tell = tell

    def __enter__(self) -> "SideReport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What stopped this process is told by `train.team`."""

    def write(
        self,
        version: int,
        metrics: Mapping[str, float],
        samples: Sequence[SampleLine] = (),
        histogram: Mapping[int, int] | None = None,
    ) -> None:
        """Process 0 writes the step."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Process 0 times the phases."""
        yield

    def warm_start(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """Process 0 records it."""

    def resume(self, version: int) -> None:
        """Process 0 cuts the files."""

    def event(self, kind: str, text: str) -> None:
        """Tells process 0. Any thread may call it."""
        self._tell(kind, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Process 0 writes it."""
