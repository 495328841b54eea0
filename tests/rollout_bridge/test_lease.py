"""One trainer publishes to an engine; its latest start, and nobody else while it lives."""

import contextlib

import pytest

from rollout_bridge import Client, ClientOptions, Fatal, Fleet, FleetOptions, InFlight, Lease, ServerOptions
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.lease import LeaseBook
from tests.rollout_bridge.waiting import eventually

ONE = Lease(holder="training of host:/runs/one", start="a")
RESUMED = Lease(holder="training of host:/runs/one", start="b")
OTHER = Lease(holder="training of hôst:/runs/two three", start="c")


def test_a_lease_travels_as_ascii():
    for lease in (ONE, OTHER):
        text = lease.to_metadata()
        assert text.isascii()
        assert Lease.from_metadata(text) == lease
    for garbled in ("", "one", "one two three", " x"):
        with pytest.raises(ValueError, match="expected a holder and a start"):
            Lease.from_metadata(garbled)


def test_another_run_is_refused_while_the_holder_lives_and_taken_when_it_is_silent():
    now = 0.0
    book = LeaseBook(30.0, lambda: now)
    book.claim(ONE)
    for _ in range(6):
        now += 29.0
        with pytest.raises(Fatal, match=rf"got one that training of host:/runs/one has held for {now:.0f} s"):
            book.claim(OTHER)
        book.renew(ONE)
    now += 29.0
    book.renew(OTHER)  # means nothing
    now += 1.0
    book.claim(OTHER)
    with pytest.raises(Fatal, match=r"runs/two three has taken over from 0 s ago"):
        book.claim(ONE)


def test_a_resumed_run_takes_over_at_once_and_its_former_start_is_out():
    book = LeaseBook(60.0)
    book.claim(ONE)
    book.claim(RESUMED)
    with pytest.raises(Fatal, match="runs/one has taken over from"):
        book.claim(ONE)
    book.claim(RESUMED)


def test_what_was_given_back_is_anybodys_and_others_cannot_give_it():
    book = LeaseBook(60.0)
    book.claim(ONE)
    book.release(OTHER)
    with pytest.raises(Fatal, match="expected a free engine"):
        book.claim(OTHER)
    book.release(ONE)
    book.claim(OTHER)
    with pytest.raises(Fatal, match="expected a free engine"):
        book.claim(ONE)


@pytest.fixture
def publisher(stack, model):
    """Publishes to a server in somebody's name."""

    def begin(server, lease):
        client = stack.enter_context(Client(server.address, options=ClientOptions(lease=lease, attempts=1)))

        def publish(version, seed=0):
            weights = fake_weights(model, version, seed=seed)
            client.stage(weights)
            client.commit(weights.manifest, fake_probe(weights, model), InFlight.FINISH)

        return publish

    return begin


def test_versions_of_a_trainer_grow_and_a_resumed_one_may_go_back(start, publisher, model):
    engine = FakeEngine(model)
    server = start(engine)
    first, resumed = publisher(server, ONE), publisher(server, RESUMED)
    first(5)
    with pytest.raises(Fatal, match="versions of a trainer only grow"):
        first(4)
    resumed(3)
    assert engine.status().version == 3
    with pytest.raises(Fatal, match="versions of a trainer only grow"):
        resumed(2)
    with pytest.raises(Fatal, match="runs/one has taken over from"):
        first(6)


def test_a_resumed_run_finds_its_version_live_and_goes_on_from_there(start, publisher, model):
    engine = FakeEngine(model)
    server = start(engine)
    publisher(server, ONE)(5)
    resumed = publisher(server, RESUMED)
    resumed(5)
    with pytest.raises(Fatal, match="versions of a trainer only grow"):
        resumed(4)  # what it found is its own now


def test_the_same_version_of_another_start_may_be_other_weights(start, publisher, model, connect, make_request):
    engine = FakeEngine(model)
    server = start(engine)
    publisher(server, ONE)(0)
    before = list(connect(server).sample(make_request(stop=()), model))
    publisher(server, RESUMED)(0, seed=1)
    after = list(connect(server).sample(make_request(stop=()), model))
    assert [c.tokens.tolist() for c in before] != [c.tokens.tolist() for c in after]


def test_a_second_trainer_is_refused_as_long_as_the_first_one_follows_the_engine(start, publisher, stack, model):
    """The first publishes rarely: that it follows the engine's state is its sign of life."""
    server = start(FakeEngine(model), options=ServerOptions(lease_seconds=3600.0, poll_seconds=0.02))
    first = stack.enter_context(training(server, ONE))
    first.publish(fake_weights(model, 1), fake_probe(fake_weights(model, 1), model), InFlight.FINISH)
    book = server._servicer._leases
    seen = book._seen
    eventually(lambda: book._seen > seen)
    for refused in (publisher(server, OTHER), publisher(server, None)):
        with pytest.raises(Fatal, match="expected a free engine, got one that training of host:/runs/one"):
            refused(9)
    lost(first)
    book._seconds = 0.0  # they have passed
    publisher(server, OTHER)(2)


def test_a_run_that_starts_right_after_another_has_ended_is_not_refused(start, publisher, model):
    server = start(FakeEngine(model), options=ServerOptions(lease_seconds=3600.0))
    with training(server, ONE) as first:
        first.publish(fake_weights(model, 1), fake_probe(fake_weights(model, 1), model), InFlight.FINISH)
        with pytest.raises(Fatal, match="expected a free engine"):
            publisher(server, OTHER)(2)
    publisher(server, OTHER)(2)


def test_a_lost_run_keeps_the_engine_until_its_lease_has_run_out(start, publisher, stack, model):
    server = start(FakeEngine(model), options=ServerOptions(lease_seconds=3600.0))
    first = stack.enter_context(training(server, ONE))
    first.publish(fake_weights(model, 1), fake_probe(fake_weights(model, 1), model), InFlight.FINISH)
    lost(first)
    with pytest.raises(Fatal, match="expected a free engine"):
        publisher(server, OTHER)(2)


def test_a_fleet_that_never_published_gives_nothing_back(start, publisher, model):
    """Of one that only looked, as an evaluation that was refused, the end is not the holder's."""
    server = start(FakeEngine(model), options=ServerOptions(lease_seconds=3600.0))
    publisher(server, ONE)(1)
    with training(server, OTHER):
        pass
    with pytest.raises(Fatal, match="expected a free engine"):
        publisher(server, OTHER)(2)


@contextlib.contextmanager
def training(server, lease):
    """A fleet that publishes in somebody's name."""
    options = FleetOptions(client=ClientOptions(lease=lease), heartbeat_seconds=0.05)
    with Fleet([server.address], options=options) as fleet:
        fleet.wait_ready(30.0)
        yield fleet


def lost(fleet):
    """Its connections end, as those of a killed process: it gives nothing back."""
    for endpoint in fleet._endpoints:
        endpoint._closing.set()
        endpoint.client.close()
