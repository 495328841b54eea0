"""The engine protocol: what the bridge's server needs of whatever samples (SGLang, the local sampler, a fake).

Every method may be called from any thread; `sample` blocks in its iterator, the rest return promptly or raise.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

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


class StageSink(Protocol):
    """Receives a push, tensor by tensor, in manifest order; the bytes were checked before."""

    def put(self, name: str, array: np.ndarray) -> None:
        """Takes one whole tensor (bfloat16 arrives as ml_dtypes.bfloat16)."""
        ...

    def finish(self) -> None:
        """The push is complete: it is now the staged version, replacing an earlier staged one."""
        ...

    def discard(self) -> None:
        """The push broke off: nothing of it may stay."""
        ...


@runtime_checkable
class Gathering(Protocol):
    """An engine that takes the requests of a call at once and says what is finished at the same time.

    A message costs sender and receiver a few tenths of a millisecond of processor time, whatever is in it, and a thread
    that waits for a request of its own about as much.
    """

    def sample_ready(
        self, requests: Sequence[SampleRequest], cancelled: threading.Event
    ) -> Iterator[Sequence[Completion]]:
        """What `Engine.sample` yields of each request, all together that need not be waited for; as it raises."""
        ...


class Engine(Protocol):
    """Samples at a verified version; takes new versions in two steps, stage and commit."""

    @property
    def engine_id(self) -> str:
        """Identity of this instance; a restarted engine has another."""
        ...

    def model(self) -> ModelInfo:
        """The architecture it holds."""
        ...

    def status(self) -> EngineStatus:
        """Its present state."""
        ...

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """Yields one completion per wanted member, as each finishes; stops early once `cancelled` is set.

        Raises:
          rollout_bridge.errors.Retryable: not serving (yet).
          rollout_bridge.errors.Fatal: the request can never be served.
        """
        ...

    def stage(self, manifest: Manifest) -> StageSink:
        """Begins a push; sampling goes on. The manifest was checked against `model()`."""
        ...

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        """Makes the staged version live if it reproduces the probe; else discards it and raises Fatal.

        On failure the engine either serves the old version as before or is NOT_SERVING; nothing in between. No
        completion with a token of the new version leaves before the probe has passed.
        """
        ...

    def discard(self) -> None:
        """Drops what is staged, if anything."""
        ...

    def pause(self, in_flight: InFlight) -> None:
        """Stops sampling; what runs is treated as by a commit."""
        ...

    def resume(self) -> None:
        """Samples again."""
        ...

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Ends these requests (all, if None); each open member returns what it has as ABORT."""
        ...

    def close(self) -> None:
        """Releases everything; what runs is aborted."""
        ...
