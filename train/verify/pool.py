"""Verifiers' processes: started, asked, timed, killed. Every method may be called from any thread.

A process that hangs is killed with all that it started and replaced at the next attempt, so that nothing an attempt
does can reach the one after it. Linux and macOS only (sessions, resource limits).
"""

import contextlib
import dataclasses
import enum
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from train.strict_toml import Range, check_fields

_START_SECONDS = 60.0  # to import a user's module, or sympy on a loaded machine
_REPLY_BYTES = 1 << 16  # longer than any honest answer
_POLL_SECONDS = 0.5


class Unverified(enum.Enum):
    """Why an attempt has no reward: its completion is then left out of its group and of the loss."""

    TIMEOUT = "timeout"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    """How verifiers run that have processes of their own; `exact_match` and `random` need none.

    Attributes:
      workers: processes.
      seconds: of one attempt, after which its process is killed.
      memory_mb: address space of a process, MiB.
      on_timeout: of an attempt. mask: its completion is left out of its group and of the loss; zero: its reward is 0;
        stop: the run stops. Counted in any case.
      on_error: the same for a function that raises, dies, or returns no finite number.
      overlong_cache: DAPO's soft punishment of long completions: width of the ramp below sampling.max_new_tokens,
        tokens; 0 = none.
      overlong_factor: size of the full punishment, reward units.
    """

    workers: Annotated[int, Range(at_least=1, at_most=256)] = 2
    seconds: Annotated[float, Range(above=0)] = 10.0
    memory_mb: Annotated[int, Range(at_least=256)] = 4096
    on_timeout: Literal["mask", "zero", "stop"] = "mask"
    on_error: Literal["mask", "zero", "stop"] = "stop"
    overlong_cache: Annotated[int, Range(at_least=0)] = 0
    overlong_factor: Annotated[float, Range(at_least=0)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "verifier")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounts:
    """What happened since the pool was made.

    Attributes:
      attempts: answered or given up.
      timeouts: given up after `seconds`.
      errors: the function raised, died, or returned no finite number.
      starts: processes started.
    """

    attempts: int = 0
    timeouts: int = 0
    errors: int = 0
    starts: int = 0


