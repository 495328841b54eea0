"""Engines that a fleet loses and that come back: nothing is lost, and they are pushed to before they sample."""

import threading

import pytest

from rollout_bridge import Fatal, ServerOptions
from rollout_bridge.endpoint import State
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_weights
from tests.rollout_bridge.fleets import QUICK, Respawning, keys, of, publish, same, sampled, wanted
from tests.rollout_bridge.waiting import eventually


def test_a_lost_engine_has_its_members_asked_for_elsewhere(model, start, gather, requests):
    engines = [FakeEngine(model, seconds_per_token=0.03) for _ in range(2)]
    servers = list(map(start, engines))
    fleet = gather(*servers, client=QUICK)
    publish(fleet, model, 1)
    completions = []
    for completion in fleet.sample(requests):
        completions.append(completion)
        if len(completions) == 2:
            servers[0].stop(0.0)
    assert keys(completions) == wanted(requests)
    assert all(same(c, sampled(model, 1, of(requests, c))[c.member]) for c in completions)
    assert fleet.status()[servers[0].address].state is State.LOST
    assert fleet.counts()["lost"] == 1


def test_an_engine_that_is_lost_as_soon_as_it_serves_is_told(model, start, gather, monkeypatch):
    """The fleet's watch looks again after a commit; here it finds nobody."""
    engine, told = FakeEngine(model), []
    server = start(engine, options=ServerOptions(poll_seconds=60.0))  # nor did it hear of it
    fleet = gather(server, client=QUICK, on_event=lambda kind, _text: told.append(kind))
    client = fleet._endpoints[0].client
    original = client.commit

    def last(*arguments, **options):
        reply = original(*arguments, **options)
        server.stop(0.0)
        return reply

    monkeypatch.setattr(client, "commit", last)
    publish(fleet, model, 1)
    eventually(lambda: told)
    start(engine, server.address)
    eventually(lambda: len(told) > 1)
    assert told == ["lost", "ready"]


def test_a_killed_engine_is_restarted_published_to_and_only_then_asked_again(model, start, gather, requests):
    def make():
        return FakeEngine(model, seconds_per_token=0.02)

    spawn, events = Respawning(make, start), []
    fleet = gather(
        spawn.server,
        client=QUICK,
        max_streams=4,
        on_lost=spawn.on_lost,
        on_event=lambda *event: events.append(event),
    )
    publish(fleet, model, 1)
    publish(fleet, model, 2)
    completions, first = [], spawn.engine.engine_id
    for completion in fleet.sample(requests):
        completions.append(completion)
        if len(completions) in (3, 20):
            spawn.kill()
    assert spawn.restarts == 2
    assert keys(completions) == wanted(requests)
    assert all(same(c, sampled(model, 2, of(requests, c))[c.member]) for c in completions)
    assert {c.engine_id for c in completions} >= {first, spawn.engine.engine_id}
    kinds = [kind for kind, _ in events if kind in ("lost", "republish", "ready")]
    assert kinds == ["ready"] + ["lost", "republish", "ready"] * 2


def test_without_a_hook_the_fleet_waits_for_the_engine_to_come_back(model, start, gather, requests):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 1)
    server.stop(0.0)
    threading.Timer(0.5, lambda: start(FakeEngine(model), server.address)).start()
    assert keys(fleet.sample(requests)) == wanted(requests)
    assert fleet.counts()["republish"] == 1


def test_an_engine_that_comes_back_with_older_weights_is_brought_forward_first(model, start, gather, requests):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 5)
    server.stop(0.0)
    start(FakeEngine(model, version=4), server.address)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {5}


def test_an_engine_that_comes_back_with_the_same_version_but_unverified_by_us_is_published_to(
    model, start, gather, requests
):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 5)
    server.stop(0.0)
    start(FakeEngine(model, version=5), server.address)  # says 5, but of other weights
    with pytest.raises(Fatal, match="push of version 5: expected a version above 5"):
        list(fleet.sample(requests))


def test_a_hook_that_gives_up_is_the_error_of_the_call(model, start, gather, requests):
    def give_up(endpoint):
        raise RuntimeError("restarted 3 times in a minute; last words: out of memory")

    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK, on_lost=give_up)
    publish(fleet, model, 1)
    server.stop(0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(fleet.sample(requests))
    with pytest.raises(Fatal, match="out of memory"):
        fleet.stage(fake_weights(model, 2))
