"""What arrives is what was asked for, or an error that names request, member, engine and version."""

import dataclasses
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge import checks
from rollout_bridge.checks import (
    check_completion,
    check_completions,
    check_manifest,
    check_probe,
    check_request,
    check_routes,
    id_dtype,
)
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.messages import Completion, Finish, LogprobDefinition, TensorSpec, Trace
from tests.reference.routes import first_bad_row


@pytest.fixture
def request_(make_request):
    return make_request("t12", members=(0, 3), length=4, stop=(1, 2), temperature=0.5)


@pytest.fixture
def completion(request_):
    """Three tokens after a prompt of three: five rows, the last token was never fed."""
    ids = np.array([[[0, 1], [2, 3]]] * 5, np.uint8)
    return Completion(
        request_id="t12",
        member=3,
        tokens=np.array([9, 8, 2], np.int32),
        behavior_logp=np.array([-0.5, 0.0, -3.0], np.float32),
        version=np.array([6, 6, 7], np.int32),
        trace=Trace(experts_TLK=ids, first_row=0, version_T=np.full(5, 7, np.int32)),
        finish=Finish.STOP,
        engine_id="e1",
        logprob=LogprobDefinition(temperature=0.5),
    )


def test_a_right_completion_passes(completion, request_, model):
    check_completion(completion, request_, model)


def test_a_completion_that_is_cut_short_may_say_so(completion, request_, model):
    trace = Trace(experts_TLK=completion.trace.experts_TLK[:4], first_row=0, version_T=np.full(4, 6, np.int32))
    partial = dataclasses.replace(
        completion,
        tokens=completion.tokens[:2],
        behavior_logp=completion.behavior_logp[:2],
        version=completion.version[:2],
        trace=trace,
        finish=Finish.ABORT,
    )
    check_completion(partial, request_, model)
    none = np.array([], np.int32)
    empty = dataclasses.replace(partial, tokens=none, behavior_logp=none.astype(np.float32), version=none, trace=None)
    check_completion(empty, request_, model)
    for finish in (Finish.STOP, Finish.LENGTH):
        with pytest.raises(ValueError, match="expected finish ABORT of 0 tokens"):
            check_completion(dataclasses.replace(empty, finish=finish), request_, model)


def test_a_trace_may_begin_within_the_prompt_and_then_has_fewer_rows(completion, request_, model):
    trace = Trace(experts_TLK=completion.trace.experts_TLK[:3], first_row=2, version_T=np.full(3, 7, np.int32))
    check_completion(dataclasses.replace(completion, trace=trace), request_, model)
    with pytest.raises(ValueError, match=re.escape("expected 4 rows (prompt 3 + 3 tokens - 1 - first row 1)")):
        check_completion(
            dataclasses.replace(completion, trace=dataclasses.replace(trace, first_row=1)), request_, model
        )
    with pytest.raises(ValueError, match="expected a first row within the prompt"):
        check_completion(
            dataclasses.replace(completion, trace=dataclasses.replace(trace, first_row=3)), request_, model
        )


def changed(completion, **fields):
    """The completion with array elements or trace fields replaced."""
    for name, value in fields.items():
        if name.startswith("trace_"):
            completion = dataclasses.replace(
                completion, trace=dataclasses.replace(completion.trace, **{name.removeprefix("trace_"): value})
            )
        else:
            completion = dataclasses.replace(completion, **{name: value})
    return completion


