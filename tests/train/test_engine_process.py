"""The local engine's own process: it starts, says why it does not, comes back on its port, and dies with its parent."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_bridge import Client
from rollout_bridge.messages import Serving
from sat_jax.model import PolicyConfig
from train.engine_process import EngineProcessConfig, LocalEngineProcess
from train.local_engine import LocalEngineConfig

POLICY = PolicyConfig.tiny(vocab_size=13, width=16, head_dim=4, expert_hidden=8)

PARENT = """
import os, signal, sys, time
from pathlib import Path
from tests.train.test_engine_process import config_in
from train.engine_process import LocalEngineProcess

child = LocalEngineProcess(config_in(Path(sys.argv[1])))
child.__enter__()
holder = os.fork()  # a process that holds the parent's end of the pipe open
if holder == 0:
    time.sleep(60)
    os._exit(0)
print(child.pid, holder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def config_in(folder: Path, **changes) -> EngineProcessConfig:
    engine = LocalEngineConfig(dtype="bfloat16", slots=2, max_tokens=8)
    config = EngineProcessConfig(policy=POLICY, engine=engine, log=folder / "run" / "engine.log", threads=1)
    return dataclasses.replace(config, **changes)


def ended(process: LocalEngineProcess, seconds: float = 60.0) -> str:
    """How it ended."""
    deadline = time.monotonic() + seconds
    while (how := process.poll()) is None:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)
    return how


def runs(pid: int) -> bool:
    """Whether an orphan still runs; one that nobody has reaped yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_it_serves_is_killed_comes_back_on_its_port_and_not_too_often(tmp_path):
    with LocalEngineProcess(config_in(tmp_path, max_restarts=1)) as process:
        assert process.poll() is None
        with Client(process.endpoint) as client:
            model, first = client.model(), client.status()
            assert (model.model_digest, model.dtype, model.max_tokens) == (POLICY.digest(), "bfloat16", 8)
            assert (first.serving, first.version) == (Serving.NOT_SERVING, -1)
        endpoint, pid = process.endpoint, process.pid
        os.kill(pid, signal.SIGKILL)
        assert ended(process).startswith(f"an end by SIGKILL (log {tmp_path}")
        process.restart("it was killed")
        assert (process.endpoint, process.restarts) == (endpoint, 1)
        assert process.pid != pid
        with Client(endpoint) as client:
            assert client.status().engine_id != first.engine_id
        with pytest.raises(RuntimeError, match=r"expected at most 1 restarts in a run, got one more: again \(log "):
            process.restart("again")
        assert "exit code 0" in ended(process)
    log = (tmp_path / "run" / "engine.log").read_text()
    assert "starts because the run starts" in log
    assert "starts because it was killed" in log
    with pytest.raises(RuntimeError, match=r"expected a started one"):
        process.restart("too late")


def test_it_dies_with_its_parent_even_if_the_pipe_stays_open(tmp_path):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout
    with parent.stdout as lines:
        pid, holder = map(int, lines.readline().split())
    try:
        assert parent.wait() == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while runs(pid):
            assert time.monotonic() < deadline, "it outlives its parent"
            time.sleep(0.05)
    finally:
        os.kill(holder, signal.SIGKILL)
    assert "because its parent is gone" in (tmp_path / "run" / "engine.log").read_text()


def test_one_that_is_stopped_is_ended_all_the_same_and_soon(tmp_path):
    with LocalEngineProcess(config_in(tmp_path)) as process:
        child = process._process
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
    assert child.returncode == 0  # it heard SIGTERM: it was not killed after five seconds


def test_it_ends_when_its_standard_input_is_closed(tmp_path):
    with LocalEngineProcess(config_in(tmp_path)) as process:
        assert process._process
        assert process._process.stdin
        process._process.stdin.close()
        assert "because its standard input was closed" in ended(process)


def test_a_port_in_use_is_one_clear_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ValueError, match=rf"{address}: .*in use.*; choose another port"),
            LocalEngineProcess(config_in(tmp_path, listen=address)),
        ):
            pass


def test_a_defect_of_the_engine_ends_the_process_and_is_told(tmp_path):
    with LocalEngineProcess(config_in(tmp_path, environment={"JAX_PLATFORMS": "nonsense"})) as process:
        how = ended(process)
    assert how.startswith("exit code 1 (log ")
    assert "nonsense" in how


def fake_python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_death_at_start_shows_the_last_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "read line; echo no such device >&2; exit 3"))
    with (
        pytest.raises(RuntimeError, match=r"expected it to listen, got exit code 3 \(log .*\nno such device"),
        LocalEngineProcess(config_in(tmp_path)),
    ):
        pass


def test_a_start_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "echo still thinking >&2; exec sleep 60"))
    with (
        pytest.raises(RuntimeError, match=r"expected it to listen within 1.5 s, got nothing (.|\n)*still thinking"),
        LocalEngineProcess(config_in(tmp_path, start_seconds=1.5)),
    ):
        pass


@pytest.mark.parametrize("changes", [{"threads": 0}, {"start_seconds": 0.0}, {"max_restarts": -1}])
def test_figures_out_of_range_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"engine process: expected"):
        config_in(tmp_path, **changes)
