"""A server over an engine that is not what it says: out of service, until a whole push."""

import pytest

from rollout_bridge import (
    Busy,
    ClientOptions,
    Fatal,
    InFlight,
    NotStaged,
    ProbeReport,
    Retryable,
    Serving,
)
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.lease import LeaseBook
from rollout_bridge.messages import Staged
from rollout_bridge.push import PushDesk
from tests.rollout_bridge.health import health_of
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually


def committed_by(engine, start, connect, model):
    server = start(engine)
    client, weights = connect(server), fake_weights(model, 4)
    client.stage(weights)
    with pytest.raises(Fatal) as caught:
        client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)
    return server, client, str(caught.value)


def test_an_engine_that_goes_live_without_reproducing_the_probe_is_out_of_service(
    model, start, connect, channel, make_request
):
    class Careless(FakeEngine):
        careless = True

        def commit(self, version, probe, in_flight):
            report = super().commit(version, probe, in_flight)
            return ProbeReport(mean_abs=0.5, max_abs=0.9) if self.careless else report

    engine = Careless(model)
    server, client, text = committed_by(engine, start, connect, model)
    assert "expected the probe within 0.001 nats, got mean 0.5, max 0.9, and yet it was committed" in text
    assert engine.status().version == 4
    assert (client.status().serving, client.status().version) == (Serving.NOT_SERVING, -1)
    with pytest.raises(Retryable, match="and yet it was committed"):
        list(client.sample(make_request(), model))
    eventually(lambda: health_of(channel(server)) == "NOT_SERVING")
    engine.careless = False
    better = fake_weights(model, 5)
    client.stage(better)
    client.commit(better.manifest, fake_probe(better, model), InFlight.FINISH)
    assert client.status().serving is Serving.SERVING


def test_an_engine_that_says_committed_and_serves_something_else_is_out_of_service(model, start, connect):
    class Forgetful(FakeEngine):
        def commit(self, version, probe, in_flight):
            return ProbeReport(mean_abs=0.0, max_abs=0.0)

    _, client, text = committed_by(Forgetful(model, version=3), start, connect, model)
    assert "commit of version 4: expected it to serve" in text
    assert client.status().serving is Serving.NOT_SERVING


def test_an_engine_whose_commit_breaks_is_out_of_service(model, start, connect):
    class Broken(FakeEngine):
        def commit(self, version, probe, in_flight):
            raise RuntimeError("device lost")

    _, client, text = committed_by(Broken(model, version=3), start, connect, model)
    assert "device lost" in text
    assert client.status().serving is Serving.NOT_SERVING


def test_what_an_engine_held_is_forgotten_when_it_restarts_behind_the_bridge(model):
    engine = FakeEngine(model)
    desk, weights = PushDesk(engine, LeaseBook(30.0)), fake_weights(model, 4)
    probe, parts = fake_probe(weights, model), [weights.manifest, *weights.chunks(1000)]
    desk.stage(iter(parts), "me")
    desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    assert desk.stage(iter(parts), "me").staged is Staged.ALREADY_LIVE
    engine._id, engine._live = "fake-restarted", None
    with pytest.raises(NotStaged):
        desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    assert desk.stage(iter(parts), "me").staged is Staged.RECEIVED
    desk.commit((4, weights.manifest.digest), probe, InFlight.FINISH, "me")
    engine._id = "fake-restarted-with-weights-of-its-own"
    with pytest.raises(Fatal, match="expected a version above 4"):
        desk.stage(iter(parts), "me")


def test_a_commit_finds_the_desk_taken_while_another_runs(model, start, connect, make_request):
    engine = Standing(model, version=3)
    server = start(engine)
    client, weights = connect(server), fake_weights(model, 4)
    client.stage(weights)
    probe = fake_probe(weights, model)
    with client.sample(make_request(length=20, stop=()), model) as stream:
        eventually(lambda: engine.standing == 1)
        hasty = connect(server, ClientOptions(sender="hasty"))
        with pytest.raises(Retryable, match=r"DEADLINE_EXCEEDED|held for"):
            hasty.commit(weights.manifest, probe, InFlight.FINISH, seconds=0.2)
        with pytest.raises(Busy, match="the commit of version 4 by hasty at ipv4"):
            client.commit(weights.manifest, probe, InFlight.FINISH)
        engine.go.set()
        assert {int(v) for c in stream for v in c.version} == {3}
    eventually(lambda: client.status().version == 4)
    report, _ = client.commit(weights.manifest, probe, InFlight.FINISH)  # the answer that was lost
    assert report.mean_abs == 0.0
