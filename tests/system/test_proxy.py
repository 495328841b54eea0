"""The misbehaving network strikes what it says, and the bridge gets over it: else the sieges would prove nothing."""

import time

import pytest

from rollout_bridge import Fleet, FleetOptions, serve
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.messages import InFlight
from tests.system.proxy import Proxy

MODEL = fake_model(vocab_size=20_000)  # most of a push is one large tensor


@pytest.fixture
def behind():
    engine = FakeEngine(MODEL)
    server = serve(engine, "127.0.0.1:0")
    proxy = Proxy(server.port)
    with Fleet([f"127.0.0.1:{proxy.port}"], options=FleetOptions(publish_seconds=60)) as fleet:
        fleet.wait_ready(30)
        yield proxy, fleet, engine
    proxy.close()
    server.stop(1.0)


def publish(fleet, version):
    weights = fake_weights(MODEL, version)
    fleet.publish(weights, fake_probe(weights, MODEL), InFlight.FINISH)


def test_a_corrupted_chunk_is_noticed_and_sent_again(behind):
    proxy, fleet, engine = behind
    proxy.corrupt()
    publish(fleet, 1)
    assert proxy.corrupted == 1
    assert engine.status().version == 1


def test_a_cut_connection_is_made_again(behind):
    proxy, fleet, engine = behind
    publish(fleet, 1)
    proxy.cut()
    publish(fleet, 2)
    assert engine.status().version == 2


def test_delayed_bytes_arrive(behind):
    proxy, fleet, engine = behind
    began = time.monotonic()
    proxy.delay(0.5)
    publish(fleet, 1)
    assert time.monotonic() - began >= 0.4
    assert engine.status().version == 1