class VerifierPool:
    """Asks a function about attempts, each in a process that may be killed."""

    def __init__(self, function: str, config: VerifierConfig) -> None:
        """Starts nothing yet.

        Args:
          function: a rule of `train.verify.worker.RULES`, or a user's "module:function".
          config: how.
        """
        self._function = function
        self._config = config
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(config.workers):
            self._free.put(None)
        self._lock = threading.Lock()
        self._counts = PoolCounts()
        self._running: set[_Process] = set()
        self._closed = False

    def check(self) -> None:
        """Starts a process, so that a function that cannot be loaded is an error before the run.

        Raises:
          ValueError: it cannot; says why.
        """
        process = self._free.get()
        try:
            process = process or self._start()
        finally:
            self._free.put(process)

    def ask(self, fields: Mapping[str, Any], where: str) -> float | Unverified:
        """The reward of one attempt; blocks until it is known, at most about `seconds`.

        Args:
          fields: keyword arguments of the function, JSON.
          where: names the attempt in errors.

        Returns:
          A finite number, or why there is none where the config says to go on.

        Raises:
          ValueError: the function failed or took too long, and the config says to stop.
        """
        process = self._free.get()
        try:
            process = process or self._start()
            answer = process.ask(fields, self._config.seconds)
            if "reward" not in answer or not answer["alone"]:
                process = self._end(process)
        except _Gone as gone:
            answer = {"error": str(gone)}
            process = self._end(process)
        except TimeoutError:
            answer = {"timeout": True}
            process = self._end(process)
        finally:
            self._free.put(process)
        return self._judge(answer, where)

    def counts(self) -> PoolCounts:
        """What happened so far."""
        return self._counts

    def close(self) -> None:
        """Kills every process; an attempt in progress fails."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()  # whoever waits for it sees its pipe end
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._free.get_nowait())
        for process in taken:
            self._end(process)
            self._free.put(None)

    def _start(self) -> "_Process":
        process = _Process(self._function, self._config.memory_mb << 20)
        with self._lock:
            closed = self._closed
            self._running.add(process)
            self._counts = dataclasses.replace(self._counts, starts=self._counts.starts + 1)
        try:
            if closed:
                raise ValueError("reward: expected a verifier that is open, got one that was closed")
            answer = process.receive(_START_SECONDS)
        except (_Gone, TimeoutError) as error:
            answer = {"error": f"{error or f'no answer within {_START_SECONDS:g} s'}"}
        except BaseException:
            self._end(process)
            raise
        if "error" in answer:
            self._end(process)
            raise ValueError(
                f"reward: expected a function that loads, got {self._function!r}: {answer['error']}; it is imported in "
                "a process of its own, from the folder where the run was started or an installed package"
            )
        return process

    def _end(self, process: "_Process | None") -> None:
        if process is not None:
            with self._lock:
                self._running.discard(process)
            process.end()

    def _judge(self, answer: Mapping[str, Any], where: str) -> float | Unverified:
        late, failed = "timeout" in answer, "error" in answer
        with self._lock:
            was = self._counts
            self._counts = dataclasses.replace(
                was, attempts=was.attempts + 1, timeouts=was.timeouts + late, errors=was.errors + failed
            )
        if not late and not failed:
            return answer["reward"]
        if late:
            does, outcome, said = self._config.on_timeout, Unverified.TIMEOUT, f"none in {self._config.seconds:g} s"
        else:
            does, outcome, said = self._config.on_error, Unverified.ERROR, answer["error"]
        if does == "stop":
            key = "on_timeout" if late else "on_error"
            raise ValueError(
                f"reward of {where}: expected a finite number from {self._function!r}, got {said}; repair the "
                f"function, or set verifier.{key} to mask or zero"
            )
        return 0.0 if does == "zero" else outcome


class _Gone(Exception):
    """The process ended, or wrote what is no answer."""


class _Process:
    """One process, leader of its own session; at most one attempt at a time."""

    def __init__(self, function: str, memory_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.verify.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._asked = 0
        # An empty entry is the present folder, which the child shares.
        self._pending = _line({"function": function, "memory_bytes": memory_bytes, "path": sys.path})

    def receive(self, seconds: float) -> dict[str, Any]:
        """Sends what is to be sent and returns one answer."""
        deadline = time.monotonic() + seconds
        while self._pending:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                self._pending = self._pending[os.write(self._in, self._pending) :]
            except BrokenPipeError:
                raise _Gone(self._epitaph()) from None
        reply = b""
        while not reply.endswith(b"\n"):
            self._wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, 4096)
            if not part:
                raise _Gone(self._epitaph())
            reply += part
            if len(reply) > _REPLY_BYTES:
                raise _Gone("more than 64 KiB where an answer was due")
        return _parsed(reply)

    def ask(self, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one attempt."""
        self._asked += 1
        self._pending = _line({"id": self._asked, **fields})
        answer = self.receive(seconds)
        if answer.get("id") != self._asked:
            raise _Gone(f"an answer to another attempt: {str(answer)[:200]}")
        return answer

    def kill(self) -> None:
        """Ends it and everything in its session's group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills it and frees what this process holds of it; only for the thread that has taken it."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it was opened"
            pipe.close()

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()  # not select, which knows no descriptor above 1023
        poll.register(descriptor, event)
        while not poll.poll(1000 * min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)):
            if time.monotonic() >= deadline:
                raise TimeoutError
            # A fork of it may hold its end of the pipe open after it has died.
            if self._process.poll() is not None:
                raise _Gone(self._epitaph())

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return "a closed pipe from a process that goes on"
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"the end of its process by {how}"


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _parsed(reply: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(reply)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _Gone(f"what is no answer: {reply[:200]!r}")
    return answer
