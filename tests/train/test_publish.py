import threading
from typing import Any

import jax
import numpy as np
import pytest

from rollout_bridge import CommitReport, Fatal, InFlight, ProbeReport
from rollout_bridge.messages import Staged, StageReport
from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model import PolicyConfig
from sat_jax.model.hf import tensor_shapes
from train.export import Export
from train.publish import PROBE_TOKENS, ProbeScorer, Publisher
from train.state import OptimConfig, TrainState, init_policy, init_state

POLICY = PolicyConfig(
    vocab_size=8,
    width=8,
    layers=2,
    query_heads=1,
    kv_heads=1,
    head_dim=8,
    experts=4,
    experts_per_token=2,
    expert_hidden=8,
    remat="none",
)
SEQUENCES = list(np.random.default_rng(0).integers(0, 8, (PROBE_TOKENS // 16, 16)).astype(np.int32))


PARTS = {"write": 0.5, "held": 4.0, "load": 2.0, "verify": 1.0}  # seconds, of the slowest engine


class FakeFleet:
    """Records what it is given; `hold` keeps a push waiting, `error` makes a commit fail."""

    def __init__(self):
        self.calls = []
        self.weights = []
        self.hold = threading.Event()
        self.hold.set()
        self.error: Fatal | None = None
        self.in_flight = None

    def stage(self, weights):
        self.hold.wait(30)
        self.weights.append(weights)
        self.calls.append(("stage", weights.version))
        reports = [
            StageReport(staged=Staged.RECEIVED, num_bytes=1, engine_id=name, seconds_write=s)
            for name, s in (("e", 0.25), ("f", 0.5))
        ]
        return {report.engine_id: report for report in reports}

    def commit(self, version, probe, in_flight):
        self.calls.append(("commit", version))
        self.in_flight = in_flight
        if self.error is not None:
            raise self.error
        slow = ProbeReport(mean_abs=0.25, max_abs=0.5, seconds_held=4.0, seconds_load=2.0, seconds_verify=1.0)
        return CommitReport(version=version, engines={"e": slow, "f": ProbeReport(mean_abs=0.0, max_abs=0.0)})


@pytest.fixture(scope="module")
def made():
    graph, params = init_policy(POLICY, 0, one_device_mesh())
    return graph, init_state(params, OptimConfig(peak_lr=1e-3).transformation(), one_device_mesh())


def make(made, fleet, failed=None):
    graph, state = made
    probe = ProbeScorer(graph, POLICY, SEQUENCES, tolerance=0.1)
    return Publisher(fleet, POLICY, probe, "float32", on_failed=([] if failed is None else failed).append), state


def test_a_push_is_staged_then_committed_then_announced(made):
    fleet, committed = FakeFleet(), []
    publisher, state = make(made, fleet)
    publisher.start(TrainState(4, state.params, state.opt_state), committed.append)
    publisher.finish()
    assert fleet.calls == [("stage", 4), ("commit", 4)]
    assert committed == [4]
    weights = fleet.weights[0]
    assert {name: array.shape for name, array in weights.tensors.items()} == dict(tensor_shapes(POLICY))
    published = publisher.published()
    assert published is not None
    assert (published.version, published.probe_mean_abs, published.probe_max_abs) == (4, 0.25, 0.5)
    assert published.bytes == sum(array.nbytes for array in weights.tensors.values())
    slowest = {name: value for name, value in published.metrics().items() if name.split("_")[-1] in PARTS}
    assert {name.split("_")[-1]: value for name, value in slowest.items()} == PARTS
    assert publisher.published() is None


def test_wait_returns_once_the_parameters_may_be_donated(made):
    fleet = FakeFleet()
    fleet.hold.clear()
    publisher, state = make(made, fleet)
    params = jax.tree.map(lambda leaf: leaf.copy(), state.params)
    publisher.start(TrainState(1, params, state.opt_state), lambda version: None)
    publisher.wait()
    expected = {name: array.copy() for name, array in zip(tensor_shapes(POLICY), _export(params), strict=True)}
    jax.tree.map(lambda leaf: leaf.delete(), params)
    fleet.hold.set()
    publisher.finish()
    for name, array in fleet.weights[0].tensors.items():
        np.testing.assert_array_equal(array, expected[name])


def _export(params):
    from sat_jax.model.hf import export_tensors

    return [array for _, array in export_tensors(params, POLICY, np.float32)]


def test_of_several_processes_the_exchange_is_the_loops_own_and_done_when_start_returns(made, monkeypatch):
    threads, fleet = [], FakeFleet()
    fleet.hold.clear()
    whole = Export.tensors

    def watched(self, params):
        for tensor in whole(self, params):
            threads.append(threading.current_thread())
            yield tensor

    monkeypatch.setattr(Export, "tensors", watched)
    monkeypatch.setattr("train.publish.is_local", lambda params: False)
    publisher, state = make(made, fleet)
    publisher.start(TrainState(1, state.params, state.opt_state), lambda version: None)
    assert threads == [threading.current_thread()] * len(tensor_shapes(POLICY))
    fleet.hold.set()
    publisher.finish()
    assert fleet.weights[0].tensors.keys() == tensor_shapes(POLICY).keys()


def test_a_probe_is_scored_on_a_mesh_of_several_batch_shards(made):
    mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
    graph, params = init_policy(POLICY, 0, mesh)
    found = ProbeScorer(graph, POLICY, SEQUENCES, tolerance=0.1)(params)
    expected = ProbeScorer(made[0], POLICY, SEQUENCES, tolerance=0.1)(made[1].params)
    np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)
    assert found.expert_coverage == expected.expert_coverage


def test_one_push_follows_another(made):
    fleet = FakeFleet()
    publisher, state = make(made, fleet)
    for version in (1, 2, 3):
        publisher.start(TrainState(version, state.params, state.opt_state), lambda version: None)
    publisher.finish()
    assert fleet.calls == [(what, version) for version in (1, 2, 3) for what in ("stage", "commit")]


@pytest.mark.parametrize("who", ["wait", "finish", "start"])
def test_a_failed_push_reaches_the_loop_and_whoever_waits_for_samples(made, who):
    fleet, failed, committed = FakeFleet(), [], []
    fleet.error = Fatal("probe of version 1: off by 3 nats")
    publisher, state = make(made, fleet, failed)
    started = TrainState(1, state.params, state.opt_state)
    publisher.start(started, committed.append)
    assert publisher._thread is not None
    publisher._thread.join()
    call = {"wait": publisher.wait, "finish": publisher.finish, "start": lambda: publisher.start(started, print)}[who]
    with pytest.raises(Fatal, match="off by 3 nats"):
        call()
    assert failed == [fleet.error]
    assert committed == []


def test_the_probe_is_what_the_policy_says_of_it(made):
    graph, state = made
    probe = ProbeScorer(graph, POLICY, SEQUENCES, tolerance=0.1)(state.params)
    assert probe.logp.shape == (PROBE_TOKENS - 1,)
    assert np.isfinite(probe.logp).all()
    # A sequence says the same alone as among others: the probe's sequences do not see each other.
    alone = ProbeScorer(graph, POLICY, SEQUENCES[5:] + SEQUENCES[:5], tolerance=0.1)(state.params)
    np.testing.assert_allclose(alone.logp[:15], probe.logp[5 * 16 : 5 * 16 + 15], atol=1e-5)
    assert (probe.logp < 0).all()
    assert 0 < probe.expert_coverage <= 1
    assert probe.tolerance == 0.1


def test_a_short_probe_is_refused(made):
    with pytest.raises(ValueError, match="expected at least 256 tokens, got 255"):
        ProbeScorer(made[0], POLICY, [*SEQUENCES[:-1], SEQUENCES[-1][:-1]], 0.1)


@pytest.mark.parametrize("policy", list(InFlight))
def test_a_push_does_to_running_requests_what_the_schedule_says(made, policy):
    graph, state = made
    fleet: Any = FakeFleet()
    probe = ProbeScorer(graph, POLICY, SEQUENCES, tolerance=0.1)
    publisher = Publisher(fleet, POLICY, probe, "float32", on_failed=[].append, in_flight=policy)
    fleet.hold.clear()
    publisher.start(TrainState(4, state.params, state.opt_state), [].append)
    assert publisher.busy
    fleet.hold.set()
    publisher.finish()
    assert (publisher.busy, fleet.in_flight) == (False, policy)
