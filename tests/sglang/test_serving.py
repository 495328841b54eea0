"""What a verified server returns is what the trainer computes, and only what was verified comes out."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from rollout_bridge import Client, Fatal, Finish, InFlight, Retryable, Serving, Weights
from tests.sglang.conftest import ADMIN_KEY, eventually

LONG = 600  # tokens of a completion that is still running when something happens to it


def checksum_of(server):
    return server.post("/weights_checker", {"action": "checksum"}, ADMIN_KEY).json()["per_engine_checksum"]


def assert_reproduced(trainer, request, completion, seed_of_version):
    """Every token's log-prob and every row of routes is that of the policy of its version, rows of the newest one."""
    versions = np.unique(completion.version).tolist()
    by_version = {version: trainer.score(request, completion, seed_of_version[version]) for version in versions}
    for version in versions:
        own = completion.version == version
        np.testing.assert_allclose(completion.behavior_logp[own], by_version[version][0][own], atol=1e-4)
    (routed_by,) = np.unique(completion.trace.version_T)
    rows = len(request.prompt_tokens) + len(completion.tokens) - 1
    assert completion.trace.experts_TLK.shape == (rows, 2, 2)
    np.testing.assert_array_equal(
        np.sort(completion.trace.experts_TLK), np.sort(by_version[int(routed_by)][1]), err_msg=f"{completion}"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_and_routes_at_lag_0_are_the_trainers(publish, fleet, trainer, temperature):
    version, report = publish(1)
    assert report.mean_abs < 1e-5
    requests = [trainer.request(number, members=4, temperature=temperature) for number in range(6)]
    completions = list(fleet.sample(requests))
    assert len(completions) == 24
    for completion in completions:
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {version: 1})


def test_the_checksum_changes_with_a_version_and_returns_with_its_weights(publish, server):
    first = publish(1)[1].engines
    (one,) = (report.checksum for report in first.values())
    assert checksum_of(server) == one
    (two,) = (report.checksum for report in publish(2)[1].engines.values())
    (again,) = (report.checksum for report in publish(1)[1].engines.values())
    assert one == again == checksum_of(server)
    assert one != two


def test_two_swapped_experts_are_refused_and_the_old_version_is_pushed_again(publish, fleet, trainer, versions, bridge):
    old, _ = publish(1)
    honest = trainer.weights(versions(), 2)
    swapped = dict(honest.tensors)
    for part in ("gate", "up", "down"):
        one, other = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 3))
        swapped[one], swapped[other] = swapped[other], swapped[one]
    with pytest.raises(Fatal, match=r"probe of weights .*: expected mean \|log-prob difference\|"):
        publish(2, weights=dataclasses.replace(honest, tensors=swapped))
    eventually(lambda: bridge[0].status().version == old)
    request = trainer.request(0, members=2)
    for completion in fleet.sample([request]):
        assert set(completion.version.tolist()) == {old}
        assert_reproduced(trainer, request, completion, {old: 1})


@pytest.mark.parametrize("in_flight", [InFlight.RETRACT, InFlight.ABORT])
def test_running_requests_go_on_under_new_weights_token_by_token(publish, fleet, trainer, bridge, in_flight):
    old, _ = publish(1)
    trainer.probe(2)  # compiled beforehand: the push is to meet requests that run
    requests = [trainer.request(number, members=2, length=LONG, temperature=1.0, stop=()) for number in range(2)]
    completions = []
    sampling = threading.Thread(target=lambda: completions.extend(fleet.sample(requests)))
    sampling.start()
    eventually(lambda: bridge[0].status().running == 4)
    time.sleep(0.5)  # running is what was sent; some tokens have to be there, and by far not all
    new, report = publish(2, in_flight)
    sampling.join(120)
    assert len(completions) == 4
    for completion in completions:
        assert completion.finish is Finish.LENGTH
        assert np.unique(completion.version).tolist() == [old, new]
        if in_flight is InFlight.RETRACT:
            assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {old: 1, new: 2})
        else:  # the rows of the first part are those that it was sampled under
            assert np.unique(completion.trace.version_T).tolist() == [old, new]
    assert all(engine.seconds_held >= engine.seconds_load > 0 for engine in report.engines.values())


def test_finish_lets_running_requests_end_under_the_old_weights(publish, fleet, trainer, bridge):
    old, _ = publish(1)
    request = trainer.request(0, members=4, length=200, temperature=1.0, stop=())
    completions = []
    sampling = threading.Thread(target=lambda: completions.extend(fleet.sample([request])))
    sampling.start()
    eventually(lambda: bridge[0].status().running == 4)
    publish(2, InFlight.FINISH)
    sampling.join(120)
    assert [np.unique(completion.version).tolist() for completion in completions] == [[old]] * 4


def test_an_abort_returns_what_there_is_with_its_true_version(publish, trainer, bridge):
    engine, address = bridge
    version, _ = publish(1)
    request = trainer.request(0, members=2, length=LONG, temperature=1.0, stop=())
    with Client(address) as client:
        threading.Timer(0.5, client.abort, [("t0",)]).start()
        completions = list(client.sample(request, engine.model()))
    assert [completion.finish for completion in completions] == [Finish.ABORT] * 2
    for completion in completions:
        assert 0 < len(completion.tokens) < LONG
        assert_reproduced(trainer, request, completion, {version: 1})


def test_paused_requests_wait_and_a_resumed_engine_serves_them(publish, trainer, bridge):
    engine, address = bridge
    publish(1)
    with Client(address) as client:
        client.pause(InFlight.FINISH)
        assert client.status().serving is Serving.PAUSED
        threading.Timer(0.5, client.resume).start()
        completions = list(client.sample(trainer.request(0, members=2), engine.model()))
    assert len(completions) == 2


def test_the_log_prob_over_kept_tokens_comes_along_when_top_k_is_on(publish, trainer, bridge):
    engine, address = bridge
    publish(1)
    request = trainer.request(0, members=4)
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, top_k=5, top_p=0.8))
    with Client(address) as client:
        for completion in client.sample(request, engine.model()):
            assert completion.truncated_logp is not None
            assert (completion.truncated_logp >= completion.behavior_logp).all()
            assert not completion.logprob.after_truncation


def test_a_cancelled_call_leaves_nothing_at_the_server(publish, trainer, bridge):
    engine, address = bridge
    publish(1)
    with Client(address) as client, client.sample(trainer.request(0, length=LONG, stop=()), engine.model()) as stream:
        eventually(lambda: engine.status().running == 8)
        stream.cancel()
    eventually(lambda: engine.status().running == 0)


def test_nothing_is_served_before_a_version_is_verified(trainer, bridge):
    engine, address = bridge
    assert engine.status().serving is Serving.NOT_SERVING
    with Client(address) as client, pytest.raises(Retryable, match="publish first"):
        list(client.sample(trainer.request(), engine.model()))


def test_a_push_leaves_no_weights_behind(publish, stage_folder):
    publish(1)
    publish(2)
    assert list(stage_folder.glob("**/*.safetensors")) == []
    assert len(list(stage_folder.glob("*/v*"))) == 1  # the config of what the server calls its model


def test_bfloat16_weights_are_refused_by_a_float32_server(publish, fleet, trainer, versions):
    import ml_dtypes

    weights = trainer.weights(versions(), 1)
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.tensors.items()}
    with pytest.raises(ValueError, match="of another shape or type"):
        fleet.stage(Weights(version=weights.version, model_digest=weights.model_digest, tensors=half))
