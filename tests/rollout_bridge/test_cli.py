"""The console script, in processes of its own."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from rollout_bridge import Client, ClientOptions, Fleet, FleetOptions, InFlight, Security
from rollout_bridge.cli import main, read_token
from rollout_bridge.engines.fake_model import fake_probe, fake_weights

TLS = pathlib.Path(__file__).with_name("tls")
TOKEN = "a-token-of-16-characters"


@pytest.fixture
def spawn(stack):
    """Starts `rollout-bridge serve --engine fake` with more arguments; returns process and address."""

    def begin(*arguments, listen="127.0.0.1:0", environ=()):
        command = [sys.executable, "-m", "rollout_bridge.cli", "serve", "--engine", "fake", "--listen", listen]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, **dict(environ)}
        )
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        line = process.stdout.readline()
        found = re.fullmatch(r"rollout-bridge: engine (fake-\w+) listens on (\S+)\n", line)
        assert found, line
        return process, found[2]

    return begin


def test_it_serves_until_sigterm(spawn, model):
    process, address = spawn("--fake-version", "3")
    with Client(address) as client:
        assert client.model() == model
        assert client.status().version == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_fleet_survives_sigkill_of_the_process(spawn, model, make_request):
    process, address = spawn()
    requests = [make_request(f"t{i}", members=(0, 1), seed=i) for i in range(8)]
    weights = fake_weights(model, 2)

    def restart(_endpoint):
        if processes[-1].poll() is not None:
            processes.append(spawn(listen=address)[0])

    processes, seen = [process], []
    options = FleetOptions(on_lost=restart, max_streams=2, client=ClientOptions(attempts=1))
    with Fleet([address], options=options) as fleet:
        fleet.wait_ready(30.0)
        fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH)
        for completion in fleet.sample(requests):
            seen.append((completion.request_id, completion.member))
            assert set(completion.version.tolist()) == {2}
            if len(seen) == 2:
                process.kill()
                process.wait(30)
    assert sorted(seen) == sorted((f"t{i}", member) for i in range(8) for member in (0, 1))
    assert len(processes) == 2


def test_the_token_comes_from_the_environment_or_a_file_and_is_not_shown(spawn, tmp_path, model):
    _, address = spawn("--token-variable", "BRIDGE_TOKEN", environ={"BRIDGE_TOKEN": TOKEN}.items())
    with Client(address, options=ClientOptions(security=Security(token=TOKEN))) as client:
        assert client.model() == model
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert read_token({}, None, path) == TOKEN
    assert read_token({}, None, None) is None
    with pytest.raises(ValueError, match="expected one in environment variable ABSENT, got nothing"):
        read_token({}, "ABSENT", None)


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys, tmp_path):
    serve = ["serve", "--engine", "fake", "--listen"]
    short = tmp_path / "token"
    short.write_text("short")
    cases = {
        "expected host:port": [*serve, "nowhere"],
        "expected TLS off loopback": [*serve, "0.0.0.0:0"],
        "expected both --tls-certificate and --tls-key": [*serve, "127.0.0.1:0", "--tls-key", str(TLS / "server.key")],
        "No such file": [*serve, "127.0.0.1:0", "--token-file", str(tmp_path / "absent")],
        "at least 16 characters": [*serve, "127.0.0.1:0", "--token-file", str(short)],
    }
    for expected, arguments in cases.items():
        assert main(arguments) == 2
        written = capsys.readouterr()
        assert written.out == ""
        assert written.err.startswith("rollout-bridge: ")
        assert written.err.count("\n") == 1
        assert expected in written.err


def test_a_port_in_use_is_one_line_and_exit_code_2(spawn, capsys):
    _, address = spawn()
    assert main(["serve", "--engine", "fake", "--listen", address]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_nothing_of_the_bridge_needs_jax():
    program = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax", "sat_jax", "train"}:
            raise ImportError(f"{name} is not for the bridge")

sys.meta_path.insert(0, Block())
import pkgutil, rollout_bridge
for module in pkgutil.walk_packages(rollout_bridge.__path__, "rollout_bridge."):
    __import__(module.name)
from rollout_bridge import Fleet, InFlight, serve
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
model = fake_model()
weights = fake_weights(model, 1)
with serve(FakeEngine(model), "127.0.0.1:0") as server, Fleet([server.address]) as fleet:
    fleet.wait_ready(30.0)
    print(fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH).mean_abs, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0.0 False\n", done.stderr
