"""Whole runs of several processes, at small sizes: how they are started, watched and looked into."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.multihost.processes import Processes, flags
from tests.system.test_whole_run import SMALL
from train.config import load, to_toml

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, *overrides: str, file: str = "small.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    settings = [*SMALL, "name=small", "mesh.data=2", "eval.prompts=8", *overrides]
    path.write_text(to_toml(load(ROOT / "configs" / "quickstart.toml", settings)))
    return path


def start(config: Path, processes: int, devices: int, *arguments: str) -> Processes:
    """Starts a run beside its config, in `small/`."""
    runs = config.parent
    command = ["train.cli", "train", str(config), "--runs", str(runs), "--quiet", *arguments]
    return Processes(runs, command, flags(processes), devices)


def run(config: Path, processes: int, devices: int, *arguments: str) -> Path:
    """A run to its end; returns its folder."""
    start(config, processes, devices, *arguments).must_end_well()
    return config.parent / "small"


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    path = folder / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition: Callable[[], bool], started: Processes, seconds: float = 200) -> None:
    """Waits while all processes run."""
    end = time.monotonic() + seconds
    while not condition():
        ended = [process for process, popen in enumerate(started.processes) if popen.poll() is not None]
        assert not ended, f"process {ended[0]} ended: {started.said(ended[0])[-3000:]}"
        assert time.monotonic() < end, started.said(0)[-3000:]
        time.sleep(0.05)


def wait_for_steps(folder: Path, more: int, started: Processes) -> None:
    """Waits until a run has made so many steps beyond those that the folder tells of already."""
    before = max((row["version"] for row in rows(folder)), default=0)
    wait_for(lambda: max((row["version"] for row in rows(folder)), default=0) >= before + more, started)


def engine_of(process: subprocess.Popen) -> int:
    """Process id of the local engine that a trainer's process has started."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    lines = [line.split(None, 2) for line in found.stdout.splitlines()]
    (engine,) = [int(pid) for pid, parent, args in lines if int(parent) == process.pid and "engine_main" in args]
    return engine


@contextlib.contextmanager
def paused(pid: int) -> "Iterator[None]":
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended with its trainer
            os.kill(pid, signal.SIGCONT)


def ledger(folder: Path) -> Sequence[dict]:
    return rows(folder, "ledger.jsonl")
