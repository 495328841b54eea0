"""The traps of SGLang 0.5.23, each set against the bridge on the real server: the old version serves on, or none."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollout_bridge import BridgeError, Client, Fatal, InFlight, Retryable, Serving, Weights
from tests.sglang.conftest import eventually
from tests.sglang.test_serving import assert_reproduced, checksum_of


def staged_file(stage_folder):
    (path,) = stage_folder.glob("*/v*/*.safetensors")
    return path


def rewrite(path, change):
    """Changes the staged weights behind the bridge's back: what it has checked is not what the server will read."""
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def staged(publish, fleet, trainer, versions):
    """Seed 1 serves; seed 2 is staged."""
    old, _ = publish(1)
    weights = trainer.weights(versions(), 2)
    fleet.stage(weights)
    return old, weights


def commit(fleet, trainer, weights, seed=2):
    return fleet.commit(weights.version, trainer.probe(seed), InFlight.RETRACT)


def test_names_that_load_nothing_are_success_to_the_server_and_not_to_the_bridge(
    staged, fleet, trainer, stage_folder, server, bridge
):
    old, weights = staged
    before = checksum_of(server)
    rewrite(staged_file(stage_folder), lambda tensors: {f"bogus.{name}": array for name, array in tensors.items()})
    with pytest.raises(Fatal, match="expected mean"):
        commit(fleet, trainer, weights)
    assert checksum_of(server) == before  # nothing was loaded, and the server said 200
    eventually(lambda: bridge[0].status().version == old)


def test_names_that_load_nothing_are_noticed_even_where_the_probe_would_pass(staged, fleet, trainer, stage_folder):
    """The probe of the old weights passes if nothing was loaded: the checksum tells."""
    _, weights = staged
    rewrite(staged_file(stage_folder), lambda tensors: {f"bogus.{name}": array for name, array in tensors.items()})
    with pytest.raises(Fatal, match="under names that it does not load"):
        commit(fleet, trainer, weights, seed=1)


def test_a_file_with_one_tensor_is_success_to_the_server_and_not_to_the_bridge(staged, fleet, trainer, stage_folder):
    _, weights = staged
    rewrite(staged_file(stage_folder), lambda tensors: {"lm_head.weight": tensors["lm_head.weight"]})
    with pytest.raises(Fatal, match="expected mean"):
        commit(fleet, trainer, weights)


def test_fused_missing_and_misshapen_tensors_never_reach_the_server(publish, fleet, trainer, versions, server):
    publish(1)
    before = checksum_of(server)
    honest = trainer.weights(versions(), 2)
    for change in (
        lambda tensors: tensors | {"model.layers.0.self_attn.qkv_proj.weight": np.zeros((128, 64), np.float32)},
        lambda tensors: {name: array for name, array in tensors.items() if "experts.2" not in name},
        lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"][:-1]},
    ):
        tensors = change(dict(honest.tensors))
        weights = Weights(version=honest.version, model_digest=honest.model_digest, tensors=tensors)
        with pytest.raises(ValueError, match="tensors exactly"):
            fleet.stage(weights)
    assert checksum_of(server) == before


def test_a_refused_update_leaves_the_engine_out_of_service_until_it_is_pushed_to_again(
    staged, trainer, stage_folder, bridge
):
    """A 400 of the server can mean that the weights changed: it is never taken for nothing having happened."""
    old, weights = staged
    engine, address = bridge
    path = staged_file(stage_folder)
    path.rename(path.with_suffix(".gone"))
    with Client(address) as client, pytest.raises(BridgeError):
        client.commit(weights.manifest, trainer.probe(2), InFlight.RETRACT)
    assert engine.status().serving is Serving.NOT_SERVING or engine.status().version == old
    eventually(lambda: engine.status().version == old)  # the fleet pushed it again, whole


def test_no_prefix_outlives_its_weights(publish, fleet, trainer):
    """The same long prompt under one version and the next: cached keys and values of the first would show."""
    prompt = np.tile(trainer.problem.data[0].tokens, 10)
    for seed in (1, 2):
        version, _ = publish(seed, InFlight.RETRACT)
        request = trainer.request(0, members=4, temperature=0.0, prompt=prompt)
        for _ in range(2):  # the second time from the cache
            for completion in fleet.sample([request]):
                assert_reproduced(trainer, request, completion, {version: seed})


def test_an_update_behind_the_bridges_back_takes_the_engine_out_of_service(publish, server, model_folder, bridge):
    """SGLang keeps the old version's name when an update gives none; where it read the weights tells."""
    from tests.sglang.conftest import ADMIN_KEY

    version, _ = publish(1)
    engine, _ = bridge
    before = engine.engine_id
    body = {"model_path": str(model_folder), "abort_all_requests": False}
    assert server.post("/update_weights_from_disk", body, ADMIN_KEY).status_code == 200
    assert server.get("/model_info").json()["weight_version"].startswith(f"{version}.")
    eventually(lambda: engine.engine_id != before)


def test_a_token_outside_the_vocabulary_never_reaches_the_server(publish, fleet, trainer, server):
    publish(1)
    for prompt in ([3, 14], [3, -1]):
        with pytest.raises(ValueError, match=r"expected ids in \[0, 14\)"):
            fleet.sample([trainer.request(0, prompt=prompt)])
    assert server.get("/ready").status_code == 200


def test_a_health_probe_of_a_paused_server_does_not_take_it_out_of_service(publish, fleet, trainer, server, bridge):
    engine, address = bridge
    version, _ = publish(1)
    with Client(address) as client:
        client.pause(InFlight.FINISH)
        assert server.get("/health").status_code == 503  # and the server now calls itself unhealthy
        client.resume()
        assert engine.status().version == version
        assert len(list(client.sample(trainer.request(0, members=2), engine.model()))) == 2
    assert publish(2)[1].mean_abs < 1e-5


def test_the_servers_control_routes_ask_for_the_admin_key(server):
    for path in ("/update_weights_from_disk", "/pause_generation", "/flush_cache"):
        assert server.post(path, {}).status_code in (401, 403), path


def test_a_second_bridge_over_the_same_server_is_refused(bridge, server, stage_folder):
    from rollout_bridge.engines.sglang import SglangConfig, SglangEngine

    with pytest.raises(ValueError, match="run one bridge for each SGLang server"):
        SglangEngine(SglangConfig(url=server.url, stage_folder=stage_folder))


def test_a_new_bridge_trusts_nothing_that_the_server_holds(publish, bridge, server, stage_folder):
    """Its predecessor was killed: which of its updates went through is not known."""
    from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
    from tests.sglang.conftest import ADMIN_KEY

    publish(1)
    engine, _ = bridge
    left = stage_folder / "left" / "sat-jax-bridge-x" / "v9-dead"
    left.mkdir(parents=True)
    engine.close()
    again = SglangEngine(SglangConfig(url=server.url, admin_key=ADMIN_KEY, stage_folder=stage_folder))
    try:
        again.connect(30.0)  # the config is where the server says, though its weights are gone
        assert again.status().serving is Serving.NOT_SERVING
        with pytest.raises(Retryable, match="publish first"):
            list(again.sample(_request(), _never()))
    finally:
        again.close()


def _request():
    from rollout_bridge import SampleRequest, Sampling

    return SampleRequest(
        request_id="t0",
        prompt_tokens=np.array([3], np.int32),
        sampling=Sampling(max_new_tokens=2, stop_ids=(), seed=0),
        members=(0,),
    )


def _never():
    import threading

    return threading.Event()
