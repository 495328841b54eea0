"""The local engine: `rollout_bridge.Engine` over `sat_jax.sampler`.

One thread (`LocalWorker`) owns the device and every decision; the others hand it commands and wait for answers. What
it raises that is no `BridgeError` is a defect of the engine: the thread ends, and every call from then on says why.
"""

import concurrent.futures
import dataclasses
import itertools
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from rollout_bridge.checks import check_request
from rollout_bridge.errors import BridgeError, Fatal, Retryable
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
    TensorSpec,
)
from sat_jax.model import Policy, PolicyConfig
from sat_jax.model.hf import import_tensors, tensor_shapes
from sat_jax.sampler import SlotsConfig
from train.local_worker import LocalWorker, StagedWeights, Ticket

T = TypeVar("T")
_Command = Callable[[LocalWorker], None]
_POLL_SECONDS = 0.25  # how soon a cancelled call, or a thread that has ended, is noticed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalEngineConfig:
    """How the local engine samples.

    Attributes:
      dtype: of weights and computation, "float32" or "bfloat16"; the type that a push must have on the wire.
      slots: sequences decoded at once.
      max_tokens: longest prompt + completion.
      max_stop_ids: most stop ids of a request.
      steps: most tokens a slot between two looks at commands and new requests.

    Raises:
      ValueError: a count is below 1.
    """

    dtype: str
    slots: int
    max_tokens: int
    max_stop_ids: int = 8
    steps: int = 16

    def __post_init__(self) -> None:
        for name in ("slots", "max_tokens", "max_stop_ids", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}: expected at least 1, got {getattr(self, name)}")


def model_info(policy: PolicyConfig, config: LocalEngineConfig) -> ModelInfo:
    """What an engine of this policy says that it holds: every tensor in the engine's own type."""
    return ModelInfo(
        model_digest=policy.digest(),
        vocab_size=policy.vocab_size,
        moe_layers=policy.moe_layers,
        num_experts=policy.experts,
        top_k=policy.experts_per_token,
        max_tokens=config.max_tokens,
        tensors=tuple(
            TensorSpec(name=name, dtype=config.dtype, shape=shape) for name, shape in tensor_shapes(policy).items()
        ),
        dtype=config.dtype,
    )


