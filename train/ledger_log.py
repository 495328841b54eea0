"""`ledger.jsonl`: which prompts every step trained on, and which were dropped or sampled again, one line a step.

Together with a cut's own books it accounts for every prompt of a run (`train.ledger.audit`), however often the run was
killed: lines of steps that are made again are removed on resume, as those of `metrics.jsonl` are.
"""

import dataclasses
from pathlib import Path
from typing import Any

from train.ledger import LedgerEntry
from train.run_folder import JsonLines, read_lines, rewrite

LEDGER = "ledger.jsonl"


class LedgerLog:
    """Appends to a run's ledger; used from the loop's thread."""

    def __init__(self, folder: Path, version: int) -> None:
        """Opens it and drops what it says of versions after the cut that the run goes on from.

        Args:
          folder: of the run.
          version: of that cut.

        Raises:
          ValueError: a line of it is damaged.
        """
        path = folder / LEDGER
        lines = read_lines(path)
        kept = [line for line in lines if line["version"] <= version and version > 0]
        if len(kept) < len(lines):
            rewrite(path, kept)
        self._lines = JsonLines(path)

    def append(self, version: int, entry: LedgerEntry) -> None:
        """Writes what moved; nothing when nothing did.

        Args:
          version: that the step made, or at which the cut is taken.
          entry: as the buffer gives it.
        """
        if entry != LedgerEntry():
            self._lines.append({"version": version, **dataclasses.asdict(entry)})

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def read_entries(folder: Path, version: int) -> list[dict[str, Any]]:
    """The lines of a run up to a version, for an audit against the cut of that version."""
    return [line for line in read_lines(folder / LEDGER) if line["version"] <= version]
