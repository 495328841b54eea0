"""An engine slowed down on purpose, for measuring what asynchrony gains: so many requests a second and no more."""

import threading
import time
from collections.abc import Iterator, Sequence

from rollout_bridge.engine import StageSink
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    InFlight,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
)
from train.local_engine import LocalEngine


class PacedEngine:
    """Implements `rollout_bridge.Engine` over another one.

    One call after the other takes `seconds` for each of its requests, like a device that is busy: asking for more at
    once is not faster. The inner engine samples ahead of that pace, so that its own speed does not show.
    """

    def __init__(self, inner: LocalEngine | FakeEngine, seconds: float) -> None:
        """Takes the engine over.

        Args:
          inner: samples; must be faster than the pace.
          seconds: of every request.
        """
        self._inner = inner
        self._seconds = seconds
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def engine_id(self) -> str:
        """The inner engine's."""
        return self._inner.engine_id

    @property
    def failure(self) -> BaseException | None:
        """The inner engine's."""
        return self._inner.failure if isinstance(self._inner, LocalEngine) else None

    def model(self) -> ModelInfo:
        """The inner engine's."""
        return self._inner.model()

    def status(self) -> EngineStatus:
        """The inner engine's."""
        return self._inner.status()

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """The inner engine's completions, not before the request's turn is over."""
        for ready in self.sample_ready([request], cancelled):
            yield from ready

    def sample_ready(self, requests: Sequence[SampleRequest], cancelled: threading.Event) -> Iterator[list[Completion]]:
        """`sample` of several requests, all together once their turns are over: a device samples a batch at a time."""
        over = self._turn(len(requests))  # from their arrival on: what the inner engine takes is within it
        completions = list(self._sampled(requests, cancelled))
        cancelled.wait(over - time.monotonic())
        yield completions

    def stage(self, manifest: Manifest) -> StageSink:
        """The inner engine's."""
        return self._inner.stage(manifest)

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        """The inner engine's."""
        return self._inner.commit(version, probe, in_flight)

    def discard(self) -> None:
        """The inner engine's."""
        self._inner.discard()

    def pause(self, in_flight: InFlight) -> None:
        """The inner engine's."""
        self._inner.pause(in_flight)

    def resume(self) -> None:
        """The inner engine's."""
        self._inner.resume()

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """The inner engine's."""
        self._inner.abort(request_ids)

    def close(self) -> None:
        """The inner engine's."""
        self._inner.close()

    def _sampled(self, requests: Sequence[SampleRequest], cancelled: threading.Event) -> Iterator[Completion]:
        if isinstance(self._inner, LocalEngine):
            for ready in self._inner.sample_ready(requests, cancelled):
                yield from ready
            return
        for request in requests:
            yield from self._inner.sample(request, cancelled)

    def _turn(self, requests: int) -> float:
        """When these requests are done, if those before them take their time."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + self._seconds * requests
            return self._free_at
