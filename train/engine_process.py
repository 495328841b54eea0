"""Starts the local engine in its own process, watches it, and starts it again on the same port.

The child has its own JAX and is reached over gRPC like any other engine. It ends by itself within seconds of its
parent's death, however that came: the pipe on its standard input closes, and it looks who its parent is.
"""

import dataclasses
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sat_jax.model import PolicyConfig
from train.local_engine import LocalEngineConfig

_TAIL_LINES = 20
_STOP_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineProcessConfig:
    """What to start, and how often.

    Attributes:
      policy: the architecture.
      engine: how it samples.
      listen: host:port of its bridge; port 0 takes any free one, which it then keeps.
      log: file that its standard error is appended to.
      threads: of the device when it is the CPU, 1 leaves the other cores to the trainer; None = as many as cores.
      environment: variables for the child beside this process's own, e.g. {"JAX_PLATFORMS": "cpu"}.
      start_seconds: within which it must listen (it compiles after that).
      max_restarts: in the whole run.
      seconds_per_request: slows it down to a request in that time; 0 = as fast as it can (see `train.paced_engine`).
      stand_in: samples made-up tokens in place of the policy's, at next to no cost: for benches.

    Raises:
      ValueError: a figure is out of range.
    """

    policy: PolicyConfig
    engine: LocalEngineConfig
    listen: str = "127.0.0.1:0"
    log: Path
    threads: int | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start_seconds: float = 120.0
    max_restarts: int = 5
    seconds_per_request: float = 0.0
    stand_in: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"engine process: expected at least 1 thread, got {self.threads}")
        if self.max_restarts < 0 or not self.start_seconds > 0:
            raise ValueError(
                f"engine process: expected max_restarts >= 0 and start_seconds > 0, got {self.max_restarts} and "
                f"{self.start_seconds}"
            )


class LocalEngineProcess:
    """A context manager that owns the child. Every method may be called from any thread."""

    def __init__(self, config: EngineProcessConfig) -> None:
        """Starts nothing yet."""
        self._config = config
        self._lock = threading.RLock()
        self._listen = config.listen
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._restarts = 0

    def __enter__(self) -> "LocalEngineProcess":
        """Starts the child and waits until it listens.

        Raises:
          ValueError: the port is in use, or the configuration is refused.
          RuntimeError: it died, or did not listen in time; with the last lines of its log.
        """
        with self._lock:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the child: SIGTERM, and SIGKILL after five seconds."""
        with self._lock:
            self._stop()
            self._process = None

    @property
    def endpoint(self) -> str:
        """host:port of its bridge, the same after a restart."""
        return self._listen

    @property
    def pid(self) -> int:
        """Process id of the present child."""
        with self._lock:
            return self._alive_or_not().pid

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts

    def poll(self) -> str | None:
        """None while it runs, else how it ended and the last lines of its log."""
        with self._lock:
            code = self._alive_or_not().poll()
            return None if code is None else self._epitaph(code)

    def restart(self, reason: str) -> None:
        """Ends the child if it still runs and starts another on the same port; it serves nothing until published to.

        Args:
          reason: why, for the log and for the error when it was too often.

        Raises:
          RuntimeError: `max_restarts` is used up, or the new one died or did not listen in time.
          ValueError: the port is in use by now.
        """
        with self._lock:
            self._alive_or_not()
            self._stop()
            if self._restarts >= self._config.max_restarts:
                raise RuntimeError(
                    f"local engine: expected at most {self._config.max_restarts} restarts in a run, got one more: "
                    f"{reason} (log {self._config.log}); see why it ends:\n{self._log_tail()}"
                )
            self._restarts += 1
            self._start(reason)

    def _start(self, reason: str = "the run starts") -> None:
        config = self._config
        config.log.parent.mkdir(parents=True, exist_ok=True)
        with config.log.open("ab") as log:
            log.write(f"local engine: starts because {reason}\n".encode())
            log.flush()
            self._log_start = log.tell()
            # A session of its own, so that Ctrl-C in the terminal reaches the trainer alone, which then decides.
            process = subprocess.Popen(
                [sys.executable, "-m", "train.engine_main"],
                bufsize=0,  # what is buffered here, `select` would not see
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        try:
            self._send(process)
            answer = self._await_answer(process)
        except BaseException:
            self._stop()
            raise
        host = self._listen.rpartition(":")[0]
        self._listen = f"{host}:{answer['port']}"

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        config = self._config
        threads = {} if config.threads is None else {"NPROC": str(config.threads)}  # what XLA's CPU client reads
        request = {
            "policy": dataclasses.asdict(config.policy),
            "engine": dataclasses.asdict(config.engine),
            "listen": self._listen,
            "environment": {**threads, **config.environment},
            "seconds_per_request": config.seconds_per_request,
            "stand_in": config.stand_in,
        }
        pipe = _pipe(process.stdin)
        try:
            pipe.write(json.dumps(request).encode() + b"\n")  # and stays open: its end is the child's end
        except BrokenPipeError as error:
            raise RuntimeError(f"local engine: expected it to listen, got {self._epitaph(process.wait())}") from error

    def _await_answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        deadline = time.monotonic() + self._config.start_seconds
        pipe, line = _pipe(process.stdout), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(
                    f"local engine: expected it to listen within {self._config.start_seconds} s, got nothing (log "
                    f"{self._config.log}); allow more start_seconds or see its last lines:\n{self._log_tail()}"
                )
            part = pipe.read(4096)
            if not part:
                raise RuntimeError(f"local engine: expected it to listen, got {self._epitaph(process.wait())}")
            line += part
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"local engine: {answer['error']}")
        return answer

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _alive_or_not(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("local engine: expected a started one, got one that is closed or was never entered")
        return self._process

    def _epitaph(self, code: int) -> str:
        how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
        return f"{how} (log {self._config.log}); its last lines:\n{self._log_tail()}"

    def _log_tail(self) -> str:
        with self._config.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(it wrote nothing)"


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None
    return pipe
