"""The rules of the wire that the server keeps, but for pushes."""

import dataclasses
import pathlib
import socket
import time
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_bridge import (
    Busy,
    Client,
    ClientOptions,
    ClientTls,
    Fatal,
    InFlight,
    Retryable,
    Security,
    ServerOptions,
    ServerTls,
    Serving,
    codec,
    serve,
)
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.proto import rollout_pb2, rollout_pb2_grpc
from rollout_bridge.transport import server_options
from tests.rollout_bridge.health import health_of
from tests.rollout_bridge.waiting import eventually

TLS = pathlib.Path(__file__).with_name("tls")
TOKEN = "a-token-of-16-characters"


class Together(FakeEngine):
    """Says that the first two members are finished together, and the others by themselves."""

    def sample_ready(self, requests, cancelled):
        completions = [completion for request in requests for completion in self.sample(request, cancelled)]
        yield completions[:2]
        yield from ([completion] for completion in completions[2:])


def messages_of(channel, server, request):
    """What a request is answered with, undecoded."""
    stub: Any = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    return list(stub.Sample(codec.encode_request(request), timeout=10))


# ------------------------------------------------------------------------------------------------ address, health


def test_a_port_in_use_is_one_clear_error(fresh, model):
    _, server = fresh
    with pytest.raises(ValueError) as caught:
        serve(FakeEngine(model), server.address)
    assert f"listen address {server.address}: expected one that is free" in str(caught.value)
    assert "Address already in use" in str(caught.value)
    assert "port 0" not in str(caught.value).split("0 = any")[0]


def test_a_port_taken_by_something_else_is_the_same_error(model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="Address already in use"):
            serve(FakeEngine(model), f"127.0.0.1:{other.getsockname()[1]}")


def test_a_stopped_server_leaves_its_port_to_the_next(fresh, model, start):
    _, server = fresh
    server.stop(0.0)
    assert server.wait(1.0)
    assert start(FakeEngine(model), server.address).port == server.port


def test_off_loopback_without_tls_is_refused(model):
    with pytest.raises(ValueError, match="expected TLS off loopback"):
        serve(FakeEngine(model), "0.0.0.0:0")


def test_health_is_not_serving_until_a_version_is_verified(fresh, channel, connect, model):
    _, server = fresh
    names = ("", codec.SERVICE)
    assert [health_of(channel(server), name) for name in names] == ["NOT_SERVING"] * 2
    client, weights = connect(server), fake_weights(model, 1)
    client.stage(weights)
    assert health_of(channel(server)) == "NOT_SERVING"
    client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    assert [health_of(channel(server), name) for name in names] == ["SERVING"] * 2
    client.pause(InFlight.FINISH)
    assert client.status().serving is Serving.PAUSED
    time.sleep(0.3)
    assert health_of(channel(server)) == "SERVING"  # a paused engine holds a verified version: nobody need restart it


def test_health_follows_an_engine_that_stops_serving_by_itself(model, start, channel):
    engine = FakeEngine(model, version=1)
    server = start(engine, options=ServerOptions(poll_seconds=0.01))
    assert health_of(channel(server)) == "SERVING"
    engine._live = None
    eventually(lambda: health_of(channel(server)) == "NOT_SERVING")


def test_an_engine_that_cannot_tell_its_state_is_not_serving(model, start, channel, caplog):
    class Mute(FakeEngine):
        def status(self):
            raise Retryable("the backend is gone")

    server = start(Mute(model), options=ServerOptions(poll_seconds=0.01))
    assert health_of(channel(server)) == "NOT_SERVING"
    time.sleep(0.1)
    assert caplog.text.count("does not tell its state") == 1


