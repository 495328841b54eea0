"""What is encoded comes back equal, and costs what it weighs."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge import codec, codec_push
from rollout_bridge.engines.fake_model import fake_weights
from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged, Retryable
from rollout_bridge.messages import (
    Chunk,
    Completion,
    EngineStatus,
    Finish,
    InFlight,
    LogprobDefinition,
    Probe,
    ProbeReport,
    SampleRequest,
    Sampling,
    Serving,
    Staged,
    StageReport,
    Trace,
)
from rollout_bridge.proto import rollout_pb2 as pb

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


def parts(message):
    """What a message of a push holds."""
    return list(codec_push.decode_part(message))


def parts_of(data):
    """The same, of its bytes."""
    return parts(pb.StageRequest.FromString(data))


def equal(left, right):
    """Records are equal in every field, arrays also in type and shape."""
    if dataclasses.is_dataclass(left):
        assert type(left) is type(right)
        for field in dataclasses.fields(left):
            equal(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def wire(message):
    """Through bytes, as on the wire."""
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_request_comes_back(data):
    request = SampleRequest(
        request_id=data.draw(st.text(max_size=8)),
        prompt_tokens=np.array(data.draw(st.lists(INT32, max_size=5)), np.int32),
        sampling=Sampling(
            temperature=data.draw(st.floats(0, 3)),
            top_p=data.draw(st.floats(0, 1)),
            top_k=data.draw(INT32),
            max_new_tokens=data.draw(INT32),
            stop_ids=tuple(data.draw(st.lists(INT32, max_size=3))),
            seed=data.draw(st.integers(0, (1 << 63) - 1)),
        ),
        members=tuple(data.draw(st.lists(INT32, max_size=3))),
        want_trace=data.draw(st.booleans()),
        already_sampled=data.draw(INT32),
    )
    equal(codec.decode_request(wire(codec.encode_request(request))), request)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_completion_comes_back(data):
    count, rows = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    trace = Trace(
        experts_TLK=rng.integers(0, np.iinfo(dtype).max + 1, (rows, 3, 2)).astype(dtype),
        first_row=data.draw(st.integers(0, 5)),
        version_T=rng.integers(0, 3, rows).astype(np.int32),
    )
    completion = Completion(
        request_id="t1",
        member=data.draw(st.integers(0, 9)),
        tokens=rng.integers(0, 1 << 31, count).astype(np.int32),
        behavior_logp=rng.normal(size=count).astype(np.float32),
        version=rng.integers(-(1 << 31), 1 << 31, count).astype(np.int32),
        trace=data.draw(st.sampled_from([None, trace])),
        finish=data.draw(st.sampled_from(list(Finish))),
        engine_id="e",
        logprob=LogprobDefinition(temperature=data.draw(st.floats(0, 2)), after_truncation=data.draw(st.booleans())),
        truncated_logp=rng.normal(size=count).astype(np.float32) if count and data.draw(st.booleans()) else None,
    )
    equal(codec.decode_completion(wire(codec.encode_completion(completion))), completion)


def test_the_trace_goes_over_the_wire_row_by_row():
    ids = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0x0102]]], np.uint16)
    trace = Trace(experts_TLK=ids, first_row=4, version_T=np.array([8, 9], np.int32))
    message = codec.encode_completion(
        Completion(
            request_id="r",
            member=0,
            tokens=np.array([1], np.int32),
            behavior_logp=np.array([-1], np.float32),
            version=np.array([9], np.int32),
            trace=trace,
            finish=Finish.STOP,
            engine_id="e",
            logprob=LogprobDefinition(temperature=1.0),
        )
    ).trace
    assert message.experts_TLK == bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 2, 1])
    assert (message.rows_T, message.layers_L, message.slots_K, message.id_bytes, message.first_row) == (2, 2, 2, 2, 4)
    assert [(run.version, run.length) for run in message.version_T] == [(8, 1), (9, 1)]


def test_a_completion_of_a_30b_model_costs_at_most_400_bytes_a_token():
    rows = 4096
    trace = Trace(
        experts_TLK=np.zeros((rows, 48, 8), np.uint8), first_row=0, version_T=np.full(rows, 1_000_000, np.int32)
    )
    message = codec.encode_completion(
        Completion(
            request_id="t123456",
            member=15,
            tokens=np.full(rows, 151_935, np.int32),
            behavior_logp=np.full(rows, -1.25, np.float32),
            version=np.full(rows, 1_000_000, np.int32),
            trace=trace,
            finish=Finish.LENGTH,
            engine_id="e" * 64,
            logprob=LogprobDefinition(temperature=1.0),
        )
    )
    assert len(message.SerializeToString()) <= 400 * rows


def test_the_other_records_come_back(model):
    equal(codec.decode_model(wire(codec.encode_model(model))), model)
    probe = Probe(
        tokens=np.arange(5, dtype=np.int32),
        lengths=(3, 2),
        logp=np.linspace(-1, 0, 4, dtype=np.float32),
        tolerance=0.05,
        expert_coverage=0.9,
    )
    for in_flight in InFlight:
        version, digest, back, policy = codec.decode_commit(wire(codec.encode_commit(7, "d", probe, in_flight)))
        assert (version, digest, policy) == (7, "d", in_flight)
        equal(back, probe)
        assert codec.decode_in_flight(wire(codec.encode_pause(in_flight)).in_flight) is in_flight
    for staged in Staged:
        report = StageReport(staged=staged, num_bytes=1 << 40, engine_id="e", seconds_write=0.5)
        assert codec.decode_stage_report(wire(codec.encode_stage_report(report))) == report
    for serving in Serving:
        for staged_version in (None, 0, 4):
            status = EngineStatus(
                engine_id="e", serving=serving, version=-1, staged_version=staged_version, running=2, waiting=3
            )
            assert codec.decode_status(wire(codec.encode_status(status))) == status
    reports = (
        ProbeReport(mean_abs=0.25, max_abs=0.5),
        ProbeReport(mean_abs=0.25, max_abs=0.5, checksum="aa", seconds_held=4.0, seconds_load=2.0, seconds_verify=1.0),
    )
    for report in reports:
        assert codec.decode_commit_reply(wire(codec.encode_commit_reply(report, "e9"))) == (report, "e9")
    chunk = Chunk(tensor=3, offset=1 << 40, data=b"abc", checksum=(1 << 64) - 1)
    assert parts_of(codec_push.serialize_part([chunk])) == [chunk]
    for request_ids in (None, (), ("a", "b")):
        assert codec.decode_abort(wire(codec.encode_abort(request_ids))) == request_ids


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(0, 1 << 40), st.integers(0, 300), st.integers(0, (1 << 64) - 1))
def test_a_chunk_is_written_as_protobuf_would(tensor, offset, length, checksum):
    data = bytes(index % 251 for index in range(length))
    ours = codec_push.serialize_part([Chunk(tensor=tensor, offset=offset, data=memoryview(data), checksum=checksum)])
    chunk = pb.Chunk(tensor=tensor, offset=offset, data=data, checksum=checksum)
    theirs = pb.StageRequest(chunk=chunk)
    assert pb.StageRequest.FromString(ours) == theirs
    assert len(ours) == theirs.ByteSize() + (2 if not data else 0)  # we write an empty field, protobuf leaves it out


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40), st.integers(100, 2000))
def test_small_chunks_share_a_message_in_their_order(lengths, size):
    chunks = [Chunk(tensor=index, offset=0, data=bytes(n), checksum=index) for index, n in enumerate(lengths)]
    messages = [codec_push.serialize_part(gathered) for gathered in codec_push.together(iter(chunks), size)]
    assert [part for message in messages for part in parts_of(message)] == chunks
    held = [len(parts_of(message)) for message in messages]
    assert all(len(message) <= size for message, count in zip(messages, held, strict=True) if count > 1)
    # Of two neighbours neither could have taken in the other.
    assert all(
        len(left) + len(right) + 128 * n > size for left, right, n in zip(messages, messages[1:], held, strict=False)
    )


def test_chunks_that_share_a_message_are_written_as_protobuf_would():
    chunks = [Chunk(tensor=n, offset=n << 33, data=bytes([n] * n), checksum=n << 60) for n in range(1, 6)]
    theirs = [pb.Chunk(tensor=c.tensor, offset=c.offset, data=bytes(c.data), checksum=c.checksum) for c in chunks]
    message = pb.StageRequest(chunk=theirs[0], together=theirs[1:])
    ours = codec_push.serialize_part(chunks)
    assert pb.StageRequest.FromString(ours) == message
    assert len(ours) == message.ByteSize()


def test_large_chunks_and_manifests_are_written_as_protobuf_would(model):
    data = bytes(range(256)) * 8192
    message = pb.StageRequest.FromString(codec_push.serialize_part([Chunk(tensor=1, offset=2, data=data, checksum=3)]))
    assert message.chunk.data == data
    weights = fake_weights(model, 7)
    assert parts_of(codec_push.serialize_part(weights.manifest)) == [weights.manifest]


def test_the_kind_of_an_error_comes_back():
    kinds = {Fatal: Fatal, NotStaged: NotStaged, Retryable: Retryable, Busy: Retryable}
    for sent, received in kinds.items():
        assert codec.decode_error(codec.encode_error(sent("x"), "e", 4)) == (received, "e", 4)
    with pytest.raises(ValueError, match="expected an ErrorDetail"):
        codec.decode_error(b"\xff\xff")
    assert issubclass(Busy, BridgeError)


def test_what_does_not_add_up_is_refused_with_its_place():
    good = pb.Completion(
        request_id="t1",
        member=2,
        tokens_T=[1, 2],
        version_T=[pb.VersionRun(version=1, length=2)],
        finish=pb.FINISH_STOP,
        engine_id="e7",
        trace=pb.Trace(
            experts_TLK=bytes(8),
            id_bytes=1,
            rows_T=2,
            layers_L=2,
            slots_K=2,
            version_T=[pb.VersionRun(version=1, length=2)],
        ),
    )
    codec.decode_completion(good)

    def refused(expected, change):
        bad = pb.Completion.FromString(good.SerializeToString())
        change(bad)
        with pytest.raises(ValueError, match=re.escape(expected)) as caught:
            codec.decode_completion(bad)
        assert "completion t1/2 of engine e7" in str(caught.value)

    refused("in runs of 2 in all", lambda m: m.version_T.add(version=1, length=1))
    refused("in runs of 3 in all", lambda m: m.tokens_T.append(3))
    refused("32-bit versions", lambda m: setattr(m.version_T[0], "version", 1 << 31))
    refused("in runs of 2", lambda m: (setattr(m.version_T[0], "length", 3), m.version_T.add(version=2, length=-1)))
    refused("is the peer newer?", lambda m: setattr(m, "finish", pb.FINISH_UNSPECIFIED))
    refused("got (3, 2, 2) ids of 1 bytes in 8 bytes", lambda m: setattr(m.trace, "rows_T", 3))
    refused("of 4 bytes", lambda m: setattr(m.trace, "id_bytes", 4))
    refused("got (-2, -2, 2)", lambda m: (setattr(m.trace, "rows_T", -2), setattr(m.trace, "layers_L", -2)))
    refused("ids of 1 bytes", lambda m: setattr(m.trace, "experts_TLK", bytes(9)))


def test_unknown_enum_values_and_empty_parts_are_refused():
    with pytest.raises(ValueError, match="expected a manifest or a chunk, got None"):
        parts(pb.StageRequest())
    with pytest.raises(ValueError, match="got manifest with 1 chunks beside it"):
        parts(pb.StageRequest(manifest=pb.Manifest(), together=[pb.Chunk()]))
    with pytest.raises(ValueError, match="got None with 1 chunks beside it"):
        parts(pb.StageRequest(together=[pb.Chunk()]))
    with pytest.raises(ValueError, match="tensor w: dtype"):
        parts(pb.StageRequest(manifest=pb.Manifest(tensors=[pb.TensorSpec(name="w")])))
    with pytest.raises(ValueError, match=re.escape("tensor w: expected sizes >= 0, got [-1]")):
        spec = pb.TensorSpec(name="w", dtype=pb.DTYPE_FLOAT32, shape=[-1])
        parts(pb.StageRequest(manifest=pb.Manifest(tensors=[spec])))
    with pytest.raises(ValueError, match="in-flight policy"):
        codec.decode_in_flight(pb.IN_FLIGHT_UNSPECIFIED)
    with pytest.raises(ValueError, match="engine e: serving"):
        codec.decode_status(pb.EngineStatus(engine_id="e"))


def test_completions_that_travel_together_bring_no_others():
    inner = pb.Completion(request_id="t1", member=2, together=[pb.Completion(request_id="t1", member=3)])
    with pytest.raises(ValueError, match=r"completion t1/2 of engine : expected none together"):
        codec.decode_completions(pb.Completion(request_id="t1", together=[inner]))


def test_the_requests_of_a_call_come_back_in_their_order(make_request):
    requests = [make_request(f"t{i}", members=(i,), prompt=range(1, 2 + i), seed=i) for i in range(3)]
    for count in (1, 3):
        back = codec.decode_requests(wire(codec.encode_requests(requests[:count])))
        assert len(back) == count
        for request, mine in zip(requests[:count], back, strict=True):
            equal(mine, request)


def test_requests_that_travel_together_bring_no_others_and_have_ids_of_their_own():
    inner = pb.SampleRequest(request_id="t1", together=[pb.SampleRequest(request_id="t2")])
    with pytest.raises(ValueError, match=r"request 't0': expected none together with it that brings others"):
        codec.decode_requests(pb.SampleRequest(request_id="t0", together=[inner]))
    twice = pb.SampleRequest(request_id="t0", together=[pb.SampleRequest(request_id="t0")])
    with pytest.raises(ValueError, match=r"request 't0': expected others with other ids .* got \['t0', 't0'\]"):
        codec.decode_requests(twice)
