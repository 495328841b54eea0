"""In processes of their own: XLA reads the flags that the verb sets once, when JAX first makes a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sat_jax.objective import ObjectiveConfig
from train.bench_clip import Options, collective_bytes, made_up, program

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "train.cli", "bench", "clip", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_json_holds_every_figure_of_the_presets_asked_for_and_of_ppo():
    done = bench("--log2-tokens", "12", "--presets", "sat_gspo", "--repetitions", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = result["tokens"]["4096"]
    assert list(rows) == ["ppo", "sat_gspo"]
    assert (result["devices"], result["clock"], result["aggregation"]) == (1, "process_time", "token_mean")
    assert rows["ppo"]["ratio"] == 1
    assert rows["sat_gspo"]["ratio"] > 1
    assert (rows["ppo"]["bytes_a_token"], rows["sat_gspo"]["bytes_a_token"]) == (21, 21)
    for row in rows.values():
        assert row["median_ms"] > 0
        assert row["share_of_bound"] > 0
        assert row["temporary_a_token"] > 0
        assert row["collectives"] == {}


def test_eight_devices_exchange_scalars_only():
    done = bench("--log2-tokens", "15", "--presets", "sat_grpo", "--repetitions", "1", "--devices", "8", "--json")
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout)["tokens"]["32768"]["sat_grpo"]["collectives"]
    assert list(moved) == ["all-reduce"]
    assert 0 < moved["all-reduce"] <= 64 * 1024


def test_the_table_ends_with_the_share_of_the_train_step():
    done = bench("--log2-tokens", "12", "--presets", "ppo", "--repetitions", "2", "--train-step", str(CONFIG))
    assert done.returncode == 0, done.stderr
    head, _, size, columns, row, _, last = done.stdout.splitlines()
    assert "aggregation token_mean" in head
    assert size == "4,096 tokens"
    assert columns.split()[:2] == ["preset", "ms"]
    assert row.split()[0] == "ppo"
    assert last.startswith("train step of quickstart, 52 rows of 45: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--log2-tokens", "11"], "--log2-tokens: expected numbers of 12 or more (a row has 4096 tokens), got 11"),
        (["--log2-tokens", "12", "--presets", "sat"], "objective preset: expected one of ppo, "),
    ],
)
def test_a_bad_argument_is_said_in_one_line(arguments, said):
    done = bench(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_rows_that_the_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"--devices: expected a divisor of the 4 rows of the smallest size, got 8"):
        Options(log2_tokens=(14, 16), devices=8)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_sat_grpo_needs_at_most_twelve_bytes_a_token(aggregation):
    inputs = jax.eval_shape(lambda: made_up(jax.random.key(0), 256, 4096, 512))
    compiled = program(ObjectiveConfig.preset("sat_grpo", aggregation=aggregation)).lower(*inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 12 * 2**20


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_turns():
    text = """
%body (a: f32[]) -> f32[] {
  %x = (s32[3]{0}, f32[2,4]{1,0}) all-reduce(%a, %b), channel_id=1
}
ENTRY %main (a: f32[]) -> f32[] {
  %w = f32[] while(%a), condition=%until, body=%body
  %g = f32[16]{0} all-gather(%a), dimensions={0}
}
"""
    assert collective_bytes(text) == {"all-reduce": 32 * (12 + 32), "all-gather": 64}
