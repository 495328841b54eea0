"""A seeded engine that fails on demand: what the bridge and the trainer are tested against.

Honest unless told otherwise: versions, probes and in-flight policies are kept as `Engine` asks. Its completions are a
function of the weights' bytes, the prompt, the seed and the member. `inject` makes it misbehave a number of times.
"""

import collections
import contextlib
import dataclasses
import enum
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from rollout_bridge.engines.fake_model import fake_logp, fake_routes, fake_token, fingerprint
from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    Finish,
    InFlight,
    LogprobDefinition,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    Serving,
    Trace,
)

_WAIT_SECONDS = 60.0  # for running requests to end, and for a pause to end


class Fault(enum.Enum):
    """A way to misbehave. Those of a completion strike one completion each."""

    DUPLICATE = "completion sent twice"
    NAN_LOGP = "a log-prob is NaN"
    POSITIVE_LOGP = "a log-prob is positive"
    UNKNOWN_TOKEN = "an id outside the vocabulary"
    WRONG_ROWS = "a row of routes is missing"
    ZERO_ROUTES = "all routes are expert 0"
    NO_TRACE = "no routes at all"
    WRONG_VERSION = "tokens of a version that was never committed"
    WRONG_TEMPERATURE = "log-probs of another temperature than asked for"
    LOST = "a member that never comes"
    DROP = "the stream breaks before a completion"
    REFUSE = "a request is refused, to be tried again"
    HANG = "a request never answers"
    FAIL_STAGE = "a push is refused, to be tried again"
    FAIL_COMMIT = "a commit does not reproduce the probe"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Weights that the engine holds."""

    version: int
    weights: int
    report: ProbeReport | None = None


class _Run:
    """A request that runs."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.aborted = False
        self.tokens: dict[int, list[int]] = {member: [] for member in request.members}
        self.held: dict[int, list[_Held]] = {member: [] for member in request.members}


