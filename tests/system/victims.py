"""What a siege strikes: the trainer's program and fake engines, each in a process of its own."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.system.proxy import Proxy
from train.config import RunConfig
from train.local_engine import LocalEngineConfig, model_info
from train.setup import make_problem

ROOT = Path(__file__).parents[2]


class Engine:
    """A fake engine in a process, behind a proxy; both keep their ports over a restart of the engine."""

    def __init__(self, model: dict, seconds_per_token: float) -> None:
        self._model = model
        self._seconds_per_token = seconds_per_token
        self._port = 0
        self.process: subprocess.Popen | None = None
        self.start()
        self.proxy = Proxy(self._port)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.chaos_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        said = {
            "model": self._model,
            "listen": f"127.0.0.1:{self._port}",
            "seconds_per_token": self._seconds_per_token,
        }
        self.tell(said)
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())

    def tell(self, said: dict) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(said) + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.kill()
        self.start()


def model_of(config: RunConfig) -> dict:
    """What an engine of this run says that it holds."""
    engine = LocalEngineConfig(
        dtype=config.rollout.dtype, slots=config.rollout.slots, max_tokens=config.batch.row_length
    )
    return dataclasses.asdict(model_info(make_problem(config).policy, engine))


class Trainer:
    """The program in a process of its own, with its output in a file."""

    def __init__(self, config: Path, runs: Path, cache: Path, *, jumping_clock: bool = False) -> None:
        paths = [str(ROOT), *([str(Path(__file__).parent / "clock_jumps")] if jumping_clock else [])]
        environment = {
            **os.environ,
            "XLA_FLAGS": "",  # several fake devices, as the tests' own process has, would be another machine
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.output = runs / "output.txt"
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train.cli", "train", str(config), "--runs", str(runs), "--quiet"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def fill_disk(self) -> None:
        """No file of the process may grow beyond what it has: what a full disk looks like to it."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1000, 1000))

    def engines(self) -> list[int]:
        """Process ids of the local engines that it started."""
        found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        rows = [line.split(None, 2) for line in found.stdout.splitlines()]
        return [int(row[0]) for row in rows if int(row[1]) == self.process.pid and "engine_main" in row[2]]
