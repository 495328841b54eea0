"""Makes recorded steps of a run again, without an engine.

    python -m tools.replay_batch runs/NAME                          every recorded step after the oldest cut
    python -m tools.replay_batch runs/NAME nonfinite-v7.npz         one saved batch, from the nearest cut before it

Prints loss and gradient norm of each step beside those of the run's own metrics, and a digest of the parameters. Record
batches with `sat-jax train CONFIG --record`. `--mesh fsdp=8` replays on another mesh (with XLA_FLAGS that make as many
devices).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import xxhash

from sat_jax.mesh import make_mesh
from train.config import RunConfig, load
from train.recording import Replayer, batch_path
from train.run_folder import CONFIG, METRICS, read_lines
from train.setup import make_problem
from train.start import Start, restore
from train.state import TrainState
from train.step import Step
from train.store import cut_folder, open_checkpoints, versions


def main() -> None:
    """Parses, restores, replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("batch", type=Path, nargs="?", help="one saved batch in place of the recorded ones")
    parser.add_argument("--version", type=int, help="of the cut to begin at (default: the oldest that is kept)")
    parser.add_argument("--steps", type=int, default=10**9, help="at most so many")
    parser.add_argument("--mesh", nargs="+", default=[], metavar="AXIS=N", help="in place of the run's")
    arguments = parser.parse_args()
    try:
        config = _on_mesh(load(arguments.folder / CONFIG), arguments.mesh)
        _replay(config, arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"replay_batch: {error}")


def _replay(config: RunConfig, arguments: argparse.Namespace) -> None:
    start = _restore(config, arguments.folder, arguments.version)
    state = start.cut.state
    step = Step(start.graph, start.optimizer, config.objective.config, config.sampling.temperature, state)
    replayer = Replayer(
        step=step,
        mesh=make_mesh(config.mesh),
        reference=start.reference,
        minibatches=config.batch.minibatches,
        proximal=config.objective.config.needs_proximal,
    )
    paths = _paths(arguments.folder, state.version, arguments.steps)
    if arguments.batch is not None:
        paths = iter([arguments.batch])
    rows = {row["version"]: row for row in read_lines(arguments.folder / METRICS)}
    for path, after, done in replayer.run(state, paths):
        row = rows.get(after.version, {}) if arguments.batch is None else {}
        said = {
            "batch": path.name,
            "version": after.version,
            "finite": done.finite,
            **{name: done.metrics[name] for name in ("loss", "grad_norm", "tokens")},
            **{f"run/{name}": row[name] for name in ("loss", "grad_norm") if name in row},
            "parameters": digest(after),
        }
        print(json.dumps(said), flush=True)


def digest(state: TrainState) -> str:
    """Of every parameter's bits."""
    seen = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(state.params):
        seen.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return seen.hexdigest()


def _restore(config: RunConfig, folder: Path, version: int | None) -> Start:
    problem = make_problem(config)
    mesh = make_mesh(config.mesh)
    kept = versions(cut_folder(folder, config))
    if not kept or (version is not None and version not in kept):
        raise ValueError(f"{folder}: expected a cut of version {version}, got {kept}")
    wanted = kept[0] if version is None else version
    with open_checkpoints(folder, config, read_only=True) as checkpoints:
        start = restore(config, problem, folder, mesh, checkpoints, wanted)
    assert start is not None, "it is kept"
    return start


def _paths(folder: Path, version: int, steps: int) -> Iterator[Path]:
    for number in range(version, version + steps):
        path = batch_path(folder, number)
        if not path.exists():
            if number == version:
                raise ValueError(f"{path}: expected a recorded batch, got none; run with --record")
            return
        yield path


def _on_mesh(config: RunConfig, axes: list[str]) -> RunConfig:
    sizes = {axis: int(size) for axis, _, size in (entry.partition("=") for entry in axes)}
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes)) if sizes else config


if __name__ == "__main__":
    main()
