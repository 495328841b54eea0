"""Two real servers under one fleet: what one of them does to the other's work."""

import contextlib
import os
import signal

import pytest

from rollout_bridge import ClientOptions, Fleet, FleetOptions, InFlight, Retryable, serve
from rollout_bridge.endpoint import State
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from tests.sglang.conftest import ADMIN_KEY, eventually, sampling
from tests.sglang.test_serving import assert_reproduced, checksum_of
from tests.sglang_cpu.server import SglangProcess


@pytest.fixture(scope="module")
def second(model_folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("second") / "server.log"
    process = SglangProcess(model_folder, log, "--admin-api-key", ADMIN_KEY)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def engines(server, second, stage_folder):
    """An engine for each server; a commit that hangs is given up soon."""
    with contextlib.ExitStack() as stack:
        found = []
        for process in (server, second):
            config = SglangConfig(
                url=process.url, admin_key=ADMIN_KEY, stage_folder=stage_folder, poll_seconds=0.2, load_seconds=60.0
            )
            engine = stack.enter_context(contextlib.closing(SglangEngine(config)))
            engine.connect(120.0)
            found.append(engine)
        yield found


@pytest.fixture
def addresses(engines):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(engine, "127.0.0.1:0")).address for engine in engines]


@pytest.fixture
def gather(addresses):
    @contextlib.contextmanager
    def begin(**options):
        options = {"client": ClientOptions(attempts=1), "progress_seconds": 400.0, "publish_seconds": 400.0} | options
        with Fleet(addresses, options=FleetOptions(**options)) as fleet:
            fleet.wait_ready(120.0)
            yield fleet

    return begin


@pytest.fixture
def fleet(gather):
    with gather() as fleet:
        yield fleet


def test_both_serve_the_same_weights_and_one_that_is_killed_loses_nothing(
    publish, fleet, trainer, engines, server, second
):
    old, report = publish(1)
    assert len({engine.checksum for engine in report.engines.values()}) == 1
    assert checksum_of(server) == checksum_of(second)
    requests = [trainer.request(number, members=2, length=300, temperature=1.0, stop=()) for number in range(8)]
    before = engines[1].engine_id
    with sampling(fleet, requests, *engines) as completions:
        assert engines[0].status().running
        second.kill()
        second.start()
    assert sorted((c.request_id, c.member) for c in completions) == [(f"t{n}", m) for n in range(8) for m in (0, 1)]
    for completion in completions:
        assert set(completion.version.tolist()) == {old}
        assert completion.engine_id in {before, *(engine.engine_id for engine in engines)}
    for completion in completions[::4]:
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {old: 1})
    eventually(lambda: engines[1].status().version == old)
    new, report = publish(2)
    assert len({engine.checksum for engine in report.engines.values()}) == 1
    assert [engine.status().version for engine in engines] == [new, new]


def test_a_straggler_in_a_commit_is_named_and_gets_no_traffic_until_it_has_caught_up(
    trainer, versions, gather, engines, addresses, second
):
    with gather() as fleet:
        old = versions()
        fleet.publish(trainer.weights(old, 1), trainer.probe(1), InFlight.RETRACT)
    with gather(publish_seconds=20.0) as fleet:
        weights = trainer.weights(versions(), 2)
        trainer.probe(2)
        fleet.stage(weights)
        with stopped(second):
            with pytest.raises(Retryable, match=rf"expected all engines, got {addresses[0]} done.*{addresses[1]}"):
                fleet.commit(weights.version, trainer.probe(2), InFlight.RETRACT)
            assert engines[0].status().version == weights.version
            request = trainer.request(0, members=4)
            for completion in fleet.sample([request]):  # by the one that serves what was published
                assert completion.engine_id == engines[0].engine_id
                assert_reproduced(trainer, request, completion, {weights.version: 2})
        eventually(lambda: engines[1].status().version == weights.version, 300.0)
        eventually(lambda: all(status.state is State.READY for status in fleet.status().values()))
        requests = [trainer.request(number, members=2) for number in range(8)]
        completions = list(fleet.sample(requests))
        assert {c.engine_id for c in completions} == {engine.engine_id for engine in engines}
        for completion in completions:
            assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {weights.version: 2})


@contextlib.contextmanager
def stopped(process):
    """All of a server's processes stand still meanwhile: it takes calls, and answers none."""
    os.killpg(process.group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process.group, signal.SIGCONT)
