"""A bfloat16 server under a trainer that computes in float32: how far apart they are, and what the probe still tells.

The figures are in docs/sglang.md; the bounds here are some times as wide.
"""

import contextlib
import dataclasses

import ml_dtypes
import numpy as np
import pytest

from rollout_bridge import Fatal, Fleet, FleetOptions, InFlight, Weights, serve
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang_cpu.server import SglangProcess

TOLERANCE = 0.1  # nats, rollout.probe_tolerance of the shipped configs


@pytest.fixture(scope="module")
def half(model_folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("half") / "server.log"
    process = SglangProcess(model_folder, log, "--admin-api-key", ADMIN_KEY, "--dtype", "bfloat16")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def fleet(half, stage_folder):
    config = SglangConfig(url=half.url, admin_key=ADMIN_KEY, stage_folder=stage_folder, poll_seconds=0.2)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.closing(SglangEngine(config)))
        assert engine.connect(120.0).dtype == "bfloat16"
        served = stack.enter_context(serve(engine, "127.0.0.1:0"))
        fleet = stack.enter_context(Fleet([served.address], options=FleetOptions(progress_seconds=400.0)))
        fleet.wait_ready(60.0)
        yield fleet


def rounded(weights):
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.tensors.items()}
    return Weights(version=weights.version, model_digest=weights.model_digest, tensors=tensors)


def test_half_precision_is_within_the_shipped_tolerance_and_a_swap_of_experts_is_not(fleet, trainer, versions, capsys):
    probe = dataclasses.replace(trainer.probe(1), tolerance=TOLERANCE)
    weights = rounded(trainer.weights(versions(), 1))
    report = fleet.publish(weights, probe, InFlight.RETRACT)
    requests = [trainer.request(number, members=4, temperature=1.0) for number in range(12)]
    difference, same, rows = [], 0, 0
    for completion in fleet.sample(requests):
        logp, routes = trainer.score(requests[int(completion.request_id[1:])], completion, 1)
        difference.append(np.abs(completion.behavior_logp - logp))
        agree = np.sort(completion.trace.experts_TLK) == np.sort(routes)
        same, rows = same + int(agree.all(-1).sum()), rows + agree.shape[0] * agree.shape[1]
    found = np.concatenate(difference)
    assert 0 < report.mean_abs < TOLERANCE / 2
    assert found.mean() < 0.05
    assert same / rows > 0.9
    swapped = dict(weights.tensors)
    for part in ("gate", "up", "down"):
        one, other = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 3))
        swapped[one], swapped[other] = swapped[other], swapped[one]
    wrong = Weights(version=versions(), model_digest=weights.model_digest, tensors=swapped)
    with pytest.raises(Fatal, match=r"probe of weights .*: expected mean \|log-prob difference\|") as caught:
        fleet.publish(wrong, probe, InFlight.RETRACT)
    with capsys.disabled():  # the figures of docs/sglang.md
        print(
            f"\nprobe: mean {report.mean_abs:.4f}, max {report.max_abs:.4f}; samples: mean {found.mean():.4f}, max "
            f"{found.max():.4f}, routes {same / rows:.4f}; {str(caught.value)[-400:]}"
        )
