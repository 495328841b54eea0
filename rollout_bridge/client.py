"""One endpoint: typed calls with a deadline each, bounded retries, and failures that say whether to try again."""

import dataclasses
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
import tenacity

from rollout_bridge import codec, codec_push
from rollout_bridge.checks import check_completions, check_request
from rollout_bridge.errors import BridgeError, Busy, Fatal, Retryable
from rollout_bridge.lease import LEASE_KEY, Lease
from rollout_bridge.messages import (
    Chunk,
    Completion,
    EngineStatus,
    InFlight,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    StageReport,
)
from rollout_bridge.proto import rollout_pb2_grpc
from rollout_bridge.transport import (
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    SENDER_KEY,
    TOKEN_KEY,
    Security,
    error_of,
    open_channel,
)
from rollout_bridge.weights import Weights

T = TypeVar("T")

_RELEASE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """How a client calls. Every figure in seconds is the deadline of one attempt.

    Attributes:
      security: TLS, token, opt-out.
      max_message_bytes: largest message in or out.
      chunk_bytes: of a push; about 1 MiB is fastest, and it must fit a message.
      control_seconds: of every call not named below.
      stage_seconds: of a whole push.
      commit_seconds: of a commit, which may wait for running requests.
      sample_seconds: of a Sample call, all its members.
      attempts: of every call that is safe to repeat (all but Sample).
      sender: who calls, for the errors of others.
      lease: in whose name weights are pushed; None = nobody's, which is refused while somebody holds the engine.
    """

    security: Security = dataclasses.field(default_factory=Security)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    chunk_bytes: int = CHUNK_BYTES
    control_seconds: float = 20.0
    stage_seconds: float = 600.0
    commit_seconds: float = 300.0
    sample_seconds: float = 3600.0
    attempts: int = 4
    sender: str = dataclasses.field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    lease: Lease | None = None

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= self.max_message_bytes - 1024:
            raise ValueError(
                f"chunk_bytes: expected 1 to {self.max_message_bytes - 1024} (max_message_bytes less its frame), got "
                f"{self.chunk_bytes}"
            )
        if self.attempts < 1:
            raise ValueError(f"attempts: expected at least 1, got {self.attempts}")


