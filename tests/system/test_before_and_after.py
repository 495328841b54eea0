"""The verbs around a run: doctor before it and on its checkpoint, eval after it; trajectories by code in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.test_whole_run import ROOT, SMALL, lines, run
from train.config import load, to_toml

pytestmark = pytest.mark.slow


def write_config(folder: Path, source: str, *overrides: str) -> Path:
    path = folder / "small.toml"
    path.write_text(to_toml(load(ROOT / "configs" / source, [*SMALL, "name=small", *overrides])))
    return path


def sat_jax(*arguments: object) -> tuple[int, dict]:
    """Exit code, and the JSON object on standard output."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "train.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def failed(said: dict) -> set[str]:
    return {finding["check"] for finding in said["findings"] if finding["status"] == "fail"}


@pytest.fixture(scope="module")
def tool_run(tmp_path_factory):
    """A run of the two-turn task, judged by a function of a user's, with four samples a problem."""
    folder = tmp_path_factory.mktemp("tool")
    config = write_config(
        folder,
        "calculator.toml",
        "reward=tests.reference.faulty_rewards:good",
        "eval.samples=4",
        "batch.rows=8",
        "warm_start.steps=100",
    )
    run(config, folder)
    return config, folder / "small"


def test_doctor_passes_a_healthy_set_up(tmp_path):
    code, said = sat_jax("doctor", write_config(tmp_path, "quickstart.toml"), "--runs", tmp_path)
    assert (code, said["healthy"], failed(said)) == (0, True, set())
    checks = {finding["check"] for finding in said["findings"]}
    rooms = ("weights", "network", "log-probs at 1", "log-probs at 0.7", "routes", "repeat", "tokens", "ends", "model")
    assert {f"fleet: {room}" for room in rooms} <= checks
    assert {"data: lines", "prompt: stop", "verifier: gold", "machine: disk", "machine: clock"} <= checks
    assert not list(tmp_path.glob("small/*"))


@pytest.mark.parametrize(
    ("overrides", "check"),
    [
        (["rollout.probe_tolerance=1e-9"], "fleet: calls"),  # the fleet's bfloat16 is no such match
        (["alarms.mismatch_abs_mean=1e-6"], "fleet: log-probs at 1"),
    ],
)
def test_doctor_finds_a_fault_that_was_planted(tmp_path, overrides, check):
    code, said = sat_jax("doctor", write_config(tmp_path, "quickstart.toml", *overrides), "--runs", tmp_path)
    assert code == 1
    assert check in failed(said), said


def test_the_two_turn_task_trains_on_what_the_policy_said_alone(tool_run):
    _, folder = tool_run
    rows = lines(folder)
    assert [row["version"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert row["routing/missing"] == 0
        assert row["mismatch/abs_mean"] < 0.1  # an inserted token without a mask would add its whole log-prob
        assert row["verify/attempts"] > 0
        assert row["reward/unverified"] == 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    text = json.dumps(samples)
    assert "!;" in text or ";" in text.replace("!;", ""), "the tool was never asked"


def test_a_verifier_that_hangs_and_forks_neither_stalls_nor_poisons_a_step(tmp_path):
    name = "tests.reference.faulty_rewards:hangs_and_forks_now_and_then"
    run(write_config(tmp_path, "quickstart.toml", f"reward={name}", "verifier.seconds=1"), tmp_path)
    rows = lines(tmp_path / "small")
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert rows[-1]["verify/timeouts"] > 0
    assert rows[-1]["verify/errors"] == 0
    assert rows[-1]["verify/starts"] > rows[-1]["verify/timeouts"]
    assert max(row["reward/unverified"] for row in rows) > 0


def test_eval_shows_several_samples_and_the_paired_difference_to_itself_is_nothing(tool_run, tmp_path):
    _, folder = tool_run
    code, said = sat_jax("eval", folder)
    assert (code, said["version"], said["samples"], len(said["problems"])) == (0, 8, 4, 16)
    assert said["eval/sampled_low"] <= said["eval/sampled_accuracy"] <= said["eval/sampled_high"]
    assert {"eval/pass_at_k", "eval/majority_at_k", "eval/seconds"} <= said.keys()
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(said))
    code, again = sat_jax("eval", folder, "--compare", earlier)
    assert (code, again["difference"]) == (0, [0.0, 0.0, 0.0])
    problems = tmp_path / "aime.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(5)))
    code, said = sat_jax("eval", folder, "--set", f"eval.path={problems}", "--set", "eval.samples=2")
    assert (code, len(said["problems"]), said["samples"]) == (0, 5, 2)


def test_doctor_looks_at_the_checkpoint_of_a_run(tool_run):
    config, folder = tool_run
    _, said = sat_jax("doctor", config, "--runs", folder.parent)
    (weights,) = [finding for finding in said["findings"] if finding["check"] == "fleet: weights"]
    assert weights["found"].startswith("version 8")
    assert failed(said) <= {"fleet: ends"}  # so few steps need not have taught it to stop
