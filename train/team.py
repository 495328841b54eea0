"""What the processes of a run tell each other: small values, in rounds, from the loop's thread; and who has failed.

A round is named, every process takes part in the same ones in the same order, and it ends when all have spoken: no
process ever decides by something that another one may see differently. A watch in every process looks after the others;
it launches no computation. A failure of one is one of all, by its name. Alone, all of this is nothing.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from train.preemption import PREEMPTED, Preempted, Preemption
from train.share import Share

T = TypeVar("T")

_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 20.0  # without a sign of life, after which a process counts as gone
_GRACE_SECONDS = 15.0  # that an orderly end may take once another process is gone
_PREFIX = "sat-jax"


class ProcessLost(OSError):
    """Another process of the run has failed or is gone; it is named."""


class Store(Protocol):
    """What is needed of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a value."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value; raises when it does not come in time."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys below one, with their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forgets a value."""
        ...


class Team(Protocol):
    """The processes of a run, as one of them sees them."""

    @property
    def share(self) -> Share:
        """Which of them this is."""
        ...

    def exchange(self, what: str, value: T) -> list[T]:
        """Gives every process's value of the round `what`, in their order; what JSON holds."""
        ...

    def together(self, what: str, wait: Callable[[], T]) -> T:
        """Waits for something of this process until every process has its own.

        Raises:
          Preempted: this process or another one is wanted back.
        """
        ...

    def tell(self, kind: str, text: str) -> None:
        """Has process 0 record what happened here. Any thread may call it."""
        ...

    def on_event(self, record: Callable[[str, str], None]) -> None:
        """Where process 0 records what others tell."""
        ...

    def on_lost(self, wake: Callable[[BaseException], None]) -> None:
        """How a wait in this process is ended once another one is gone."""
        ...