class LocalEngine:
    """Samples with the policy of this repository; see `rollout_bridge.engine.Engine` for what each method promises."""

    def __init__(
        self, policy: PolicyConfig, config: LocalEngineConfig, initial: Policy | None = None, version: int = 0
    ) -> None:
        """Starts its thread, which first compiles (seconds); calls wait for that.

        Args:
          policy: the architecture; its `dtype` is overridden by the config's.
          config: how to sample.
          initial: weights to serve from the start; None = NOT_SERVING until a commit.
          version: of `initial`.
        """
        self._policy = dataclasses.replace(policy, dtype=config.dtype)
        self._config = config
        self._engine_id = f"local-{uuid.uuid4().hex[:12]}"
        self._initial = None if initial is None else (initial, version)
        self._worker: LocalWorker | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self._engine_id, daemon=True)
        self._thread.start()

    @property
    def engine_id(self) -> str:
        """Identity of this instance."""
        return self._engine_id

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if something did."""
        return self._failure

    def model(self) -> ModelInfo:
        """The architecture, and what a push must contain: every tensor in the engine's own type."""
        return model_info(self._policy, self._config)

    def status(self) -> EngineStatus:
        """The present state; NOT_SERVING while it compiles, and once its thread has ended."""
        worker = self._worker
        if worker is not None and self._thread.is_alive():
            return worker.status()
        return EngineStatus(
            engine_id=self._engine_id,
            serving=Serving.NOT_SERVING,
            version=-1,
            staged_version=None,
            running=0,
            waiting=0,
        )

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """Yields one completion per member, as each finishes; ends early once `cancelled` is set.

        Raises:
          Retryable: no version serves, or the engine is closed.
          Fatal: the request can never be served, or the engine has failed.
        """
        for ready in self.sample_ready([request], cancelled):
            yield from itertools.takewhile(lambda _: not cancelled.is_set(), ready)

    def sample_ready(self, requests: Sequence[SampleRequest], cancelled: threading.Event) -> Iterator[list[Completion]]:
        """`sample` of several requests, with those together that ended together."""
        for request in requests:
            self._check(request)
        reply: queue.SimpleQueue[Completion | BridgeError] = queue.SimpleQueue()
        tickets = [
            Ticket(request=request, member=member, reply=reply) for request in requests for member in request.members
        ]
        self._ask(lambda worker: worker.submit(tickets))
        answered = 0
        try:
            while answered < len(tickets) and (answer := self._next(reply, cancelled)):
                answers = [answer]
                while not reply.empty():  # nobody else takes from it
                    answers.append(reply.get())
                answered += len(answers)
                ready = [one for one in answers if isinstance(one, Completion)]
                if ready:
                    yield ready
                for one in answers:
                    if isinstance(one, BridgeError):
                        raise one
        finally:
            if answered < len(tickets):
                self._commands.put(lambda worker: worker.cancel(tickets))

    def stage(self, manifest: Manifest) -> "LocalStageSink":
        """Begins a push; sampling goes on."""
        return LocalStageSink(self, manifest)

    def commit(self, version: int, probe: Probe, in_flight: InFlight) -> ProbeReport:
        """Verifies what is staged and makes it live.

        Raises:
          NotStaged: this version is neither staged nor live.
          Fatal: it does not reproduce the probe.
          Retryable: another call is waiting for running requests, or paused ones would never finish.
        """
        return self._ask_later(lambda worker, done: worker.commit(version, probe, in_flight, done))

    def discard(self) -> None:
        """Drops what is staged, if anything."""
        self._ask(lambda worker: worker.discard())

    def pause(self, in_flight: InFlight) -> None:
        """Stops sampling; returns once nothing is sampled any more.

        Raises:
          Retryable: another call is waiting for running requests.
        """
        self._ask_later(lambda worker, done: worker.pause(in_flight, done))

    def resume(self) -> None:
        """Samples again.

        Raises:
          Retryable: a call is waiting for running requests.
        """
        self._ask(lambda worker: worker.resume())

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Ends these requests (all, if None)."""
        self._ask(lambda worker: worker.abort(request_ids))

    def close(self) -> None:
        """Aborts what runs and ends the thread."""
        self._closing = True
        self._commands.put(lambda worker: None)  # wakes it
        self._thread.join()

    def take_push(self, manifest: Manifest, tensors: dict[str, np.ndarray]) -> None:
        """Puts a complete push on the device as the staged version; for `LocalStageSink`.

        Raises:
          ValueError: a tensor is missing, unexpected or misshapen.
        """
        policy = import_tensors(self._policy, tensors, param_dtype=self._policy.dtype)
        self._ask(lambda worker: worker.stage(StagedWeights(manifest=manifest, weights=nnx.state(policy, nnx.Param))))

    def _check(self, request: SampleRequest) -> None:
        try:
            check_request(request, self.model())
        except ValueError as error:
            raise Fatal(str(error)) from error
        stops = len(request.sampling.stop_ids)
        if stops > self._config.max_stop_ids:
            raise Fatal(
                f"request {request.request_id!r}: expected at most {self._config.max_stop_ids} stop ids, got {stops}; "
                "start the engine with a larger max_stop_ids"
            )

    def _next(
        self, reply: "queue.SimpleQueue[Completion | BridgeError]", cancelled: threading.Event
    ) -> Completion | BridgeError | None:
        """The next answer, or None once cancelled."""
        while not cancelled.is_set():
            try:
                return reply.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._must_run()
        return None

    def _ask(self, act: Callable[[LocalWorker], T]) -> T:
        """Runs something on the engine's thread and returns what it gives."""
        return self._ask_later(lambda worker, done: done.set_result(act(worker)))

    def _ask_later(self, act: Callable[[LocalWorker, "concurrent.futures.Future[Any]"], None]) -> Any:
        """The same for an action that sets its result later; bounded by the longest running request."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def command(worker: LocalWorker) -> None:
            try:
                act(worker, done)
            except BaseException as error:
                done.set_exception(error)
                if not isinstance(error, BridgeError):
                    raise

        self._commands.put(command)
        while not concurrent.futures.wait([done], _POLL_SECONDS).done:
            self._must_run()
        return done.result()

    def _must_run(self) -> None:
        if self._failure is not None:
            raise Fatal(f"engine {self._engine_id}: expected a running engine, got {self._failure!r}; restart it")
        if not self._thread.is_alive():
            raise Retryable(f"engine {self._engine_id}: expected a running engine, got one that was closed")

    def _run(self) -> None:
        try:
            slots = SlotsConfig(
                slots=self._config.slots, positions=self._config.max_tokens, stop_ids=self._config.max_stop_ids
            )
            worker = LocalWorker(self._engine_id, self._policy, slots, self._config.steps)
            if self._initial is not None:
                worker.begin(*self._initial)
            self._worker = worker
            while not self._closing:
                self._obey(worker, wait=not worker.turn())
            worker.abort(None)
        except BaseException as error:  # told to whoever calls, and to the process that serves the engine
            self._failure = error

    def _obey(self, worker: LocalWorker, wait: bool) -> None:
        """Runs the commands that are there, and at least one if there is nothing else to do."""
        if wait:
            self._commands.get()(worker)
        while not self._commands.empty():
            self._commands.get()(worker)


class LocalStageSink:
    """Collects a push by name; see `rollout_bridge.engine.StageSink`."""

    def __init__(self, engine: LocalEngine, manifest: Manifest) -> None:
        self._engine = engine
        self._manifest = manifest
        self._tensors: dict[str, np.ndarray] = {}

    def put(self, name: str, array: np.ndarray) -> None:
        """Takes one whole tensor."""
        self._tensors[name] = array

    def finish(self) -> None:
        """Makes the push the staged version.

        Raises:
          ValueError: a tensor is missing, unexpected or misshapen.
        """
        self._engine.take_push(self._manifest, self._tensors)
        self._tensors = {}

    def discard(self) -> None:
        """Forgets the push."""
        self._tensors = {}
