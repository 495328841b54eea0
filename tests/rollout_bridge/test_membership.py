"""A fleet behind a name: addresses come and go while it works."""

import threading

import pytest

from rollout_bridge import ClientOptions, Fleet, FleetOptions, InFlight, Lease, ServerOptions, serve
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from tests.rollout_bridge.waiting import eventually

NAME = "dns:fleet.example:50051"


class Name:
    """A resolver that says what it is told to."""

    def __init__(self, *servers):
        self.is_now(*servers)
        self.failure = ""

    def is_now(self, *servers):
        self._addresses = tuple(server.address for server in servers)

    def __call__(self, endpoints):
        assert tuple(endpoints) == (NAME,)
        if self.failure:
            raise ValueError(self.failure)
        return self._addresses


@pytest.fixture
def behind(stack):
    """A fleet behind a name, and what it told."""

    def begin(name, **client):
        told = []
        options = FleetOptions(
            client=ClientOptions(**client),
            heartbeat_seconds=0.05,
            resolve=name,
            resolve_seconds=0.01,
            on_event=lambda kind, text: told.append((kind, text)),
        )
        fleet = stack.enter_context(Fleet([NAME], options=options))
        fleet.wait_ready(30.0)
        return fleet, told

    return begin


def publish(fleet, model, version):
    weights = fake_weights(model, version)
    return fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH)


def kinds(told):
    return [kind for kind, _ in told]


def test_a_new_address_is_pushed_to_before_it_gets_a_request(model, start, behind, make_request):
    engines = [FakeEngine(model), FakeEngine(model)]
    first, second = map(start, engines)
    name = Name(first)
    fleet, told = behind(name)
    publish(fleet, model, 4)
    name.is_now(first, second)
    eventually(lambda: engines[1].status().version == 4)
    eventually(lambda: kinds(told).count("ready") >= 2)
    assert ("joined", second.address) in told
    requests = [make_request(f"t{number}", seed=number) for number in range(16)]
    completions = list(fleet.sample(requests))
    assert {c.engine_id for c in completions} == {engine.engine_id for engine in engines}
    assert all(set(c.version.tolist()) == {4} for c in completions)
    assert publish(fleet, model, 5).engines.keys() == {first.address, second.address}


def test_a_bare_new_engine_is_asked_nothing_while_it_cannot_serve(model, start, behind, make_request):
    """It was given up by whoever made it: nothing is published yet, and it holds nothing."""
    engine = FakeEngine(model, version=3)
    name = Name(start(engine))
    fleet, _ = behind(name)
    empty = FakeEngine(model)
    name.is_now(start(engine), start(empty))
    eventually(lambda: len(fleet.status()) == 2)
    completions = list(fleet.sample([make_request(f"t{number}", seed=number) for number in range(8)]))
    assert {c.engine_id for c in completions} == {engine.engine_id}


def test_an_address_that_is_gone_ends_what_it_has_and_gets_nothing_new(model, start, behind, make_request):
    engines = [FakeEngine(model, seconds_per_token=0.03), FakeEngine(model)]
    servers = [start(engine, options=ServerOptions(lease_seconds=3600.0)) for engine in engines]
    name = Name(servers[0])
    fleet, told = behind(name, lease=Lease(holder="one", start="a"))
    publish(fleet, model, 1)
    long = make_request("long", length=60, stop=(), members=(0,))
    completions = []
    running = threading.Thread(target=lambda: completions.extend(fleet.sample([long])))
    running.start()
    eventually(lambda: engines[0].status().running == 1 or completions)
    name.is_now(servers[1])
    eventually(lambda: "left" in kinds(told))
    later = list(fleet.sample([make_request(f"t{number}", seed=number) for number in range(8)]))
    assert {c.engine_id for c in later} == {engines[1].engine_id}
    assert publish(fleet, model, 2).engines.keys() == {servers[1].address}
    running.join(30.0)
    (ended,) = completions
    assert (ended.engine_id, len(ended.tokens), set(ended.version.tolist())) == (engines[0].engine_id, 60, {1})
    assert fleet.counts().get("reissued", 0) == 0
    eventually(lambda: servers[0]._servicer._leases._held is None)  # drained, then let go
    assert servers[1]._servicer._leases._held is not None


def test_a_commit_does_not_wait_for_an_engine_that_is_gone(model, start, behind):
    first, second = start(FakeEngine(model)), serve(FakeEngine(model), "127.0.0.1:0")
    name = Name(first, second)
    fleet, told = behind(name, attempts=1)
    publish(fleet, model, 1)
    eventually(lambda: kinds(told).count("ready") >= 2)
    second.stop(grace=0.0)
    reports = []
    pushing = threading.Thread(target=lambda: reports.append(publish(fleet, model, 2)))
    pushing.start()
    eventually(lambda: "lost" in kinds(told))
    assert not reports  # a lost engine is waited for
    name.is_now(first)
    pushing.join(30.0)
    assert reports[0].engines.keys() == {first.address}


def test_a_name_without_addresses_for_a_moment_changes_nothing(model, start, behind, make_request):
    server = start(FakeEngine(model))
    name = Name(server)
    fleet, told = behind(name)
    publish(fleet, model, 1)
    name.failure = "no such name"
    eventually(lambda: "unresolved" in kinds(told))
    assert len(list(fleet.sample([make_request()]))) == 2
    name.failure = ""
    name.is_now()
    eventually(lambda: kinds(told).count("unresolved") == 2)
    assert [text for kind, text in told if kind == "unresolved"] == [
        "no such name",
        "fleet: expected one or more endpoints of ['dns:fleet.example:50051'], got none",
    ]
    assert len(list(fleet.sample([make_request("t1")]))) == 2


def test_an_address_that_comes_back_is_another_engine_to_the_fleet(model, start, behind, make_request):
    engines = [FakeEngine(model), FakeEngine(model)]
    servers = list(map(start, engines))
    name = Name(*servers)
    fleet, told = behind(name)
    publish(fleet, model, 1)
    name.is_now(servers[0])
    eventually(lambda: "left" in kinds(told))
    publish(fleet, model, 2)
    assert engines[1].status().version == 1
    name.is_now(*servers)
    eventually(lambda: engines[1].status().version == 2)


def test_a_list_is_looked_at_once(model, start, gather):
    fleet = gather(start(FakeEngine(model)), resolve_seconds=0.001)
    assert fleet._follow is None