class Alone:
    """A run of one process: nothing is exchanged and nobody is watched."""

    share = Share()

    def exchange(self, what: str, value: T) -> list[T]:
        """Its own."""
        return [value]

    def together(self, what: str, wait: Callable[[], T]) -> T:
        """Just waits."""
        return wait()

    def tell(self, kind: str, text: str) -> None:
        """Nobody else listens."""

    def on_event(self, record: Callable[[str, str], None]) -> None:
        """Nobody tells anything."""

    def on_lost(self, wake: Callable[[BaseException], None]) -> None:
        """Nobody is lost."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TeamConfig:
    """How long the processes of a run wait for each other, seconds.

    Attributes:
      deadline: of a round; processes have shorter deadlines of their own, which then say what is missing.
      silent: without a sign of life, after which a process counts as gone.
      grace: that an orderly end may take once another one is gone; then the process is ended.
      look: how often the watch looks.
    """

    deadline: float = 7200.0
    silent: float = _SILENT_SECONDS
    grace: float = _GRACE_SECONDS
    look: float = _LOOK_SECONDS


def _end_process(code: int, said: str) -> None:
    sys.stderr.write(f"sat-jax: {said}\n")
    sys.stderr.flush()
    os._exit(code)  # the loop's thread may wait in a collective that will never end


class Members:
    """The processes of a run, over the coordination service's store. `watching` is a context manager around the run."""

    def __init__(
        self,
        share: Share,
        store: Store,
        config: TeamConfig | None = None,
        end: Callable[[int, str], None] = _end_process,
    ) -> None:
        """Joins; nothing is sent yet.

        Args:
          share: which process this is.
          store: of the coordination service.
          config: deadlines.
          end: ends this process at once; called with the exit code and why.
        """
        self.share = share
        self._names = ("not met yet",) * share.processes
        self._store = store
        self._config = config or TeamConfig()
        self._end = end
        self._round = 0
        self._told = 0
        self._lock = threading.Lock()
        self._lost: ProcessLost | Preempted | None = None
        self._wake: Callable[[BaseException], None] = lambda _error: None
        self._record: Callable[[str, str], None] = lambda _kind, _text: None
        self._closing = threading.Event()

    def meet(self, name: str) -> None:
        """The first round: who everybody is.

        Args:
          name: of this process, such as its host's.
        """
        self._names = tuple(self.exchange("meeting", name))

    def name(self, process: int) -> str:
        """Of a process, in words."""
        return f"process {process} ({self._names[process]})"

    def exchange(self, what: str, value: T) -> list[T]:
        """As `Team.exchange`.

        Raises:
          ProcessLost: another process has failed or is gone.
          TimeoutError: one did not come.
        """
        number, own = self._round, self.share.process
        self._round += 1
        if number >= 2:  # all have read this one: each has spoken in the round after it
            self._store.key_value_delete(self._key(number - 2, own))
        self._store.key_value_set(self._key(number, own), json.dumps([what, value]))
        end = time.monotonic() + self._config.deadline
        values = []
        for process in range(self.share.processes):
            theirs, said = json.loads(self._await(process, number, what, end))
            if theirs != what:
                raise ValueError(
                    f"{self.name(process)}: expected to meet it at {what!r}, got it at {theirs!r}; this is a defect"
                )
            values.append(said)
        return values

    def together(self, what: str, wait: Callable[[], T]) -> T:
        """As `Team.together`."""
        result: list[T] = []
        with contextlib.suppress(Preempted):
            result.append(wait())
        if not all(self.exchange(what, bool(result))):
            raise Preempted
        return result[0]

    def tell(self, kind: str, text: str) -> None:
        """As `Team.tell`."""
        with self._lock:
            number, self._told = self._told, self._told + 1
        said = json.dumps([kind, f"{self.name(self.share.process)}: {text}"])
        self._store.key_value_set(f"{_PREFIX}/events/{self.share.process}.{number}", said)

    def on_event(self, record: Callable[[str, str], None]) -> None:
        """As `Team.on_event`."""
        self._record = record

    def on_lost(self, wake: Callable[[BaseException], None]) -> None:
        """As `Team.on_lost`."""
        self._wake = wake
        if self._lost is not None:
            wake(self._lost)

    @contextlib.contextmanager
    def watching(self, preemption: Preemption) -> Iterator[None]:
        """Looks after the others; what ends this process is told to them.

        Args:
          preemption: of this process: a SIGTERM here is one everywhere.

        Raises:
          ProcessLost: in place of the error of a computation that failed because another process is gone.
        """
        thread = threading.Thread(target=self._watch, args=(preemption,), name="team", daemon=True)
        thread.start()
        try:
            yield
            self.exchange("the end", None)
        except Preempted:
            self._say_end("preempted", "")
            raise
        except ProcessLost:
            raise  # who lost it was told by that process, or is found by everybody's watch
        except BaseException as error:
            lost = self._cause(error)
            if lost is not None:
                raise lost from error
            self._say_end("failed", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            raise
        finally:
            self._closing.set()
            thread.join()

    def _cause(self, error: BaseException) -> ProcessLost | Preempted | None:
        """Who is gone, when a collective failed: the watch needs a while to be sure of it."""
        if not _of_collective(error):
            return None
        end = time.monotonic() + self._config.silent + 5 * self._config.look
        while self._lost is None and time.monotonic() < end:
            time.sleep(min(0.1, self._config.look))
        return self._lost

    def _await(self, process: int, number: int, what: str, end: float) -> str:
        while True:
            if self._lost is not None:
                raise self._lost
            try:
                return self._store.blocking_key_value_get(self._key(number, process), 1000)
            except Exception as error:  # JAX's own error, whose type is not public: nothing has come in that second
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{what}: expected {self.name(process)} within {self._config.deadline:g} s, got nothing from it; "
                    "it lives: its own log says what it does"
                )

    def _key(self, number: int, process: int) -> str:
        return f"{_PREFIX}/rounds/{number}/{process}"

    def _say_end(self, kind: str, text: str) -> None:
        with contextlib.suppress(Exception):  # the service may be gone, and the others then know that
            self._store.key_value_set(f"{_PREFIX}/ends/{self.share.process}", json.dumps([kind, text]))

    def _watch(self, preemption: Preemption) -> None:
        seen: dict[int, tuple[str, float]] = {}
        heard: set[str] = set()
        beats, asked = 0, False
        while not self._closing.wait(self._config.look):
            beats += 1
            try:
                self._store.key_value_set(f"{_PREFIX}/alive/{self.share.process}", str(beats), allow_overwrite=True)
                if preemption.asked and not asked:
                    asked = True
                    self._store.key_value_set(f"{_PREFIX}/asked/{self.share.process}", "")
                if not preemption.asked and self._store.key_value_dir_get(f"{_PREFIX}/asked/"):
                    preemption.ask()
                self._hear(heard)
                self._judge(dict(self._read("ends")), dict(self._read("alive")), seen)
            except Exception as error:
                if not self._closing.is_set():
                    self._lose(ProcessLost(f"the coordination service of {self.name(0)} does not answer: {error}"))
                return
            if self._lost is not None:
                return

    def _read(self, folder: str) -> list[tuple[int, str]]:
        found = self._store.key_value_dir_get(f"{_PREFIX}/{folder}/")
        return [(int(key.rpartition("/")[2]), value) for key, value in found]

    def _judge(self, ends: dict[int, str], alive: dict[int, str], seen: dict[int, tuple[str, float]]) -> None:
        now = time.monotonic()
        for process in range(self.share.processes):
            if process == self.share.process:
                continue
            if process in ends:
                kind, text = json.loads(ends[process])
                if kind == "preempted":
                    self._lose(Preempted(), f"{self.name(process)} was asked to stop")
                else:
                    self._lose(ProcessLost(f"{self.name(process)} failed: {text}"))
                return
            beat = alive.get(process, "")
            if process not in seen or seen[process][0] != beat:
                seen[process] = (beat, now)
            elif now - seen[process][1] > self._config.silent:
                said = f"{self.name(process)} is gone: no sign of life for {self._config.silent:g} s"
                self._lose(ProcessLost(said))
                return

    def _lose(self, lost: ProcessLost | Preempted, why: str = "") -> None:
        """Wakes the loop's thread; if it does not end by itself, it sits in a collective, and the process is ended."""
        if isinstance(lost, ProcessLost):
            lost.add_note("start the same command again in every process to resume")
        self._lost = lost
        self._wake(lost)
        if not self._closing.wait(self._config.grace):
            code = PREEMPTED if isinstance(lost, Preempted) else 1
            self._end(code, f"error: {why or lost}")

    def _hear(self, heard: set[str]) -> None:
        if self.share.process:
            return
        for key, value in self._store.key_value_dir_get(f"{_PREFIX}/events/"):
            if key not in heard:
                heard.add(key)
                self._record(*json.loads(value))


def _of_collective(error: BaseException) -> bool:
    """Whether a computation over several processes failed, by its type or text: JAX has no type for that."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or any(
        word in str(error) for word in ("Gloo", "coordination service", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    )


def shared(team: Team, what: str, value: Any) -> Any:
    """Process 0's value, in every process."""
    return team.exchange(what, value if team.share.process == 0 else None)[0]
