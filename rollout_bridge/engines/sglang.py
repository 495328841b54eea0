"""The engine over a real SGLang server: HTTP on the server's host, our own protocol towards the trainer.

What the server says about itself is not believed where it can be checked. A completion leaves only if every update that
had a part in it was verified on this very instance of the server, so what a restarted server samples from its base
weights, or what somebody else loaded, never does. While an update is being verified nothing new begins, and completions
that have a part of it wait for the verdict. An update in doubt leaves the engine NOT_SERVING until the next commit.
"""

import dataclasses
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollout_bridge.engines import sglang_update
from rollout_bridge.engines.sglang_files import Push, StageRoot
from rollout_bridge.engines.sglang_flights import LOOK_SECONDS, Flight, Flights, Landed
from rollout_bridge.engines.sglang_group import ByGroup, GroupConfig
from rollout_bridge.engines.sglang_http import SglangHttp
from rollout_bridge.engines.sglang_update import ByDisk, Transport
from rollout_bridge.engines.sglang_watch import Instance, Live, Watch
from rollout_bridge.errors import Fatal, NotStaged, Retryable
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
      group: the process group over which staged weights go; None = the server reads their files.
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
    group: GroupConfig | None = None


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
        self._transport: Transport = ByDisk(self._http)
        if config.group is not None:
            self._transport = ByGroup(self._http, config.group)
        self._changed = threading.Condition()
        self._staged: Push | None = None
        self._committing = False
        self._paused = False
        self._waiting = 0
        self._closing = False
        self._flights = Flights(self._http, self._changed, config.sample_seconds)
        self._watch = Watch(
            self._http,
            config.model,
            self._changed,
            held=lambda: self._committing,
            seconds=(config.poll_seconds, config.control_seconds),
        )

    @property
    def engine_id(self) -> str:
        """Identity of the server's instance."""
        return self._watch.engine_id

    def connect(self, seconds: float) -> ModelInfo:
        """Waits for the server's first answer.

        Raises:
          Retryable: none within the time.
          Fatal: it cannot be used as it was started; says what to change.
        """
        self._watch.wait(seconds)
        return self.model()

    def model(self) -> ModelInfo:
        """What the server holds.

        Raises:
          Retryable: it has not answered yet.
          Fatal: it cannot be used as it was started.
        """
        return self._watch.model()

    def status(self) -> EngineStatus:
        """The present state, as last seen."""
        with self._changed:
            live = self._watch.live
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
        landed: Landed = queue.SimpleQueue()
        flights = self._take_off(request, cancelled, landed)
        try:
            while flights and not cancelled.is_set():
                try:
                    flight = landed.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    continue
                flights.remove(flight)
                answered = self._judge(flight, cancelled)
                if answered is None:
                    return
                yield answered
        finally:
            self._flights.forget(flights)

    def stage(self, manifest: Manifest) -> "SglangSink":
        """Begins a push; what was staged before makes room for it."""
        self.discard()
        with self._changed:
            instance = self._watch.present()
        self._transport.prepare(instance)  # here rather than in the commit: sampling goes on
        return SglangSink(self, self._root.begin(manifest, instance.facts.config))

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
            live, push = self._watch.live, self._staged
            if push is None and live is not None and live.manifest.version == version:
                return live.report
            if push is None or push.manifest.version != version:
                got = "nothing" if push is None else f"version {push.manifest.version}"
                raise NotStaged(f"commit of version {version}: expected it to be staged, got {got} ({self.engine_id})")
            instance = self._watch.present()
            if self._paused or self._committing:
                raise Retryable(f"commit of version {version}: expected a running engine, got a paused one; resume it")
            self._committing = True
        try:
            return self._commit(push, instance, probe, in_flight)
        finally:
            with self._changed:
                self._committing, self._flights.pending = False, None
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
            if self._committing:
                raise Retryable("pause: expected no commit under way; try again")
            if self._paused:
                return
            self._paused = True
        try:
            if in_flight is InFlight.FINISH:
                self._flights.await_idle("pause", self._config.load_seconds)
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
        self._flights.abort(request_ids)

    def close(self) -> None:
        """Hangs up; the server goes on as it is, what is staged is dropped. A second time it does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._flights.hang_up()
        self._watch.close()
        self._transport.close()
        self._http.close()
        self.discard()
        self._root.close()

    def _take_off(self, request: SampleRequest, cancelled: threading.Event, landed: Landed) -> list[Flight]:
        """Starts every member, once nothing holds new requests back; none if it was cancelled before."""
        with self._changed:
            self._waiting += 1
            try:
                while (self._committing or self._paused) and not (cancelled.is_set() or self._closing):
                    self._changed.wait(LOOK_SECONDS)
            finally:
                self._waiting -= 1
            if cancelled.is_set():
                return []
            instance, live = self._watch.present(), self._watch.live
            if live is None or self._closing:
                raise Retryable(f"sample: expected a verified version, got none at {self.engine_id}; publish first")
            return [self._flights.start(request, member, instance, live.tag, landed) for member in request.members]

    def _judge(self, flight: Flight, cancelled: threading.Event) -> Completion | None:
        try:
            return self._flights.judge(flight, cancelled)
        except Retryable:
            self._watch.look_soon()  # the server may be gone, or another one
            raise

    def _unpause(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _commit(self, push: Push, instance: Instance, probe: Probe, in_flight: InFlight) -> ProbeReport:
        version, seconds = push.manifest.version, self._config.load_seconds
        held = time.monotonic()
        if in_flight is InFlight.FINISH:
            self._flights.await_idle(f"commit of version {version}", seconds)
        self._transport.prepare(instance)
        tag = f"{version}.{uuid.uuid4().hex[:12]}"
        abort, began = in_flight is InFlight.ABORT, time.monotonic()
        try:
            sglang_update.switch(
                self._http,
                tag,
                lambda: self._transport.load(push, tag, seconds),
                abort=abort,
                seconds=seconds,
                changing=lambda: self._changing(instance, tag, push),
            )
            loaded = time.monotonic()
            report = dataclasses.replace(
                sglang_update.verify(self._http, tag, probe, seconds),
                checksum=self._checksum(push.manifest, instance.live),
                seconds_held=time.monotonic() - held,
                seconds_load=loaded - began,
                seconds_verify=time.monotonic() - loaded,
            )
        except BaseException as error:
            self._doubt(instance, tag, error)
            raise
        with self._changed:
            instance.verified[tag] = version
            instance.own = {(tag, self._transport.path(push, instance))}
            instance.live = Live(tag=tag, manifest=push.manifest, report=report)
            self._staged = None
        self._root.keep_only(Path(self._transport.path(push, instance)))
        return report

    def _changing(self, instance: Instance, tag: str, push: Push) -> None:
        """From now on the weights may be new ones: what has this tag waits, and the server may show it."""
        with self._changed:
            self._flights.pending = tag
            paths = {path for _, path in instance.own} | {self._transport.path(push, instance)}
            instance.own |= {(name, path) for name in (tag, sglang_update.torn(tag)) for path in paths}

    def _doubt(self, instance: Instance, tag: str, error: BaseException) -> None:
        """A commit broke. If the weights may have changed, nothing is served before the next commit."""
        with self._changed:
            if self._flights.pending != tag:
                return  # the old version serves as before
            instance.live = None
        self.discard()
        logging.getLogger(__name__).warning("%s serves nothing until it is pushed to again: %s", self.engine_id, error)

    def _checksum(self, manifest: Manifest, before: Live | None) -> str:
        """SGLang's checksum of what it serves now.

        Raises:
          Fatal: other weights were pushed, and yet it has not changed: they were taken and not loaded.
        """
        found = sglang_update.checksum(self._http, self._config.load_seconds)
        if before is not None and before.manifest.digest != manifest.digest and before.report.checksum == found:
            raise Fatal(
                f"commit of version {manifest.version}: expected the server's weights to change, got the checksum "
                f"{found} that they had before; the server takes tensors under names that it does not load"
            )
        return found


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
