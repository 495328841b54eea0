"""`sat-jax eval`: accuracy of a run's newest checkpoint, or of what a fleet serves, sampled as the run samples."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sat_jax.mesh import make_mesh
from train.config import RunConfig, load
from train.engines import Engines, attach_fleet
from train.estimates import Interval, paired_difference
from train.evaluate import Evaluation
from train.records import parse_record
from train.rewards import open_verifier
from train.run_folder import CONFIG
from train.setup import Problem, evaluate_held_out, make_problem, make_publisher
from train.start import restore
from train.store import open_checkpoints


def evaluate_run(target: Path, overrides: list[str], compare: Path | None = None, *, as_json: bool) -> Evaluation:
    """Evaluates and prints the figures.

    Args:
      target: a run folder with at least one checkpoint, which is only read (but for the engine's log), and served; or
        a config whose remote fleet serves some version already: nothing is published to it.
      overrides: of the config, `a.b=c` each, such as eval.path=aime.jsonl or eval.samples=16.
      compare: what `--json` printed for the same problems before: the difference is shown, paired.
      as_json: print one JSON object in place of tables.

    Raises:
      ValueError: the folder is not a run's, has no checkpoint, or there is nothing to evaluate on.
    """
    is_folder = target.is_dir()
    if is_folder and not (target / CONFIG).exists():
        raise ValueError(f"{target}: expected a run folder, got no {CONFIG} in it")
    config = load(target / CONFIG if is_folder else target, overrides)
    earlier = None if compare is None else parse_record(compare.read_bytes(), str(compare))
    problem = make_problem(config)
    if not problem.evaluation:
        raise ValueError(
            f"{target}: expected problems to evaluate on, got none; set eval.prompts, and eval.path or data.holdout"
        )
    serving = _serve_checkpoint(config, problem, target) if is_folder else _serve_nothing(config, problem)
    with open_verifier(problem.verifier), serving as engines:
        result = evaluate_held_out(config, problem, engines.fleet)
    _print(result, None if earlier is None else _difference(result, earlier), as_json)
    return result


@contextlib.contextmanager
def _serve_checkpoint(config: RunConfig, problem: Problem, folder: Path) -> Iterator[Engines]:
    """The fleet at the newest checkpoint of the folder."""
    mesh = make_mesh(config.mesh)
    with open_checkpoints(folder, config, read_only=True) as checkpoints:
        start = restore(config, problem, folder, mesh, checkpoints)
    if start is None:
        raise ValueError(f"{folder}: expected a checkpoint, got none; let the run reach its first one")
    with attach_fleet(config, problem, folder, on_event=lambda _kind, _text: None, errand="evaluation") as engines:
        publisher = make_publisher(config, problem, start.graph, engines.fleet)
        publisher.start(start.cut.state, on_committed=lambda _version: None)
        publisher.finish()
        yield engines


@contextlib.contextmanager
def _serve_nothing(config: RunConfig, problem: Problem) -> Iterator[Engines]:
    """The fleet at whatever it serves."""
    if config.rollout.engine != "remote":
        raise ValueError(
            'rollout.engine: expected "remote" to evaluate what a fleet serves, got "local", which serves nothing yet; '
            "give a run folder, or --set rollout.engine=remote and rollout.endpoints"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        attach_fleet(config, problem, Path(folder), on_event=lambda _kind, _text: None, errand="evaluation") as engines,
    ):
        yield engines


def _difference(result: Evaluation, earlier: dict[str, Any]) -> Interval:
    before = [np.mean(problem["right"]) for problem in earlier.get("problems", [])]
    try:
        return paired_difference(result.accuracy_P, np.array(before), result.seed)
    except ValueError as error:
        raise ValueError(f"--compare: {error}; it must be the --json of the same problems") from error


def _print(result: Evaluation, difference: Interval | None, as_json: bool) -> None:
    if as_json:
        more = {} if difference is None else {"difference": [difference.mean, difference.low, difference.high]}
        sys.stdout.write(json.dumps({**result.to_json(), **more}) + "\n")
        return
    k = result.samples
    table = Table(f"version {result.version}, {result.prompts} problems", "value", "95 % interval over problems")
    table.add_row(f"avg@{k}", f"{result.sampled:.4f}", _bounds(result.average))
    for tries in [2**power for power in range(1, k.bit_length()) if 2**power <= k]:
        table.add_row(f"pass@{tries}", f"{result.passes(tries).mean:.4f}", _bounds(result.passes(tries)))
    if k > 1:
        table.add_row(f"majority@{k}", f"{result.majority.mean:.4f}", _bounds(result.majority))
    table.add_row("greedy", f"{result.greedy:.4f}", "")
    table.add_row("entropy, nats a token", f"{result.entropy:.4f}", "")
    table.add_row("without a verdict", f"{result.unverified}", "")
    table.add_row("seconds", f"{result.seconds:.1f}", "")
    if difference is not None:
        table.add_row("difference to --compare, paired", f"{difference.mean:+.4f}", _bounds(difference))
    console = Console()
    console.print(table)
    if k > 1:
        console.print(_problems(result))


def _problems(result: Evaluation) -> Table:
    table = Table("problem", "right", "most frequent answer", "greedy", "tokens")
    for problem in result.table:
        said = [answer for answer in problem.answers if answer is not None]
        most = max(said, key=said.count) if said else "-"
        table.add_row(
            str(problem.index),
            f"{sum(problem.right)} of {len(problem.right)}",
            f"{most[:40]} ({said.count(most)})",
            "right" if problem.greedy else "wrong",
            f"{problem.tokens:.0f}",
        )
    return table


def _bounds(found: Interval) -> str:
    return f"{found.low:.4f} to {found.high:.4f}"