WRONG = {
    "another request": ({"request_id": "t13"}, "t13/3: expected an answer to request 't12'"),
    "another member": ({"member": 1}, "t12/1: expected an answer to request 't12', members (0, 3)"),
    "NaN": ({"behavior_logp": np.array([-1, np.nan, -1], np.float32)}, "finite log-probs <= 0, got nan at token 1"),
    "inf": ({"behavior_logp": np.array([-np.inf, -1, -1], np.float32)}, "got -inf at token 0"),
    "kept below all": (
        {"truncated_logp": np.array([-0.6, 0.0, -3.0], np.float32)},
        "expected a finite log-prob over the kept tokens",
    ),
    "kept is NaN": ({"truncated_logp": np.array([-0.1, np.nan, -1], np.float32)}, "over the kept tokens"),
    "fewer kept": ({"truncated_logp": np.array([-0.1], np.float32)}, "over the kept tokens for each of 3"),
    "positive": ({"behavior_logp": np.array([-1, -1, 1e-6], np.float32)}, "token 2"),
    "fewer log-probs": ({"behavior_logp": np.array([-1, -1], np.float32)}, "got 3 tokens, 2 log-probs, 3 versions"),
    "fewer versions": ({"version": np.array([6, 6], np.int32)}, "got 3 tokens, 3 log-probs, 2 versions"),
    "unknown id": ({"tokens": np.array([9, 32, 2], np.int32)}, "expected ids in [0, 32), got 32 at token 1"),
    "negative id": ({"tokens": np.array([-1, 3, 2], np.int32)}, "got -1 at token 0"),
    "negative version": ({"version": np.array([-1, 6, 6], np.int32)}, "versions >= 0 that never fall"),
    "falling version": ({"version": np.array([7, 6, 6], np.int32)}, "versions >= 0 that never fall"),
    "stop in the middle": ({"tokens": np.array([1, 3, 2], np.int32)}, "got more after 1 at token 0"),
    "no stop token": ({"tokens": np.array([9, 8, 4], np.int32)}, "expected finish ABORT of 3 tokens"),
    "LENGTH at a stop": ({"finish": Finish.LENGTH}, "expected finish STOP"),
    "no trace": ({"trace": None}, "trace of t12/3: expected routes, got none"),
    "first row": ({"trace_first_row": -1}, "first row within the prompt"),
    "missing row": ({"trace_experts_TLK": np.array([[[0, 1], [2, 3]]] * 4, np.uint8)}, "expected 5 rows"),
    "one layer": (
        {"trace_experts_TLK": np.array([[[0, 1]]] * 5, np.uint8)},
        "2 layers, 2 experts, got shape (5, 1, 2)",
    ),
    "flat": ({"trace_experts_TLK": np.zeros(20, np.uint8)}, "[T, L, K] ids"),
    "all zero": ({"trace_experts_TLK": np.zeros((5, 2, 2), np.uint8)}, "2 distinct ids below 4, got [0, 0] in row 0"),
    "id of E": ({"trace_experts_TLK": np.array([[[0, 1], [2, 4]]] * 5, np.uint8)}, "got [2, 4] in row 0, layer 1"),
    "wide ids": ({"trace_experts_TLK": np.array([[[0, 1], [2, 3]]] * 5, np.uint16)}, "type uint8, got uint16"),
    "row versions": ({"trace_version_T": np.full(4, 7, np.int32)}, "with 4 versions"),
    "negative row version": ({"trace_version_T": np.array([7, 7, -1, 7, 7], np.int32)}, "row versions >= 0, got -1"),
    "temperature": ({"logprob": LogprobDefinition(temperature=1.0)}, "expected temperature 0.5 before top-p/top-k"),
    "truncation": ({"logprob": LogprobDefinition(temperature=0.5, after_truncation=True)}, "after truncation"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_completion_is_refused_with_its_place(name, completion, request_, model):
    fields, expected = WRONG[name]
    with pytest.raises(ValueError) as caught:
        check_completion(changed(completion, **fields), request_, model)
    text = str(caught.value)
    assert expected in text
    assert "engine e1, version" in text


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_completion_is_refused_among_right_ones_as_alone(name, place, completion, request_, model):
    wrong = changed(completion, **WRONG[name][0])
    with pytest.raises(ValueError) as alone:
        check_completion(wrong, request_, model)
    several = [completion, dataclasses.replace(completion, member=0)]
    several.insert(place, wrong)
    with pytest.raises(ValueError) as among:
        check_completions(several, request_, model)
    assert str(among.value) == str(alone.value)


def test_right_completions_pass_together_without_being_looked_at_singly(model, make_request, monkeypatch):
    engine, looked = FakeEngine(model, version=3), []
    monkeypatch.setattr(checks, "check_completion", lambda *_: looked.append(_))
    for seed in range(30):
        request = make_request(
            seed=seed,
            members=tuple(range(2 + seed % 5)),
            length=1 + seed % 7,
            stop=(1, 2, 3)[: seed % 4],
            temperature=0.5,
        )
        check_completions(list(engine.sample(request, threading.Event())), request, model)
    assert not looked


def test_more_tokens_than_asked_for_are_refused(completion, request_, model):
    short = dataclasses.replace(request_, sampling=dataclasses.replace(request_.sampling, max_new_tokens=2))
    with pytest.raises(ValueError, match="expected at most 2 tokens, got 3"):
        check_completion(completion, short, model)


def test_a_full_completion_without_a_stop_token_is_length(completion, request_, model):
    exact = dataclasses.replace(request_, sampling=dataclasses.replace(request_.sampling, max_new_tokens=3))
    long = dataclasses.replace(completion, tokens=np.array([9, 8, 4], np.int32), finish=Finish.LENGTH)
    check_completion(long, exact, model)
    with pytest.raises(ValueError, match="expected finish LENGTH"):
        check_completion(dataclasses.replace(long, finish=Finish.ABORT), exact, model)


def test_routes_nobody_asked_for_are_refused(completion, request_, model):
    with pytest.raises(ValueError, match="expected none, got some"):
        check_completion(completion, dataclasses.replace(request_, want_trace=False), model)
    check_completion(dataclasses.replace(completion, trace=None), request_, dataclasses.replace(model, moe_layers=0))


def test_greedy_log_probs_are_those_of_temperature_one(completion, request_, model):
    greedy = dataclasses.replace(request_, sampling=dataclasses.replace(request_.sampling, temperature=0.0))
    check_completion(dataclasses.replace(completion, logprob=LogprobDefinition(temperature=1.0)), greedy, model)
    with pytest.raises(ValueError, match="log-prob definition"):
        check_completion(dataclasses.replace(completion, logprob=LogprobDefinition(temperature=0.0)), greedy, model)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.uint8, (7, 2, 3), elements=st.integers(0, 6)), st.sampled_from([5, 6, 256]))
def test_distinctness_agrees_with_the_obvious_twin(experts_TLK, num_experts):
    trace = Trace(experts_TLK=experts_TLK, first_row=0, version_T=np.zeros(7, np.int32))
    if first_bad_row(experts_TLK, num_experts) is None:
        check_routes(trace, num_experts, "trace")
    else:
        with pytest.raises(ValueError, match="3 distinct ids below"):
            check_routes(trace, num_experts, "trace")


def test_a_duplicate_is_found_in_any_pair_of_slots_and_beyond_the_first_block():
    rows, slots = 40_000, 8
    clean = np.tile(np.arange(slots, dtype=np.uint8), (rows, 1, 1))
    for first in range(slots):
        for second in range(first):
            experts = clean.copy()
            experts[rows - 1, 0, first] = experts[rows - 1, 0, second]
            trace = Trace(experts_TLK=experts, first_row=0, version_T=np.zeros(rows, np.int32))
            with pytest.raises(ValueError, match=f"in row {rows - 1}, layer 0"):
                check_routes(trace, 64, "trace")


def test_the_type_of_ids_is_the_smallest_that_holds_them():
    assert [id_dtype(experts) for experts in (2, 256, 257)] == [np.uint8, np.uint8, np.uint16]


BAD_REQUESTS = {
    "no id": ({"request_id": ""}, "1 to 256 characters"),
    "no prompt": ({"prompt": ()}, "at least one prompt token"),
    "unknown id": ({"prompt": (1, 40)}, "prompt tokens: expected ids in [0, 32), got 40 at token 1"),
    "no member": ({"members": ()}, "distinct members >= 0, got ()"),
    "member twice": ({"members": (1, 1)}, "distinct members"),
    "too long": ({"length": 126}, "at most 128 (the engine's limit), got 3 + 126"),
    "no new token": ({"length": 0}, "got 0 of members"),
    "cold": ({"temperature": -0.1}, "temperature >= 0"),
    "not a temperature": ({"temperature": float("nan")}, "temperature >= 0"),
    "no nucleus": ({"top_p": 0.0}, "top_p in (0, 1]"),
    "top k": ({"top_k": 0}, "top_k of -1 or >= 1"),
    "seed": ({"seed": -1}, "seed in [0, 2^63)"),
    "stop": ({"stop": (99,)}, "stop ids: expected ids in [0, 32), got 99"),
    "continuation of two": ({"already_sampled": 1}, "of a single member"),
    "continuation of all": ({"already_sampled": 3, "members": (0,)}, "already_sampled below prompt length 3"),
    "continuation of a full one": ({"already_sampled": 2, "members": (0,), "length": 2}, "max_new_tokens 2"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_with_its_field(name, model, make_request):
    fields, expected = BAD_REQUESTS[name]
    with pytest.raises(ValueError, match=re.escape(expected)):
        check_request(make_request(**fields), model)


def test_a_prompt_and_its_tokens_may_fill_the_engine_exactly(model, make_request):
    check_request(make_request(length=125), model)
    check_request(make_request(prompt=[4] * 100, already_sampled=70, length=98, members=(2,)), model)


def test_a_manifest_must_cover_the_model_exactly(model):
    good = fake_weights(model, 5).manifest
    check_manifest(good, model)
    specs, other = good.tensors, TensorSpec(name="lm_head.qkv_proj", dtype="float32", shape=(1,))
    wide = dataclasses.replace(specs[0], shape=(*specs[0].shape, 1))
    typed = dataclasses.replace(specs[0], dtype="float32")
    bad = {
        "unknown: lm_head.qkv_proj": (*specs, other),
        "missing: model.embed_tokens.weight": specs[1:],
        "twice: model.embed_tokens.weight": (*specs, specs[0]),
        "model.embed_tokens.weight expected bfloat16[32, 8], got bfloat16[32, 8, 1]": (wide, *specs[1:]),
        "expected bfloat16[32, 8], got float32[32, 8]": (typed, *specs[1:]),
    }
    for expected, tensors in bad.items():
        with pytest.raises(ValueError, match=re.escape(expected)):
            check_manifest(dataclasses.replace(good, tensors=tensors), model)
    with pytest.raises(ValueError, match=re.escape("and 8 more")):
        check_manifest(dataclasses.replace(good, tensors=()), model)
    with pytest.raises(ValueError, match="got fake-other"):
        check_manifest(dataclasses.replace(good, model_digest="fake-other"), model)
    with pytest.raises(ValueError, match="expected a version in"):
        check_manifest(dataclasses.replace(good, version=-1), model)


def test_a_probe_must_be_able_to_decide(model):
    good = fake_probe(fake_weights(model, 1), model)
    check_probe(good, model)
    bad = {
        "at least 256 tokens, got 255": {"tokens": good.tokens[1:], "logp": good.logp[1:]},
        "sequences of 2 or more tokens, 256 in all, got lengths .255.": {"lengths": (255,)},
        "sequences of 2 or more tokens, 256 in all, got lengths .255, 1.": {"lengths": (255, 1)},
        f"sequences of at most {model.max_tokens} tokens, got 256": {"lengths": (256,)},
        "expected 255 log-probs, got 256": {"logp": np.append(good.logp, np.float32(-1))},
        "got nan at token 3": {"logp": np.where(np.arange(255) == 3, np.nan, good.logp)},
        "expected ids in": {"tokens": good.tokens + 1},
        "tolerance > 0": {"tolerance": 0.0},
        "tolerance > 0 nats, got inf": {"tolerance": float("inf")},
        "coverage in": {"expert_coverage": 1.5},
    }
    for expected, fields in bad.items():
        with pytest.raises(ValueError, match=expected):
            check_probe(dataclasses.replace(good, **fields), model)


def test_what_a_probe_compares_is_within_its_sequences(model):
    probe = dataclasses.replace(fake_probe(fake_weights(model, 1), model), lengths=(100, 2, 127, 27))
    assert probe.segments.tolist() == [1] * 100 + [2] * 2 + [3] * 127 + [4] * 27
    assert probe.positions.tolist() == [*range(100), 0, 1, *range(127), *range(27)]
    assert np.flatnonzero(~probe.compared).tolist() == [99, 101, 228]
    # Where another sequence begins nothing is predicted: what stands there has no influence.
    off = probe.logp - np.where(probe.compared, 0.25, np.nan).astype(np.float32)
    off[5] -= 0.5
    off[6] -= 7.0
    report = probe.compare(off)
    # One token that is far off counts as one nat.
    assert report.mean_abs == pytest.approx(0.25 + (0.5 + 0.75) / 252, rel=1e-5)
    assert report.max_abs == pytest.approx(7.25, rel=1e-5)
    check_probe(dataclasses.replace(probe, logp=np.where(probe.compared, probe.logp, np.nan)), model)


def test_every_honest_completion_of_the_fake_engine_passes(model, make_request, stack):
    engine = FakeEngine(model, version=0)
    for seed in range(20):
        request = make_request(seed=seed, members=(0, 1, 5), stop=(1, 2, 3, 4), temperature=seed % 3 / 2)
        completions = list(engine.sample(request, threading.Event()))
        assert sorted(completion.member for completion in completions) == [0, 1, 5]
        for completion in completions:
            check_completion(completion, request, model)
