"""A completion in parts equals the undivided one."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model
from rollout_bridge.messages import Completion, Finish, LogprobDefinition, SampleRequest, Sampling, Trace
from rollout_bridge.stitch import continuation, stitch


def part(tokens, *, rows, first_row=0, version=0, finish=Finish.ABORT, mark=0):
    count = len(tokens)
    return Completion(
        request_id="t0",
        member=1,
        tokens=np.array(tokens, np.int32),
        behavior_logp=np.full(count, -1.0 - mark, np.float32),
        version=np.full(count, version, np.int32),
        trace=Trace(
            experts_TLK=np.full((rows, 1, 1), mark, np.uint8),
            first_row=first_row,
            version_T=np.full(rows, version, np.int32),
        ),
        finish=finish,
        engine_id=f"e{mark}",
        logprob=LogprobDefinition(temperature=1.0),
    )


def test_rows_come_from_the_part_that_sampled_after_them(make_request):
    request = make_request(prompt=(5, 6, 7), members=(0, 1))
    parts = [
        part([10, 11], rows=4, version=2, mark=1),
        part([12], rows=5, version=3, mark=2),
        part([13, 1], rows=4, first_row=3, version=4, mark=3, finish=Finish.STOP),
    ]
    whole = stitch(request, parts)
    assert whole.tokens.tolist() == [10, 11, 12, 13, 1]
    assert whole.behavior_logp.tolist() == [-2, -2, -3, -4, -4]
    assert whole.version.tolist() == [2, 2, 3, 4, 4]
    assert whole.trace is not None
    assert whole.trace.experts_TLK.ravel().tolist() == [1, 1, 1, 1, 2, 3, 3]
    assert whole.trace.version_T.tolist() == [2, 2, 2, 2, 3, 4, 4]
    assert (whole.finish, whole.engine_id, whole.trace.first_row) == (Finish.STOP, "e3", 0)


def test_log_probs_over_kept_tokens_are_joined_when_every_part_has_them(make_request):
    request = make_request(prompt=(5, 6, 7), members=(0, 1))
    one, two = part([10, 11], rows=4), part([12], rows=5, finish=Finish.LENGTH)
    told = [dataclasses.replace(p, truncated_logp=p.behavior_logp / 2) for p in (one, two)]
    joined = stitch(request, told).truncated_logp
    assert joined is not None
    assert joined.tolist() == [-0.5, -0.5, -0.5]
    assert stitch(request, [one, told[1]]).truncated_logp is None


def test_the_next_part_is_asked_for_from_the_last_token(make_request):
    request = make_request(prompt=(5, 6, 7), members=(0, 1))
    asked = continuation(request, 1, [part([10, 11], rows=4), part([12], rows=5)])
    assert asked.prompt_tokens.tolist() == [5, 6, 7, 10, 11, 12]
    assert (asked.members, asked.already_sampled, asked.request_id) == ((1,), 3, "t0")
    assert asked.sampling == request.sampling
    again = continuation(asked, 1, [part([13, 14], rows=7)])
    assert (again.prompt_tokens.tolist(), again.already_sampled) == ([5, 6, 7, 10, 11, 12, 13, 14], 5)


def test_a_gap_between_parts_is_an_error(make_request):
    parts = [part([10, 11], rows=4), part([12], rows=1, first_row=5)]
    with pytest.raises(ValueError, match="trace of t0/1: expected a continuation with rows from 4 on, got rows from 5"):
        stitch(make_request(), parts)


def run(engine, request):
    return {completion.member: completion for completion in engine.sample(request, threading.Event())}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=3), st.integers(0, 50), st.sampled_from([0.0, 0.7, 1.0]))
def test_parts_under_equal_weights_equal_the_undivided_completion(lengths, seed, temperature):
    model = fake_model()
    engine = FakeEngine(model, version=2)
    request = make(seed, temperature, 14)
    whole = run(engine, request)[3]
    parts, sampled = [], 0
    for length in lengths:
        if sampled + length >= len(whole.tokens):
            break
        sampled += length
        asked = continuation(request, 3, parts) if parts else request
        partial = run(engine, cut(asked, sampled))[3]
        parts.append(partial)
    parts.append(run(engine, continuation(request, 3, parts) if parts else request)[3])
    joined = stitch(request, parts)
    np.testing.assert_array_equal(joined.tokens, whole.tokens)
    np.testing.assert_array_equal(joined.behavior_logp, whole.behavior_logp)
    np.testing.assert_array_equal(joined.version, whole.version)
    assert joined.trace is not None
    assert whole.trace is not None
    np.testing.assert_array_equal(joined.trace.experts_TLK, whole.trace.experts_TLK)
    np.testing.assert_array_equal(joined.trace.version_T, whole.trace.version_T)
    assert joined.finish is whole.finish


def make(seed, temperature, length):
    return SampleRequest(
        request_id="t0",
        prompt_tokens=np.array([4, 9], np.int32),
        sampling=Sampling(temperature=temperature, max_new_tokens=length, stop_ids=(1,), seed=seed),
        members=(3,),
    )


def cut(request, length):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=length))