class FakeEngine:
    """Implements rollout_bridge.engine.Engine."""

    def __init__(self, model: ModelInfo, *, version: int | None = None, seconds_per_token: float = 0.0) -> None:
        """Makes an instance, with an identity of its own.

        Args:
          model: what it holds.
          version: of made-up weights that it serves from the start; None = NOT_SERVING until a commit.
          seconds_per_token: how long a token takes.
        """
        self._id = f"fake-{uuid.uuid4().hex[:12]}"
        self._model = model
        self._seconds_per_token = seconds_per_token
        self._live = None if version is None else _Held(version=version, weights=version)
        self._staged: _Held | None = None
        self._changed = threading.Condition()
        self._runs: list[_Run] = []
        self._waiting = 0
        self._held_back = 0  # commits and pauses that let nothing new begin
        self._paused = False
        self._closed = False
        self._faults: collections.Counter[Fault] = collections.Counter()
        self.struck: collections.Counter[Fault] = collections.Counter()

    @property
    def engine_id(self) -> str:
        """Identity of this instance."""
        return self._id

    def inject(self, fault: Fault, times: int = 1) -> None:
        """Makes the next `times` occasions fail; `struck` counts those that did."""
        with self._changed:
            self._faults[fault] += times

    def model(self) -> ModelInfo:
        """The architecture it pretends to hold."""
        return self._model

    def status(self) -> EngineStatus:
        """Its present state."""
        with self._changed:
            serving = Serving.NOT_SERVING if self._live is None or self._closed else Serving.SERVING
            return EngineStatus(
                engine_id=self._id,
                serving=Serving.PAUSED if self._paused and serving is Serving.SERVING else serving,
                version=-1 if self._live is None else self._live.version,
                staged_version=None if self._staged is None else self._staged.version,
                running=len(self._runs),
                waiting=self._waiting,
            )

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """Yields a completion per member, token by token in lockstep."""
        if self._strikes(Fault.REFUSE):
            raise Retryable("sample: the fake engine was told to refuse")
        if self._strikes(Fault.HANG):
            cancelled.wait(_WAIT_SECONDS)
            return
        with self._running(request, cancelled) as run:
            for completion in self._complete(run, cancelled):
                yield from self._misbehave(completion)

    def stage(self, manifest: Manifest) -> "_Sink":
        """Begins a push."""
        if self._strikes(Fault.FAIL_STAGE):
            raise Retryable("stage: the fake engine was told to fail")

        def keep(weights: int) -> None:
            with self._changed:
                self._staged = _Held(version=manifest.version, weights=weights)

        return _Sink(keep)

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        """Makes the staged version live if it reproduces the probe."""
        with self._changed:
            staged, live = self._staged, self._live
        if staged is None and live is not None and live.version == version and live.report is not None:
            return live.report
        if staged is None or staged.version != version:
            raise Fatal(f"commit of version {version}: expected it staged, got {self.status()}")
        logp = fake_logp(staged.weights, probe.tokens, 1.0)
        report = probe.compare(logp - 1.0 if self._strikes(Fault.FAIL_COMMIT) else logp)
        if report.mean_abs > probe.tolerance:
            self.discard()
            raise Fatal(
                f"commit of version {version}: expected the probe's log-probs within {probe.tolerance} nats on "
                f"average, got {report.mean_abs}"
            )
        with self._settled(in_flight), self._changed:
            self._live, self._staged = dataclasses.replace(staged, report=report), None
        return report

    def discard(self) -> None:
        """Drops what is staged."""
        with self._changed:
            self._staged = None

    def pause(self, in_flight: InFlight) -> None:
        """Stops sampling."""
        with self._settled(in_flight), self._changed:
            self._paused = True

    def resume(self) -> None:
        """Samples again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Ends these requests (all, if None)."""
        with self._changed:
            for run in self._runs:
                run.aborted |= request_ids is None or run.request.request_id in request_ids
            self._changed.notify_all()

    def close(self) -> None:
        """Aborts what runs and takes nothing more."""
        with self._changed:
            self._closed = True
        self.abort(None)

    @contextlib.contextmanager
    def _settled(self, in_flight: InFlight) -> Iterator[None]:
        """Lets nothing begin, and treats what runs as told: all has ended, unless it is to go on afterwards."""
        with self._changed:
            self._held_back += 1
        try:
            if in_flight is InFlight.ABORT:
                self.abort(None)
            if in_flight is not InFlight.RETRACT:
                with self._changed:
                    if not self._changed.wait_for(lambda: not self._runs, _WAIT_SECONDS):
                        raise Retryable(
                            f"running requests: expected an end within {_WAIT_SECONDS} s, got {self.status()}"
                        )
            yield
        finally:
            with self._changed:
                self._held_back -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _running(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[_Run]:
        run = _Run(request)
        with self._changed:
            self._waiting += 1
            try:
                self._wait(lambda: self._held_back == 0 and not self._paused, cancelled)
            finally:
                self._waiting -= 1
            if self._live is None or self._closed:
                raise Retryable(f"sample: expected a serving engine, got {self.status()}")
            self._runs.append(run)
        try:
            yield run
        finally:
            with self._changed:
                self._runs.remove(run)
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], cancelled: threading.Event) -> None:
        """Waits, holding the condition; short slices, because `cancelled` cannot wake it."""
        end = time.monotonic() + _WAIT_SECONDS
        while not (ready() or self._closed or cancelled.is_set()):
            if time.monotonic() > end:
                raise Retryable(f"sample: expected the engine to go on within {_WAIT_SECONDS} s, got {self.status()}")
            self._changed.wait(0.01)

    def _complete(self, run: _Run, cancelled: threading.Event) -> Iterator[Completion]:
        members = list(run.request.members)
        while members and not cancelled.is_set():
            if self._seconds_per_token:
                cancelled.wait(self._seconds_per_token)
            with self._changed:
                self._wait(lambda: run.aborted or not self._paused, cancelled)
                live, ended = self._live, run.aborted or self._closed
            assert live is not None  # a running request was admitted by a serving engine, and serving never stops
            for member in list(members):
                finish = Finish.ABORT if ended else self._step(run, member, live)
                if finish is not None:
                    members.remove(member)
                    yield self._completion(run, member, finish, live)

    def _step(self, run: _Run, member: int, live: _Held) -> Finish | None:
        """Samples a member's next token; says whether it was the last."""
        sampling, tokens = run.request.sampling, run.tokens[member]
        count = run.request.already_sampled + len(tokens)
        previous = tokens[-1] if tokens else int(run.request.prompt_tokens[-1])
        token = fake_token(live.weights, previous, (member, count), sampling, self._model.vocab_size)
        tokens.append(token)
        run.held[member].append(live)
        if token in sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if count + 1 == sampling.max_new_tokens else None

    def _completion(self, run: _Run, member: int, finish: Finish, live: _Held) -> Completion:
        request, held = run.request, run.held[member]
        tokens = np.array(run.tokens[member], np.int32)
        whole = np.concatenate([request.prompt_tokens, tokens])
        temperature = request.sampling.temperature or 1.0
        first = len(request.prompt_tokens) - 1
        logp = np.empty(len(held), np.float32)
        for weights in {h.weights for h in held}:  # one or two: those before and after a push
            of = np.array([h.weights == weights for h in held])
            logp[of] = fake_logp(weights, whole[first:], temperature)[of]
        trace = None
        if request.want_trace and self._model.moe_layers and len(tokens):
            routes = fake_routes(live.weights, whole[:-1], self._model)
            trace = Trace(experts_TLK=routes, first_row=0, version_T=np.full(len(routes), live.version, np.int32))
        return Completion(
            request_id=request.request_id,
            member=member,
            tokens=tokens,
            behavior_logp=logp,
            version=np.array([h.version for h in held], np.int32),
            trace=trace,
            finish=finish,
            engine_id=self._id,
            logprob=LogprobDefinition(temperature=temperature),
        )

    def _misbehave(self, completion: Completion) -> Iterator[Completion]:
        if self._strikes(Fault.DROP):
            raise Retryable("sample: the fake engine was told to break the stream")
        if self._strikes(Fault.LOST):
            return
        for fault, corrupt in _CORRUPTIONS.items():
            if len(completion.tokens) and self._strikes(fault):
                completion = corrupt(completion, self._model)
        yield completion
        if self._strikes(Fault.DUPLICATE):
            yield completion

    def _strikes(self, fault: Fault) -> bool:
        if self._faults[fault] <= 0:  # mostly; without the lock, which every completion would take a dozen times
            return False
        with self._changed:
            if self._faults[fault] <= 0:
                return False
            self._faults[fault] -= 1
            self.struck[fault] += 1
            return True


