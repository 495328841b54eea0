"""One endpoint: every completion checked on arrival, every failure named, every retry bounded."""

import collections
import time

import numpy as np
import pytest

from rollout_bridge import Client, ClientOptions, Fatal, InFlight, Retryable, Security, Weights
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.messages import Staged
from tests.rollout_bridge.standing import Standing


def test_it_sees_the_model_and_samples(serving, connect, model, make_request):
    client = connect(serving[1])
    assert client.model() == model
    completions = list(client.sample(make_request(members=(0, 2, 5)), model))
    assert sorted(completion.member for completion in completions) == [0, 2, 5]
    (dense,) = client.sample(make_request("t1", members=(1,), want_trace=False), model)
    assert dense.trace is None


BROKEN = {
    Fault.NAN_LOGP: "expected finite log-probs <= 0, got nan",
    Fault.POSITIVE_LOGP: "expected finite log-probs <= 0, got 0.5",
    Fault.UNKNOWN_TOKEN: "expected ids in [0, 32), got 32 at token 0",
    Fault.WRONG_ROWS: "expected 8 rows (prompt 3 + 6 tokens - 1 - first row 0)",
    Fault.ZERO_ROUTES: "expected 2 distinct ids below 4, got [0, 0] in row 0, layer 0",
    Fault.NO_TRACE: "expected routes, got none",
    Fault.WRONG_TEMPERATURE: "expected temperature 1.0 before top-p/top-k",
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.name)
def test_a_broken_completion_is_fatal_and_named(fault, serving, connect, model, make_request):
    engine, server = serving
    engine.inject(fault)
    with pytest.raises(Fatal) as caught:
        list(connect(server).sample(make_request("t7", members=(4,), stop=()), model))
    text = str(caught.value)
    assert BROKEN[fault] in text
    for part in (server.address, "t7/4", engine.engine_id, "versions 3 to 3"):
        assert part in text
    assert engine.struck[fault] == 1


def test_a_stream_that_breaks_is_retryable_and_gives_what_came_before(serving, connect, model, make_request):
    engine, server = serving
    engine.inject(Fault.DROP)
    with pytest.raises(Retryable, match=r"Sample of 't0' at 127.*told to break the stream"):
        list(connect(server).sample(make_request(), model))


def test_a_request_that_never_answers_ends_at_its_deadline(serving, connect, model, make_request):
    engine, server = serving
    engine.inject(Fault.HANG)
    client = connect(server, ClientOptions(sample_seconds=0.3))
    began = time.monotonic()
    with pytest.raises(Retryable, match="DEADLINE_EXCEEDED"):
        list(client.sample(make_request(), model))
    assert 0.2 < time.monotonic() - began < 5


def test_a_bad_request_is_refused_before_it_is_sent(serving, connect, model, make_request):
    with pytest.raises(ValueError, match="distinct members"):
        connect(serving[1]).sample(make_request(members=(0, 0)), model)


def test_an_engine_that_is_away_is_retried_a_bounded_number_of_times(stack, model):
    client = stack.enter_context(Client("127.0.0.1:1", options=ClientOptions(attempts=3)))
    began = time.monotonic()
    with pytest.raises(Retryable, match=r"GetModel at 127\.0\.0\.1:1: UNAVAILABLE"):
        client.model()
    assert time.monotonic() - began < 5
    with pytest.raises(Retryable, match=r"StageWeights of version 4 at 127\.0\.0\.1:1"):
        client.stage(fake_weights(model, 4))


class Counting(FakeEngine):
    """Counts what is tried, and fails as told."""

    def __init__(self, model, error, times):
        super().__init__(model, version=3)
        self.tried = collections.Counter()
        self._error, self._times = error, times

    def resume(self):
        self.tried["resume"] += 1
        if self.tried["resume"] <= self._times:
            raise self._error


def test_a_retryable_failure_is_tried_again_and_a_fatal_one_is_not(model, start, connect):
    for error, times, tried in ((Retryable("busy"), 2, 3), (Fatal("no"), 1, 1), (Retryable("busy"), 9, 4)):
        engine = Counting(model, error, times)
        client = connect(start(engine), ClientOptions(attempts=4))
        if times == 2:
            client.resume()
        else:
            with pytest.raises(type(error), match=str(error)):
                client.resume()
        assert engine.tried["resume"] == tried


def test_a_push_that_breaks_is_sent_again(serving, connect, model):
    engine, server = serving
    engine.inject(Fault.FAIL_STAGE, times=2)
    report = connect(server).stage(fake_weights(model, 4))
    assert report.staged is Staged.RECEIVED
    assert engine.struck[Fault.FAIL_STAGE] == 2
    assert engine.status().staged_version == 4


def test_tensors_that_cannot_be_read_are_their_own_error(serving, connect, model):
    weights = fake_weights(model, 4)
    _ = weights.manifest

    class Torn(dict):
        def __getitem__(self, name):
            if name == "model.norm.weight":
                raise OSError("the file is gone")
            return super().__getitem__(name)

    torn = Weights(version=4, model_digest=model.model_digest, tensors=Torn(weights.tensors))
    with pytest.raises(OSError, match="the file is gone"):
        connect(serving[1]).stage(torn)
    assert serving[0].status().staged_version is None


@pytest.mark.parametrize("size", [1, 999, 1 << 20])
def test_any_chunk_size_carries_a_push(size, model, start, connect):
    engine = FakeEngine(model)
    client, weights = connect(start(engine), ClientOptions(chunk_bytes=size)), fake_weights(model, 1)
    assert client.stage(weights).num_bytes == weights.num_bytes
    report, _ = client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    assert report.max_abs == 0.0


def test_pause_resume_abort_reach_the_engine(model, start, connect, make_request):
    engine = Standing(model, version=3)
    client = connect(start(engine))
    with client.sample(make_request(length=100, stop=()), model) as stream:
        while not engine.standing:
            time.sleep(0.01)
        client.abort(("other",))
        assert engine.status().running == 1
        client.abort(("t0",))
        partial = list(stream)
    assert [len(c.tokens) > 0 for c in partial] == [True, True]
    client.pause(InFlight.FINISH)
    assert client.status().serving.name == "PAUSED"
    client.resume()
    assert client.status().serving.name == "SERVING"


def test_a_closed_client_says_so(serving, model, make_request):
    client = Client(serving[1].address)
    client.close()
    for call in (client.model, client.status, lambda: client.sample(make_request(), model)):
        with pytest.raises(Fatal, match="closed"):
            call()


def test_options_that_cannot_work_are_refused():
    with pytest.raises(
        ValueError, match=r"chunk_bytes: expected 1 to 976 \(max_message_bytes less its frame\), got 977"
    ):
        ClientOptions(max_message_bytes=2000, chunk_bytes=977)
    with pytest.raises(ValueError, match="attempts: expected at least 1, got 0"):
        ClientOptions(attempts=0)
    with pytest.raises(ValueError, match="expected TLS off loopback"):
        Client("10.0.0.1:5000")
    with pytest.raises(ValueError, match="no bearer token on an insecure connection"):
        security = Security(token="x" * 16, allow_insecure=True)
        Client("10.0.0.1:5000", options=ClientOptions(security=security))


def test_versions_and_log_probs_arrive_in_their_types(serving, connect, model, make_request):
    (completion,) = connect(serving[1]).sample(make_request(members=(0,)), model)
    assert [array.dtype for array in (completion.tokens, completion.behavior_logp, completion.version)] == [
        np.int32,
        np.float32,
        np.int32,
    ]
    assert completion.trace.experts_TLK.dtype == np.uint8
    assert completion.trace.version_T.dtype == np.int32
