"""Writes the table of docs/pods.md: what every 30B config needs on its machine, by `sat-jax plan`.

    .venv-plan/bin/python -m tools.pods_table      (hours, unless runs/plan-cache holds the programs)

A config that cannot be planned here ends it, with nothing written.
"""

import os
from pathlib import Path
from typing import Any

from tools.make_configs import CONFIGS, topologies

PAGE = CONFIGS.parent / "docs" / "pods.md"
BEGIN, END = "<!-- by tools/pods_table.py -->", "<!-- end of the table -->"
_GIB = 2**30
_COLUMNS = (
    "config",
    "topology",
    "rows x length",
    "needed, GiB",
    "of",
    "spare",
    "fullest",
    "executed / useful",
    "s a step",
    "MFU at most",
    "bound by",
    "compile, s",
)


def main() -> None:
    """Plans them all and puts the table into the page."""
    # Read when JAX or libtpu first start, as by `sat-jax plan`.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from train.config import load
    from train.plan import PlanOptions, make_plan

    rows = []
    for name, topology in topologies().items():
        options = PlanOptions(topology=topology, cache=CONFIGS.parent / "runs" / "plan-cache")
        plan = make_plan(load(CONFIGS / name), options, lambda line: print(line, flush=True))
        rows.append(line((Path(name).stem, *cells(plan))))
        print(rows[-1], flush=True)
    PAGE.write_text(replaced(PAGE.read_text(), rows))


def line(cells: tuple[str, ...]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def replaced(page: str, rows: list[str]) -> str:
    """The page with these rows between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    table = [BEGIN, "", line(_COLUMNS), "|" + "---|" * len(_COLUMNS), *rows, "", END]
    return before + "\n".join(table) + after


def cells(plan: Any) -> tuple[str, ...]:
    """The columns after the config's name; memory at worst lengths, the rest at mean lengths, balanced routing."""
    cost = plan.cost("mean", "balanced")
    load = plan.loads[-1]
    known = cost.seconds is not None and plan.chip.flops is not None
    return (
        plan.topology,
        f"{load.rows} x {load.row_length}",
        f"{plan.fullest.need / _GIB:.1f}",
        f"{plan.available / _GIB:.2f}",
        f"{100 * plan.spare:.0f} %" if plan.fits else "does not fit",
        plan.fullest.name,
        f"{cost.ratio:.2f}",
        f"{cost.seconds:.1f}" if known else "not known",
        f"{cost.useful / (plan.chip.flops * cost.seconds):.2f}" if known else "not known",
        cost.binding,
        f"{sum(program.compiled.seconds for program in plan.programs):.0f}",
    )


if __name__ == "__main__":
    main()
