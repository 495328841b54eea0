"""`sat-jax bench async`: what asynchrony gains, on one machine, with an engine slowed to the trainer's pace.

Real runs of a config in processes of their own, three kinds in turns, so that a machine that is slow for a while is
slow for all. A bounded one with the engine at full speed says how long the trainer takes for a step when it never waits
for samples: its pace. With an engine that takes as long for a step's prompts follow a synchronous and a bounded run.
Two is the most that overlap can give.
Trainer and engine have devices of their own in a real run. Here each has half of the cores, in every run alike: else
one takes the other's processor time as soon as both have something to do, and what overlaps is not faster. A stand-in
engine costs next to no processor time, as if it were elsewhere: then the trainer has the machine.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.config import RunConfig, load, to_toml
from train.engine_process import EngineProcessConfig, LocalEngineProcess
from train.local_engine import LocalEngineConfig
from train.run_folder import METRICS, read_lines
from train.setup import make_problem

_SKIPPED = 8  # steps at a run's beginning, in which programs compile and buffers fill
_CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
      config: of the run; its warm start, evaluations and checkpoints are left out.
      max_lag: of the bounded runs, steps.
      steps: of every run, the first few of which are not counted.
      rounds: of a synchronous and a bounded run each.
      stand_in: sample made-up tokens in place of the policy's.
    """

    config: Path
    max_lag: int = 1
    steps: int = 48
    rounds: int = 3
    stand_in: bool = False

    def __post_init__(self) -> None:
        if self.steps <= _SKIPPED or self.rounds < 1:
            raise ValueError(f"bench: expected more than {_SKIPPED} steps and a round, got {self.steps}, {self.rounds}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured.

    Attributes:
      trainer: seconds that the trainer takes for a step when samples are always there, receiving them and publishing
        included; and the engine for a step's prompts; by round.
      synchronous, bounded: mean seconds of a step, by round.
      max_lag: the greatest lag that a bounded run trained on.
    """

    trainer: tuple[float, ...]
    synchronous: tuple[float, ...]
    bounded: tuple[float, ...]
    max_lag: int

    @property
    def gains(self) -> tuple[float, ...]:
        """Throughput of bounded over synchronous, by round."""
        return tuple(s / b for s, b in zip(self.synchronous, self.bounded, strict=True))


def measure(options: Options) -> Result:
    """Runs everything; minutes.

    Raises:
      ValueError: the config cannot be used, or a run failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name:
        bench = _Bench(Path(name), options)
        trainers, synchronous, bounded, lags = [], [], [], []
        settings = ("schedule.mode=bounded", f"schedule.max_lag={options.max_lag}")
        for number in range(options.rounds):
            trainers.append(_mean(bench.run(f"pace-{number}", *settings, pace=0.0), "seconds/step"))
            pace = trainers[-1] / bench.config.batch.groups_per_step
            rows = bench.run(f"synchronous-{number}", "schedule.lag=0", pace=pace)
            synchronous.append(_mean(rows, "seconds/step"))
            rows = bench.run(f"bounded-{number}", *settings, pace=pace)
            bounded.append(_mean(rows, "seconds/step"))
            lags.append(max(row["lag/max"] for row in rows))
    return Result(
        trainer=tuple(trainers), synchronous=tuple(synchronous), bounded=tuple(bounded), max_lag=int(max(lags))
    )


def report(result: Result, *, as_json: bool) -> str:
    """For a program, or as a table."""
    gain = statistics.median(result.gains)
    if as_json:
        return json.dumps({**dataclasses.asdict(result), "gains": result.gains, "gain": gain})
    lines = [
        "| round | trainer = engine, s a step | synchronous, s a step | bounded, s a step | throughput |",
        "|---|---|---|---|---|",
    ]
    rounds = zip(result.trainer, result.synchronous, result.bounded, result.gains, strict=True)
    lines += [f"| {n} | {t:.3f} | {s:.3f} | {b:.3f} | {g:.2f} |" for n, (t, s, b, g) in enumerate(rounds, start=1)]
    return "\n".join([*lines, "", f"median {gain:.2f} times the throughput, lag at most {result.max_lag}"])


class _Bench:
    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        self._options = options
        self._settings = (
            f"steps={options.steps}",
            "warm_start.steps=0",
            "eval.prompts=0",
            "eval.every=0",
            "checkpoint.every=0",
            "rollout.engine=remote",
            *(("rollout.probe_tolerance=1.0",) if options.stand_in else ()),  # it reproduces no probe
        )
        self.config = self._load("pace", "127.0.0.1:1")
        self._cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), **_CACHE}

    def run(self, name: str, *settings: str, pace: float) -> list[dict[str, Any]]:
        """The counted steps of a run against an engine of its own, which takes `pace` seconds a request."""
        config = self.config
        engine = LocalEngineConfig(
            dtype=config.rollout.dtype, slots=config.rollout.slots, max_tokens=config.batch.row_length
        )
        process = EngineProcessConfig(
            policy=make_problem(config).policy,
            engine=engine,
            log=self._folder / f"{name}.log",
            threads=1,
            environment=self._cache,
            seconds_per_request=pace,
            stand_in=self._options.stand_in,
        )
        first, second = (set(), set()) if self._options.stand_in else _halves()
        with contextlib.ExitStack() as stack:
            with _on(second):
                served = stack.enter_context(LocalEngineProcess(process))
            path = self._folder / f"{name}.toml"
            path.write_text(to_toml(self._load(name, served.endpoint, *settings)))
            with _on(first):
                self._train(path)
        return read_lines(self._folder / name / METRICS)[_SKIPPED:]

    def _load(self, name: str, endpoint: str, *settings: str) -> RunConfig:
        endpoints = f'rollout.endpoints=["{endpoint}"]'
        return load(self._options.config, [*self._settings, f"name={name}", endpoints, *settings])

    def _train(self, config: Path) -> None:
        command = [sys.executable, "-m", "train.cli", "train", str(config), "--runs", str(self._folder), "--quiet"]
        done = subprocess.run(
            command, env={**os.environ, **self._cache}, capture_output=True, text=True, check=False, timeout=3600
        )
        if done.returncode:
            raise ValueError(f"bench: expected {config.stem} to end well, got {done.stderr[-2000:]}")


def _halves() -> tuple[set[int], set[int]]:
    """The cores of trainer and engine; both have all of them where there is one, or where a process cannot be kept."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """What is started within stays on these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row.get(name, 0.0) for row in rows)
