"""The bridge as an operator starts it: a process of its own, killed without warning, started again at its address."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LISTENS = re.compile(r"rollout-bridge: engine sglang-\w+ listens on (\S+)\n")


class BridgeProcess:
    """One bridge at a time, on one port."""

    def __init__(self, url: str, stage_folder: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._command = [sys.executable, "-m", "rollout_bridge.cli", "serve", "--engine", "sglang", "--url", url]
        self._command += ["--listen", self.address, "--stage-folder", str(stage_folder), *arguments]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts it; returns when it listens."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = _LISTENS.fullmatch(line)
        assert found, line
        assert found[1] == self.address

    def children(self) -> list[int]:
        """Process ids of what it has started."""
        assert self._process is not None
        pid = self._process.pid
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]

    def kill(self) -> None:
        """SIGKILL; a second time it does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()
