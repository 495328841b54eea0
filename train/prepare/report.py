"""What became of the records, said: a table, or JSON."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from train.prepare.math import Counts


def report_counts(counts: Counts, out: Path, *, as_json: bool) -> None:
    """Prints the counts and the first few records of each kind that were left out.

    Args:
      counts: of `prepare_math`.
      out: what was written.
      as_json: print one JSON object in place of a table.
    """
    if as_json:
        sys.stdout.write(json.dumps({"out": str(out), **counts.figures(), "examples": counts.examples}) + "\n")
        return
    table = Table("records", "count", "the first of them")
    for kind, count in counts.figures().items():
        if count or kind in ("read", "written"):
            table.add_row(kind.replace("_", " "), f"{count:,}", "\n".join(counts.examples.get(kind, [])))
    Console().print(table)
