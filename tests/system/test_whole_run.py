"""The real loop: two processes, gRPC between them, killed and resumed. Small sizes, the same code path as any run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from train.config import load, to_toml

ROOT = Path(__file__).parents[2]
SMALL = (
    "steps=8",
    "schedule.lag=2",
    "policy.width=16",
    "policy.layers=1",
    "policy.query_heads=2",
    "policy.kv_heads=1",
    "policy.head_dim=8",
    "policy.expert_hidden=16",
    "policy.remat=none",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.rows=4",
    "rollout.slots=16",
    "rollout.deadline=60",
    "warm_start.steps=20",
    "warm_start.batch_size=32",
    "checkpoint.every=2",
    "eval.prompts=16",
    "data.holdout=16",
)


def write_config(folder: Path, *overrides: str) -> Path:
    path = folder / "small.toml"
    path.write_text(to_toml(load(ROOT / "configs" / "quickstart.toml", [*SMALL, "name=small", *overrides])))
    return path


def start(config: Path, runs: Path, *arguments: str) -> subprocess.Popen:
    # Several fake devices, as the tests' own process has, would be another machine.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "train.cli", "train", str(config), "--runs", str(runs), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def run(config: Path, runs: Path, *arguments: str) -> str:
    process = start(config, runs, *arguments)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def lines(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def final_arrays(folder: Path, version: int) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((folder / "checkpoints" / str(version) / "state").absolute())
    return {name: np.asarray(array) for name, array in found.items()}


def assert_same_end(left: Path, right: Path, version: int) -> None:
    one, two = final_arrays(left, version), final_arrays(right, version)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    output = run(write_config(folder), folder)
    return folder / "small", output


def test_a_run_leaves_the_files_of_the_public_surface(undisturbed):
    folder, output = undisturbed
    for name in ("config.toml", "metrics.jsonl", "tb", "checkpoints", "report.html", "summary.json", "engine.log"):
        assert (folder / name).exists(), name
    assert load(folder / "config.toml").steps == 8
    assert "held-out accuracy" in output


def test_every_step_reports_the_figures_of_the_public_surface(undisturbed):
    rows = lines(undisturbed[0])
    assert [row["version"] for row in rows] == list(range(1, 9))
    public = """reward/mean mismatch/abs_mean mismatch/k3 sat/threshold sat/gate_rate sat/radius_low sat/radius_high
        sat/factor_min sat/effective_low sat/effective_high clip/fraction lag/mean lag/max routing/agreement
        routing/missing grad_norm tokens"""
    for row in rows:
        missing = set(public.split()) - row.keys()
        assert not missing
        assert any(name.startswith("seconds/") for name in row)


def test_tokens_are_as_old_as_the_schedule_says(undisturbed):
    lags = [row["lag/max"] for row in lines(undisturbed[0])]
    assert lags == [0, 1, 2, 3, 2, 3, 2, 3]


def test_routes_are_all_there_and_nothing_compiles_after_the_first_steps(undisturbed):
    rows = lines(undisturbed[0])
    assert all(row["routing/missing"] == 0 for row in rows)
    assert all(0.8 < row["routing/agreement"] <= 1 for row in rows)
    # Step 5 is the first after everything (evaluation, checkpoint, publication of a later version) happened once.
    assert len({row["compiles"] for row in rows[4:]}) == 1


def test_a_run_that_is_complete_says_so_and_changes_nothing(undisturbed):
    folder, _ = undisturbed
    before = final_arrays(folder, 8)
    run(folder.parent / "small.toml", folder.parent)
    after = final_arrays(folder, 8)
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])
    assert [row["version"] for row in lines(folder)] == list(range(1, 9))
    summary = json.loads((folder / "summary.json").read_text())
    for side in ("before", "after"):
        assert {"eval/sampled_accuracy", "eval/greedy_accuracy", "entropy"} <= summary[side].keys()


def test_a_run_that_was_killed_before_its_last_evaluation_makes_it(undisturbed, tmp_path):
    folder, _ = undisturbed
    expected = json.loads((folder / "summary.json").read_text())
    shutil.copytree(folder, tmp_path / "small")
    (tmp_path / "small" / "summary.json").unlink()
    run(folder.parent / "small.toml", tmp_path)
    assert json.loads((tmp_path / "small" / "summary.json").read_text())["after"] == expected["after"]


def test_a_killed_run_ends_with_the_same_parameters_bit_for_bit(undisturbed, tmp_path):
    config = write_config(tmp_path)
    process = start(config, tmp_path)
    wait_for_version(process, tmp_path / "small", 5)
    process.kill()
    process.communicate(timeout=30)
    assert not (tmp_path / "small" / "checkpoints" / "8").exists()
    run(config, tmp_path)
    assert_same_end(undisturbed[0], tmp_path / "small", 8)
    assert [row["version"] for row in lines(tmp_path / "small")] == list(range(1, 9))


def test_a_killed_engine_is_restarted_and_nothing_is_lost_or_trained_twice(undisturbed, tmp_path):
    config = write_config(tmp_path)
    process = start(config, tmp_path)
    wait_for_version(process, tmp_path / "small", 3)
    os.kill(engine_of(process), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert_same_end(undisturbed[0], tmp_path / "small", 8)
    events = [json.loads(line) for line in (tmp_path / "small" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "restart" for event in events), events
    assert lines(tmp_path / "small")[-1]["buffer/trained"] == 32


def test_a_synchronous_run_in_float32_shows_the_two_log_probs_agree(tmp_path):
    config = write_config(tmp_path, "schedule.lag=0", "rollout.dtype=float32", "steps=3", "sampling.temperature=0.7")
    run(config, tmp_path)
    rows = lines(tmp_path / "small")
    assert [row["lag/max"] for row in rows] == [0, 0, 0]
    assert max(row["mismatch/abs_mean"] for row in rows) < 1e-5
    assert all(row["routing/agreement"] == 1 for row in rows)


@pytest.mark.slow
def test_the_minibatches_of_a_batch_share_the_log_probs_of_its_start(tmp_path):
    config = write_config(
        tmp_path,
        "reward=random",  # the small policy never answers rightly, and equal rewards clip nothing
        "objective.preset=decoupled_ppo",
        "batch.minibatches=2",
        "optim.peak_lr=0.02",
        "optim.warmup=0",
    )
    run(config, tmp_path)
    rows = lines(tmp_path / "small")
    assert [row["version"] for row in rows] == list(range(1, 9))
    # Before its batch's first step the policy is its own proximal one, and nothing is clipped; after it, some is.
    assert all(row["clip/fraction"] == 0 for row in rows[0::2])
    assert max(row["clip/fraction"] for row in rows[1::2]) > 0
    events = (tmp_path / "small" / "events.jsonl").read_text()
    assert "that ratio is always one" not in events


@pytest.mark.slow
def test_one_minibatch_with_a_proximal_preset_is_warned_of(tmp_path):
    config = write_config(tmp_path, "objective.preset=ppo", "reward=random", "steps=2", "schedule.lag=0")
    run(config, tmp_path)
    assert "that ratio is always one" in (tmp_path / "small" / "events.jsonl").read_text()


def wait_for_version(process: subprocess.Popen, folder: Path, version: int, timeout: float = 250) -> None:
    deadline = time.monotonic() + timeout
    while len(lines_or_none(folder)) < version:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"version {version} not reached in {timeout} s"
        time.sleep(0.02)


def lines_or_none(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def engine_of(process: subprocess.Popen) -> int:
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in found.stdout.splitlines()]
    (pid,) = [int(row[0]) for row in rows if int(row[1]) == process.pid and "engine_main" in row[2]]
    return pid


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("policy.layers=3", "policy.dense_layers=[1]", "policy.dense_hidden=24"),
        (
            *("policy.dense_layers=[0]", "policy.dense_hidden=24"),
            *(f"policy.{name}=0" for name in ("experts", "experts_per_token", "expert_hidden")),
        ),
    ],
    ids=["mixed", "dense"],
)
def test_policies_with_dense_layers_run_whole(changes, tmp_path):
    run(write_config(tmp_path, *changes), tmp_path)
    rows = lines(tmp_path / "small")
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert all(row["mismatch/abs_mean"] < 0.05 for row in rows)
    assert all(row["routing/missing"] == (len(changes) == 5) for row in rows)  # nothing to replay without experts
    assert "routing/missing" not in (tmp_path / "small" / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_its_checkpoint(tmp_path):
    from sat_jax.model import PolicyConfig, hf
    from train.convert import Options, convert
    from train.setup import make_problem

    # A random policy is never right: with random rewards it learns something all the same.
    changes = ("steps=2", "schedule.lag=1", "warm_start.steps=0", "checkpoint.keep=4", "reward=random")
    config = write_config(tmp_path, *changes)
    vocabulary = make_problem(load(config)).tokenizer.vocab_size
    policy = PolicyConfig.tiny(
        vocab_size=vocabulary, width=16, head_dim=4, layers=2, dense_layers=(0,), dense_hidden=24
    )
    draw = np.random.default_rng(0)
    tensors = {n: (draw.normal(size=shape) / 8).astype(np.float32) for n, shape in hf.tensor_shapes(policy).items()}
    hf.save(hf.import_tensors(policy, tensors), tmp_path / "model")
    text = config.read_text()
    begin, end = text.index("[policy]"), text.index("[sampling]")
    policy_table = f'[policy]\npath = "{tmp_path / "model"}"\ndtype = "float32"\nremat = "none"\n\n'
    config.write_text(text[:begin] + policy_table + text[end:])
    run(config, tmp_path)
    convert(tmp_path / "small", tmp_path / "first", Options(version=0))
    convert(tmp_path / "small", tmp_path / "last", Options())
    first = dict(hf.read_tensors(tmp_path / "first", policy))
    last = dict(hf.read_tensors(tmp_path / "last", policy))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(first[name], tensor)
    assert any((last[name] != tensor).any() for name, tensor in tensors.items())
    assert json.loads((tmp_path / "last" / "config.json").read_text())["max_position_embeddings"] == 4096
