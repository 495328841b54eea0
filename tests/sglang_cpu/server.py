"""The real SGLang as a process of a test: started, awaited, killed without warning, started again on the same port."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).with_name("shim")
START_SECONDS = 400.0


def python_of_sglang() -> Path:
    """The environment's interpreter; SGLANG_VENV names another environment."""
    found = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
    assert found.exists(), f"{found}: no SGLang environment; run these tests by `make test-sglang`"
    return found


class SglangProcess:
    """One server at a time, in a session of its own, on one port."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._model = model
        self._arguments = arguments
        self._process: subprocess.Popen | None = None

    def start(self, *, wait: bool = True) -> None:
        """Starts it; returns when it is ready."""
        command = [str(python_of_sglang()), "-m", "sglang.launch_server", "--model-path", str(self._model)]
        command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-total-tokens", "4096", "--max-running-requests", "32", "--enable-return-routed-experts"]
        command += ["--weight-version", "base", "--sleep-on-idle", "--skip-tokenizer-init", "--skip-server-warmup"]
        environment = {**os.environ, "PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        environment["HF_HUB_OFFLINE"] = "1"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START_SECONDS
        while not self._ready():
            assert self._process is not None
            assert self._process.poll() is None, f"it ended; {self.tail()}"
            assert time.monotonic() < end, f"not ready within {START_SECONDS} s; {self.tail()}"
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    @property
    def group(self) -> int:
        """The process group of all of its processes."""
        assert self._process is not None
        return self._process.pid

    def alive(self) -> bool:
        """Whether it answers."""
        return self._ready()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def post(self, path: str, body: dict, key: str | None = None) -> httpx2.Response:
        """What nobody but a test would ask of it behind the bridge's back."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.post(self.url + path, json=body, headers=headers, timeout=60.0, trust_env=False)

    def get(self, path: str) -> httpx2.Response:
        """The same."""
        return httpx2.get(self.url + path, timeout=60.0, trust_env=False)

    def _ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx2.TransportError:
            return False
