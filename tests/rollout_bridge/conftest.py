"""A served fake engine, and requests for it."""

import contextlib

import grpc
import numpy as np
import pytest

from rollout_bridge import Client, Fleet, FleetOptions, SampleRequest, Sampling, serve
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model
from tests.rollout_bridge.fake_sglang import FakeSglang


@pytest.fixture(scope="session")
def model():
    return fake_model()


@pytest.fixture
def stack():
    """Whatever a test opens is closed at its end, last first."""
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture
def start(stack):
    """Serves an engine; returns the server."""

    def begin(engine, address="127.0.0.1:0", options=None):
        server = serve(engine, address, options=options)
        stack.callback(server.stop, 0.0)
        stack.callback(engine.close)
        return server

    return begin


@pytest.fixture
def connect(stack):
    """A client of a server."""
    return lambda server, options=None: stack.enter_context(Client(server.address, options=options))


@pytest.fixture
def gather(stack):
    """A fleet over servers."""

    def begin(*servers, **options):
        fleet = stack.enter_context(Fleet([server.address for server in servers], options=FleetOptions(**options)))
        fleet.wait_ready(30.0)
        return fleet

    return begin


@pytest.fixture
def serving(model, start):
    """An engine that serves version 3 from the start, and its server."""
    engine = FakeEngine(model, version=3)
    return engine, start(engine)


@pytest.fixture(scope="session")
def make_request():
    def make(request_id="t0", *, prompt=(5, 6, 7), members=(0, 1), length=6, stop=(1,), seed=11, **rest):
        sampling = {name: rest.pop(name) for name in ("temperature", "top_p", "top_k") if name in rest}
        return SampleRequest(
            request_id=request_id,
            prompt_tokens=np.array(prompt, np.int32),
            sampling=Sampling(max_new_tokens=length, stop_ids=stop, seed=seed, **sampling),
            members=members,
            **rest,
        )

    return make


@pytest.fixture
def sglang(stack, tmp_path):
    """A fake server, as the real one stands after its start."""

    def begin(**info):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        server = FakeSglang(folder, **info)
        stack.callback(server.close)
        return server

    return begin


@pytest.fixture
def both(sglang, attach):
    """A server and an engine that has found it; each file attaches its own kind."""
    server = sglang()
    engine = attach(server)
    engine.connect(30.0)
    return server, engine


@pytest.fixture
def requests(make_request):
    return [make_request(f"t{i}", members=(0, 1, 2), seed=i, prompt=(3 + i % 5, 9)) for i in range(12)]


@pytest.fixture
def fresh(model, start):
    """An engine that serves nothing yet, and its server."""
    engine = FakeEngine(model)
    return engine, start(engine)


@pytest.fixture
def channel(stack):
    return lambda server: stack.enter_context(grpc.insecure_channel(server.address))
