"""The main job over the real server: trainer, bridge and SGLang, a process each, undisturbed and with kills."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sglang.bridge import BridgeProcess
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.trainer import CONFIG
from train.config import load, to_toml

ROOT = Path(__file__).parents[2]
STEPS = 20
GROUPS = 4  # of a step
MOVED = (
    0.5  # nats that the policy moves at most in three small steps; samples of the base weights would be 1 or more away
)


@pytest.fixture
def bridge_process(server, stage_folder, tmp_path):
    """The bridge as an operator starts it; gives its address."""
    key = tmp_path / "admin-key"
    key.write_text(ADMIN_KEY)
    process = BridgeProcess(server.url, stage_folder, "--admin-key-file", str(key))
    process.start()
    yield process.address
    process.kill()


@pytest.fixture
def train(bridge_process, tmp_path):
    """Starts a run of sat_gspo with replay on addition, two versions behind; gives process and run folder."""
    overrides = [
        "name=run",
        f'rollout.endpoints=["{bridge_process}"]',
        "rollout.dtype=float32",
        "rollout.probe_tolerance=0.001",
        "rollout.deadline=400",  # a killed server needs minutes to come back on a busy machine
        "reward=random",  # so small a policy is never right, and equal rewards teach nothing
        "optim.peak_lr=3e-4",
        "optim.warmup=0",
        f"steps={STEPS}",
        "schedule.lag=2",
        f"batch.groups_per_step={GROUPS}",
        "batch.group_size=4",
        "batch.rows=4",
        "warm_start.steps=0",
        "checkpoint.every=10",
        "eval.prompts=0",
        "data.holdout=0",
    ]
    path = tmp_path / "run.toml"
    path.write_text(to_toml(load(CONFIG, overrides)))
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "train.cli", "train", str(path), "--runs", str(tmp_path), "--quiet"]
    with contextlib.ExitStack() as stack:

        def start():
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            )
            stack.callback(process.kill)
            return process, tmp_path / "run"

        yield start


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(process):
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output


def assert_trained_once(rows):
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["buffer/trained"] == STEPS * GROUPS
    assert rows[-1]["buffer/dropped"] == 0
    assert all(row["routing/missing"] == 0 for row in rows)


def test_twenty_asynchronous_steps_with_replay(train):
    process, folder = train()
    finish(process)
    rows = lines(folder)
    assert_trained_once(rows)
    first = rows[0]
    assert first["lag/max"] == 0
    assert first["mismatch/abs_max"] < 1e-4
    assert first["routing/agreement"] == 1
    assert [row["lag/max"] for row in rows] == [0, 1] + [2, 3] * 9
    published = [row["publish/version"] for row in rows if "publish/version" in row]
    assert published == sorted(set(published))
    assert len(published) >= 9
    for row in rows:
        if "publish/version" in row:
            assert row["publish/probe_mean_abs"] < 1e-5
            assert row["publish/seconds_held"] >= row["publish/seconds_load"] > 0
    assert 1e-3 < max(row["mismatch/abs_mean"] for row in rows) < MOVED  # the policy did move, but not far


def test_the_run_goes_on_when_the_server_is_killed_and_comes_back(train, server):
    process, folder = train()
    end = time.monotonic() + 300
    while len(lines(folder)) < 6:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)
    server.kill()
    server.start()
    finish(process)
    rows = lines(folder)
    assert_trained_once(rows)
    events = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert "ready" in events[events.index("lost") :]  # pushed to again: by the next version, or before it
    assert max(row["mismatch/abs_mean"] for row in rows) < MOVED
