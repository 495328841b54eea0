"""One engine of a fleet: followed from its first answer to its loss and back, and brought to the published version.

A thread follows the engine's state. Whatever does not serve what this fleet published (it restarted, it missed a
commit) gets it pushed again before it gets traffic.

    LOST ──answers──> BEHIND ──serves the published version──> READY <──> HELD (paused)
     ^                                                           │
     └───────────no answer────── CHECKING <──a call failed───────┘        FAILED: for good; says why
"""

import dataclasses
import enum
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from rollout_bridge.client import Client, Stream
from rollout_bridge.errors import BridgeError, Fatal, Left, NotStaged, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    InFlight,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    Serving,
    StageReport,
)
from rollout_bridge.weights import Weights

T = TypeVar("T")

_FOLLOW_SECONDS = 600.0
_RECONNECT_SECONDS = (0.1, 2.0)


class State(enum.Enum):
    """Where an endpoint stands. Only READY gets traffic."""

    LOST = "lost"
    CHECKING = "checking"
    BEHIND = "behind"
    HELD = "held"
    READY = "ready"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Published:
    """What every engine of a fleet shall serve, and how it was committed."""

    weights: Weights
    probe: Probe
    in_flight: InFlight

    @property
    def version(self) -> int:
        """Its version."""
        return self.weights.version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ties:
    """What an endpoint shares with its fleet.

    Attributes:
      changed: guards the states and loads of all endpoints; notified when one changes.
      target: what shall be served; None before the first commit.
      agree: takes an engine's model; raises Fatal when it is not the others'.
      on_lost: called with the endpoint's address before each attempt to reach a lost engine again.
      on_event: called with a kind and a text.
      heartbeat_seconds: of the status stream.
    """

    changed: threading.Condition
    target: Callable[[], Published | None]
    agree: Callable[[str, ModelInfo], None]
    on_lost: Callable[[str], None] | None
    on_event: Callable[[str, str], None]
    heartbeat_seconds: float


