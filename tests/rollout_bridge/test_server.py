"""The rules of the wire that the server keeps."""

import dataclasses
import pathlib
import socket
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_bridge import (
    Busy,
    Client,
    ClientOptions,
    ClientTls,
    Fatal,
    InFlight,
    NotStaged,
    ProbeReport,
    Retryable,
    Security,
    ServerOptions,
    ServerTls,
    Serving,
    Weights,
    codec,
    codec_push,
    serve,
)
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.lease import LeaseBook
from rollout_bridge.messages import Manifest, Staged
from rollout_bridge.proto import rollout_pb2, rollout_pb2_grpc
from rollout_bridge.push import PushDesk
from rollout_bridge.transport import server_options
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually

TLS = pathlib.Path(__file__).with_name("tls")
TOKEN = "a-token-of-16-characters"


@pytest.fixture
def fresh(model, start):
    """An engine that serves nothing yet, and its server."""
    engine = FakeEngine(model)
    return engine, start(engine)


class Together(FakeEngine):
    """Says that the first two members are finished together, and the others by themselves."""

    def sample_ready(self, request, cancelled):
        completions = list(self.sample(request, cancelled))
        yield completions[:2]
        yield from ([completion] for completion in completions[2:])


def messages_of(channel, server, request):
    """What a request is answered with, undecoded."""
    stub: Any = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    return list(stub.Sample(codec.encode_request(request), timeout=10))


@pytest.fixture
def channel(stack):
    return lambda server: stack.enter_context(grpc.insecure_channel(server.address))


def health_of(channel, name=""):
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def encoded(part):
    part = part if isinstance(part, Manifest) else [part]
    return rollout_pb2.StageRequest.FromString(codec_push.serialize_part(part))


def parts_of(weights, size=64):
    """The messages of a push."""
    yield encoded(weights.manifest)
    yield from map(encoded, weights.chunks(size))


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
        with pytest.raises(Busy, match="at most 1 Sample calls at once"):
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


# ------------------------------------------------------------------------------------------------ pushes


def test_a_push_arrives_bit_for_bit_and_serves_only_once_committed(fresh, connect, model, make_request):
    engine, server = fresh
    client, weights = connect(server), fake_weights(model, 4)
    with pytest.raises(Retryable, match="no version has been verified yet"):
        list(client.sample(make_request(), model))
    report = client.stage(weights)
    assert (report.staged, report.num_bytes, report.engine_id) == (
        Staged.RECEIVED,
        weights.num_bytes,
        engine.engine_id,
    )
    assert (client.status().version, client.status().staged_version) == (-1, 4)
    with pytest.raises(Retryable, match="no version has been verified yet"):
        list(client.sample(make_request(), model))
    probe, engine_id = client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    assert (probe, engine_id) == (ProbeReport(mean_abs=0.0, max_abs=0.0), engine.engine_id)
    assert (client.status().version, client.status().staged_version) == (4, None)
    (first, second) = client.sample(make_request(), model)
    assert {int(v) for v in (*first.version, *second.version)} == {4}


def test_two_swapped_experts_do_not_go_live(fresh, connect, model):
    _, server = fresh
    client, weights = connect(server), fake_weights(model, 1)
    tensors = dict(weights.tensors)
    a, b = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (0, 3))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    swapped = Weights(version=1, model_digest=model.model_digest, tensors=tensors)
    client.stage(swapped)
    with pytest.raises(Fatal, match="expected the probe's log-probs within"):
        client.commit(swapped.manifest, fake_probe(weights, model), InFlight.FINISH)
    status = client.status()
    assert (status.serving, status.version, status.staged_version) == (Serving.NOT_SERVING, -1, None)


def test_a_failed_commit_leaves_the_old_version_serving(serving, connect, model, make_request):
    engine, server = serving
    client, weights = connect(server), fake_weights(model, 4)
    engine.inject(Fault.FAIL_COMMIT)
    client.stage(weights)
    with pytest.raises(Fatal, match=r"engine fake-\w+, version 3.*expected the probe"):
        client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    assert client.status().version == 3
    assert {int(v) for c in client.sample(make_request(), model) for v in c.version} == {3}


