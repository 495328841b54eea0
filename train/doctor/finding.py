"""What a check found, and how all of it is shown."""

import dataclasses
import enum
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


class Status(enum.Enum):
    """OK: as it must be. WARN: the run works, and something deserves a look. FAIL: the run cannot or must not begin."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
      check: its name, "room: what".
      status: how it is.
      found: what was seen, with numbers.
      remedy: what to do; empty when it is well.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """It is as it must be."""
    return Finding(check=check, status=Status.OK, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """It deserves a look."""
    return Finding(check=check, status=Status.WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """The run must not begin."""
    return Finding(check=check, status=Status.FAIL, found=found, remedy=remedy)


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.status is not Status.FAIL for finding in findings)


def to_json(findings: Sequence[Finding], seconds: float) -> str:
    """One JSON object: `healthy`, `seconds`, `findings`."""
    rows = [{**dataclasses.asdict(finding), "status": finding.status.value} for finding in findings]
    return json.dumps({"healthy": healthy(findings), "seconds": round(seconds, 1), "findings": rows})


def show(findings: Sequence[Finding], seconds: float, console: Console) -> None:
    """Prints the table, a fix-it line under everything that is not well, and the verdict."""
    styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table("check", "", "found")
    for finding in findings:
        said = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
        table.add_row(finding.check, f"[{styles[finding.status]}]{finding.status.value}[/]", _plain(said))
    console.print(table)
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    verdict = "healthy" if healthy(findings) else "not ready to run"
    console.print(
        f"{verdict}: {counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed "
        f"({seconds:.0f} s)"
    )


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # brackets are rich's markup
