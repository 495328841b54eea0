"""SIGKILL of the real server at the worst moments: nothing is lost, nothing comes twice, nothing is of base weights."""

import threading
import time

import pytest

from rollout_bridge import Client, InFlight, Retryable, Serving
from tests.sglang.conftest import eventually
from tests.sglang.test_serving import assert_reproduced


def test_a_killed_server_comes_back_out_of_service_and_is_pushed_to_before_it_samples(
    publish, fleet, trainer, bridge, server
):
    version, _ = publish(1)
    engine, _ = bridge
    before = engine.engine_id
    requests = [trainer.request(number, members=2, length=400, temperature=1.0, stop=()) for number in range(6)]
    completions, errors = [], []

    def sample():
        try:
            completions.extend(fleet.sample(requests))
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    sampling = threading.Thread(target=sample)
    sampling.start()
    eventually(lambda: engine.status().running == 12)
    server.kill()
    eventually(lambda: engine.status().serving is Serving.NOT_SERVING)
    server.start()
    sampling.join(400)
    assert not errors
    assert sorted((c.request_id, c.member) for c in completions) == [(f"t{n}", m) for n in range(6) for m in (0, 1)]
    assert engine.engine_id != before
    for completion in completions:
        assert set(completion.version.tolist()) == {version}
    for completion in completions[:4]:
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {version: 1})
    assert fleet.counts()["republish"] >= 1


def test_base_weights_are_sampled_by_nobody(publish, trainer, bridge, server):
    """Straight at the bridge, with no fleet to push again: the restarted server stays out of service."""
    publish(1)
    engine, address = bridge
    server.kill()
    server.start(wait=False)
    end = time.monotonic() + 120
    refused = 0
    with Client(address) as client:
        model = engine.model()
        while time.monotonic() < end and refused < 200:
            try:
                completions = list(client.sample(trainer.request(0, members=1), model))
            except Retryable:
                refused += 1
                if server.alive() and engine.status().serving is Serving.SERVING:
                    break  # the fixture's fleet has pushed the published version again
            else:
                assert all(
                    set(c.version.tolist()) == {engine.status().version} and c.engine_id == engine.engine_id
                    for c in completions
                )
                break
            time.sleep(0.3)
    assert refused > 0
    server.wait()


@pytest.mark.parametrize("moment", ["/pause_generation", "/update_weights_from_disk"])
def test_a_server_killed_in_a_commit_is_committed_to_again(publish, fleet, trainer, versions, bridge, server, moment):
    old, _ = publish(1)
    engine, _ = bridge
    requests = [trainer.request(number, members=2, length=400, temperature=1.0, stop=()) for number in range(4)]
    completions = []
    sampling = threading.Thread(target=lambda: completions.extend(fleet.sample(requests)))
    sampling.start()
    eventually(lambda: engine.status().running == 8)
    weights = trainer.weights(versions(), 2)
    fleet.stage(weights)
    written = server.log.stat().st_size

    def kill():
        eventually(lambda: moment.encode() in server.log.read_bytes()[written:], 300.0, every=0.002)
        server.kill()
        time.sleep(1.0)
        server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    report = fleet.commit(weights.version, trainer.probe(2), InFlight.RETRACT)
    killer.join(400)
    sampling.join(400)
    assert report.mean_abs < 1e-5
    assert sorted((c.request_id, c.member) for c in completions) == [(f"t{n}", m) for n in range(4) for m in (0, 1)]
    for completion in completions:
        assert set(completion.version.tolist()) <= {old, weights.version}
