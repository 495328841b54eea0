"""Pushes to a fleet: all engines or none; and which engines it takes."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from rollout_bridge import ClientOptions, Fatal, Fleet, FleetOptions, InFlight, Retryable
from rollout_bridge.endpoint import State
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.errors import NotStaged
from rollout_bridge.messages import Staged
from tests.rollout_bridge.fleets import QUICK, Respawning, publish
from tests.rollout_bridge.waiting import eventually


def test_publishing_reaches_every_engine_and_reports_each(model, start, gather):
    servers = [start(FakeEngine(model)) for _ in range(3)]
    fleet = gather(*servers)
    weights = fake_weights(model, 1)
    staged = fleet.stage(weights)
    assert {address: report.staged for address, report in staged.items()} == {
        server.address: Staged.RECEIVED for server in servers
    }
    off = dataclasses.replace(fake_probe(weights, model), tolerance=0.5)
    off = dataclasses.replace(off, logp=off.logp - np.float32(0.25))
    report = fleet.commit(1, off, InFlight.FINISH)
    assert report.engines.keys() == {server.address for server in servers}
    assert (report.version, report.mean_abs, report.max_abs) == (1, pytest.approx(0.25), pytest.approx(0.25))
    eventually(lambda: {s.engine.version for s in fleet.status().values()} == {1})


def test_a_push_goes_beside_sampling(model, start, gather, requests):
    engine = FakeEngine(model, seconds_per_token=0.01)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    mixed, versions = set(), set()
    deadline = time.monotonic() + 60

    def collect():
        while not (mixed and len(versions) > 3) and time.monotonic() < deadline:
            for completion in fleet.sample(requests):
                seen = {int(version) for version in completion.version}
                versions.update(seen)
                mixed.update(seen if len(seen) > 1 else ())

    thread = threading.Thread(target=collect)
    thread.start()
    version = 1
    while thread.is_alive():
        version += 1
        publish(fleet, model, version, list(InFlight)[version % 3])
    thread.join()
    # A push that waited for the samples to end, or they for it, would leave no completion of two versions.
    assert mixed
    assert len(versions) > 3


def test_a_push_that_one_engine_refuses_is_dropped_by_all(model, start, gather):
    class Full(FakeEngine):
        def stage(self, manifest):
            raise Fatal("no space left for a push")

    engines = [FakeEngine(model), Full(model), FakeEngine(model)]
    servers = list(map(start, engines))
    with pytest.raises(Fatal) as caught:
        gather(*servers).stage(fake_weights(model, 1))
    text = str(caught.value)
    assert f"these failed: {servers[1].address}: StageWeights of version 1 at {servers[1].address}" in text
    assert "no space left for a push" in text
    assert [engine.status().staged_version for engine in engines] == [None] * 3


def test_a_commit_that_fails_everywhere_leaves_the_old_version_serving(model, start, gather, requests):
    engines = [FakeEngine(model), FakeEngine(model)]
    fleet = gather(*map(start, engines))
    publish(fleet, model, 1)
    for engine in engines:
        engine.inject(Fault.FAIL_COMMIT)
    with pytest.raises(Fatal, match=r"expected all engines, got none done and these failed: .*expected the probe"):
        publish(fleet, model, 2)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {1}
    publish(fleet, model, 3)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {3}


def test_a_commit_that_fails_somewhere_names_who_serves_and_who_does_not(model, start, gather):
    engines = [FakeEngine(model), FakeEngine(model)]
    servers = list(map(start, engines))
    fleet = gather(*servers)
    publish(fleet, model, 1)
    engines[1].inject(Fault.FAIL_COMMIT, times=9)
    with pytest.raises(Fatal) as caught:
        publish(fleet, model, 2)
    assert f"got {servers[0].address} done and these failed: {servers[1].address}: " in str(caught.value)
    eventually(
        lambda: fleet.status()[servers[1].address].state is State.FAILED
    )  # it was pushed again, and failed again
    assert fleet.status()[servers[0].address].state is State.READY


def test_an_engine_that_is_away_is_awaited_by_a_push(model, start, gather):
    spawn = Respawning(lambda: FakeEngine(model), start)
    fleet = gather(spawn.server, client=QUICK, on_lost=spawn.on_lost)
    publish(fleet, model, 1)
    spawn.kill()
    assert publish(fleet, model, 2).version == 2
    assert spawn.restarts == 1
    assert spawn.engine.status().version == 2


def test_an_engine_that_restarts_between_stage_and_commit_is_staged_again(model, start, gather, requests):
    for target in (False, True):
        spawn = Respawning(lambda: FakeEngine(model), start)
        fleet = gather(spawn.server, client=QUICK, on_lost=spawn.on_lost)
        if target:
            publish(fleet, model, 1)
        weights = fake_weights(model, 2)
        fleet.stage(weights)
        spawn.kill()
        assert fleet.commit(2, fake_probe(weights, model), InFlight.FINISH).mean_abs == 0.0
        assert {int(v) for c in fleet.sample(requests) for v in c.version} == {2}


class Forgetful(FakeEngine):
    """Becomes another instance before each of its first commits, with what is staged lost, and the desk not told."""

    def __init__(self, model, times):
        super().__init__(model)
        self.times = times

    def commit(self, version, probe, in_flight):
        if self.times:
            self.times -= 1
            raise NotStaged("another instance by now")
        return super().commit(version, probe, in_flight)


@pytest.mark.parametrize("restored", [False, True])
def test_an_engine_that_restarts_again_and_again_is_staged_as_often(model, start, gather, restored):
    """Also where the fleet restores it by itself: a second time in a row is no reason to give it up."""
    engine = Forgetful(model, 0 if restored else 4)
    fleet = gather(start(engine), client=QUICK, heartbeat_seconds=0.05)
    publish(fleet, model, 1)
    if restored:
        engine.times = 4
        with engine._changed:
            engine._live = None  # it serves nothing any more
        eventually(lambda: engine.status().version == 1, 30.0)
    assert engine.times == 0
    assert fleet.status().popitem()[1].state is not State.FAILED


def test_an_engine_that_stays_away_is_named_when_time_is_up(model, start, gather):
    servers = [start(FakeEngine(model)), start(FakeEngine(model))]
    fleet = gather(*servers, client=QUICK, publish_seconds=0.5)
    servers[1].stop(0.0)
    with pytest.raises(Retryable) as caught:
        fleet.stage(fake_weights(model, 1))
    assert f"stage of version 1 at {servers[1].address}: expected an end within 0.5 s" in str(caught.value)
    assert f"got {servers[0].address} done" in str(caught.value)


def test_what_cannot_be_published_is_refused_at_once(model, start, gather):
    fleet = gather(start(FakeEngine(model)))
    weights = fake_weights(model, 1)
    probe = fake_probe(weights, model)
    with pytest.raises(ValueError, match="expected it staged, got nothing; stage it first"):
        fleet.commit(1, probe, InFlight.FINISH)
    other = dataclasses.replace(weights, tensors=dict(list(weights.tensors.items())[1:]))
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        fleet.stage(other)
    fleet.stage(weights)
    with pytest.raises(ValueError, match="commit of version 2: expected it staged, got version 1"):
        fleet.commit(2, probe, InFlight.FINISH)
    with pytest.raises(ValueError, match="at least 256 tokens"):
        fleet.commit(1, dataclasses.replace(probe, tokens=probe.tokens[:9]), InFlight.FINISH)


# ------------------------------------------------------------------------------------------------ membership


def test_engines_of_different_models_are_refused(model, start, stack):
    servers = [start(FakeEngine(model)), start(FakeEngine(fake_model(experts=8)))]
    fleet = stack.enter_context(Fleet([server.address for server in servers]))
    with pytest.raises(Fatal, match=r"expected the model of .* \(fake-32-2-\d-2, .*serve one model in a fleet"):
        fleet.wait_ready(30.0)


def test_an_engine_that_never_answers_is_named(model, start, stack):
    server = start(FakeEngine(model))
    options = FleetOptions(client=ClientOptions(attempts=1))
    fleet = stack.enter_context(Fleet([server.address, "127.0.0.1:1"], options=options))
    eventually(lambda: "UNAVAILABLE" in fleet.status()["127.0.0.1:1"].reason)
    with pytest.raises(Retryable, match=r"every engine to answer within 0.5 s.*127\.0\.0\.1:1 lost \(.*UNAVAILABLE"):
        fleet.wait_ready(0.5)


def test_a_fleet_needs_distinct_endpoints_and_an_answer():
    for endpoints in ((), ("127.0.0.1:1", "127.0.0.1:1")):
        with pytest.raises(ValueError, match="one or more distinct endpoints"):
            Fleet(endpoints)
    with Fleet(["127.0.0.1:1"]) as fleet, pytest.raises(Retryable, match="expected an engine that has answered"):
        fleet.model()


def test_a_closed_fleet_leaves_no_thread(model, start):
    before = set(threading.enumerate())
    server = start(FakeEngine(model, version=1))
    with Fleet([server.address]) as fleet:
        fleet.wait_ready(30.0)
    eventually(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("fleet")])


def test_replicas_that_serve_different_weights_are_named(model, start, gather):
    class Summing(FakeEngine):
        checksum = "aa"

        def commit(self, version, probe, in_flight):
            return dataclasses.replace(super().commit(version, probe, in_flight), checksum=self.checksum)

    one, other = Summing(model), Summing(model)
    fleet = gather(start(one), start(other))
    weights = fake_weights(model, 1)
    assert fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH).version == 1
    other.checksum = "bb"
    weights = fake_weights(model, 2)
    with pytest.raises(Fatal, match="expected the same checksum of the served weights everywhere"):
        fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH)
