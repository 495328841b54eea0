"""`sat-jax eval`: held-out accuracy of a run's newest checkpoint, sampled as the run samples."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sat_jax.mesh import make_mesh
from train.buffer import Buffer
from train.checkpoint import Checkpoints
from train.config import load
from train.engines import attach_fleet
from train.evaluate import Evaluation
from train.run_folder import CHECKPOINTS, CONFIG
from train.setup import evaluate_held_out, make_problem, make_publisher
from train.start import restore


def evaluate_run(folder: Path, *, as_json: bool) -> Evaluation:
    """Serves the newest checkpoint of a run folder and evaluates it; prints the figures.

    Args:
      folder: of a run that has at least one checkpoint; it is only read, but for the engine's log.
      as_json: print one JSON object in place of a table.

    Raises:
      ValueError: the folder is not a run's, has no checkpoint, or nothing is held out.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder}: expected a run folder, got no {CONFIG} in it")
    config = load(folder / CONFIG)
    problem = make_problem(config)
    if not problem.data.held_out:
        raise ValueError(f"{folder}: expected held-out prompts, got none; the run has data.holdout = 0")
    mesh = make_mesh(config.mesh)
    with Checkpoints(folder / CHECKPOINTS, config.checkpoint.keep, read_only=True) as checkpoints:
        start = restore(config, problem, folder, mesh, checkpoints)
    if start is None:
        raise ValueError(f"{folder}: expected a checkpoint, got none; let the run reach its first one")
    with attach_fleet(config, problem, folder, on_event=lambda _kind, _text: None, errand="evaluation") as engines:
        buffer = Buffer(max_lag=0, deadline=config.rollout.deadline)
        publisher = make_publisher(config, problem, start.graph, engines.fleet, buffer)
        publisher.start(start.cut.state, on_committed=lambda _version: None)
        publisher.finish()
        result = evaluate_held_out(config, problem, engines.fleet)
    _print(result, as_json)
    return result


def _print(result: Evaluation, as_json: bool) -> None:
    figures = {"version": float(result.version), **result.metrics()}
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("held-out figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
