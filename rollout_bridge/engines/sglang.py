"""The engine over a real SGLang server: HTTP on the server's host, our own protocol towards the trainer.

What the server says about itself is not believed where it can be checked. Every update of the weights gets a *tag* that
nobody used before; SGLang names it in every answer. A completion leaves only if all its tags were verified on this very
instance of the server, so what a restarted server samples from its base weights, or what somebody else loaded, never
does. While an update is being verified nothing new begins, and completions that have a part of it wait for the verdict.

    GONE ──answers──> not serving ──commit, probe passed──> serving ──another tag, or no answer──> not serving
                           ^──────────────── an update in doubt ────────────────┘
"""

import dataclasses
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from rollout_bridge.engines import sglang_update
from rollout_bridge.engines.sglang_files import Push, StageRoot
from rollout_bridge.engines.sglang_http import Refused, SglangHttp
from rollout_bridge.engines.sglang_samples import Answer, completion, payload, read_answer
from rollout_bridge.engines.sglang_server import TESTED, ServerFacts, read_facts, read_tag
from rollout_bridge.errors import BridgeError, Fatal, NotStaged, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    InFlight,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    Serving,
)

_LOOK_SECONDS = 0.25  # how soon a cancelled call is noticed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SglangConfig:
    """Which server, and how it is spoken to.

    Attributes:
      url: http://host:port of the server; on this host, because it reads what is staged here.
      api_key, admin_key: as the server was started with; None = without.
      model: folder of its config.json; None = the folder that the server names.
      stage_folder: where pushes are staged; shared memory by default.
      control_seconds: deadline of a control call.
      load_seconds: deadline of loading an update, of its probe, and of running requests to end before it.
      sample_seconds: deadline of one completion.
      poll_seconds: how often the server is looked at.
    """

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_key: str | None = dataclasses.field(default=None, repr=False)
    model: Path | None = None
    stage_folder: Path = Path("/dev/shm")
    control_seconds: float = 20.0
    load_seconds: float = 600.0
    sample_seconds: float = 3600.0
    poll_seconds: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Instance:
    """A server from its start to its end. `verified` maps tags to versions; `own` are all tags that it may show."""

    engine_id: str
    facts: ServerFacts
    verified: dict[str, int] = dataclasses.field(default_factory=dict)
    own: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Live:
    """What serves, verified."""

    tag: str
    manifest: Manifest
    report: ProbeReport


@dataclasses.dataclass(kw_only=True, eq=False)
class _Flight:
    """One member at the server."""

    rid: str
    request: SampleRequest
    member: int
    instance: _Instance
    aborted: bool = False
    answer: "Future[bytes]" = dataclasses.field(default_factory=Future)