def test_reflection_lists_the_services(fresh, channel):
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel(fresh[1]))
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=5)
    names = {service.name for service in answer.list_services_response.service}
    assert names == {codec.SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


# ------------------------------------------------------------------------------------------------ every call


def test_a_call_without_a_deadline_is_refused(serving, channel):
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(serving[1]))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(rollout_pb2.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected a deadline, got none" in str(caught.value.details())


def test_a_bug_of_the_engine_is_internal_fatal_and_logged_whole(model, start, connect, caplog):
    class Broken(FakeEngine):
        def resume(self):
            raise KeyError("slot 7")

    server = start(Broken(model, version=1))
    with pytest.raises(Fatal, match=r"Resume at .*internal error of the engine: KeyError: 'slot 7'"):
        connect(server).resume()
    assert 'raise KeyError("slot 7")' in caplog.text


def test_messages_beyond_the_limit_are_refused_with_both_numbers(model, start, connect, make_request):
    small = ServerOptions(max_message_bytes=4000)
    server = start(FakeEngine(fake_model(layers=30, experts=64, top_k=8), version=1), options=small)
    client = connect(server)
    wide = fake_model(layers=30, experts=64, top_k=8)
    with pytest.raises(Fatal, match=r"completion t0/\d: expected a message of at most 4000 bytes, got \d+"):
        list(client.sample(make_request(prompt=range(1, 30)), wide))
    with pytest.raises(Fatal, match=r"larger than max.*4000"):
        list(client.sample(make_request(request_id="x" * 250, prompt=[3] * 100, stop=[5] * 4000), wide))
    narrow = connect(server, ClientOptions(max_message_bytes=2000, chunk_bytes=500))
    with pytest.raises(Fatal, match=r"GetModel.*larger than max.*up to 2000 bytes are accepted on this side"):
        narrow.model()


def test_more_samples_than_threads_are_told_to_come_again(model, start, connect, make_request):
    engine = FakeEngine(model, version=1, seconds_per_token=0.05)
    client = connect(start(engine, options=ServerOptions(max_samples=1)))
    with client.sample(make_request(), model) as first:
        eventually(lambda: engine.status().running == 1)
        with pytest.raises(Busy, match="at most 1 requests at once, got 1 beside 1"):
            next(client.sample(make_request("t1"), model))
        assert client.status().running == 1  # other calls have threads of their own
        assert len(list(first)) == 2
    assert len(list(client.sample(make_request("t2"), model))) == 2


def test_a_bad_request_never_reaches_the_engine(serving, connect, make_request, model):
    engine, server = serving
    lenient = dataclasses.replace(model, vocab_size=10_000)
    with pytest.raises(Fatal, match=r"prompt tokens: expected ids in \[0, 32\), got 77 at token 1"):
        list(connect(server).sample(make_request(prompt=(1, 77)), lenient))
    assert engine.status().waiting == engine.status().running == 0


def test_a_client_that_leaves_ends_its_request(model, start, connect, make_request):
    engine = FakeEngine(model, version=1, seconds_per_token=0.05)
    client = connect(start(engine))
    with client.sample(make_request(length=100, stop=()), model):
        eventually(lambda: engine.status().running == 1)
    eventually(lambda: engine.status().running == 0)


# ------------------------------------------------------------------------------------------------ status


def test_the_status_stream_tells_the_state_at_once_each_change_and_a_heartbeat(serving, connect, model):
    _, server = serving
    client, weights = connect(server), fake_weights(model, 4)
    with client.watch(follow_seconds=30, heartbeat_seconds=30) as states:
        assert next(states).version == 3
        client.stage(weights)
        assert next(states).staged_version == 4
        client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
        state = next(states)
        assert (state.version, state.staged_version) == (4, None)
        client.pause(InFlight.FINISH)
        assert next(states).serving is Serving.PAUSED
        client.resume()
        assert next(states).serving is Serving.SERVING
    began = time.monotonic()
    with client.watch(follow_seconds=1.0, heartbeat_seconds=0.2) as states:
        assert 3 <= len(list(states)) <= 7
    assert 0.9 < time.monotonic() - began < 10


def test_a_server_that_stops_ends_its_status_streams_at_once(serving, connect):
    _, server = serving
    with connect(server).watch(follow_seconds=60, heartbeat_seconds=60) as states:
        next(states)
        began = time.monotonic()
        server.stop(grace=20.0)
        assert time.monotonic() - began < 5
        with pytest.raises(Retryable, match="shutting down"):
            next(states)


# ------------------------------------------------------------------------------------------------ TLS and token


def pem(name):
    return (TLS / name).read_bytes()


def test_tls_with_a_token_lets_in_only_who_has_both(model, start, stack, channel):
    tls = ServerTls(certificate=pem("server.pem"), key=pem("server.key"))
    options = ServerOptions(security=Security(tls=tls, token=TOKEN))
    server = start(FakeEngine(model, version=3), "localhost:0", options)

    def client(**security):
        options = ClientOptions(security=Security(**security), attempts=1, control_seconds=3)
        return stack.enter_context(Client(server.address, options=options))

    trusted = ClientTls(ca=pem("ca.pem"))
    assert client(tls=trusted, token=TOKEN).model() == model
    with pytest.raises(Fatal, match="expected the bridge's bearer token, got none") as caught:
        client(tls=trusted).model()
    with pytest.raises(Fatal, match="got another") as caught:
        client(tls=trusted, token=TOKEN + "x").status()
    assert TOKEN not in str(caught.value)
    with pytest.raises(Retryable):
        client(token=TOKEN).model()  # in the clear
    with pytest.raises(Retryable):
        client(tls=ClientTls(ca=pem("client.pem")), token=TOKEN).model()
    with pytest.raises(Fatal, match="bearer token"):
        client(tls=trusted).stage(fake_weights(model, 4))
    credentials = grpc.ssl_channel_credentials(pem("ca.pem"))
    assert health_of(stack.enter_context(grpc.secure_channel(server.address, credentials))) == "SERVING"


def test_mutual_tls_asks_the_client_for_its_certificate(model, start, stack):
    tls = ServerTls(certificate=pem("server.pem"), key=pem("server.key"), client_ca=pem("ca.pem"))
    server = start(FakeEngine(model, version=3), "localhost:0", ServerOptions(security=Security(tls=tls)))

    def client(tls):
        options = ClientOptions(security=Security(tls=tls), attempts=1, control_seconds=3)
        return stack.enter_context(Client(server.address, options=options))

    own = ClientTls(ca=pem("ca.pem"), certificate=pem("client.pem"), key=pem("client.key"))
    assert client(own).status().version == 3
    with pytest.raises(Retryable):
        client(ClientTls(ca=pem("ca.pem"))).status()


def test_the_limits_are_set_on_the_server():
    options = dict(server_options(123))
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 123
    assert options["grpc.so_reuseport"] == 0


def test_completions_that_are_ready_together_travel_together(model, start, channel, connect, make_request):
    engine, request = Together(model, version=3), make_request(members=(0, 1, 2))
    server = start(engine)
    assert [1 + len(message.together) for message in messages_of(channel, server, request)] == [2, 1]
    alone = list(connect(start(FakeEngine(model, version=3))).sample(request, model))
    assert len(alone) == 3
    together = list(connect(server).sample(request, model))
    assert [c.member for c in together] == [c.member for c in alone]
    for mine, reference in zip(together, alone, strict=True):
        np.testing.assert_array_equal(mine.tokens, reference.tokens)
        np.testing.assert_array_equal(mine.trace.experts_TLK, reference.trace.experts_TLK)


def test_completions_that_are_large_travel_alone(model, start, channel, make_request):
    request = make_request(members=(0, 1, 2))
    size = max(
        len(message.SerializeToString())
        for message in messages_of(channel, start(FakeEngine(model, version=3)), request)
    )
    server = start(Together(model, version=3), options=ServerOptions(max_message_bytes=2 * size))
    assert [1 + len(message.together) for message in messages_of(channel, server, request)] == [1, 1, 1]


def test_a_wrong_completion_among_others_ends_the_stream(model, start, connect, make_request):
    class Wrong(Together):
        def sample_ready(self, requests, cancelled):
            first, second = list(self.sample(requests[0], cancelled))
            yield [first, dataclasses.replace(second, member=first.member + 7)]

    with (
        connect(start(Wrong(model, version=3))).sample(make_request(), model) as stream,
        pytest.raises(Fatal, match="member"),
    ):
        list(stream)