class _Sink:
    """Keeps a push and, when it is whole, what follows from its bytes."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        self._keep = keep
        self._tensors: dict[str, np.ndarray] = {}

    def put(self, name: str, array: np.ndarray) -> None:
        """Takes a tensor."""
        self._tensors[name] = array

    def finish(self) -> None:
        """Stages it."""
        self._keep(fingerprint(self._tensors))

    def discard(self) -> None:
        """Forgets it."""
        self._tensors.clear()


def _with_logp(completion: Completion, value: float) -> Completion:
    logp = completion.behavior_logp.copy()
    logp[-1] = value
    return dataclasses.replace(completion, behavior_logp=logp)


def _with_unknown_token(completion: Completion, model: ModelInfo) -> Completion:
    tokens = completion.tokens.copy()
    tokens[0] = model.vocab_size
    return dataclasses.replace(completion, tokens=tokens)


def _with_trace(completion: Completion, change: Callable[[np.ndarray], np.ndarray]) -> Completion:
    if completion.trace is None:
        return completion
    experts = change(completion.trace.experts_TLK)
    trace = Trace(experts_TLK=experts, first_row=0, version_T=completion.trace.version_T[: len(experts)])
    return dataclasses.replace(completion, trace=trace)


_CORRUPTIONS: dict[Fault, Callable[[Completion, ModelInfo], Completion]] = {
    Fault.NAN_LOGP: lambda completion, _: _with_logp(completion, float("nan")),
    Fault.POSITIVE_LOGP: lambda completion, _: _with_logp(completion, 0.5),
    Fault.UNKNOWN_TOKEN: _with_unknown_token,
    Fault.WRONG_ROWS: lambda completion, _: _with_trace(completion, lambda experts: experts[:-1]),
    Fault.ZERO_ROUTES: lambda completion, _: _with_trace(completion, np.zeros_like),
    Fault.NO_TRACE: lambda completion, _: dataclasses.replace(completion, trace=None),
    Fault.WRONG_VERSION: lambda completion, _: dataclasses.replace(completion, version=completion.version + 1000),
    Fault.WRONG_TEMPERATURE: lambda completion, _: dataclasses.replace(
        completion, logprob=LogprobDefinition(temperature=completion.logprob.temperature + 0.5)
    ),
}
