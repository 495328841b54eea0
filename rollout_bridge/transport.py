"""How bytes travel: addresses, TLS, bearer tokens, message limits, keepalive, and failures as gRPC status.

Off loopback a connection is encrypted, or the operator says in so many words that it need not be; then no token is
accepted, because it would travel in the clear.
"""

import dataclasses
import hmac
import ipaddress
from collections.abc import Callable
from typing import Any

import grpc

from rollout_bridge import codec
from rollout_bridge.errors import BridgeError, Busy, Fatal, Retryable

MAX_MESSAGE_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
TOKEN_KEY = "authorization"
SENDER_KEY = "sat-jax-sender"
_STATUS_CHARS = 3000  # of an error's text: a status travels in the trailers, which gRPC limits to 8 KiB
_KEEPALIVE_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """A server's identity, PEM. With `client_ca` every client must show a certificate that it signed."""

    certificate: bytes
    key: bytes = dataclasses.field(repr=False)
    client_ca: bytes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """What a client trusts (`ca`; None = the system's roots) and, for mutual TLS, its own identity, PEM."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """How one side of a connection is protected.

    Attributes:
      tls: None = in the clear.
      token: bearer token that the client sends and the server asks for; at least 16 characters. Never shown.
      allow_insecure: off loopback without TLS, knowingly.
    """

    tls: ServerTls | ClientTls | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    allow_insecure: bool = False

    def check(self, address: str) -> None:
        """Refuses what would expose the bridge, its weights or its token.

        Raises:
          ValueError: names the address and the remedy.
        """
        if self.token is not None and len(self.token) < 16:
            raise ValueError(f"bearer token for {address}: expected at least 16 characters, got {len(self.token)}")
        if self.tls is not None or is_loopback(address):
            return
        if not self.allow_insecure:
            raise ValueError(
                f"address {address}: expected TLS off loopback, got none; give a certificate, or allow an insecure "
                "connection explicitly on a network that you trust"
            )
        if self.token is not None:
            raise ValueError(
                f"address {address}: expected no bearer token on an insecure connection off loopback (anyone on the "
                "way could read it), got one; use TLS"
            )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
      ValueError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host) != (host[0] == "[" and host[-1] == "]"):
        raise ValueError(f"address {address!r}: expected host:port (a v6 host in brackets), port 0 to 65535")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address never leaves this machine."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name; only the resolver knows


def common_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Settings of both sides: message limits, and pings that notice a peer that died without a word."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Settings of a server; one process a port, so that a second one fails instead of sharing it."""
    return [
        *common_options(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ]


def open_channel(address: str, security: Security, max_message_bytes: int) -> grpc.Channel:
    """A channel of its own (never a shared connection, never through a proxy), which reconnects within a second.

    Raises:
      ValueError: the security is not enough for the address.
    """
    security.check(address)
    options: list[tuple[str, int]] = [
        *common_options(max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A stream's own reader takes its events: a thread of the channel between them doubles what a request costs.
        ("SingleThreadedUnaryStream", 1),
    ]
    if isinstance(security.tls, ClientTls):
        tls = security.tls
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        return grpc.secure_channel(address, credentials, options=options)
    return grpc.insecure_channel(address, options=options)


class TokenGate(grpc.ServerInterceptor):
    """Turns away calls without the bearer token; health checks need none, because probes of schedulers send none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Passes the call on, or answers UNAUTHENTICATED."""
        if handler_call_details.method.startswith("/grpc.health."):
            return continuation(handler_call_details)
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == TOKEN_KEY]
        if any(hmac.compare_digest(_octets(value), self._expected) for value in given):
            return continuation(handler_call_details)
        return _refusal(continuation(handler_call_details), bool(given))


def status_of(error: Exception) -> tuple[grpc.StatusCode, BridgeError]:
    """The gRPC status of a server's exception, and the kind that the client shall raise."""
    if isinstance(error, BridgeError):
        codes = {Busy: grpc.StatusCode.ABORTED, Retryable: grpc.StatusCode.UNAVAILABLE}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), None)
        return code or grpc.StatusCode.FAILED_PRECONDITION, error
    if isinstance(error, ValueError):
        return grpc.StatusCode.INVALID_ARGUMENT, Fatal(str(error))
    return grpc.StatusCode.INTERNAL, Fatal(f"internal error of the engine: {type(error).__name__}: {error}")


def status_text(error: BridgeError) -> str:
    """An error's text, short enough for a status."""
    text = str(error)
    return text if len(text) <= _STATUS_CHARS else f"{text[:_STATUS_CHARS]}... ({len(text)} characters)"


def error_of(error: grpc.RpcError, call: str, max_message_bytes: int) -> BridgeError:
    """What a failed call means to the caller.

    Our servers send the kind along; without it the failure came from gRPC itself and the status code decides.

    Args:
      error: what gRPC raised; it is also a grpc.Call.
      call: what was called and where, for the text.
      max_message_bytes: our own limit, for the text.
    """
    code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
    trailing = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
    text = f"{call}: {code.name}: {details}"
    if codec.ERROR_KEY in trailing:
        try:
            kind, engine_id, version = codec.decode_error(trailing[codec.ERROR_KEY])
        except ValueError as garbled:
            return Fatal(f"{text}; {garbled}")
        if kind is Retryable and code is grpc.StatusCode.ABORTED:
            kind = Busy
        return kind(f"{call} (engine {engine_id}, version {version}): {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Fatal(f"{text}; messages of up to {max_message_bytes} bytes are accepted on this side")
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,  # a proxy or a reset stream: our own internal errors carry a kind
        grpc.StatusCode.UNKNOWN,
    ):
        return Retryable(text)
    return Fatal(text)


def _octets(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _refusal(handler: grpc.RpcMethodHandler | None, given: bool) -> grpc.RpcMethodHandler | None:
    """A handler of the same kind that refuses; gRPC would misread the stream through one of another kind."""
    if handler is None:
        return None
    got = "another" if given else "none"

    def refuse(_request: Any, context: grpc.ServicerContext) -> Any:
        error = Fatal(
            f"authentication: expected the bridge's bearer token, got {got}; is the same token set on both sides?"
        )
        context.set_trailing_metadata(((codec.ERROR_KEY, codec.encode_error(error, "", -1)),))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(refuse, handler.request_deserializer, handler.response_serializer)