def test_pushing_again_what_is_staged_or_live_transfers_nothing(fresh, connect, model):
    _, server = fresh
    client, weights = connect(server), fake_weights(model, 4)
    probe = fake_probe(weights, model)
    assert client.stage(weights).staged is Staged.RECEIVED
    again = client.stage(weights)
    assert (again.staged, again.num_bytes) == (Staged.ALREADY_STAGED, 0)
    first = client.commit(weights.manifest, probe, InFlight.FINISH)
    live = client.stage(weights)
    assert (live.staged, live.num_bytes) == (Staged.ALREADY_LIVE, 0)
    assert client.commit(weights.manifest, probe, InFlight.FINISH) == first


def test_the_answer_of_a_push_that_is_already_live_comes_before_its_bytes(fresh, channel, connect, model):
    _, server = fresh
    client, weights = connect(server), fake_weights(model, 4)
    client.stage(weights)
    client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    never = threading.Event()

    def manifest_only():
        yield encoded(weights.manifest)
        never.wait(30)

    reply = rollout_pb2_grpc.RolloutBridgeStub(channel(server)).StageWeights(manifest_only(), timeout=10)
    never.set()
    assert reply.state == rollout_pb2.StageReply.STATE_ALREADY_LIVE


def test_versions_only_grow(serving, connect, model):
    _, server = serving
    client = connect(server)
    for version in (0, 2, 3):
        with pytest.raises(Fatal, match=f"push of version {version}: expected a version above 3"):
            client.stage(fake_weights(model, version))
    live = fake_weights(model, 5)
    client.stage(live)
    client.commit(live.manifest, fake_probe(live, model), InFlight.FINISH)
    with pytest.raises(Fatal, match=f"above 5 \\(live, digest {live.manifest.digest}\\)"):
        client.stage(fake_weights(model, 5, seed=1))
    other = fake_weights(model, 5, seed=1).manifest
    with pytest.raises(Fatal, match="expected a version above 5"):
        client.commit(other, fake_probe(live, model), InFlight.FINISH)


def test_a_commit_of_what_is_not_staged_says_so(serving, connect, model):
    _, server = serving
    client, weights, other = connect(server), fake_weights(model, 4), fake_weights(model, 4, seed=1)
    probe = fake_probe(weights, model)
    with pytest.raises(NotStaged, match="got none staged"):
        client.commit(weights.manifest, probe, InFlight.FINISH)
    client.stage(other)
    with pytest.raises(NotStaged, match=f"with digest {weights.manifest.digest}, got version 4 staged"):
        client.commit(weights.manifest, probe, InFlight.FINISH)
    client.stage(weights)
    client.discard()
    with pytest.raises(NotStaged):
        client.commit(weights.manifest, probe, InFlight.FINISH)
    assert client.status().version == 3


def test_a_manifest_that_does_not_fit_is_refused_before_any_byte(serving, channel, model):
    _, server = serving
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    tensors = dict(fake_weights(model, 4).tensors)
    tensors["lm_head.weight"] = np.zeros((1 << 14, 1 << 12), np.float32)
    manifest = Weights(version=4, model_digest=model.model_digest, tensors=tensors).manifest
    refused = threading.Event()

    def parts():
        yield encoded(manifest)
        refused.wait(30)  # longer than the call may take

    with pytest.raises(grpc.RpcError) as caught:
        stub.StageWeights(parts(), timeout=10)
    refused.set()
    assert "unknown: lm_head.weight" in str(caught.value.details())


def test_a_broken_stream_leaves_nothing_and_frees_the_engine(serving, channel, connect, model):
    _, server = serving
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    weights = fake_weights(model, 4)
    begun, end = threading.Event(), threading.Event()

    def stuck():
        messages = parts_of(weights)
        for _ in range(5):
            yield next(messages)
        begun.set()
        end.wait(30)

    call = stub.StageWeights.future(stuck(), timeout=30)
    begun.wait(30)
    client = connect(server)

    def busy():
        try:
            client.discard()
        except Busy as error:
            return "held for" in str(error) and "the push of version 4 by unnamed at ipv4:127.0.0.1" in str(error)
        return False

    eventually(busy)
    with pytest.raises(Busy, match="the push of version 4 by"):
        client.stage(fake_weights(model, 6))
    call.cancel()
    end.set()
    eventually(lambda: not busy())
    assert client.status().staged_version is None
    assert client.stage(weights).staged is Staged.RECEIVED


