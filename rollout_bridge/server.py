"""The gRPC service over an Engine, with health and reflection beside it.

Health follows the engine: NOT_SERVING until a version is verified. A paused engine is healthy: it holds one. Every call
must come with a deadline, so that no forgotten caller holds the engine for ever.
"""

import contextlib
import dataclasses
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_bridge import codec, codec_push
from rollout_bridge.checks import check_request
from rollout_bridge.engine import Engine
from rollout_bridge.errors import BridgeError, Retryable
from rollout_bridge.lease import LEASE_KEY, NOBODY, Lease, LeaseBook
from rollout_bridge.messages import Completion, EngineStatus, Serving
from rollout_bridge.proto import rollout_pb2_grpc
from rollout_bridge.push import PushDesk
from rollout_bridge.sampling import Slots, sampled
from rollout_bridge.transport import (
    MAX_MESSAGE_BYTES,
    SENDER_KEY,
    Security,
    ServerTls,
    TokenGate,
    server_options,
    split_address,
    status_of,
    status_text,
)

_FOREVER_SECONDS = 10 * 365 * 86400.0  # gRPC shows a missing deadline as one centuries away
_TOGETHER_BYTES = 1 << 20  # of completions that share a message: what it costs beside its bytes is nothing then
_CONTROL_THREADS = 16  # calls that are neither Sample nor Status: short, or one at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How a server serves.

    Attributes:
      security: TLS, token, opt-out.
      max_message_bytes: largest message in or out; a completion's trace must fit.
      max_samples: requests at once, of all Sample calls; a call that would make them more is told to come again.
      max_watchers: Status calls at once, one thread each.
      poll_seconds: how often the engine's state is looked at.
      lease_seconds: of silence after which a trainer has lost the engine to whoever comes.
    """

    security: Security = dataclasses.field(default_factory=Security)
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_samples: int = 256
    max_watchers: int = 64
    poll_seconds: float = 0.1
    lease_seconds: float = 30.0


class Server:
    """A running server. The engine stays the caller's: stop the server first, then close the engine."""

    def __init__(self, server: grpc.Server, servicer: "_Servicer", address: str) -> None:
        self._server = server
        self._servicer = servicer
        self.address = address

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return split_address(self.address)[1]

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has been stopped; False if `timeout` seconds pass first."""
        return not self._server.wait_for_termination(timeout)

    def stop(self, grace: float = 5.0) -> None:
        """Takes no more calls, gives those that run `grace` seconds, and ends them."""
        self._servicer.close()
        self._server.stop(grace).wait(grace + 5.0)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace=0.0)


def serve(engine: Engine, address: str, *, options: ServerOptions | None = None) -> Server:
    """Serves an engine at an address and returns at once.

    Args:
      engine: what samples.
      address: host:port; port 0 takes any free one.
      options: limits and security.

    Raises:
      ValueError: the port is taken, the address is not this machine's, or the security is not enough for it.
    """
    options = options or ServerOptions()
    host, _ = split_address(address)
    options.security.check(address)
    token = options.security.token
    interceptors: list[grpc.ServerInterceptor] = [] if token is None else [TokenGate(token)]
    pool = futures.ThreadPoolExecutor(
        options.max_samples + options.max_watchers + _CONTROL_THREADS, thread_name_prefix="rollout-bridge"
    )
    server = grpc.server(pool, interceptors=interceptors, options=server_options(options.max_message_bytes))
    servicer = _Servicer(engine, options)
    rollout_pb2_grpc.add_RolloutBridgeServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    names = (codec.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _bind(server, address, options.security)
    server.start()
    servicer.start()
    return Server(server, servicer, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _bind(server: grpc.Server, address: str, security: Security) -> int:
    try:
        if not isinstance(security.tls, ServerTls):
            return server.add_insecure_port(address)
        tls = security.tls
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.client_ca, require_client_auth=tls.client_ca is not None
        )
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:  # gRPC does not say why; the system does
        raise ValueError(
            f"listen address {address}: expected one that is free and ours, got {_why_not(address) or error}; choose "
            "another port (0 = any free one) or stop the process that has it"
        ) from error


def _why_not(address: str) -> str | None:
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        return f'"{error.strerror}"'
    return None


class _Servicer(rollout_pb2_grpc.RolloutBridgeServicer):
    """The methods of the service."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._leases = LeaseBook(options.lease_seconds)
        self._desk = PushDesk(engine, self._leases)
        self._samples = Slots(options.max_samples, "requests")
        self._watchers = Slots(options.max_watchers, "Status calls")
        self._threads = futures.ThreadPoolExecutor(options.max_samples, thread_name_prefix="rollout-bridge-request")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow_health, name="rollout-bridge-health", daemon=True)
        self.health = health.HealthServicer()
        self._healthy = True
        self._refresh_health()

    def start(self) -> None:
        """Begins to follow the engine's state."""
        self._thread.start()

    def close(self) -> None:
        """Ends what would otherwise run until its deadline."""
        self._stopping.set()
        self.health.enter_graceful_shutdown()
        self._thread.join(timeout=5.0)
        self._threads.shutdown(wait=False)

    def GetModel(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            return codec.encode_model(self._engine.model())

    def Sample(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        cancelled = threading.Event()
        with self._answer(context):
            wanted = codec.decode_requests(request)
            with self._samples.take(len(wanted)):
                if not context.add_callback(cancelled.set):
                    return
                self._must_serve()
                model = self._engine.model()
                for one in wanted:
                    check_request(one, model)
                for ready in sampled(self._engine, wanted, cancelled, self._threads):
                    yield from self._messages(ready)

    def _messages(self, ready: Sequence[Completion]) -> Iterator[Any]:
        """Completions in as few messages of a moderate size as hold them."""
        most = min(_TOGETHER_BYTES, self._options.max_message_bytes // 2)
        first, size = None, 0
        for completion in ready:
            message = codec.encode_completion(completion)
            bytes_ = message.ByteSize()
            self._must_fit(bytes_, f"completion {completion.request_id}/{completion.member}")
            if first is not None and size + bytes_ <= most:
                first.together.append(message)
                size += bytes_
                continue
            if first is not None:
                yield first
            first, size = message, bytes_
        if first is not None:
            yield first

    def StageWeights(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            parts = itertools.chain.from_iterable(map(codec_push.decode_part, request_iterator))
            report = self._desk.stage(parts, _sender(context), _lease(context))
            return codec.encode_stage_report(report)

    def CommitWeights(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            version, digest, probe, in_flight = codec.decode_commit(request)
            report = self._desk.commit((version, digest), probe, in_flight, _sender(context), _lease(context))
            self._refresh_health()
            return codec.encode_commit_reply(report, self._engine.engine_id)

    def DiscardStaged(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            self._desk.discard(_sender(context), _lease(context))
            return codec.Discarded()

    def Pause(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            self._engine.pause(codec.decode_in_flight(request.in_flight))
            return codec.Paused()

    def Resume(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            self._engine.resume()
            return codec.Resumed()

    def Abort(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            self._engine.abort(codec.decode_abort(request))
            return codec.Aborted()

    def Status(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with self._answer(context), self._watchers.take():
            began = told = time.monotonic()
            status = self._desk.status()
            yield codec.encode_status(status)
            while time.monotonic() - began < request.follow_seconds and context.is_active():
                if self._stopping.wait(self._options.poll_seconds):
                    raise Retryable("status: the server is shutting down")
                self._leases.renew(_lease(context))
                before, status = status, self._desk.status()
                if _facts(before) != _facts(status) or time.monotonic() - told >= request.heartbeat_seconds:
                    told = time.monotonic()
                    yield codec.encode_status(status)

    def ReleaseLease(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._answer(context):
            self._leases.release(_lease(context))
            return codec.Released()

    @contextlib.contextmanager
    def _answer(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Turns an exception into a status that carries its kind; what nobody foresaw is logged whole."""
        try:
            left = context.time_remaining()
            if left is None or left > _FOREVER_SECONDS:
                raise ValueError(
                    "call: expected a deadline, got none; set one, so that the engine is not held for ever"
                )
            self._leases.renew(_lease(context))
            yield
        except Exception as error:
            code, kind = status_of(error)
            if not isinstance(error, BridgeError | ValueError):
                logging.getLogger(__name__).exception("call failed")
            context.set_trailing_metadata(((codec.ERROR_KEY, self._detail(kind)),))
            context.abort(code, status_text(kind))

    def _detail(self, error: BridgeError) -> bytes:
        try:
            status = self._desk.status()
        except BridgeError:  # the engine that failed the call cannot be asked either: the call's own error is the news
            return codec.encode_error(error, self._engine.engine_id, -1)
        return codec.encode_error(error, status.engine_id, status.version)

    def _must_serve(self) -> None:
        if self._desk.status().serving is Serving.NOT_SERVING:
            why = self._desk.doubt or "no version has been verified yet"
            raise Retryable(f"sample: expected an engine that serves, got one that does not: {why}; publish first")

    def _must_fit(self, size: int, subject: str) -> None:
        if size > self._options.max_message_bytes:
            raise ValueError(
                f"{subject}: expected a message of at most {self._options.max_message_bytes} bytes, got {size}; raise "
                "max_message_bytes on both sides"
            )

    def _follow_health(self) -> None:
        while not self._stopping.wait(self._options.poll_seconds):
            self._refresh_health()

    def _refresh_health(self) -> None:
        try:
            serving = self._desk.status().serving is not Serving.NOT_SERVING
        except Exception:
            if self._healthy:  # once, not at every look
                logging.getLogger(__name__).exception("the engine does not tell its state")
            serving = False
        self._healthy = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", codec.SERVICE):
            self.health.set(name, status)


def _facts(status: EngineStatus) -> tuple[Any, ...]:
    """What of a state is worth telling at once; counts of requests wait for the heartbeat."""
    return status.engine_id, status.serving, status.version, status.staged_version


def _lease(context: grpc.ServicerContext) -> Lease:
    """In whose name a call comes."""
    given = [str(value) for key, value in context.invocation_metadata() if key == LEASE_KEY]
    return Lease.from_metadata(given[0]) if given else NOBODY


def _sender(context: grpc.ServicerContext) -> str:
    names = [str(value) for key, value in context.invocation_metadata() if key == SENDER_KEY]
    return f"{names[0] if names else 'unnamed'} at {context.peer()}"
