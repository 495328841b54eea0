"""The server's side of a push: one at a time, idempotent by (version, digest), live only when verified.

What is staged and what is live is known here by digest; the engine knows versions. When the two disagree, or an engine
does not do what it promised, the engine is in doubt: it counts as NOT_SERVING until a version has been committed again.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator

from rollout_bridge.checks import check_manifest, check_probe
from rollout_bridge.engine import Engine, StageSink
from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged
from rollout_bridge.lease import NOBODY, Lease, LeaseBook
from rollout_bridge.messages import (
    Chunk,
    EngineStatus,
    InFlight,
    Manifest,
    Probe,
    ProbeReport,
    Serving,
    Staged,
    StageReport,
)
from rollout_bridge.weights import Assembly, is_finite


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Push:
    """A push that this desk saw through, and the instance that took it."""

    engine_id: str
    version: int
    digest: str
    report: ProbeReport | None = None


class PushDesk:
    """Stages and commits on one engine. Every method may be called from any thread."""

    def __init__(self, engine: Engine, leases: LeaseBook) -> None:
        self._engine = engine
        self._leases = leases
        self._lock = threading.Lock()
        self._holder = ""
        self._held_since = 0.0
        self._staged: _Push | None = None
        self._live: _Push | None = None
        self._live_lease = NOBODY  # in whose name
        self._doubt: str | None = None

    def status(self) -> EngineStatus:
        """The engine's state; NOT_SERVING while it is in doubt."""
        status = self._engine.status()
        if self._doubt is None:
            return status
        return dataclasses.replace(status, serving=Serving.NOT_SERVING, version=-1)

    @property
    def doubt(self) -> str | None:
        """Why the engine is not trusted, if it is not."""
        return self._doubt

    def stage(self, parts: Iterator[Manifest | Chunk], sender: str, lease: Lease = NOBODY) -> StageReport:
        """Receives a push.

        Args:
          parts: the manifest, then all chunks.
          sender: who pushes, for whoever finds the desk taken.
          lease: in whose name.

        Raises:
          Busy: another push is under way.
          Fatal: another trainer holds the engine, the version is not above the live one of the same trainer, or its
            bytes are not what the manifest promised.
          Retryable: the stream broke or was corrupted; nothing of it stays.
          ValueError: the manifest does not fit the model, or the chunks do not fit the manifest.
        """
        manifest = next(parts, None)
        if not isinstance(manifest, Manifest):
            raise ValueError(f"push: expected a manifest first, got {'a chunk' if manifest else 'an empty stream'}")
        with self._hold(f"the push of version {manifest.version} by {sender}"):
            self._leases.claim(lease)
            status = self.status()
            if (already := self._already(manifest.version, manifest.digest, status)) is not None:
                return StageReport(staged=already, num_bytes=0, engine_id=status.engine_id)
            self._must_grow(manifest.version, status, lease)
            check_manifest(manifest, self._engine.model())
            received, seconds = _receive(parts, manifest, self._engine.stage(manifest))
            self._staged = _Push(engine_id=status.engine_id, version=manifest.version, digest=manifest.digest)
            return StageReport(
                staged=Staged.RECEIVED, num_bytes=received, engine_id=status.engine_id, seconds_write=seconds
            )

    def commit(
        self, push: tuple[int, str], probe: Probe, in_flight: InFlight, sender: str, lease: Lease = NOBODY
    ) -> ProbeReport:
        """Makes a staged push live.

        Args:
          push: its version and digest.
          probe: what the engine must reproduce under it.
          in_flight: what becomes of running requests.
          sender: who commits.
          lease: in whose name.

        Raises:
          Busy: another push is under way.
          NotStaged: it is neither staged nor live.
          Fatal: another trainer holds the engine, the version is not above the live one of the same trainer, or the
            engine does not reproduce the probe.
          ValueError: the probe cannot decide anything.
        """
        version, digest = push
        with self._hold(f"the commit of version {version} by {sender}"):
            self._leases.claim(lease)
            check_probe(probe, self._engine.model())
            status = self.status()
            already = self._already(version, digest, status)
            if already is Staged.ALREADY_LIVE and self._live is not None and self._live.report is not None:
                self._live_lease = lease
                return self._live.report
            self._must_grow(version, status, lease)
            if already is not Staged.ALREADY_STAGED:
                raise NotStaged(
                    f"commit of version {version}: expected it to be staged with digest {digest}, got "
                    f"{'none' if status.staged_version is None else f'version {status.staged_version}'} staged"
                )
            report = self._commit(version, probe, in_flight)
            live = _Push(engine_id=status.engine_id, version=version, digest=digest, report=report)
            self._live, self._live_lease, self._staged, self._doubt = live, lease, None, None
            return report

    def discard(self, sender: str, lease: Lease = NOBODY) -> None:
        """Drops what is staged.

        Raises:
          Busy: a push is under way.
          Fatal: another trainer holds the engine.
        """
        with self._hold(f"a discard by {sender}"):
            self._leases.claim(lease)
            self._staged = None
            self._engine.discard()

    def _commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        try:
            report = self._engine.commit(version, probe, in_flight)
        except BridgeError:
            raise  # the engine says that the old version serves as before, or that none does
        except Exception as error:
            self._doubt = f"the commit of version {version} broke: {type(error).__name__}: {error}"
            raise
        status = self._engine.status()
        if not (math.isfinite(report.max_abs) and report.mean_abs <= probe.tolerance):
            self._doubt = (
                f"commit of version {version}: expected the probe within {probe.tolerance} nats, got mean "
                f"{report.mean_abs}, max {report.max_abs}, and yet it was committed"
            )
        elif status.version != version or status.serving is Serving.NOT_SERVING:
            self._doubt = f"commit of version {version}: expected it to serve, got {status}"
        else:
            return report
        raise Fatal(self._doubt)

    def _already(self, version: int, digest: str, status: EngineStatus) -> Staged | None:
        key = (status.engine_id, version, digest)
        live, staged = self._live, self._staged
        if live and (live.engine_id, live.version, live.digest) == key and status.version == version:
            return Staged.ALREADY_LIVE
        if staged and (staged.engine_id, staged.version, staged.digest) == key and status.staged_version == version:
            return Staged.ALREADY_STAGED
        return None

    def _must_grow(self, version: int, status: EngineStatus, lease: Lease) -> None:
        """Versions of a trainer only grow. One that has just come may go back: it was resumed, or is another run."""
        if version > status.version or lease != self._live_lease:
            return
        known = self._live.digest if self._live and self._live.version == status.version else "unknown"
        raise Fatal(
            f"push of version {version}: expected a version above {status.version} (live, digest {known}), or that "
            "very push again; versions of a trainer only grow"
        )

    @contextlib.contextmanager
    def _hold(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            seconds = time.monotonic() - self._held_since
            raise Busy(f"{what}: expected a free engine, got one held for {seconds:.1f} s by {self._holder}; try again")
        try:
            self._holder, self._held_since = what, time.monotonic()
            yield
        finally:
            self._lock.release()


def _receive(parts: Iterator[Manifest | Chunk], manifest: Manifest, sink: StageSink) -> tuple[int, float]:
    """Feeds a sink; leaves nothing in it unless everything came. Returns the bytes received and the sink's seconds."""
    assembly = Assembly(manifest)
    seconds = 0.0

    def feed() -> None:
        nonlocal seconds
        for name, array in assembly.ready():
            if not is_finite(array):  # a server that samples from such weights ends
                raise ValueError(
                    f"push of version {manifest.version}: expected finite numbers, got NaN or infinity in {name}"
                )
            began = time.monotonic()
            sink.put(name, array)
            seconds += time.monotonic() - began

    try:
        feed()
        for part in parts:
            if not isinstance(part, Chunk):
                raise ValueError(f"push of version {manifest.version}: expected one manifest, got a second")
            assembly.add(part)
            feed()
        assembly.finish()
        began = time.monotonic()
        sink.finish()
        seconds += time.monotonic() - began
    except BaseException:
        sink.discard()
        raise
    return assembly.received, seconds