def test_a_deadline_that_passes_in_the_middle_of_a_push_discards_it(serving, channel, connect, model):
    _, server = serving
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    end = threading.Event()

    def stuck():
        messages = parts_of(fake_weights(model, 4))
        for _ in range(5):
            yield next(messages)
        end.wait(30)

    with pytest.raises(grpc.RpcError) as caught:
        stub.StageWeights(stuck(), timeout=0.3)
    end.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    client = connect(server)
    eventually(lambda: _free(client))
    assert client.status().staged_version is None


def _free(client):
    try:
        client.discard()
    except Busy:
        return False
    return True


def corrupt(messages, index, change):
    for number, message in enumerate(messages):
        if number == index:
            change(message)
        yield message


BROKEN = {
    "flipped bit": (lambda m: setattr(m.chunk, "data", b"\x01" + m.chunk.data[1:]), "UNAVAILABLE", "checksum"),
    "offset": (lambda m: setattr(m.chunk, "offset", m.chunk.offset + 64), "INVALID_ARGUMENT", "expected tensor 0"),
    "tensor": (lambda m: setattr(m.chunk, "tensor", 1), "INVALID_ARGUMENT", "expected tensor 0"),
    "no part": (lambda m: m.ClearField("chunk"), "INVALID_ARGUMENT", "expected a manifest or a chunk"),
    "manifest": (lambda m: m.manifest.SetInParent(), "INVALID_ARGUMENT", "expected one manifest, got a second"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chunk_is_refused_and_nothing_stays(name, serving, channel, model):
    engine, server = serving
    change, code, text = BROKEN[name]
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    with pytest.raises(grpc.RpcError) as caught:
        stub.StageWeights(corrupt(parts_of(fake_weights(model, 4)), 2, change), timeout=10)
    assert caught.value.code().name == code
    assert text in str(caught.value.details())
    assert engine.status().staged_version is None


def test_a_wrong_digest_a_short_stream_and_a_stream_without_manifest_are_refused(serving, channel, model):
    engine, server = serving
    stub = rollout_pb2_grpc.RolloutBridgeStub(channel(server))
    weights = fake_weights(model, 4)
    messages = list(parts_of(weights))
    wrong = dataclasses.replace(weights.manifest, digest="0" * 32)
    for sent, text in (
        ([encoded(wrong), *messages[1:]], "the tensors changed between digest and push"),
        (messages[:-1], "the stream ended in number"),
        (messages[1:], "expected a manifest first, got a chunk"),
        ([], "expected a manifest first, got an empty stream"),
        ([*messages, messages[-1]], "expected the end of the stream"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.StageWeights(iter(sent), timeout=10)
        assert text in str(caught.value.details())
        assert engine.status().staged_version is None


class Sink:
    """Notes what it was told."""

    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def put(self, name, array):
        if self.fail_at == len(self.seen):
            raise OSError(28, "No space left on device")
        self.seen.append(name)

    def finish(self):
        self.seen.append("finish")

    def discard(self):
        self.seen.append("discard")


def test_a_sink_gets_tensors_in_manifest_order_then_one_end(model):
    class Noting(FakeEngine):
        def stage(self, manifest):
            return sinks.pop()

    weights = fake_weights(model, 4)
    messages = [weights.manifest, *weights.chunks(100)]
    whole, partial, full = Sink(), Sink(), Sink(fail_at=3)
    sinks = [whole]
    PushDesk(Noting(model), LeaseBook(30.0)).stage(iter(messages), "me")
    assert whole.seen == [*weights.tensors, "finish"]
    sinks = [partial]
    with pytest.raises(Retryable):
        PushDesk(Noting(model), LeaseBook(30.0)).stage(iter(messages[:9]), "me")
    assert partial.seen[-1] == "discard"
    assert "finish" not in partial.seen
    sinks = [full]
    with pytest.raises(OSError, match="No space left"):
        PushDesk(Noting(model), LeaseBook(30.0)).stage(iter(messages), "me")
    assert full.seen[-1] == "discard"


# ------------------------------------------------------------------------------------------------ an engine in doubt


def committed_by(engine, start, connect, model):
    server = start(engine)
    client, weights = connect(server), fake_weights(model, 4)
    client.stage(weights)
    with pytest.raises(Fatal) as caught:
        client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    return server, client, str(caught.value)


def test_an_engine_that_goes_live_without_reproducing_the_probe_is_out_of_service(
    model, start, connect, channel, make_request
):
    class Careless(FakeEngine):
        careless = True

        def commit(self, version, probe, in_flight):
            report = super().commit(version, probe, in_flight)
            return ProbeReport(mean_abs=0.5, max_abs=0.9) if self.careless else report

    engine = Careless(model)
    server, client, text = committed_by(engine, start, connect, model)
    assert "expected the probe within 0.001 nats, got mean 0.5, max 0.9, and yet it was committed" in text
    assert engine.status().version == 4
    assert (client.status().serving, client.status().version) == (Serving.NOT_SERVING, -1)
    with pytest.raises(Retryable, match="and yet it was committed"):
        list(client.sample(make_request(), model))
    eventually(lambda: health_of(channel(server)) == "NOT_SERVING")
    engine.careless = False
    better = fake_weights(model, 5)
    client.stage(better)
    client.commit(better.manifest, fake_probe(better, model), InFlight.FINISH)
    assert client.status().serving is Serving.SERVING


def test_an_engine_that_says_committed_and_serves_something_else_is_out_of_service(model, start, connect):
    class Forgetful(FakeEngine):
        def commit(self, version, probe, in_flight):
            return ProbeReport(mean_abs=0.0, max_abs=0.0)

    _, client, text = committed_by(Forgetful(model, version=3), start, connect, model)
    assert "commit of version 4: expected it to serve" in text
    assert client.status().serving is Serving.NOT_SERVING


def test_an_engine_whose_commit_breaks_is_out_of_service(model, start, connect):
    class Broken(FakeEngine):
        def commit(self, version, probe, in_flight):
            raise RuntimeError("device lost")

    _, client, text = committed_by(Broken(model, version=3), start, connect, model)
    assert "device lost" in text
    assert client.status().serving is Serving.NOT_SERVING


def test_what_an_engine_held_is_forgotten_when_it_restarts_behind_the_bridge(model):
    engine = FakeEngine(model)
    desk, weights = PushDesk(engine, LeaseBook(30.0)), fake_weights(model, 4)
    probe, parts = fake_probe(weights, model), [weights.manifest, *weights.chunks(1000)]
    desk.stage(iter(parts), "me")
    desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    assert desk.stage(iter(parts), "me").staged is Staged.ALREADY_LIVE
    engine._id, engine._live = "fake-restarted", None
    with pytest.raises(NotStaged):
        desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    assert desk.stage(iter(parts), "me").staged is Staged.RECEIVED
    desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    engine._id = "fake-restarted-with-weights-of-its-own"
    with pytest.raises(Fatal, match="expected a version above 4"):
        desk.stage(iter(parts), "me")


def test_a_commit_finds_the_desk_taken_while_another_runs(model, start, connect, make_request):
    engine = Standing(model, version=3)
    server = start(engine)
    client, weights = connect(server), fake_weights(model, 4)
    client.stage(weights)
    probe = fake_probe(weights, model)
    with client.sample(make_request(length=20, stop=()), model) as stream:
        eventually(lambda: engine.standing == 1)
        hasty = connect(server, ClientOptions(sender="hasty"))
        with pytest.raises(Retryable, match=r"DEADLINE_EXCEEDED|held for"):
            hasty.commit(weights.manifest, probe, InFlight.FINISH, seconds=0.2)
        with pytest.raises(Busy, match="the commit of version 4 by hasty at ipv4"):
            client.commit(weights.manifest, probe, InFlight.FINISH)
        engine.go.set()
        assert {int(v) for c in stream for v in c.version} == {3}
    eventually(lambda: client.status().version == 4)
    report, _ = client.commit(weights.manifest, probe, InFlight.FINISH)  # the answer that was lost
    assert report.mean_abs == 0.0


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
        def sample_ready(self, request, cancelled):
            first, second = list(self.sample(request, cancelled))
            yield [first, dataclasses.replace(second, member=first.member + 7)]

    with (
        connect(start(Wrong(model, version=3))).sample(make_request(), model) as stream,
        pytest.raises(Fatal, match="member"),
    ):
        list(stream)
