"""docs/metrics.md and the code say the same: every metric that is written or shown is documented, and no other."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from train.alarms import LEVELS
from train.buffer import BufferStats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
SLASHED = re.compile(r"[a-z_]+/[a-z0-9_]+")
# Functions that write metrics whose names have no slash.
EMITTERS = (
    ("sat_jax/objective/report.py", "loss_metrics"),
    ("train/step.py", "update"),
    ("train/step.py", "_grad"),
    ("train/step.py", "_policy_metrics"),
    ("train/run.py", "write"),
)


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("sat_jax", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def phases(tree: ast.AST) -> set[str]:
    """Names of `report.phase("...")`."""
    return {
        f"seconds/{node.args[0].value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "phase"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value
    }


def rows() -> Iterator[list[str]]:
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def documented() -> set[str]:
    return {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}


def buffer_metrics() -> set[str]:
    return {f"buffer/{field.name}" for field in dataclasses.fields(BufferStats) if field.name != "reasons"}


def test_every_slashed_metric_of_the_code_is_documented() -> None:
    unknown = {
        f"{name} ({path})"
        for path, tree in modules()
        for name in {text for text in strings(tree) if SLASHED.fullmatch(text)} | phases(tree)
        if name not in documented()
    }
    assert not unknown, f"describe in docs/metrics.md: {sorted(unknown)}"


def test_every_metric_of_the_functions_that_write_them_is_documented() -> None:
    trees = {path.as_posix(): tree for path, tree in modules()}
    for file, name in EMITTERS:
        found = [node for node in ast.walk(trees[file]) if isinstance(node, ast.FunctionDef) and node.name == name]
        assert found, f"{file} has no {name} any more: say in EMITTERS where its metrics are written now"
        keys = {
            str(key.value)
            for node in ast.walk(found[0])
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant)
        }
        assert keys <= documented(), f"describe in docs/metrics.md ({file}, {name}): {sorted(keys - documented())}"


def test_every_figure_of_the_buffer_is_documented() -> None:
    assert buffer_metrics() <= documented()


def test_every_documented_metric_is_in_the_code() -> None:
    known = buffer_metrics() | {"version", "time"}
    for _, tree in modules():
        known |= strings(tree) | phases(tree)
    # Phases that the page knows by name, whether or not the loop has them today.
    known |= {f"seconds/{name}" for name in known}
    assert documented() <= known, f"remove from docs/metrics.md: {sorted(documented() - known)}"


def test_the_documented_alarm_levels_are_those_of_the_code() -> None:
    table = PAGE.split("## Alarm levels")[1]
    shown = re.findall(r"^\| `([^`]+)` \| ([^|]+?) \| (\w+) \|", table, flags=re.MULTILINE)
    assert [(f"{metric} {rule}", severity) for metric, rule, severity in shown] == [
        (level.text(), level.severity) for level in LEVELS
    ]
