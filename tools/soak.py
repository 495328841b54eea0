"""The whole fault suite, for `make soak`: its record goes to docs/soak.md.

python -m tools.soak --folder runs/soak [--seed 0] [--part batch_wise bounded]
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

from tests.system.chaos import batch_wise, bounded, emptied

PAGE = Path(__file__).parents[1] / "docs" / "soak.md"


def main() -> None:
    """Runs what was asked for and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="for the runs; a part's is emptied")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", nargs="+", choices=["batch_wise", "bounded"], default=["batch_wise", "bounded"])
    parser.add_argument("--kills", type=int, default=20, help="of the trainer, in each part")
    parser.add_argument("--faults", type=int, default=200, help="of engines and network, in the bounded part")
    parser.add_argument("--steps", type=int, default=320, help="of the bounded part")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    cache = folder / "cache"
    for part in arguments.part:
        with emptied(folder / part) as place:
            if part == "batch_wise":
                record = batch_wise(place, cache, seed=arguments.seed, steps=60, kills=arguments.kills)
            else:
                record = bounded(
                    place,
                    cache,
                    seed=arguments.seed,
                    steps=arguments.steps,
                    kills=arguments.kills,
                    faults=arguments.faults,
                )
        (folder / f"{part}.json").write_text(json.dumps(vars(record)))
        print(part, vars(record), flush=True)
    found = {
        part: json.loads((folder / f"{part}.json").read_text())
        for part in ("batch_wise", "bounded")
        if (folder / f"{part}.json").exists()
    }
    PAGE.write_text(page(found))


def page(found: dict[str, dict]) -> str:
    """The record as a page."""
    lines = [
        "# Soak",
        "",
        f"`make soak`, {datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}. Every figure "
        "below comes from a run whose checks all held; a check that fails writes no page.",
    ]
    for part, record in found.items():
        lines += ["", *_section(part, record)]
    return "\n".join(lines) + "\n"


def _section(part: str, record: dict) -> list[str]:
    words = {
        "batch_wise": "batch-wise: killed and resumed, it ends with the parameters of the undisturbed run, bit for bit",
        "bounded": "bounded: the ledger accounts for every prompt, none trained twice or lost, lag within its bound",
    }
    lines = [f"## {words[part]}", "", "| | |", "|---|---|"]
    rows = {
        "seed": record["seed"],
        "steps": record["steps"],
        "SIGKILLs of the trainer": record["kills"],
        "starts": record["starts"],
        "seconds": round(record["seconds"]),
        **record["facts"],
    }
    if part == "bounded":
        rows |= {
            "largest lag trained on": record["max_lag"],
            "longest time without a step, seconds (restarts included)": round(record["longest_silence"], 1),
            "faults": sum(record["faults"].values()),
        }
    lines += [f"| {name} | {value:g} |" for name, value in rows.items()]
    if record["faults"]:
        lines += ["", "| fault | times |", "|---|---|"]
        lines += [f"| {name} | {times} |" for name, times in sorted(record["faults"].items())]
    if record["errors"]:
        lines += ["", "What stopped the trainer with a named error, and it was started again:", ""]
        lines += [f"- {text[:300].replace(chr(10), ' ')}" for text in record["errors"]]
    return lines


if __name__ == "__main__":
    main()
