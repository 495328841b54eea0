"""Writes the table of docs/pods.md: what every 30B config needs on its machine, by `sat-jax plan`.

    .venv-plan/bin/python -m tools.pods_table [PART ...]     (hours, unless runs/plan-cache holds the programs)

With parts, only the configs whose names hold one of them are planned anew: the GPU ones want another environment than
the TPU ones (docs/pods.md). A config that cannot be planned here ends it, with the page as it was.
"""

import argparse
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pods.md"
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
    """Plans what was asked for and puts it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the configs' names; none = all")
    parts = parser.parse_args().parts
    # Read when JAX is imported or libtpu starts, as by `sat-jax plan`: hence the imports below it.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from tools.make_configs import CONFIGS, topologies
    from train.config import load
    from train.plan import PlanOptions, make_plan

    rows = {}
    for name, topology in topologies().items():
        if parts and not any(part in name for part in parts):
            continue
        options = PlanOptions(topology=topology, cache=ROOT / "runs" / "plan-cache")
        plan = make_plan(load(CONFIGS / name), options, lambda line: print(line, flush=True))
        rows[Path(name).stem] = line((Path(name).stem, *cells(plan)))
        print(rows[Path(name).stem], flush=True)
    PAGE.write_text(replaced(PAGE.read_text(), rows))


def line(cells: tuple[str, ...]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def replaced(page: str, rows: dict[str, str]) -> str:
    """The page with these rows, by config, between its marks; rows of other configs stay."""
    from tools.make_configs import topologies

    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    known = {row.split(" | ")[0].removeprefix("| "): row for row in old.splitlines() if row.startswith("| qwen3")}
    known |= rows
    kept = [known[name] for name in (Path(config).stem for config in topologies()) if name in known]
    table = [BEGIN, "", line(_COLUMNS), "|" + "---|" * len(_COLUMNS), *kept, "", END]
    return before + "\n".join(table) + after


def cells(plan: Any) -> tuple[str, ...]:
    """The columns after the config's name; memory at worst lengths, the rest at mean lengths, balanced routing."""
    cost, load = plan.cost("mean", "balanced"), plan.loads[-1]
    peak, seconds, mfu = plan.chip.flops, "not known", "not known"
    if cost.seconds is not None and peak is not None:
        seconds, mfu = f"{cost.seconds:.1f}", f"{cost.useful / (peak * cost.seconds):.2f}"
    return (
        plan.topology,
        f"{load.rows} x {load.row_length}",
        f"{plan.fullest.need / _GIB:.1f}",
        f"{plan.available / _GIB:.2f}",
        f"{100 * plan.spare:.0f} %" if plan.fits else "does not fit",
        plan.fullest.name,
        f"{cost.ratio:.2f}",
        seconds,
        mfu,
        cost.binding,
        f"{sum(program.compiled.seconds for program in plan.programs):.0f}",
    )


if __name__ == "__main__":
    main()
