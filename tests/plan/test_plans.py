"""Whole plans for TPU topologies that are not there (needs libtpu, no TPU)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.config import load
from train.plan import Plan, PlanOptions, make_plan
from train.plan.report import as_text

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GIB = 2**30
# A vocabulary that four devices divide.
SIXTEEN = 'tokenizer.alphabet="0123456789+=xy"'
TINY = ["mesh.fsdp=2", "mesh.expert=2", SIXTEEN, "policy.dtype=bfloat16", "policy.remat=attention"]

pytestmark = pytest.mark.plan


@pytest.fixture(scope="module", autouse=True)
def _libtpu_alone() -> Iterator[None]:
    """No metadata server to ask, and other processes may have libtpu open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield


def planned(name: str, topology: str, overrides: list[str], cache: Path) -> Plan:
    config = load(CONFIGS / f"{name}.toml", overrides)
    return make_plan(config, PlanOptions(topology=topology, cache=cache), lambda line: print(line, flush=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plan-cache")


@pytest.fixture(scope="module")
def tiny(cache) -> Plan:
    return planned("quickstart", "v5e:2x2", [*TINY, "batch.row_length=256"], cache)


@pytest.mark.timeout(1500)
def test_the_tiny_plan_for_v5e_has_the_figures_of_a_hand(tiny):
    held, count = tiny.resident, tiny.parameters
    # Experts, embedding and head are cut four ways, projections two ways, norms and router not at all.
    experts, vocabulary = 2 * 3 * 4 * 64 * 64, 2 * 16 * 64
    projections = 2 * 64 * 16 * 2 * (4 + 2)
    whole = count - experts - vocabulary - projections
    assert held.parameters == 4 * (experts / 4 + vocabulary / 4 + projections / 2 + whole)
    assert held.optimizer == 2 * held.parameters + 2 * 4
    assert tiny.fits
    assert tiny.available == int(15.75 * GIB)
    # What the compiler was given is what a hand counts, but for its tiles of 8 x 128.
    apply = next(program for program in tiny.programs if program.name == "apply").compiled.memory
    assert apply is not None
    assert 4 * held.parameters <= apply.argument < 12 * held.parameters


def test_the_tiny_plan_counts_the_flops_of_a_layer_and_its_kernels(tiny):
    load, executed = tiny.loads[1], tiny.cost("worst", "balanced").executed
    assert (load.rows, load.row_length, load.microbatches) == (52, 256, 5)
    positions = 5 * 52 * 256 / 4  # of one device
    linear = 2 * positions * 64 * 16 * 2 * (4 + 2)
    # One block a row: fwd 2 products, dq 3, dkv 4, as often as each pass runs (forward 3 times, saved for backward);
    # and the sums of the output's gradient with the output, which are products of H C with itself.
    block = 2 * 4 * 16 * positions * 256
    inner = 2 * positions * 4 * 16
    assert executed["attention"] == 2 * (6 * linear + (3 * 2 + 3 + 4) * block + inner)
    assert executed["router"] == 2 * 2 * positions * 64 * 4 * (3 + 1 + 2)


def test_the_tiny_plans_collectives_are_those_of_its_mesh(tiny):
    links = tiny.cost("worst", "balanced").links
    assert {name.split(" over ")[1] for name in links} <= {"fsdp", "expert", "fsdp x expert", "other groups"}
    assert {"all-gather over expert", "reduce-scatter over expert", "all-gather over fsdp"} <= set(links)


# Rows of 4096 positions in two copies of a model whose activations are what fills a chip.
LARGE = [
    *("mesh.data=2", "mesh.fsdp=2", SIXTEEN, "policy.dtype=bfloat16", "policy.remat=attention"),
    *("batch.row_length=4096", "sampling.max_new_tokens=4000", "batch.groups_per_step=8", "batch.group_size=512"),
    *("batch.rows=6144", "objective.preset=grpo", "objective.kl_coef=0.0"),
]


@pytest.mark.timeout(1800)
def test_what_cannot_fit_says_so_and_its_advice_applied_fits(cache):
    refused = planned("quickstart", "v5e:2x2", LARGE, cache)
    assert not refused.fits
    text = as_text(refused)
    assert f"needs {refused.fullest.need / GIB:.2f} of 15.75 GiB" in text
    assert refused.advice
    assert all(f"--set {setting}" in text for one in refused.advice for setting in one.settings)
    applied = [setting for one in refused.advice for setting in one.settings]
    assert planned("quickstart", "v5e:2x2", [*LARGE, *applied], cache).fits


# 3.6 B parameters on four chips of 15.75 GiB, whose moments are what is too much.
MANY = [
    *("mesh.fsdp=2", "mesh.expert=2", SIXTEEN, "policy.dtype=bfloat16", "policy.remat=full", "policy.width=2048"),
    *("policy.layers=24", "policy.experts=32", "policy.expert_hidden=768", "batch.rows=8", "batch.row_length=128"),
    *("sampling.max_new_tokens=120", "batch.groups_per_step=4", "batch.group_size=4", "objective.preset=grpo"),
    "objective.kl_coef=0.0",
]


@pytest.mark.timeout(1800)
def test_what_cannot_fit_for_its_moments_fits_with_them_in_the_hosts_memory(cache):
    refused = planned("quickstart", "v5e:2x2", MANY, cache)
    assert not refused.fits
    (advice,) = refused.advice
    assert advice.settings == ("optim.moments_memory=host",)
    applied = planned("quickstart", "v5e:2x2", [*MANY, *advice.settings], cache)
    assert applied.fits
    assert refused.fullest.need - applied.fullest.need == pytest.approx(advice.frees, rel=0.01)
    # Of the moments nothing stays on a chip but the two counters: its host has those of four.
    assert applied.resident.optimizer == 2 * 4
    assert applied.host.moments == 4 * (refused.resident.optimizer - 2 * 4)
    assert f"host: {applied.host.moments / GIB:.2f} GiB of moments" in as_text(applied)
    device, host = (
        next(program.compiled.memory for program in plan.programs if program.name == "apply")
        for plan in (refused, applied)
    )
    assert device is not None
    assert host is not None
    # The layers' moments visit a few at a time, not all at once.
    assert device.peak - host.peak > 0.8 * refused.resident.optimizer
    assert applied.cost("mean", "balanced").by_binding["host"] == pytest.approx(host.host_argument / 15e9)


def test_the_command_lets_libtpu_say_nothing_of_a_machine_that_is_not_there(tmp_path):
    arguments = ["plan", str(CONFIGS / "quickstart.toml"), "--topology", "v5e:2x2", "--runs", str(tmp_path)]
    command = [sys.executable, "-m", "train.cli", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("sat-jax: error: mesh: expected data 1 * fsdp 1 * expert 1 * tensor 1 = 4 devices, got 1")


# What lives between programs is most of it: what XLA's products pack beside their arrays is in no figure of a program.
MEDIUM = [
    *("mesh.fsdp=4", "mesh.expert=2", SIXTEEN, "policy.width=512", "policy.layers=12", "policy.experts=8"),
    *("policy.expert_hidden=512", "policy.remat=full", "batch.rows=8", "batch.row_length=128"),
    *("sampling.max_new_tokens=120", "batch.groups_per_step=4", "batch.group_size=4", "objective.preset=grpo"),
    "objective.kl_coef=0.0",
]
# Eight devices wait for each other on few cores: longer than XLA's 40 seconds on a loaded machine.
FAKE_DEVICES = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=800",
        "--xla_cpu_collective_timeout_seconds=800",
    ]
)


@pytest.mark.timeout(1800)
def test_memory_on_made_up_devices_is_what_the_plan_says_to_15_percent():
    environment = os.environ | {
        "XLA_FLAGS": FAKE_DEVICES,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.plan.measure_memory", str(CONFIGS / "quickstart.toml"), "cpu:8", *MEDIUM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["planned"] == pytest.approx(seen["used"], rel=0.15)


@pytest.fixture(scope="module")
def large(cache) -> Plan:
    return planned("qwen3_30b_a3b_sat_gspo_r3_lag8", "v5p:4x4x4", [], cache)


@pytest.mark.timeout(2700)
def test_the_30b_step_fits_v5p_128_with_a_tenth_spare(large):
    assert large.fits
    assert large.spare is not None
    assert large.spare >= 0.1


@pytest.mark.timeout(2700)
def test_the_30b_figures_are_those_of_a_hand(large):
    assert large.parameters == 30_532_122_624
    held = large.resident
    experts, vocabulary = 48 * 3 * 128 * 2048 * 768, 2 * 151936 * 2048
    projections = 48 * 2048 * 128 * 2 * (32 + 4)
    whole = large.parameters - experts - vocabulary - projections
    assert held.parameters == 4 * (experts // 64 + vocabulary // 64 + projections // 8 + whole)
    assert held.optimizer == 2 * held.parameters + 2 * 4
    assert large.host.routes == 48 * GIB
    # One layer forward, a position of 32768: projections, 8 experts, half the row's keys.
    layer = 2 * (2048 * 128 * 2 * 36 + 2048 * 128 + 3 * 8 * 2048 * 768) + 4 * 4096 * (32768 + 1) / 2
    head = 2 * 2048 * 151936
    # Forward and backward, and the forward passes that measure the mismatch and score the reference.
    assert large.cost("worst", "balanced").useful == pytest.approx(5 * 4096 * 32768 / 64 * (48 * layer + head))


@pytest.mark.timeout(2700)
def test_the_30b_step_executes_at_most_125_percent_of_what_is_useful(large):
    assert large.cost("worst", "balanced").ratio <= 1.25
    assert large.cost("mean", "balanced").ratio <= 1.25


@pytest.mark.timeout(2700)
def test_no_collective_of_the_30b_step_moves_the_batchs_logits_or_all_experts(large):
    moved = [one for program in large.programs for one in program.compiled.collectives]
    logits = 64 * 32768 * 151936 * 2
    assert max(one.bytes for one in moved) < logits / 100
    # Over `fsdp` an eighth of the experts' matrices of one kind is put together, never more; over `expert` the tokens
    # of eight rows, their ids and weights, and no weight of an expert.
    over = {
        axis: {one.bytes for one in moved if one.kind == "all-gather" and one.axes == (axis,)}
        for axis in ("fsdp", "expert")
    }
    assert max(over["fsdp"]) == 128 // 8 * 2048 * 768 * 2
    assert over["expert"] <= {8 * 32768 * 2048 * 2, 8 * 32768 * 8 * 4}
