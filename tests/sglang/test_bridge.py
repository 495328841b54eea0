"""The bridge as an operator runs it, under TLS and token, and killed at the worst moments, over the real server."""

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollout_bridge import (
    Client,
    ClientOptions,
    ClientTls,
    Fatal,
    Fleet,
    FleetOptions,
    InFlight,
    Retryable,
    Security,
    Serving,
)
from tests.sglang.bridge import BridgeProcess
from tests.sglang.conftest import ADMIN_KEY, eventually, sampling
from tests.sglang.test_serving import assert_reproduced

TLS = Path(__file__).parents[1] / "rollout_bridge" / "tls"


@pytest.fixture
def token():
    return secrets.token_urlsafe()


@pytest.fixture
def trusted():
    return ClientTls(ca=(TLS / "ca.pem").read_bytes())


@pytest.fixture
def bridge(server, stage_folder, tmp_path, token):
    files = {"--admin-key-file": ADMIN_KEY, "--token-file": token}
    arguments = ["--tls-certificate", str(TLS / "server.pem"), "--tls-key", str(TLS / "server.key")]
    for number, (flag, content) in enumerate(files.items()):
        path = tmp_path / f"secret-{number}"
        path.write_text(content)
        arguments += [flag, str(path)]
    process = BridgeProcess(server.url, stage_folder, *arguments)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def options(token, trusted):
    # Messages of a few tensors each: all of this model's weights would share one, sent when nothing more is to be read.
    return ClientOptions(security=Security(tls=trusted, token=token), attempts=1, chunk_bytes=4096)


@pytest.fixture
def client(bridge, options):
    with Client(bridge.address, options=options) as client:
        yield client


@pytest.fixture
def fleet(bridge, options):
    with Fleet([bridge.address], options=FleetOptions(client=options, progress_seconds=400.0)) as fleet:
        fleet.wait_ready(60.0)
        yield fleet


class Interrupted(Mapping):
    """Tensors of which one does something before it is read the second time, for the push itself."""

    def __init__(self, tensors, name, do):
        self._tensors, self._name, self._do, self._reads = tensors, name, do, 0

    def __getitem__(self, name):
        if name == self._name:
            self._reads += 1
            if self._reads == 2:
                self._do()
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


class Watcher:
    """A bridge's state as the test sees it from outside."""

    def __init__(self, client):
        self.status = client.status


def weights_in(folder):
    return list(folder.glob("*/*/*.safetensors"))


def test_tls_and_token_guard_the_way_to_the_real_server(publish, fleet, trainer, bridge, token, trusted):
    version, report = publish(1)
    assert report.mean_abs < 1e-5
    request = trainer.request(0, members=4)
    for completion in fleet.sample([request]):
        assert_reproduced(trainer, request, completion, {version: 1})
    for security, kind, said in (
        (Security(tls=trusted), Fatal, "expected the bridge's bearer token, got none"),
        (Security(tls=trusted, token=token + "x"), Fatal, "got another"),
        (Security(token=token), Retryable, None),  # in the clear
    ):
        options = ClientOptions(security=security, attempts=1, control_seconds=5.0)
        with Client(bridge.address, options=options) as stranger, pytest.raises(kind, match=said) as caught:
            stranger.model()
        assert token not in str(caught.value)


def test_a_bridge_killed_while_it_stages_comes_back_clean_and_out_of_service(
    trainer, versions, bridge, client, options, stage_folder, server
):
    weights = trainer.weights(versions(), 1)

    def kill():
        eventually(lambda: any(path.stat().st_size for path in weights_in(stage_folder)))
        bridge.kill()

    torn = dataclasses.replace(weights, tensors=Interrupted(weights.tensors, "model.norm.weight", kill))
    with pytest.raises(Retryable):
        client.stage(torn)
    assert weights_in(stage_folder)
    bridge.start()
    assert weights_in(stage_folder) == []
    status = client.status()
    assert (status.serving, status.version, status.staged_version) == (Serving.NOT_SERVING, -1, None)
    with pytest.raises(Retryable, match="publish first"):
        list(client.sample(trainer.request(), client.model()))
    with Fleet([bridge.address], options=FleetOptions(client=options)) as fleet:
        fleet.wait_ready(60.0)
        assert fleet.publish(weights, trainer.probe(1), InFlight.RETRACT).mean_abs < 1e-5
        request = trainer.request(0, members=2)
        for completion in fleet.sample([request]):
            assert_reproduced(trainer, request, completion, {weights.version: 1})


def test_a_bridge_killed_in_a_commit_comes_back_out_of_service_and_is_pushed_to_again(
    publish, fleet, trainer, versions, bridge, client, server, stage_folder
):
    """It may have left the server paused, and which of its updates went through nobody knows."""
    old, _ = publish(1)
    trainer.probe(2)
    weights = trainer.weights(versions(), 2)
    requests = [trainer.request(number, members=2, length=400, temperature=1.0, stop=()) for number in range(4)]
    seen = []

    def kill(written):
        eventually(lambda: b"/pause_generation" in server.log.read_bytes()[written:], 300.0, every=0.002)
        bridge.kill()
        seen.extend(weights_in(stage_folder))
        bridge.start()
        seen.append(weights_in(stage_folder))

    with sampling(fleet, requests, Watcher(client)) as completions:
        fleet.stage(weights)
        killer = threading.Thread(target=kill, args=(server.log.stat().st_size,))
        killer.start()
        report = fleet.commit(weights.version, trainer.probe(2), InFlight.RETRACT)
        killer.join(400)
    assert report.mean_abs < 1e-5
    assert seen[-1] == []  # whatever it had left was removed at its start
    assert sorted((c.request_id, c.member) for c in completions) == [(f"t{n}", m) for n in range(4) for m in (0, 1)]
    for completion in completions:
        assert set(completion.version.tolist()) <= {old, weights.version}
        assert_reproduced(trainer, requests[int(completion.request_id[1:])], completion, {old: 1, weights.version: 2})


def test_a_run_that_follows_another_at_once_is_not_refused(trainer, versions, bridge, options):
    """Over the real server too, the lease is given back with the end of a fleet."""
    from rollout_bridge import Lease

    for holder in ("one", "another"):
        lease = dataclasses.replace(options, lease=Lease(holder=holder, start=secrets.token_hex(4)))
        with contextlib.closing(Fleet([bridge.address], options=FleetOptions(client=lease))) as fleet:
            fleet.wait_ready(60.0)
            fleet.publish(trainer.weights(versions(), 1), trainer.probe(1), InFlight.RETRACT)
