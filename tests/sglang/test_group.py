"""Weights over a gloo process group into the real server, from a real sender."""

import contextlib
import os
import signal

import pytest

from rollout_bridge import BridgeError, ClientOptions, Fleet, FleetOptions, InFlight, Serving, serve
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from rollout_bridge.engines.sglang_group import GroupConfig, Sender
from tests.sglang.bridge import BridgeProcess, alive
from tests.sglang.conftest import ADMIN_KEY, eventually, sampling
from tests.sglang.test_serving import assert_reproduced, checksum_of
from tests.sglang_cpu.server import python_of_sglang


def by_group():
    """Some ten buckets of so small a model."""
    return GroupConfig.with_python(python_of_sglang(), bucket_bytes=32 << 10)


@pytest.fixture
def attach(server, stage_folder):
    """A context of an engine over the server, with the sender that it is given."""

    @contextlib.contextmanager
    def begin(group):
        config = SglangConfig(
            url=server.url, admin_key=ADMIN_KEY, stage_folder=stage_folder, poll_seconds=0.2, group=group
        )
        with contextlib.closing(SglangEngine(config)) as engine:
            engine.connect(120.0)
            yield engine

    return begin


@pytest.fixture
def bridge(attach):
    """In place of the one by disk."""
    with attach(by_group()) as engine, serve(engine, "127.0.0.1:0") as served:
        yield engine, served.address


@pytest.fixture
def push(trainer, versions):
    """Straight at an engine: the policy of a seed under a version that nobody used."""

    def begin(engine, seed):
        weights = trainer.weights(versions(), seed)
        sink = engine.stage(weights.manifest)
        for name, array in weights.tensors.items():
            sink.put(name, array)
        sink.finish()
        return engine.commit(weights.version, trainer.probe(seed), InFlight.RETRACT)

    return begin


def before_bucket(monkeypatch, number, do):
    """Does something before the bucket of this number (from 1) is broadcast, once."""
    original, sent = Sender.order, []

    def order(self, order):
        if order["do"] == "send":
            sent.append(order)
            if len(sent) == number:
                do(self)
        original(self, order)

    monkeypatch.setattr(Sender, "order", order)
    return sent


def test_the_served_checksum_is_that_of_the_disk_transport(attach, push, server):
    with attach(None) as engine:
        one = push(engine, 1).checksum
        assert checksum_of(server) == one
    with attach(by_group()) as engine:
        other, again = push(engine, 2), push(engine, 1)
    assert again.checksum == one == checksum_of(server)
    assert other.checksum != one
    assert max(other.mean_abs, again.mean_abs) < 1e-5


def test_running_requests_go_on_under_weights_that_were_broadcast(publish, fleet, trainer, bridge):
    old, _ = publish(1)
    requests = [trainer.request(number, members=2, length=400, temperature=1.0, stop=()) for number in range(2)]
    with sampling(fleet, requests, bridge[0]) as completions:
        new, report = publish(2, InFlight.RETRACT)
    assert len(completions) == 4
    for completion in completions:
        assert set(completion.version.tolist()) <= {old, new}
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {old: 1, new: 2})
    assert report.mean_abs < 1e-5


def test_a_sender_killed_in_an_update_leaves_the_engine_out_of_service_until_a_whole_push(
    attach, push, server, monkeypatch
):
    with attach(by_group()) as engine:
        one = push(engine, 1).checksum
        with monkeypatch.context() as patched:
            sent = before_bucket(patched, 4, lambda sender: os.kill(sender.pid, signal.SIGKILL))
            with pytest.raises(BridgeError):
                push(engine, 2)
        assert len(sent) == 4
        assert engine.status().serving is Serving.NOT_SERVING
        assert server.get("/model_info").json()["weight_version"].endswith(".torn")
        torn = checksum_of(server)
        assert torn != one
        report = push(engine, 1)
        assert report.checksum == one
        assert engine.status().serving is Serving.SERVING


def test_a_fleet_pushes_again_and_loses_nothing_when_the_sender_is_killed(
    publish, fleet, trainer, versions, bridge, monkeypatch
):
    old, _ = publish(1)
    weights = trainer.weights(versions(), 2)
    requests = [trainer.request(number, members=2, length=400, temperature=1.0, stop=()) for number in range(4)]
    with sampling(fleet, requests, bridge[0]) as completions, monkeypatch.context() as patched:
        fleet.stage(weights)
        before_bucket(patched, 3, lambda sender: os.kill(sender.pid, signal.SIGKILL))
        report = fleet.commit(weights.version, trainer.probe(2), InFlight.RETRACT)
    assert report.mean_abs < 1e-5
    assert sorted((c.request_id, c.member) for c in completions) == [(f"t{n}", m) for n in range(4) for m in (0, 1)]
    for completion in completions:
        assert set(completion.version.tolist()) <= {old, weights.version}
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {old: 1, weights.version: 2})


def test_a_server_that_restarts_in_an_update_gets_a_new_group_and_a_whole_push(
    publish, fleet, trainer, versions, server, bridge, monkeypatch
):
    publish(1)
    engine, _ = bridge
    before = engine.engine_id
    weights = trainer.weights(versions(), 2)
    fleet.stage(weights)

    def restart(_sender):
        server.kill()
        server.start(wait=False)

    with monkeypatch.context() as patched:
        before_bucket(patched, 3, restart)
        report = fleet.commit(weights.version, trainer.probe(2), InFlight.RETRACT)
    assert report.mean_abs < 1e-5
    assert engine.engine_id != before
    eventually(lambda: engine.status().version == weights.version)
    request = trainer.request(0, members=2)
    for completion in fleet.sample([request]):
        assert_reproduced(trainer, request, completion, {weights.version: 2})


def test_a_killed_bridge_leaves_no_sender_and_its_successor_makes_a_group_of_its_own(
    server, stage_folder, trainer, versions, tmp_path
):
    key = tmp_path / "admin-key"
    key.write_text(ADMIN_KEY)
    arguments = ["--transport", "distributed", "--sender-python", str(python_of_sglang())]
    bridge = BridgeProcess(server.url, stage_folder, "--admin-key-file", str(key), *arguments)
    bridge.start()
    try:
        options = FleetOptions(client=ClientOptions(attempts=1), publish_seconds=400.0)
        with Fleet([bridge.address], options=options) as fleet:
            fleet.wait_ready(120.0)
            one = fleet.publish(trainer.weights(versions(), 1), trainer.probe(1), InFlight.RETRACT)
            (sender,) = bridge.children()
            bridge.kill()
            eventually(lambda: not alive(sender))
            bridge.start()
            other = fleet.publish(trainer.weights(versions(), 2), trainer.probe(2), InFlight.RETRACT)
            again = fleet.publish(trainer.weights(versions(), 1), trainer.probe(1), InFlight.RETRACT)
        assert max(one.mean_abs, other.mean_abs, again.mean_abs) < 1e-5
        (first,), (second,) = ({r.checksum for r in report.engines.values()} for report in (one, again))
        assert first == second == checksum_of(server)
    finally:
        bridge.kill()
