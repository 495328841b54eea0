"""Many engines as one: completions in, each exactly once; weights out, to all of them."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rollout_bridge.checks import check_manifest, check_probe, check_request
from rollout_bridge.client import Client, ClientOptions
from rollout_bridge.discovery import PREFIX, Follow, resolve
from rollout_bridge.dispatch import Counts, Limits, Router, SampleCall, Workers
from rollout_bridge.endpoint import Endpoint, Published, State, Ties
from rollout_bridge.errors import Fatal, Left, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    InFlight,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    StageReport,
)
from rollout_bridge.weights import Weights

__all__ = ["CommitReport", "EndpointStatus", "Fleet", "FleetOptions", "Weights"]

T = TypeVar("T")


def _ignore(_kind: str, _text: str) -> None:
    """Nobody wants to hear."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """How a fleet behaves.

    Attributes:
      client: of every endpoint: deadlines, limits, security.
      progress_seconds: `sample` without any completion for this long is an error that says what it waited for.
      publish_seconds: of `stage` and of `commit`, each over all engines, lost ones awaited.
      max_streams: requests at once at one engine; the rest waits here. At most the server's max_samples.
      max_failures: of one request in a row, without progress, before `sample` gives up.
      heartbeat_seconds: an engine's state is looked at this often even when it does not change.
      on_lost: called with the endpoint, in a thread of its own, before each attempt to reach a lost engine again: the
        place to restart a local one. What it raises is raised by `sample`, `stage` and `commit`.
      on_event: called with a kind (lost, ready, republish, failed; of names also joined, left, unresolved) and a text,
        from any thread.
      resolve: gives the addresses that endpoints stand for at the moment; raises ValueError where there are none.
      resolve_seconds: from one look at the addresses of "dns:" endpoints to the next.
    """

    client: ClientOptions = dataclasses.field(default_factory=ClientOptions)
    progress_seconds: float = 120.0
    publish_seconds: float = 600.0
    max_streams: int = 64
    max_failures: int = 8
    heartbeat_seconds: float = 5.0
    on_lost: Callable[[str], None] | None = None
    on_event: Callable[[str, str], None] = _ignore
    resolve: Callable[[Sequence[str]], tuple[str, ...]] = resolve
    resolve_seconds: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStatus:
    """Where an endpoint stands: its state, why, what its engine said last, and members that it samples for us."""

    state: State
    reason: str
    engine: EngineStatus | None
    in_flight: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitReport:
    """How well each engine reproduced the probe, by endpoint."""

    version: int
    engines: Mapping[str, ProbeReport]

    @property
    def mean_abs(self) -> float:
        """The worst engine's mean |difference|, nats."""
        return max(report.mean_abs for report in self.engines.values())

    @property
    def max_abs(self) -> float:
        """The worst engine's largest |difference|, nats."""
        return max(report.max_abs for report in self.engines.values())


