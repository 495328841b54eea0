"""One real server for the whole group, a bridge over it, and a trainer's policies."""

import contextlib
import gc
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rollout_bridge import ClientOptions, Fleet, FleetOptions, InFlight, serve
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from tests.sglang.trainer import CONFIG, Trainer
from tests.sglang_cpu.server import SglangProcess
from tools.make_model import make_model

_LEFT_OPEN = (
    r"ignore:Exception ignored in. <(socket\.socket|function _SelectorTransport):"
    "pytest.PytestUnraisableExceptionWarning"
)
ADMIN_KEY = "the-admin-key-of-the-tests"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(600))
            # Connections that a killed server has reset are closed when the HTTP client's objects are collected.
            item.add_marker(pytest.mark.filterwarnings(_LEFT_OPEN))


@pytest.fixture(scope="session", autouse=True)
def collected():
    """Ends last, while the filter above still holds: what is left open must not be found only after all tests."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(CONFIG, folder, seed=1000)
    return folder


@pytest.fixture(scope="session")
def server(model_folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    process = SglangProcess(model_folder, log, "--admin-api-key", ADMIN_KEY)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="session")
def trainer():
    return Trainer()


@pytest.fixture(scope="session")
def versions():
    """Versions that nobody used yet: they only grow, and every test has the same server."""
    counter = iter(range(1, 10**6))
    return lambda: next(counter)


@pytest.fixture
def stage_folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def bridge(server, stage_folder):
    """The engine over the server, and the address of its bridge."""
    config = SglangConfig(url=server.url, admin_key=ADMIN_KEY, stage_folder=stage_folder, poll_seconds=0.2)
    with contextlib.closing(SglangEngine(config)) as engine:
        engine.connect(60.0)
        with serve(engine, "127.0.0.1:0") as served:
            yield engine, served.address


@pytest.fixture
def fleet(bridge):
    # A killed server needs minutes to come back on a busy machine.
    options = FleetOptions(client=ClientOptions(attempts=1), progress_seconds=400.0, publish_seconds=400.0)
    with Fleet([bridge[1]], options=options) as fleet:
        fleet.wait_ready(30.0)
        yield fleet


@pytest.fixture
def publish(fleet, trainer, versions):
    """Publishes the policy of a seed as a version that nobody used; returns it with the report."""

    def push(seed, in_flight=InFlight.FINISH, weights=None):
        version = versions()
        weights = weights or trainer.weights(version, seed)
        return version, fleet.publish(weights, trainer.probe(seed), in_flight)

    return push


@contextlib.contextmanager
def sampling(fleet, requests, *engines):
    """Samples in a thread; begins once all members run at these engines, and gives all completions at the end."""
    members = sum(len(request.members) for request in requests)
    completions, errors = [], []

    def run():
        try:
            completions.extend(fleet.sample(requests))
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: sum(engine.status().running for engine in engines) == members or not thread.is_alive(), 120.0)
    yield completions
    thread.join(400)
    assert not errors
    assert not thread.is_alive()


def eventually(what, seconds=120.0, every=0.02):
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "did not come to pass"
        time.sleep(every)
