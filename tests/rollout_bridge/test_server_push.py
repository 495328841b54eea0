"""The rules that the server keeps of a push: whole or nothing, and live only when verified."""

import dataclasses
import threading

import grpc
import numpy as np
import pytest

from rollout_bridge import (
    Busy,
    Fatal,
    InFlight,
    NotStaged,
    ProbeReport,
    Retryable,
    Serving,
    Weights,
    codec_push,
)
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.lease import LeaseBook
from rollout_bridge.messages import Manifest, Staged
from rollout_bridge.proto import rollout_pb2, rollout_pb2_grpc
from rollout_bridge.push import PushDesk
from tests.rollout_bridge.waiting import eventually


def encoded(part):
    part = part if isinstance(part, Manifest) else [part]
    return rollout_pb2.StageRequest.FromString(codec_push.serialize_part(part))


def parts_of(weights, size=64):
    """The messages of a push."""
    yield encoded(weights.manifest)
    yield from map(encoded, weights.chunks(size))


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
