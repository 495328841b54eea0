"""Times an optimizer step of two processes with a device each against one process with two: what gloo costs.

    python -m tools.bench.bench_processes [--rounds 3] [--steps 20] [--config configs/quickstart.toml] [--rows N]

Runs of both kinds take turns; each times steps of the config's policy on a made-up batch after a warm-up. On a CPU.
Prints one JSON line: median seconds a step of either, and their ratio; and that of the fastest steps of all, which says
what two processes wait for each other where other programs wait for the cores, too.
"""

import argparse
import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from train.multihost import Launch, join
from train.preemption import Preemption

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Starts the workers in turns, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.toml"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=0, help="of the batch, in place of the config's")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _worker(arguments, arguments.worker)
        return
    seconds: dict[int, list[float]] = {1: [], 2: []}
    fastest: dict[int, float] = dict.fromkeys(seconds, math.inf)
    for _ in range(arguments.rounds):
        for processes in seconds:
            median, least = _timed(arguments, processes)
            seconds[processes].append(median)
            fastest[processes] = min(fastest[processes], least)
    one, two = (statistics.median(seconds[processes]) for processes in (1, 2))
    said = {
        "config": Path(arguments.config).stem,
        "rows": arguments.rows or None,
        "seconds_one_process": one,
        "seconds_two_processes": two,
        "ratio": two / one,
        "ratios": [b / a for a, b in zip(seconds[1], seconds[2], strict=True)],
        "fastest": [fastest[1], fastest[2]],
        "ratio_of_fastest": fastest[2] / fastest[1],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(said))


def _timed(arguments: argparse.Namespace, processes: int) -> tuple[float, float]:
    """Median and least seconds a step, by process 0 of so many."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
    }
    command = [sys.executable, "-m", "tools.bench.bench_processes", "--config", arguments.config]
    command += ["--steps", str(arguments.steps), "--rows", str(arguments.rows), "--worker"]
    started = [
        subprocess.Popen(
            [*command, *([address, str(processes), str(process)] if processes > 1 else [])],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"bench_processes: a worker ended with {[process.returncode for process in started]}")
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("seconds ")]
    _, median, least = line.split()
    return float(median), float(least)


def _worker(arguments: argparse.Namespace, rest: list[str]) -> None:
    launch = Launch(coordinator=rest[0], processes=int(rest[1]), process=int(rest[2])) if rest else None
    with join(launch, Preemption()) as team:
        seconds = _steps(arguments.config, arguments.steps, arguments.rows)
        if team.share.process == 0:
            # gloo writes to standard output, too
            print(f"\nseconds {statistics.median(seconds)} {min(seconds)}", flush=True)


def _steps(path: str, steps: int, rows: int) -> list[float]:
    from sat_jax.mesh import MeshConfig, make_mesh
    from sat_jax.routing import free_trace
    from sat_jax.types import TokenBatch
    from train.config import load
    from train.place import place
    from train.setup import make_problem
    from train.state import init_policy, init_state
    from train.step import Step

    config = load(path)
    policy = make_problem(config).policy
    mesh = make_mesh(MeshConfig(data=2))
    graph, params = init_policy(policy, 0, mesh)
    optimizer = config.optim.transformation()
    state = init_state(params, optimizer, mesh)
    objective = dataclasses.replace(config.objective.config, kl_coef=0.0)
    step = Step(graph, optimizer, objective, config.sampling.temperature, state)
    rows, length = rows or config.batch.rows, config.batch.row_length
    draw = np.random.default_rng(0)
    token_BT = draw.integers(0, policy.vocab_size, (rows, length)).astype(np.int32)
    arrays = {
        "input_BT": token_BT,
        "target_BT": np.roll(token_BT, -1, 1),
        "segment_BT": np.ones((rows, length), np.int32),
        "position_BT": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask_BT": np.ones((rows, length), bool),
        "behavior_logp_BT": np.full((rows, length), -2.5, np.float32),
        "advantage_BT": draw.normal(size=(rows, length)).astype(np.float32),
        "lag_BT": np.zeros((rows, length), np.int32),
        "trace": free_trace(policy.moe_layers, rows, length, policy.experts_per_token, policy.experts),
    }
    batch = place((TokenBatch(**arrays),), mesh)  # type: ignore[arg-type]
    seconds = []
    for number in range(3 + steps):
        began = time.monotonic()
        state, _ = step.update(state, batch, step.measure(state, batch))
        if number >= 3:
            seconds.append(time.monotonic() - began)
    return seconds


if __name__ == "__main__":
    main()