class SglangEngine:
    """See `rollout_bridge.engine.Engine` for what each method promises.

    A completion is not a function of its seed here: SGLang draws from one stream for all requests.
    """

    def __init__(self, config: SglangConfig) -> None:
        """Begins to look for the server and returns at once.

        Raises:
          ValueError: another bridge stages for this server on this host.
          OSError: the staging folder cannot be made.
        """
        self._config = config
        self._root = StageRoot(config.stage_folder, config.url.split("//")[-1].strip("/").replace(":", "-"))
        self._http = SglangHttp(config.url, api_key=config.api_key, admin_key=config.admin_key)
        self._changed = threading.Condition()
        self._instance: _Instance | None = None
        self._gone: str | None = f"SGLang at {config.url} has not been reached yet"
        self._failure: Fatal | None = None
        self._live: _Live | None = None
        self._pending: str | None = None  # the tag that is being verified
        self._staged: Push | None = None
        self._committing = False
        self._paused = False
        self._flights: dict[str, _Flight] = {}
        self._waiting = 0
        self._look_now = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sglang-watch", daemon=True)
        self._thread.start()

    @property
    def engine_id(self) -> str:
        """Identity of the server's instance."""
        instance = self._instance
        return "sglang-unreached" if instance is None else instance.engine_id

    def connect(self, seconds: float) -> ModelInfo:
        """Waits for the server's first answer.

        Raises:
          Retryable: none within the time.
          Fatal: it cannot be used as it was started; says what to change.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._instance is not None or self._failure is not None, seconds)
        return self.model()

    def model(self) -> ModelInfo:
        """What the server holds.

        Raises:
          Retryable: it has not answered yet.
          Fatal: it cannot be used as it was started.
        """
        with self._changed:
            if self._failure is not None:
                raise Fatal(str(self._failure))
            if self._instance is None:
                raise Retryable(str(self._gone))
            return self._instance.facts.model

    def status(self) -> EngineStatus:
        """The present state, as last seen."""
        with self._changed:
            live = None if self._gone or self._failure else self._live
            served = Serving.PAUSED if self._paused else Serving.SERVING
            return EngineStatus(
                engine_id=self.engine_id,
                serving=Serving.NOT_SERVING if live is None else served,
                version=-1 if live is None else live.manifest.version,
                staged_version=None if self._staged is None else self._staged.manifest.version,
                running=len(self._flights),
                waiting=self._waiting,
            )

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """Yields one completion per member, as each finishes; ends early once `cancelled` is set."""
        landed: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        flights = self._take_off(request, cancelled, landed)
        try:
            while flights and not cancelled.is_set():
                try:
                    flight = landed.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    continue
                flights.remove(flight)
                answered = self._judge(flight, cancelled)
                if answered is None:
                    return
                yield answered
        finally:
            self._end(flights)

    def stage(self, manifest: Manifest) -> "SglangSink":
        """Begins a push; what was staged before makes room for it."""
        self.discard()
        with self._changed:
            instance = self._must_answer()
        push = self._root.begin(manifest, instance.facts.config)
        return SglangSink(self, push)

    def take(self, push: Push) -> None:
        """A push is complete; for `SglangSink`."""
        with self._changed:
            self._staged = push

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        """Loads what is staged, verifies it, and only then lets anything of it out.

        Raises:
          NotStaged: this version is neither staged nor live.
          Retryable: running requests did not end, or the server failed; where its weights may have changed it is
            NOT_SERVING.
          Fatal: the probe was not reproduced, or the server refused; it is NOT_SERVING.
        """
        with self._changed:
            live = self._live
            if live is not None and live.manifest.version == version and self._staged is None:
                return live.report
            push, instance = self._must_be_staged(version), self._must_answer()
            if self._paused or self._committing:
                raise Retryable(
                    f"commit of version {version}: expected an engine that runs, got a paused one; resume it"
                )
            self._committing = True
        try:
            return self._commit(push, instance, probe, in_flight)
        finally:
            with self._changed:
                self._committing, self._pending = False, None
                self._changed.notify_all()

    def discard(self) -> None:
        """Drops what is staged, if anything."""
        with self._changed:
            push, self._staged = self._staged, None
        if push is not None:
            push.remove()

    def pause(self, in_flight: InFlight) -> None:
        """Stops sampling."""
        with self._changed:
            if self._paused:
                return
            if self._committing:
                raise Retryable("pause: expected no commit under way; try again")
            self._paused = True
        try:
            if in_flight is InFlight.FINISH:
                self._await_idle("pause")
            mode = "abort" if in_flight is InFlight.ABORT else "retract"
            self._http.post("/pause_generation", {"mode": mode}, self._config.control_seconds)
        except BaseException:
            self._unpause()
            raise

    def resume(self) -> None:
        """Samples again."""
        self._http.post("/continue_generation", {}, self._config.control_seconds)
        self._unpause()

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Ends these requests (all, if None); each open member returns what it has as ABORT."""
        with self._changed:
            chosen = [f for f in self._flights.values() if request_ids is None or f.request.request_id in request_ids]
            for flight in chosen:
                flight.aborted = True
        for flight in chosen:
            self._http.post("/abort_request", {"rid": flight.rid}, self._config.control_seconds)

    def close(self) -> None:
        """Aborts what runs and leaves the server as it is."""
        self._closing.set()
        self._look_now.set()
        with self._changed:
            flights = list(self._flights.values())
            self._changed.notify_all()
        for flight in flights:
            flight.answer.cancel()
        self._thread.join(self._config.control_seconds + 5.0)
        self._http.close()
        self._root.close()

    # ------------------------------------------------------------------------------------------------------ sampling

    def _take_off(
        self, request: SampleRequest, cancelled: threading.Event, landed: "queue.SimpleQueue[_Flight]"
    ) -> list[_Flight]:
        """Starts every member, once nothing holds new requests back; none if it was cancelled before."""
        with self._changed:
            self._waiting += 1
            try:
                while (self._committing or self._paused) and not cancelled.is_set() and not self._closing.is_set():
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._waiting -= 1
            if cancelled.is_set():
                return []
            instance, live = self._must_answer(), self._live
            if live is None or self._closing.is_set():
                raise Retryable(f"sample: expected a verified version, got none at {self.engine_id}; publish first")
            return [self._start(request, member, instance, live.tag, landed) for member in request.members]

    def _start(
        self, request: SampleRequest, member: int, instance: _Instance, tag: str, landed: "queue.SimpleQueue[_Flight]"
    ) -> _Flight:
        """Sends one member off. The condition is held."""
        flight = _Flight(
            rid=f"{request.request_id}-{member}-{uuid.uuid4().hex}", request=request, member=member, instance=instance
        )
        self._flights[flight.rid] = flight

        def land(_answer: "Future[bytes]") -> None:
            with self._changed:
                self._flights.pop(flight.rid, None)
                self._changed.notify_all()
            landed.put(flight)

        body = payload(request, member, rid=flight.rid, tag=tag)
        flight.answer = self._http.start("/generate", body, self._config.sample_seconds)
        flight.answer.add_done_callback(land)
        return flight

    def _judge(self, flight: _Flight, cancelled: threading.Event) -> Completion | None:
        """The completion of a flight that has landed, once its weights are verified; None once cancelled.

        Raises:
          Retryable: the server failed, or weights that nobody verified had a part in it.
          Fatal: the answer is not as it must be.
        """
        request, member = flight.request, flight.member
        where = f"completion {request.request_id}/{member} of {flight.instance.engine_id}"
        try:
            answer = read_answer(flight.answer.result(), where)
        except Refused:
            if not flight.aborted:
                raise
            answer = _NOTHING  # aborted before it had begun
        with self._changed:
            while self._pending in answer.tags and not cancelled.is_set():
                self._changed.wait(_LOOK_SECONDS)
            if cancelled.is_set():
                return None
            unknown = answer.tags - flight.instance.verified.keys()
        if unknown:
            self._look_now.set()
            raise Retryable(
                f"{where}: expected tokens of verified weights, got some of {sorted(unknown)}; sample again"
            )
        instance = flight.instance
        return completion(
            answer,
            request,
            member,
            model=instance.facts.model,
            versions=instance.verified,
            engine_id=instance.engine_id,
        )

    def _end(self, flights: list[_Flight]) -> None:
        """Nobody waits for these any more."""
        for flight in flights:
            flight.answer.cancel()
            if not self._closing.is_set():
                self._http.start("/abort_request", {"rid": flight.rid}, self._config.control_seconds)

    def _await_idle(self, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._flights, self._config.load_seconds):
                raise Retryable(
                    f"{what}: expected running requests to end within {self._config.load_seconds} s, got "
                    f"{len(self._flights)} that run; commit with retract or abort"
                )

    def _unpause(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- weights

    def _commit(self, push: Push, instance: _Instance, probe: Probe, in_flight: InFlight) -> ProbeReport:
        version, seconds = push.manifest.version, self._config.load_seconds
        tag = f"{version}.{uuid.uuid4().hex[:12]}"
        if in_flight is InFlight.FINISH:
            self._await_idle(f"commit of version {version}")
        began = time.monotonic()
        try:
            sglang_update.switch(
                self._http,
                push.folder,
                tag,
                abort=in_flight is InFlight.ABORT,
                seconds=seconds,
                changing=lambda: self._begin(instance, tag),
            )
            loaded = time.monotonic()
            report = sglang_update.verify(self._http, tag, probe, seconds)
            report = dataclasses.replace(
                report,
                checksum=self._checksum(push.manifest),
                seconds_load=loaded - began,
                seconds_verify=time.monotonic() - loaded,
            )
        except BaseException as error:
            self._doubt(tag, error)
            raise
        with self._changed:
            instance.verified[tag] = version
            self._live, self._staged = _Live(tag=tag, manifest=push.manifest, report=report), None
        self._root.keep_only(push.folder)
        return report

    def _begin(self, instance: _Instance, tag: str) -> None:
        """The weights may change from now on: what has this tag waits, and the server may show it."""
        with self._changed:
            self._pending = tag
            instance.own.add(tag)

    def _doubt(self, tag: str, error: BaseException) -> None:
        """If the weights may have changed, the engine serves nothing until the next commit."""
        with self._changed:
            if self._pending != tag:
                return  # the old version serves as before
            self._live = None
        logging.getLogger(__name__).warning(
            "update %s is in doubt: the server serves nothing until it is pushed to again: %s", tag, error
        )
        self.discard()

    def _checksum(self, manifest: Manifest) -> str:
        """SGLang's checksum of what it serves now.

        Raises:
          Fatal: other weights were pushed, and yet it has not changed: they were taken and not loaded.
        """
        found = sglang_update.checksum(self._http, self._config.load_seconds)
        before = self._live
        if before is not None and before.manifest.digest != manifest.digest and before.report.checksum == found:
            raise Fatal(
                f"commit of version {manifest.version}: expected the server's weights to change, got the checksum "
                f"{found} that they had before; the server takes tensors under names that it does not load"
            )
        return found

    def _must_be_staged(self, version: int) -> Push:
        if self._staged is None or self._staged.manifest.version != version:
            got = "nothing" if self._staged is None else f"version {self._staged.manifest.version}"
            raise NotStaged(f"commit of version {version}: expected it to be staged, got {got} ({self.engine_id})")
        return self._staged

    # ------------------------------------------------------------------------------------------------ the server's life

    def _must_answer(self) -> _Instance:
        """The instance that is there. The condition is held."""
        if self._failure is not None:
            raise Fatal(str(self._failure))
        if self._gone is not None or self._instance is None:
            raise Retryable(str(self._gone))
        return self._instance

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except Retryable as error:
                self._lose(error)
            except BridgeError as error:
                self._fail(error)
            except Exception as error:
                logging.getLogger(__name__).exception("the watch of the server broke; it goes on")
                self._fail(error)
            self._look_now.wait(self._config.poll_seconds)
            self._look_now.clear()

    def _look(self) -> None:
        """Notices a server that came, went, or is another one than before."""
        tag = read_tag(self._http, self._config.control_seconds)
        with self._changed:
            instance = self._instance
            known = instance is not None and tag in instance.own
            if self._committing or (known and self._gone is None and self._failure is None):
                return
        facts = read_facts(self._http, self._config.model, self._config.control_seconds)
        with self._changed:
            if self._committing:
                return  # it looks for itself
            self._gone = self._failure = None
            if instance is None or facts.tag not in instance.own or facts.model != instance.facts.model:
                self._welcome(facts)
            self._changed.notify_all()

    def _welcome(self, facts: ServerFacts) -> None:
        """A server that nothing is verified of. The condition is held."""
        engine_id = f"sglang-{uuid.uuid4().hex[:12]}"
        self._instance = _Instance(engine_id=engine_id, facts=facts, own={facts.tag})
        self._live = None
        log = logging.getLogger(__name__)
        log.info("%s: SGLang %s at %s, weights %s", engine_id, facts.version, self._config.url, facts.tag)
        if facts.version != TESTED:
            log.warning("SGLang %s at %s: %s is what was tested", facts.version, self._config.url, TESTED)

    def _lose(self, error: Retryable) -> None:
        with self._changed:
            self._gone = str(error)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error if isinstance(error, Fatal) else Fatal(str(error))
            self._changed.notify_all()


class SglangSink:
    """Writes a push; see `rollout_bridge.engine.StageSink`."""

    def __init__(self, engine: SglangEngine, push: Push) -> None:
        self._engine = engine
        self._push = push

    def put(self, name: str, array: np.ndarray) -> None:
        """Writes one tensor."""
        self._push.put(array)

    def finish(self) -> None:
        """Makes the push the staged version."""
        self._push.finish()
        self._engine.take(self._push)

    def discard(self) -> None:
        """Removes what was written."""
        self._push.remove()


_NOTHING = Answer(
    tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), spans=(), aborted=True, retractions=0, routes=None
)