class Fleet:
    """A set of endpoints. Every method may be called from any thread; `sample` and `stage` run side by side.

    The fleet remembers what it committed last. An engine that restarted, or does not serve that version, gets it pushed
    again before it gets a request.
    """

    def __init__(self, endpoints: Sequence[str], *, options: FleetOptions | None = None) -> None:
        """Begins to connect and returns at once.

        Args:
          endpoints: host:port of each bridge; "dns:name:port" stands for every address of a name, looked up again and
            again: a new one joins and is pushed to before it gets a request, one that is gone gets none any more.
          options: see there.

        Raises:
          ValueError: no endpoint, one twice, a name without addresses, or the security is not enough for one.
        """
        self.options = options or FleetOptions()
        addresses = self.options.resolve(endpoints)
        if not addresses or len(set(addresses)) != len(addresses):
            raise ValueError(f"fleet: expected one or more distinct endpoints, got {list(addresses)}")
        self._named = tuple(endpoints)
        self._changed = threading.Condition()
        self._model: tuple[str, ModelInfo] | None = None
        self._target: Published | None = None
        self._staged: Weights | None = None
        self._publishing = threading.Lock()
        self._counts = Counts()
        self._calls: set[SampleCall] = set()
        self._ties = Ties(
            changed=self._changed,
            target=lambda: self._target,
            agree=self._agree,
            on_lost=self.options.on_lost,
            on_event=self._tell,
            heartbeat_seconds=self.options.heartbeat_seconds,
        )
        self._endpoints = self._connect(addresses)
        self._leaving: list[Endpoint] = []
        self._unresolved = ""
        limits = Limits(
            progress_seconds=self.options.progress_seconds,
            max_failures=self.options.max_failures,
            max_streams=self.options.max_streams,
        )
        self._router = Router(self._endpoints, self._changed, limits)
        self._workers = Workers(limits.max_streams * len(self._endpoints))
        for endpoint in self._endpoints:
            endpoint.start()
        follows = any(endpoint.startswith(PREFIX) for endpoint in endpoints)
        self._follow = Follow(self._look, self.options.resolve_seconds) if follows else None

    def wait_ready(self, timeout: float) -> ModelInfo:
        """Waits until every engine has answered; they need not serve anything yet.

        Args:
          timeout: seconds.

        Returns:
          The model that all of them hold.

        Raises:
          Retryable: some have not answered; says where each stands.
          Fatal: they hold different models.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failures() or all(e.answered for e in self._endpoints), timeout)
            for failure in self._failures():
                raise failure
            if not all(endpoint.answered for endpoint in self._endpoints):
                raise Retryable(
                    f"fleet: expected every engine to answer within {timeout} s, got {self._router.describe()}"
                )
        return self.model()

    def model(self) -> ModelInfo:
        """The model that the engines hold.

        Raises:
          Retryable: none has answered yet.
        """
        if self._model is None:
            raise Retryable(f"fleet: expected an engine that has answered, got {self._router.describe()}")
        return self._model[1]

    def status(self) -> dict[str, EndpointStatus]:
        """Where every endpoint stands."""
        with self._changed:
            return {
                e.address: EndpointStatus(state=e.state, reason=e.reason, engine=e.status, in_flight=e.load)
                for e in self._endpoints
            }

    def counts(self) -> dict[str, int]:
        """What happened so far: completions, duplicates, continued, reissued, and events by kind."""
        return self._counts.snapshot()

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        """Yields every wanted (request, member) exactly once, as they arrive.

        Members of a request go to one engine. What a lost or failing engine leaves open is asked for again elsewhere,
        or there once it is back; a partial completion is continued from its last token. Closing the iterator ends
        what is still running.

        Args:
          requests: with distinct ids. Sampling begins with the first `next`.

        Raises:
          ValueError: a request does not fit the model, or an id comes twice.
          Retryable: no completion for `progress_seconds`, or a request failed too often.
          Fatal: a completion is not as it must be, or an engine failed for good.
        """
        model = self.model()
        for request in requests:
            check_request(request, model)
        if len({request.request_id for request in requests}) != len(requests):
            raise ValueError(f"sample: expected distinct request ids, got {[r.request_id for r in requests]}")
        return self._run(SampleCall(requests, model, self._router, self._workers, self._counts))

    def stage(self, weights: Weights) -> dict[str, StageReport]:
        """Pushes weights to every engine, while they go on sampling. All or nothing: a failure discards the rest.

        Raises:
          ValueError: the weights do not cover the model exactly.
          Retryable: not done within `publish_seconds`; names the engines.
          Fatal: an engine refused them for good; names it.
        """
        check_manifest(weights.manifest, self.model())
        with self._publishing:
            what = f"stage of version {weights.version}"
            reports, failures = self._everywhere(lambda e: e.stage(weights, self.options.publish_seconds))
            if failures:
                _, undone = self._everywhere(lambda e: e.discard() if e.address in reports else None)
                _raise(what, reports, {**undone, **failures})
            self._staged = weights
            return reports

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> CommitReport:
        """Makes the staged weights live on every engine, each only if it reproduces the probe.

        From the first engine that serves them they are what the fleet serves, and remembered.

        Args:
          version: as staged.
          probe: what to reproduce.
          in_flight: what becomes of running requests.

        Raises:
          ValueError: that version is not staged, or the probe cannot decide anything.
          Retryable: not done within `publish_seconds`; names the engines.
          Fatal: an engine did not reproduce the probe, or refused; names it, and those that serve. Or engines that tell
            a checksum of what they serve tell different ones.
        """
        with self._publishing:
            weights = self._staged
            if weights is None or weights.version != version:
                got = "nothing" if weights is None else f"version {weights.version}"
                raise ValueError(f"commit of version {version}: expected it staged, got {got}; stage it first")
            check_probe(probe, self.model())
            published = Published(weights=weights, probe=probe, in_flight=in_flight)
            reports, failures = self._everywhere(lambda e: e.commit(published, self.options.publish_seconds))
            if reports:
                with self._changed:
                    self._target, self._staged = published, None
                for endpoint in self._endpoints:
                    endpoint.recheck()
            if failures:
                _raise(f"commit of version {version}", reports, failures)
            _must_agree(version, {address: report.checksum for address, report in reports.items()})
            return CommitReport(version=version, engines=reports)

    def publish(self, weights: Weights, probe: Probe, in_flight: InFlight) -> CommitReport:
        """Stages and commits."""
        self.stage(weights)
        return self.commit(weights.version, probe, in_flight)

    def close(self) -> None:
        """Ends everything; whoever iterates `sample` gets an error. The engines go on, free for another trainer."""
        if self._follow is not None:
            self._follow.close()
        with self._changed:
            self._router.closed = True
            calls = list(self._calls)
            self._changed.notify_all()
        for call in calls:
            call.fail(Fatal("sample: the fleet was closed"))
            call.cancel()
        with concurrent.futures.ThreadPoolExecutor(max(len(self._endpoints), 1)) as pool:
            list(pool.map(Endpoint.close, [*self._endpoints, *self._leaving]))
        self._workers.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: SampleCall) -> Iterator[Completion]:
        with self._changed:
            if self._router.closed:
                raise Fatal("sample: the fleet was closed")
            self._calls.add(call)
        try:
            yield from call.completions()
        finally:
            with self._changed:
                self._calls.discard(call)

    def _everywhere(self, act: Callable[[Endpoint], T]) -> tuple[dict[str, T], dict[str, BaseException]]:
        """Does it at every endpoint at once; returns what came of it and what failed, by endpoint."""
        endpoints = self._endpoints
        with concurrent.futures.ThreadPoolExecutor(len(endpoints), thread_name_prefix="fleet-publish") as pool:
            pending = {endpoint.address: pool.submit(act, endpoint) for endpoint in endpoints}
        errors = {address: error for address, future in pending.items() if (error := future.exception())}
        done = {address: future.result() for address, future in pending.items() if address not in errors}
        stayed = {address: error for address, error in errors.items() if not isinstance(error, Left)}
        return done, stayed if done else errors  # an act that nobody did is none

    def _connect(self, addresses: Sequence[str]) -> list[Endpoint]:
        return [Endpoint(Client(address, options=self.options.client), self._ties) for address in addresses]

    def _look(self) -> None:
        """Looks which addresses there are; what has come joins, what is gone leaves."""
        try:
            addresses = dict.fromkeys(self.options.resolve(self._named))
            if not addresses:
                raise ValueError(f"fleet: expected one or more endpoints of {list(self._named)}, got none")
            joined = self._connect([address for address in addresses if address not in self.status()])
        except ValueError as error:  # the next look may find them; until then the fleet stays as it is
            if str(error) != self._unresolved:  # once
                self._unresolved = str(error)
                self._tell("unresolved", str(error))
            return
        self._unresolved = ""
        with self._changed:
            left = [endpoint for endpoint in self._endpoints if endpoint.address not in addresses]
            self._endpoints = [endpoint for endpoint in self._endpoints if endpoint not in left] + joined
            self._router.endpoints = self._endpoints
            self._workers.allow(self.options.max_streams * len(self._endpoints))
            self._leaving += left
            idle = [endpoint for endpoint in self._leaving if not endpoint.streams]
            self._leaving = [endpoint for endpoint in self._leaving if endpoint.streams]
            self._changed.notify_all()
        for endpoint in left:
            endpoint.leave()
            self._tell("left", endpoint.describe())
        for endpoint in joined:
            endpoint.start()
            self._tell("joined", endpoint.address)
        for endpoint in idle:
            endpoint.close()

    def _agree(self, address: str, model: ModelInfo) -> None:
        with self._changed:
            if self._model is None:
                self._model = (address, model)
            first, expected = self._model
        if model != expected:
            raise Fatal(
                f"engine {address}: expected the model of {first} ({expected.model_digest}, {len(expected.tensors)} "
                f"tensors, vocabulary {expected.vocab_size}), got {model.model_digest}, {len(model.tensors)} tensors, "
                f"vocabulary {model.vocab_size}; serve one model in a fleet"
            )

    def _failures(self) -> list[Exception]:
        return [endpoint.failure for endpoint in self._endpoints if endpoint.failure is not None]

    def _tell(self, kind: str, text: str) -> None:
        self._counts.add(kind)
        self.options.on_event(kind, text)


def _must_agree(version: int, checksums: Mapping[str, str]) -> None:
    """Replicas that took the same bytes must serve the same weights."""
    told = {address: checksum for address, checksum in checksums.items() if checksum}
    if len(set(told.values())) > 1:
        raise Fatal(
            f"commit of version {version}: expected the same checksum of the served weights everywhere, got {told}; "
            "start all servers alike (--tp, --dtype), or restart the one that differs"
        )


def _raise(what: str, reports: Mapping[str, object], failures: Mapping[str, BaseException]) -> None:
    """Raises one error for all engines: Retryable only if every failure is."""
    kind = Retryable if all(isinstance(error, Retryable) for error in failures.values()) else Fatal
    texts = "; ".join(f"{address}: {error}" for address, error in failures.items())
    done = ", ".join(reports) or "none"
    raise kind(f"{what}: expected all engines, got {done} done and these failed: {texts}") from next(
        iter(failures.values())
    )
