"""Starts the processes of a multi-host test on this machine: on a CPU, over gloo, with made-up devices."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from train.host_threads import host_threads

ROOT = Path(__file__).parents[2]
# Compiles in half the time; the same in every run that is compared.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """P processes of one command; `arguments` of process i is what `rest(i)` adds to it."""

    def __init__(self, folder: Path, command: Sequence[str], launches: Sequence[Sequence[str]], devices: int) -> None:
        """Starts them.

        Args:
          folder: for their output, output-<process>.txt.
          command: a module and its arguments.
          launches: what each process has in addition.
          devices: of each process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / f"output-{process}.txt" for process in range(len(launches))]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FAST}",
            "PYTHONPATH": str(ROOT),
        }
        environment |= host_threads(environment)
        self.processes = []
        for path, launch in zip(self.outputs, launches, strict=True):
            with path.open("a") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command, *launch],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def wait(self, seconds: float = 240) -> list[int]:
        """Waits for all; kills those that are still there in the end. Returns their exit codes."""
        try:
            for process in self.processes:
                process.wait(seconds)
        finally:
            self.kill()
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """Ends all that are still there."""
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, process: int) -> str:
        """What a process has written so far."""
        return self.outputs[process].read_text()

    def must_end_well(self, seconds: float = 240) -> None:
        """Waits for all.

        Raises:
          AssertionError: one did not end with 0; with its last lines.
        """
        codes = self.wait(seconds)
        for process, code in enumerate(codes):
            assert code == 0, f"process {process} of {len(codes)} ended with {code}: {self.said(process)[-3000:]}"


def positional(processes: int) -> list[list[str]]:
    """Launches for a test's own program."""
    coordinator = f"127.0.0.1:{free_port()}"
    return [[coordinator, str(processes), str(process)] for process in range(processes)] if processes > 1 else [[]]


def flags(processes: int) -> list[list[str]]:
    """Launches for `sat-jax train`."""
    names = ("--coordinator", "--processes", "--process")
    return [[part for pair in zip(names, launch, strict=False) for part in pair] for launch in positional(processes)]
