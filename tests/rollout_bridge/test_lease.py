"""One trainer publishes to an engine; its latest start, and nobody else while it lives."""

import time

import pytest

from rollout_bridge import Client, ClientOptions, Fatal, Fleet, FleetOptions, InFlight, Lease, ServerOptions
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights
from rollout_bridge.lease import LeaseBook

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
    book = LeaseBook(0.2)
    book.claim(ONE)
    for _ in range(6):
        time.sleep(0.05)
        book.renew(ONE)
        book.renew(OTHER)  # means nothing
        with pytest.raises(Fatal, match=r"got one that training of host:/runs/one has held for 0 s"):
            book.claim(OTHER)
    time.sleep(0.25)
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
    server = start(FakeEngine(model), options=ServerOptions(lease_seconds=0.3, poll_seconds=0.02))
    first = Fleet([server.address], options=FleetOptions(client=ClientOptions(lease=ONE), heartbeat_seconds=0.05))
    stack.enter_context(first).wait_ready(10)
    weights = fake_weights(model, 1)
    first.publish(weights, fake_probe(weights, model), InFlight.FINISH)
    other, nobody = publisher(server, OTHER), publisher(server, None)
    time.sleep(0.5)
    for refused in (other, nobody):
        with pytest.raises(Fatal, match="expected a free engine, got one that training of host:/runs/one"):
            refused(9)
    first.close()
    time.sleep(0.5)
    other(2)
