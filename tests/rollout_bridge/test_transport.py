"""Addresses, security, and what a status means."""

import grpc
import pytest

from rollout_bridge import codec
from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged, Retryable
from rollout_bridge.transport import (
    ClientTls,
    Security,
    ServerTls,
    error_of,
    is_loopback,
    split_address,
    status_of,
    status_text,
)

TOKEN = "a-token-of-16-characters"


def test_addresses_are_read_or_refused():
    assert split_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("[::1]:0") == ("::1", 0)
    assert split_address("engine-3.fleet:65535") == ("engine-3.fleet", 65535)
    for bad in ("127.0.0.1", ":80", "host:", "host:65536", "host:-1", "::1:80", "[::1:80", "host:8o"):
        with pytest.raises(ValueError, match="expected host:port"):
            split_address(bad)


def test_loopback_is_what_never_leaves_the_machine():
    loopback = ["127.0.0.1:1", "127.8.9.10:1", "localhost:1", "[::1]:1"]
    others = ["0.0.0.0:1", "10.0.0.2:1", "[::]:1", "engine.local:1", "localhost.example:1"]
    assert [is_loopback(address) for address in loopback + others] == [True] * 4 + [False] * 5


def test_off_loopback_needs_tls_or_an_explicit_opt_out_and_then_takes_no_token():
    Security().check("127.0.0.1:1")
    Security(token=TOKEN).check("127.0.0.1:1")
    Security(allow_insecure=True).check("10.0.0.2:1")
    Security(tls=ClientTls(), token=TOKEN).check("10.0.0.2:1")
    with pytest.raises(ValueError, match=r"address 10\.0\.0\.2:1: expected TLS off loopback, got none"):
        Security().check("10.0.0.2:1")
    with pytest.raises(ValueError, match="expected TLS off loopback"):
        Security(token=TOKEN).check("0.0.0.0:1")
    with pytest.raises(ValueError, match="expected no bearer token on an insecure connection"):
        Security(token=TOKEN, allow_insecure=True).check("10.0.0.2:1")
    with pytest.raises(ValueError, match="at least 16 characters, got 5"):
        Security(token="short").check("127.0.0.1:1")


def test_secrets_are_never_shown():
    tls = ServerTls(certificate=b"public", key=b"private-key")
    shown = repr(Security(tls=tls, token=TOKEN)) + repr(ClientTls(key=b"private-key"))
    assert TOKEN not in shown
    assert "private-key" not in shown


class Failed(grpc.RpcError):
    """What gRPC raises: an error that is also a call."""

    def __init__(self, code, details="", trailing=()):
        self._code, self._details, self._trailing = code, details, trailing

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailing


@pytest.mark.parametrize("kind", [Retryable, Busy, Fatal, NotStaged])
def test_the_kind_that_the_server_raised_is_the_kind_that_the_client_raises(kind):
    code, error = status_of(kind("no room"))
    failed = Failed(code, status_text(error), ((codec.ERROR_KEY, codec.encode_error(error, "e5", 9)),))
    raised = error_of(failed, "Pause at host:1", 100)
    assert type(raised) is kind
    assert str(raised) == "Pause at host:1 (engine e5, version 9): no room"


def test_without_a_kind_the_status_code_decides():
    retryable = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN"}
    for code in grpc.StatusCode:
        raised = error_of(Failed(code, "why"), "Sample at host:1", 100)
        assert isinstance(raised, Retryable if code.name in retryable else Fatal), code
        assert f"Sample at host:1: {code.name}: why" in str(raised)
    garbled = Failed(grpc.StatusCode.UNAVAILABLE, "why", ((codec.ERROR_KEY, b"\xff\xff"),))
    assert isinstance(error_of(garbled, "Sample", 100), Fatal)
    too_large = Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)")
    assert "up to 100 bytes are accepted on this side" in str(error_of(too_large, "Sample", 100))


def test_a_peers_mistake_is_an_invalid_argument_and_a_bug_is_internal_and_both_are_fatal():
    code, error = status_of(ValueError("prompt: expected tokens"))
    assert (code, type(error), str(error)) == (grpc.StatusCode.INVALID_ARGUMENT, Fatal, "prompt: expected tokens")
    code, error = status_of(KeyError("w"))
    assert (code, type(error)) == (grpc.StatusCode.INTERNAL, Fatal)
    assert "KeyError: 'w'" in str(error)


def test_a_status_text_fits_the_trailers():
    text = status_text(BridgeError("x" * 100_000))
    assert len(text) < 3100
    assert "(100000 characters)" in text
