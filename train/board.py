"""TensorBoard scalars, written by the thread that calls.

tensorboardX's own `SummaryWriter` hands events to a thread behind a queue of ten; when that thread dies of a full disk,
the next step waits for the queue for ever. Here a failed write is an error of the step.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class Board:
    """One event file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Opens a new file; of what earlier files hold, TensorBoard then forgets `first_step` and later.

        Args:
          folder: for event files; made if absent.
          first_step: that will be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # Files are named by the second: without a suffix, a quick restart would overwrite the file before it.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes a step's figures; None is left out.

        Raises:
          OSError: the file could not be written, for example to a full disk.
        """
        # One event holds them all: tensorboardX's own, of one scalar each, took a fifth of the quickstart's step.
        known = {name: value for name, value in values.items() if value is not None}
        self._write(step, summary=Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in known.items()]))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, step: int, **fields: object) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, **fields))