class Client:
    """Calls one bridge. Every method may be called from any thread.

    Every method raises Retryable or Fatal; repeated attempts are made within.
    """

    def __init__(self, endpoint: str, *, options: ClientOptions | None = None) -> None:
        """Opens a channel, without connecting.

        Args:
          endpoint: host:port.
          options: deadlines, limits, security.

        Raises:
          ValueError: the security is not enough for the address.
        """
        self.endpoint = endpoint
        self.options = options or ClientOptions()
        security = self.options.security
        self._channel = open_channel(endpoint, security, self.options.max_message_bytes)
        self._stub = rollout_pb2_grpc.RolloutBridgeStub(self._channel)
        self._stage = self._channel.stream_unary(  # the stub's, but for its way to bytes
            f"/{codec.SERVICE}/StageWeights", codec_push.serialize_part, codec.stage_reply
        )
        token = () if security.token is None else ((TOKEN_KEY, f"Bearer {security.token}"),)
        lease = () if self.options.lease is None else ((LEASE_KEY, self.options.lease.to_metadata()),)
        self._metadata: tuple[tuple[str, str | bytes], ...] = ((SENDER_KEY, self.options.sender), *token, *lease)

    def model(self) -> ModelInfo:
        """What the engine holds."""
        return codec.decode_model(
            self._call(self._stub.GetModel, "GetModel", codec.GetModel(), self.options.control_seconds)
        )

    def status(self) -> EngineStatus:
        """The engine's present state, from one attempt."""
        seconds = self.options.control_seconds
        with self.watch(follow_seconds=0.0, heartbeat_seconds=seconds) as states:
            for status in states:
                return status
        raise Retryable(f"Status of {self.endpoint}: expected a state, got none")

    def watch(self, *, follow_seconds: float, heartbeat_seconds: float) -> "Stream[EngineStatus]":
        """Follows the engine's state: the present one, every change, and a heartbeat.

        Args:
          follow_seconds: after which the stream ends by itself.
          heartbeat_seconds: at most this long without a message.
        """
        request = codec.encode_status_request(follow_seconds, heartbeat_seconds)
        deadline = follow_seconds + self.options.control_seconds
        return self._stream(
            self._stub.Status, "Status", request, deadline, lambda message: (codec.decode_status(message),)
        )

    def sample(self, request: SampleRequest, model: ModelInfo) -> "Stream[Completion]":
        """Starts a request; its completions come as they finish, each checked: `sample_all` of one."""
        return self.sample_all([request], model)

    def sample_all(self, requests: Sequence[SampleRequest], model: ModelInfo) -> "Stream[Completion]":
        """Starts requests by one call; their completions come as they finish, each checked.

        The stream raises Fatal for a completion that is not what was asked for (see checks.check_completion). Not
        repeated here: who knows other engines decides. What fails one request ends the call.

        Args:
          requests: one or more, with distinct ids.
          model: what the engine holds.

        Raises:
          ValueError: a request does not fit the model.
        """
        for request in requests:
            check_request(request, model)
        wanted = {request.request_id: request for request in requests}

        def decode(message: Any) -> tuple[Completion, ...]:
            completions = codec.decode_completions(message)
            for request_id, answers in itertools.groupby(completions, lambda completion: completion.request_id):
                # One that nobody asked for is told to be none of the first request's.
                check_completions(tuple(answers), wanted.get(request_id, requests[0]), model)
            return completions

        more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        name = f"Sample of {requests[0].request_id!r}{more}"
        message = codec.encode_requests(requests)
        return self._stream(self._stub.Sample, name, message, self.options.sample_seconds, decode)

    def stage(self, weights: Weights, *, seconds: float | None = None) -> StageReport:
        """Pushes weights, unless this very push is staged or live already.

        Args:
          weights: what to push.
          seconds: deadline of an attempt, when less than `stage_seconds` are left.
        """
        manifest = weights.manifest
        limit = min(seconds or self.options.stage_seconds, self.options.stage_seconds)

        def attempt() -> StageReport:
            parts = _Parts(manifest, weights, self.options.chunk_bytes)
            try:
                reply = self._stage(iter(parts), timeout=limit, metadata=self._metadata)
            except grpc.RpcError as error:
                if parts.error is not None:
                    raise parts.error from error
                raise self._error(error, f"StageWeights of version {weights.version}") from error
            if parts.error is not None:
                raise parts.error
            return codec.decode_stage_report(reply)

        return self._repeat(attempt)

    def commit(
        self, push: Manifest, probe: Probe, in_flight: InFlight, *, seconds: float | None = None
    ) -> tuple[ProbeReport, str]:
        """Makes a staged push live.

        Args:
          push: its manifest.
          probe: what the engine must reproduce.
          in_flight: what becomes of running requests.
          seconds: deadline of an attempt, when less than `commit_seconds` are left.

        Returns:
          How well the probe was reproduced, and by which instance.
        """
        request = codec.encode_commit(push.version, push.digest, probe, in_flight)
        limit = min(seconds or self.options.commit_seconds, self.options.commit_seconds)
        name = f"CommitWeights of version {push.version}"
        return codec.decode_commit_reply(self._call(self._stub.CommitWeights, name, request, limit))

    def discard(self) -> None:
        """Drops what is staged."""
        self._call(self._stub.DiscardStaged, "DiscardStaged", codec.Discard(), self.options.control_seconds)

    def pause(self, in_flight: InFlight) -> None:
        """Stops sampling; requests wait."""
        self._call(self._stub.Pause, "Pause", codec.encode_pause(in_flight), self.options.commit_seconds)

    def resume(self) -> None:
        """Samples again."""
        self._call(self._stub.Resume, "Resume", codec.Resume(), self.options.control_seconds)

    def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """Ends these requests (all, if None); each open member returns what it has as ABORT."""
        self._call(self._stub.Abort, "Abort", codec.encode_abort(request_ids), self.options.control_seconds)

    def release(self) -> None:
        """Gives back the lease, from one attempt that is short: whoever gives it back is about to end."""
        seconds = min(self.options.control_seconds, _RELEASE_SECONDS)
        self._attempt(self._stub.ReleaseLease, "ReleaseLease", codec.Release(), seconds)

    def close(self) -> None:
        """Ends every call and the connection."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], name: str, request: Any, seconds: float) -> Any:
        return self._repeat(lambda: self._attempt(method, name, request, seconds))

    def _attempt(self, method: Callable[..., Any], name: str, request: Any, seconds: float) -> Any:
        try:
            return method(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error, name) from error
        except ValueError as error:  # gRPC's word for a channel that was closed under the call
            raise Fatal(f"{self._name(name)}: {error}") from error

    def _stream(
        self, method: Callable[..., Any], name: str, request: Any, seconds: float, decode: Callable[[Any], Iterable[T]]
    ) -> "Stream[T]":
        try:
            call = method(request, timeout=seconds, metadata=self._metadata)
        except ValueError as error:
            raise Fatal(f"{self._name(name)}: {error}") from error
        return Stream(call, decode, self._name(name), self.options.max_message_bytes)

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Tries again, with jitter, while the failure is Retryable. A Busy engine is the caller's to wait for."""
        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.options.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            retry=tenacity.retry_if_exception(_worth_another_try),
            reraise=True,
        )(attempt)

    def _name(self, call: str) -> str:
        return f"{call} at {self.endpoint}"

    def _error(self, error: grpc.RpcError, call: str) -> BridgeError:
        return error_of(error, self._name(call), self.options.max_message_bytes)


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, Retryable) and not isinstance(error, Busy)


class Stream(Generic[T]):
    """Answers as they come. Iterate it once; leaving its `with` block, or `cancel` from any thread, ends the call."""

    def __init__(self, call: Any, decode: Callable[[Any], Iterable[T]], name: str, max_message_bytes: int) -> None:
        self._call = call
        self._ready: deque[T] = deque()  # of a message that held several
        self._decode = decode
        self._name = name
        self._max_message_bytes = max_message_bytes

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._ready:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                raise error_of(error, self._name, self._max_message_bytes) from error
            try:
                self._ready.extend(self._decode(message))
            except ValueError as error:
                self.cancel()
                raise Fatal(f"{self._name}: {error}") from error
        return self._ready.popleft()

    @property
    def pending(self) -> int:
        """How many answers have come and were not iterated yet."""
        return len(self._ready)

    def cancel(self) -> None:
        """Ends the call; the engine is told."""
        self._call.cancel()

    def __enter__(self) -> "Stream[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class _Parts:
    """The messages of a push. Keeps what broke them: gRPC, which reads them in its own thread, would only log it."""

    def __init__(self, manifest: Manifest, weights: Weights, chunk_bytes: int) -> None:
        self._manifest = manifest
        self._weights = weights
        self._chunk_bytes = chunk_bytes
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Manifest | tuple[Chunk, ...]]:
        try:
            yield self._manifest
            yield from codec_push.together(self._weights.chunks(self._chunk_bytes), self._chunk_bytes)
        except Exception as error:  # ends the stream early, which the server refuses; `stage` raises this
            self.error = error