class Endpoint:
    """One engine, by its address."""

    def __init__(self, client: Client, ties: Ties) -> None:
        self.client = client
        self.address = client.endpoint
        self.state = State.LOST
        self.reason = "not reached yet"
        self.status: EngineStatus | None = None
        self.answered = False
        self.failure: Exception | None = None
        self.load = 0  # members in flight
        self.streams = 0
        self._ties = ties
        self._engine_id = ""
        self._confirmed = -1  # the last version that this fleet committed on this instance
        self._verified: set[int] = set()  # versions that this instance may have sampled with
        self._pushing = threading.Lock()
        self._settled = threading.Event()
        self._settled.set()
        self._closing = threading.Event()
        self._leaving = threading.Event()
        self._pause = _RECONNECT_SECONDS[0]
        self._watch: Stream[EngineStatus] | None = None
        self._missed = True  # it was said that it does not answer; before it first serves nobody need be told
        self._left: Stream[EngineStatus] | None = None  # the watch that we ended ourselves, to look again
        self._thread = threading.Thread(target=self._live, name=f"fleet-{self.address}", daemon=True)

    def start(self) -> None:
        """Begins to follow the engine."""
        self._thread.start()

    def leave(self) -> None:
        """Takes no more part in a push. Its router asks nothing new of it; what runs there goes on until `close`."""
        self._leaving.set()

    def close(self) -> None:
        """Gives the engine back and ends everything. Returns once the thread has ended, or a hook has held it long."""
        self._closing.set()
        self.recheck()
        if self.client.options.lease is not None and self.state is not State.LOST:
            try:
                self.client.release()
            except BridgeError as error:  # nothing else is to be done here: it is free by itself, a little later
                logging.getLogger(__name__).info("%s keeps the lease until it has run out: %s", self.address, error)
        self.client.close()
        self._thread.join(timeout=5.0)

    def recheck(self) -> None:
        """Looks at the engine at once: what shall be served may have changed."""
        self._left = self._watch
        if self._left is not None:
            self._left.cancel()

    def suspect(self, error: Exception) -> None:
        """A call failed: no traffic until the engine has told its state again."""
        with self._ties.changed:
            if self.state is not State.READY:
                return  # it is being looked at
            self._set(State.CHECKING, str(error))
        self.recheck()

    def admit(self, completion: Completion) -> None:
        """Lets a completion pass if its tokens and routes are of versions that were verified on this very instance.

        Raises:
          Retryable: another instance sampled it.
          Fatal: a version was never verified.
        """
        where = f"completion {completion.request_id}/{completion.member} of {self.address}"
        if completion.engine_id != self._engine_id:
            raise Retryable(f"{where}: expected engine {self._engine_id}, got {completion.engine_id}; it restarted")
        versions = _distinct(completion.version)
        if completion.trace is not None:
            versions |= _distinct(completion.trace.version_T)
        if versions <= self._verified:
            return
        self._settled.wait(self.client.options.commit_seconds)  # the answer of the commit may still be on its way
        if not versions <= self._verified and self._ties.target() is None:
            self._note(self.client.status())  # another fleet publishes
        if not versions <= self._verified:
            raise Fatal(
                f"{where}: expected tokens and routes of verified versions {sorted(self._verified)}, got "
                f"{sorted(versions)} (engine {completion.engine_id})"
            )

    def stage(self, weights: Weights, seconds: float) -> StageReport:
        """Pushes weights; waits for an engine that is away.

        Raises:
          Retryable: not done within `seconds`.
          Fatal: never will be.
        """
        return self._until(
            f"stage of version {weights.version}", seconds, lambda s: self.client.stage(weights, seconds=s)
        )

    def commit(self, published: Published, seconds: float) -> ProbeReport:
        """Makes staged weights live, pushing them again if the engine lost them.

        Raises:
          Retryable: not done within `seconds`.
          Fatal: never will be.
        """
        what = f"commit of version {published.version}"
        report = self._until(what, seconds, lambda s: self._commit(published, s))
        self.recheck()
        return report

    def discard(self) -> None:
        """Drops what is staged."""
        self.client.discard()

    def describe(self) -> str:
        """State, reason and engine in a line; the condition need not be held."""
        engine = self.status
        text = f"{self.address} {self.state.value}"
        if self.state is not State.READY:
            text += f" ({self.reason})"
        if engine is not None:
            text += (
                f": engine {engine.engine_id} {engine.serving.value} at version {engine.version}, "
                f"{engine.running} running, {engine.waiting} waiting"
            )
        return f"{text}, {self.load} members in flight"

    def _live(self) -> None:
        """The thread: follows and reconnects until closed. What ends it otherwise, whoever needs this engine raises."""
        try:
            while not self._closing.is_set():
                try:
                    self._follow()
                except Retryable as error:
                    self._reconnect_after(error)
        except Exception as error:
            if not self._closing.is_set():
                self._fail(error)

    def _reconnect_after(self, error: Retryable) -> None:
        ours = self._watch is not None and self._watch is self._left  # we ended it ourselves, to look again
        if ours or self._closing.is_set():
            return
        self._lose(error)
        self._closing.wait(random.uniform(0.5, 1.0) * self._pause)
        self._pause = min(2 * self._pause, _RECONNECT_SECONDS[1])

    def _follow(self) -> None:
        self._watch = None
        self._ties.agree(self.address, self.client.model())
        with self.client.watch(
            follow_seconds=_FOLLOW_SECONDS, heartbeat_seconds=self._ties.heartbeat_seconds
        ) as self._watch:
            for status in self._watch:
                self._observe(status)
                self._pause = _RECONNECT_SECONDS[0]  # not before: a bridge may answer whose engine does not

    def _observe(self, status: EngineStatus) -> None:
        if not self._fits(status) and status.serving is not Serving.PAUSED:
            self._mark(State.BEHIND, f"serves version {status.version}")
            with self._pushing:
                status = self.client.status()  # a commit may just have ended
                published = None if self._leaving.is_set() else self._ties.target()
                if not self._fits(status) and published is not None and status.serving is not Serving.PAUSED:
                    status = self._restore(published, status)
        self._note(status)
        if status.serving is Serving.PAUSED:
            self._mark(State.HELD, "paused")
        elif self._fits(status):
            self._mark(State.READY, "")
        else:
            self._mark(State.BEHIND, "serves no verified version, and nothing was published")

    def _restore(self, published: Published, status: EngineStatus) -> EngineStatus:
        self.client.stage(published.weights)
        self._commit(published, self.client.options.commit_seconds)
        self._ties.on_event("republish", f"{self.address}: version {status.version} -> {published.version}")
        return self.client.status()

    def _commit(self, published: Published, seconds: float) -> ProbeReport:
        manifest = published.weights.manifest
        arguments = (manifest, published.probe, published.in_flight)
        self._settled.clear()
        try:
            try:
                report, engine_id = self.client.commit(*arguments, seconds=seconds)
            except NotStaged:
                self.client.stage(published.weights, seconds=seconds)
                report, engine_id = self._commit_staged(arguments, seconds)
            with self._ties.changed:
                self._know(engine_id)
                self._verified.add(published.version)
                self._confirmed = published.version
                self._missed = False  # it serves; the watch may see it again only once it is lost
            return report
        finally:
            self._settled.set()

    def _commit_staged(self, arguments: tuple[Manifest, Probe, InFlight], seconds: float) -> tuple[ProbeReport, str]:
        """Commits what was staged a moment ago. An engine may restart just then, and again: that ends by itself."""
        try:
            return self.client.commit(*arguments, seconds=seconds)
        except NotStaged as error:
            raise Retryable(f"{self.address}: it lost what had just been staged: {error}") from error

    def _until(self, what: str, seconds: float, attempt: Callable[[float], T]) -> T:
        """Repeats while the failure is Retryable and time is left; in between, a lost engine may be restored."""
        end = time.monotonic() + seconds
        while True:
            if self._leaving.is_set():
                raise Left(f"{what} at {self.address}: it has left the fleet")
            if self.failure is not None:
                raise self.failure
            try:
                with self._pushing:
                    return attempt(max(end - time.monotonic(), 1.0))
            except Retryable as error:
                over = time.monotonic() > end or self._closing.is_set()
                if over and not self._leaving.is_set():
                    raise Retryable(
                        f"{what} at {self.address}: expected an end within {seconds} s, got none; last: {error}"
                    ) from error
            self._closing.wait(random.uniform(0.1, 0.5))

    def _fits(self, status: EngineStatus) -> bool:
        published = self._ties.target()
        if status.serving is not Serving.SERVING or published is None:
            return status.serving is Serving.SERVING
        return status.engine_id == self._engine_id and status.version == self._confirmed >= published.version

    def _note(self, status: EngineStatus) -> None:
        with self._ties.changed:
            self._know(status.engine_id)
            if self._ties.target() is None and status.version >= 0:
                self._verified.add(status.version)
            self.status, self.answered = status, True
            self._ties.changed.notify_all()

    def _know(self, engine_id: str) -> None:
        """Another instance has verified nothing yet. The condition is held."""
        if engine_id != self._engine_id:
            self._engine_id, self._confirmed, self._verified = engine_id, -1, set()

    def _lose(self, error: Retryable) -> None:
        self._mark(State.LOST, str(error))
        if not self._missed:  # once, until it serves again
            self._missed = True
            self._ties.on_event("lost", f"{self.address}: {error}")
        if self._ties.on_lost is not None:
            self._ties.on_lost(self.address)

    def _fail(self, error: Exception) -> None:
        with self._ties.changed:
            self.failure = error
            self._set(State.FAILED, str(error))
        self._ties.on_event("failed", f"{self.address}: {error}")

    def _mark(self, state: State, reason: str) -> None:
        with self._ties.changed:
            came_back = state is State.READY and self.state is not State.READY
            self._set(state, reason)
        if came_back:
            self._missed = False
            self._ties.on_event("ready", self.describe())

    def _set(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._ties.changed.notify_all()


def _distinct(version: np.ndarray) -> set[int]:
    """The versions in an array; nearly always there is one, which needs no sorting."""
    if len(version) and (version == version[0]).all():
        return {int(version[0])}
    return set(np.unique(version).tolist())
