"""The local engine as the bridge sees it: many threads outside, one inside. What it decides is in test_local_worker."""

import dataclasses
import functools
import threading
import time

import numpy as np
import pytest
from flax import nnx

from rollout_bridge import Client, Weights, serve
from rollout_bridge.checks import check_completion, check_manifest
from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import Finish, InFlight, Probe, SampleRequest, Sampling, Serving
from sat_jax.model import Policy, PolicyConfig
from sat_jax.model.hf import export_tensors
from train import local_engine
from train.local_engine import LocalEngine, LocalEngineConfig

CONFIG = PolicyConfig.tiny(vocab_size=13, width=32, head_dim=8, expert_hidden=24)
SETTINGS = LocalEngineConfig(dtype="float32", slots=4, max_tokens=32, max_stop_ids=2, steps=2)
NEVER = threading.Event()


@functools.cache
def policy() -> Policy:
    return Policy(CONFIG, nnx.Rngs(1))


@pytest.fixture(scope="module")
def engine():
    engine = LocalEngine(CONFIG, SETTINGS, initial=policy(), version=3)
    yield engine
    engine.close()


def ask(name: str, **changes) -> SampleRequest:
    fields = {"prompt": (2, 3, 4), "new": 9, "members": (0, 1), "seed": 7, "stop": (1,), "already": 0} | changes
    return SampleRequest(
        request_id=name,
        prompt_tokens=np.array(fields["prompt"], np.int32),
        sampling=Sampling(max_new_tokens=fields["new"], stop_ids=fields["stop"], seed=fields["seed"]),
        members=fields["members"],
        already_sampled=fields["already"],
    )


def weights_of(version: int) -> Weights:
    tensors = dict(export_tensors(policy(), CONFIG, "float32"))
    return Weights(version=version, model_digest=CONFIG.digest(), tensors=tensors)


def probe_by(engine: LocalEngine) -> Probe:
    """The probe as this very engine scores it: these tests are not about its numbers."""
    tokens = np.arange(256, dtype=np.int32) % 13
    weights = nnx.state(policy(), nnx.Param)
    probe = Probe(tokens=tokens, lengths=(32,) * 8, logp=np.zeros(255), tolerance=1e-6, expert_coverage=1.0)
    return dataclasses.replace(probe, logp=engine._ask(lambda worker: worker._programs.score(weights, probe)))


def test_requests_from_many_threads_each_get_their_members(engine):
    found = {}

    def call(number: int) -> None:
        request = ask(f"r{number}", seed=number, members=(0, 1, 2))
        found[number] = list(engine.sample(request, NEVER))
        for completion in found[number]:
            check_completion(completion, request, engine.model())

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
    assert all(sorted(one.member for one in got) == [0, 1, 2] for got in found.values())
    assert {one.engine_id for got in found.values() for one in got} == {engine.engine_id}
    assert {int(one.version[0]) for got in found.values() for one in got} == {3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": tuple(range(2, 13)) * 3}, r"expected prompt \+ new tokens of at most 32"),
        ({"prompt": (2, 13)}, r"prompt tokens: expected ids in \[0, 13\), got 13 at token 1"),
        ({"stop": (1, 2, 3)}, r"expected at most 2 stop ids, got 3; start the engine with a larger max_stop_ids"),
        ({"already": 9}, r"expected already_sampled below prompt length"),
    ],
)
def test_a_request_that_can_never_be_served_is_fatal(engine, changes, message):
    with pytest.raises(Fatal, match=message):
        list(engine.sample(ask("bad", **changes), NEVER))


def test_a_cancelled_call_ends_and_frees_its_slots(engine):
    cancelled = threading.Event()
    stream = engine.sample(ask("long", new=29, stop=(), members=(0, 1, 2, 3, 4, 5)), cancelled)
    next(stream)
    cancelled.set()
    assert list(stream) == []
    engine.discard()  # a command after the cancellation's
    status = engine.status()
    assert (status.running, status.waiting) == (0, 0)


def test_a_caller_that_goes_away_frees_its_slots(engine):
    stream = engine.sample(ask("left", new=29, stop=(), members=(0, 1, 2, 3, 4, 5)), NEVER)
    next(stream)
    stream.close()
    engine.discard()
    assert engine.status().running == 0


def test_pause_resume_and_abort_reach_running_requests(engine):
    engine.pause(InFlight.RETRACT)
    assert engine.status().serving is Serving.PAUSED
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.sample(ask("held"), NEVER)))
    thread.start()
    deadline = time.monotonic() + 30
    while engine.status().waiting < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.abort(("held",))
    thread.join()
    assert {(one.finish, len(one.tokens)) for one in found} == {(Finish.ABORT, 0)}
    engine.resume()
    assert engine.status().serving is Serving.SERVING


def test_a_push_goes_live_over_the_wire_and_bad_ones_do_not(engine):
    with serve(engine, "127.0.0.1:0") as server, Client(server.address) as client:
        check_manifest(weights_of(4).manifest, client.model())
        probe = probe_by(engine)
        weights = weights_of(4)
        client.stage(weights)
        assert engine.status().staged_version == 4
        report, engine_id = client.commit(weights.manifest, probe, InFlight.FINISH)
        assert (report.mean_abs, engine_id) == (0, engine.engine_id)
        assert {int(one.version[-1]) for one in client.sample(ask("new"), client.model())} == {4}
        with pytest.raises(Fatal, match=r"versions of a trainer only grow"):
            client.stage(weights_of(2))


def test_a_push_that_breaks_off_leaves_nothing(engine):
    sink = engine.stage(weights_of(9).manifest)
    sink.put("model.norm.weight", np.ones(32, np.float32))
    sink.discard()
    sink = engine.stage(weights_of(9).manifest)
    with pytest.raises(ValueError, match=r"tensors: expected exactly the model's"):
        sink.finish()
    assert engine.status().staged_version is None


def test_a_closed_engine_aborts_what_runs_and_takes_no_more():
    engine = LocalEngine(CONFIG, SETTINGS, initial=policy())
    stream = engine.sample(ask("cut", new=29, stop=(), members=tuple(range(12))), NEVER)
    next(stream)
    engine.close()
    assert Finish.ABORT in {completion.finish for completion in stream}
    with pytest.raises(Retryable, match=r"expected a running engine, got one that was closed"):
        next(engine.sample(ask("late"), NEVER))
    assert engine.status().serving is Serving.NOT_SERVING


def test_an_engine_whose_thread_has_died_says_why(monkeypatch):
    def fail(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(local_engine, "LocalWorker", fail)
    engine = LocalEngine(CONFIG, SETTINGS)
    with pytest.raises(Fatal, match=r"expected a running engine, got RuntimeError\('device lost'\); restart it"):
        next(engine.sample(ask("lost"), NEVER))
    assert isinstance(engine.failure, RuntimeError)
    assert engine.status().serving is Serving.NOT_SERVING
    engine.close()


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match=r"rollout\.slots: expected at least 1, got 0"):
        LocalEngineConfig(dtype="float32", slots=0, max_tokens=8)
