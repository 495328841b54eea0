"""All that a run's page is made of: its folder, read into memory."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train import run_folder
from train.alarms import LEVELS, Level, Span, levels_for, spans
from train.run_folder import RunHeader, read_header, read_json, read_lines


@dataclasses.dataclass(frozen=True)
class Folder:
    """All that the page is made of."""

    path: Path
    run: RunHeader | None
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    warm_start: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    config: str

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """The run's alarm levels."""
        return LEVELS if self.run is None else levels_for(self.run)

    @functools.cached_property
    def spans(self) -> list[Span]:
        """Where these levels were passed."""
        return spans(self.levels, self.rows)

    @property
    def version(self) -> int:
        """Last version made."""
        return max(run_folder.last_version(self.rows), 0)


def read_folder(path: Path) -> Folder:
    """Reads a run folder; absent files are empty.

    Raises:
      ValueError: a file is damaged; it is named.
    """
    config = path / run_folder.CONFIG
    return Folder(
        path=path,
        run=read_header(path),
        rows=read_lines(path / run_folder.METRICS),
        events=read_lines(path / run_folder.EVENTS),
        samples=read_lines(path / run_folder.SAMPLES),
        warm_start=read_lines(path / run_folder.WARM_START),
        summary=read_json(path / run_folder.SUMMARY),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )
