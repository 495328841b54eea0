"""SGLang's answers, read strictly."""

import base64
import json

import numpy as np
import pytest

from rollout_bridge import Fatal, Finish
from rollout_bridge.engines.sglang_samples import completion, payload, read_answer
from tests.rollout_bridge.fake_sglang import MODEL


def answer_of(tokens=(4, 9, 1), *, prompt=3, spans=None, finish="stop", routes: str | None = "right", **meta):
    """An answer as the real server gave it, changed where a test says so."""
    rows = prompt + len(tokens) - 1
    ids = np.tile(np.array([[3, 0], [1, 2]], "<i4"), (rows, 1, 1))
    parsed = {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": "t2",
            "weight_versions": spans or [{"version": "t2", "start": 0, "end": len(tokens)}],
            "num_retractions": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "routed_experts": base64.b64encode(ids.tobytes()).decode() if routes == "right" else routes,
        }
        | meta,
    }
    return json.dumps(parsed).encode()


def judged(content, request, member=0):
    answer = read_answer(content, "completion t0/0")
    versions = {"t2": 2, "t5": 5}
    return completion(answer, request, member, model=MODEL, versions=versions, engine_id="e")


def test_a_request_asks_for_everything_that_the_trainer_needs(make_request):
    request = make_request(already_sampled=1, members=(3,), length=6, temperature=0.7, stop=(1, 2))
    body = payload(request, 3, rid="r", tag="t2")
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("r", [5, 6, 7], "t2")
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 5,
        "stop_token_ids": [1, 2],
    }
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, -1)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    assert "return_sampling_mask" not in body
    assert payload(make_request(top_k=5), 0, rid="r", tag="t")["return_sampling_mask"] is True
    assert payload(make_request(want_trace=False), 0, rid="r", tag="t")["return_routed_experts"] is False


def test_every_token_has_its_version_and_every_row_the_last(make_request):
    spans = [{"version": "t2", "start": 0, "end": 2}, {"version": "t5", "start": 2, "end": 3}]
    found = judged(answer_of(spans=spans, num_retractions=1), make_request(members=(0,)))
    assert found.version.tolist() == [2, 2, 5]
    assert found.trace is not None
    assert found.trace.version_T.tolist() == [5] * 5
    assert found.trace.experts_TLK[0].tolist() == [[3, 0], [1, 2]]
    assert found.trace.experts_TLK.dtype == np.uint8
    assert found.finish is Finish.STOP


def test_an_end_is_named_by_what_was_asked_for(make_request):
    request = make_request(members=(0,), length=3)
    for tokens, finish in (((4, 9, 1), Finish.STOP), ((4, 9, 8), Finish.LENGTH), ((4, 9), Finish.ABORT)):
        assert judged(answer_of(tokens), request).finish is finish


def test_an_aborted_answer_is_kept_unless_its_cache_was_being_rebuilt(make_request):
    request = make_request(members=(0,))
    kept = judged(answer_of((4, 9), finish="abort"), request)
    assert (kept.tokens.tolist(), kept.finish) == ([4, 9], Finish.ABORT)
    lost = judged(answer_of((4, 9), finish="abort", num_retractions=1), request)
    assert (len(lost.tokens), len(lost.version), lost.trace, lost.finish) == (0, 0, None, Finish.ABORT)
    nothing = judged(answer_of((), finish="abort", output_token_logprobs=None, routes=None), request)
    assert len(nothing.tokens) == 0


def test_log_probs_over_kept_tokens_come_along(make_request):
    found = judged(answer_of(output_token_sampling_logprobs=[-0.1, -0.2, -0.3]), make_request(members=(0,)))
    assert found.truncated_logp is not None
    np.testing.assert_allclose(found.truncated_logp, [-0.1, -0.2, -0.3], rtol=1e-6)
    assert not found.logprob.after_truncation


def test_a_log_prob_that_is_null_becomes_nan_which_nobody_accepts(make_request):
    found = judged(answer_of((4,), output_token_logprobs=[[None, 4, None]]), make_request(members=(0,)))
    assert np.isnan(found.behavior_logp).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"routes": None}, "start SGLang with --enable-return-routed-experts"),
        ({"routes": "AAAA"}, "expected base64 of 32-bit expert ids|= 20 ids, got"),
        (
            {"routes": base64.b64encode(np.zeros(12, "<i4").tobytes()).decode()},
            r"5 rows .* x 2 layers x 2 experts = 20",
        ),
        ({"routes": base64.b64encode(np.full(20, 4, "<i4").tobytes()).decode()}, r"ids in \[0, 4\), got 4 to 4"),
        ({"routes": base64.b64encode(np.full(20, -1, "<i4").tobytes()).decode()}, r"ids in \[0, 4\), got -1 to -1"),
        ({"output_token_logprobs": None}, "expected a log-prob for each of the 3 tokens, got 0"),
        ({"output_token_logprobs": [[-1.0, 4, None], [-1.0, 8, None], [-1.0, 1, None]]}, "for tokens \\[4, 8, 1\\]"),
        ({"spans": [{"version": "t2", "start": 0, "end": 2}]}, "version spans of 3 tokens"),
        ({"spans": [{"version": "t2", "start": 1, "end": 3}]}, "version spans of 3 tokens"),
        ({"weight_versions": None}, "expected an answer of SGLang's /generate"),
        ({"finish_reason": None}, "expected an answer of SGLang's /generate"),
    ],
)
def test_an_answer_that_is_not_as_it_must_be_is_named(make_request, change, said):
    with pytest.raises(Fatal, match=said):
        judged(answer_of(**change), make_request(members=(0,)))


def test_what_is_no_json_is_named():
    with pytest.raises(Fatal, match="is the server's version one that was tested"):
        read_answer(b"<html>", "completion t0/0")
