"""The fake engine keeps the Engine contract: versions, in-flight policies, continuations."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from rollout_bridge import Engine, Fatal, Finish, InFlight, Retryable, Serving
from rollout_bridge.checks import check_completion
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_logp, fake_probe, fake_routes, fake_weights, fingerprint
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually


@pytest.fixture
def engine(model):
    engine = Standing(model, version=3)
    conforming: Engine = engine
    yield engine
    conforming.close()


def stage(engine, weights):
    sink = engine.stage(weights.manifest)
    for name, array in weights.tensors.items():
        sink.put(name, array)
    sink.finish()


class Running:
    """A request that runs in a thread."""

    def __init__(self, engine, request):
        self.request, self.completions, self.error = request, [], None
        self._thread = threading.Thread(target=self._run, args=(engine,), daemon=True)
        self._thread.start()

    def _run(self, engine):
        try:
            for completion in engine.sample(self.request, threading.Event()):
                self.completions.append(completion)
        except Retryable as error:
            self.error = error

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.completions


def run(engine, request):
    """A request that stands at its first tokens."""
    before = engine.standing
    running = Running(engine, request)
    eventually(lambda: engine.standing > before)
    return running


@pytest.fixture
def long_request(make_request):
    return make_request(members=(0, 1, 2), length=30, stop=())


def test_a_completion_depends_on_weights_prompt_seed_and_member_alone(model, make_request):
    def sampled(request):
        return {c.member: c.tokens.tolist() for c in FakeEngine(model, version=3).sample(request, threading.Event())}

    request = make_request(length=12, stop=())
    alone = dataclasses.replace(request, members=(1,))
    assert sampled(request) == sampled(request)
    assert sampled(alone)[1] == sampled(request)[1] != sampled(request)[0]
    assert sampled(make_request(length=12, stop=(), seed=12)) != sampled(request)
    assert sampled(make_request(length=12, stop=(), prompt=(5, 6, 8))) != sampled(request)


def test_log_probs_and_routes_are_what_the_holder_of_the_weights_computes(model, make_request):
    weights = fake_weights(model, 4)
    engine = FakeEngine(model)
    stage(engine, weights)
    engine.commit(4, fake_probe(weights, model), InFlight.FINISH)
    request = make_request(members=(0,), temperature=0.5)
    (completion,) = engine.sample(request, threading.Event())
    whole = np.concatenate([request.prompt_tokens, completion.tokens])
    held = fingerprint(dict(weights.tensors))
    np.testing.assert_array_equal(completion.behavior_logp, fake_logp(held, whole, 0.5)[2:])
    assert completion.trace is not None
    np.testing.assert_array_equal(completion.trace.experts_TLK, fake_routes(held, whole[:-1], model))


def test_finish_ends_running_requests_on_the_old_weights_and_new_ones_wait_for_the_new(engine, model, long_request):
    running = run(engine, long_request)
    weights = fake_weights(model, 4)
    stage(engine, weights)
    commit = threading.Thread(target=engine.commit, args=(4, fake_probe(weights, model), InFlight.FINISH))
    commit.start()
    eventually(lambda: engine._held_back)
    late = Running(engine, dataclasses.replace(long_request, request_id="t1"))
    eventually(lambda: engine.status().waiting == 1)
    engine.go.set()
    versions = {int(v) for completion in running.join() for v in completion.version}
    commit.join(30)
    assert versions == {3}
    assert {int(v) for completion in late.join() for v in completion.version} == {4}
    assert [c.finish for c in running.completions] == [Finish.LENGTH] * 3


def test_retract_goes_on_under_the_new_weights_which_route_every_row(engine, model, long_request):
    running = run(engine, long_request)
    weights = fake_weights(model, 4)
    stage(engine, weights)
    engine.commit(4, fake_probe(weights, model), InFlight.RETRACT)
    engine.go.set()
    for completion in running.join():
        check_completion(completion, long_request, model)
        assert completion.version[0] == 3
        assert completion.version[-1] == 4
        assert set(completion.trace.version_T.tolist()) == {4}
        assert completion.finish is Finish.LENGTH


def test_abort_returns_what_there_is(engine, model, long_request):
    running = run(engine, long_request)
    weights = fake_weights(model, 4)
    stage(engine, weights)
    engine.commit(4, fake_probe(weights, model), InFlight.ABORT)
    for completion in running.join():
        check_completion(completion, long_request, model)
        assert completion.finish is Finish.ABORT
        assert 0 < len(completion.tokens) < 30
        assert set(completion.version.tolist()) == set(completion.trace.version_T.tolist()) == {3}


def test_abort_by_id_ends_only_that_request(engine, long_request):
    one, two = run(engine, long_request), run(engine, dataclasses.replace(long_request, request_id="t1"))
    engine.abort(("t1",))
    engine.go.set()
    assert {c.finish for c in two.join()} == {Finish.ABORT}
    assert {c.finish for c in one.join()} == {Finish.LENGTH}


def test_a_paused_engine_samples_nothing_and_lets_requests_wait(engine, long_request):
    engine.pause(InFlight.FINISH)
    assert engine.status().serving is Serving.PAUSED
    engine.go.set()
    waiting = Running(engine, long_request)
    eventually(lambda: engine.status().waiting == 1)
    assert engine.status().running == 0
    engine.resume()
    assert len(waiting.join()) == 3


def test_retract_pauses_in_the_middle(engine, long_request):
    running = run(engine, long_request)
    engine.pause(InFlight.RETRACT)
    engine.go.set()
    time.sleep(0.3)
    assert not running.completions
    engine.resume()
    assert len(running.join()) == 3


def test_a_version_that_is_not_staged_is_refused_and_an_older_one_is_the_desks_to_judge(engine, model):
    weights = fake_weights(model, 2)
    with pytest.raises(Fatal):
        engine.commit(4, fake_probe(weights, model), InFlight.FINISH)
    assert engine.status().version == 3
    stage(engine, weights)
    engine.commit(2, fake_probe(weights, model), InFlight.FINISH)
    assert engine.status().version == 2


def test_swapped_experts_do_not_reproduce_the_probe(model):
    weights = fake_weights(model, 4)
    probe = fake_probe(weights, model)
    a, b = "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight"
    swapped = dict(weights.tensors) | {a: weights.tensors[b], b: weights.tensors[a]}
    difference = np.abs(fake_logp(fingerprint(swapped), probe.tokens, 1.0) - probe.logp)
    assert difference.mean() > 100 * probe.tolerance


def test_a_closed_engine_ends_what_runs_and_takes_nothing_more(engine, long_request):
    running = run(engine, long_request)
    engine.close()
    assert {c.finish for c in running.join()} == {Finish.ABORT}
    assert isinstance(Running(engine, long_request).join(), list)
    with pytest.raises(Retryable):
        list(engine.sample(long_request, threading.Event()))
