"""A whole plan on this machine's own devices, and its figures by hand."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from train.cli import main
from train.config import load
from train.plan import PlanOptions, make_plan, topology
from train.plan.load import loads
from train.plan.report import as_json, as_text

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.toml"
GIB = 2**30


@pytest.fixture(scope="module")
def config():
    return load(CONFIG, ["policy.remat=attention"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plan-cache")


@pytest.fixture(scope="module")
def plan(config, cache):
    return make_plan(config, PlanOptions(topology="cpu:1", cache=cache, rollout_tokens=1e6), lambda _line: None)


def test_every_program_of_a_step_of_several_microbatches_is_compiled(plan):
    assert plan.loads[1].microbatches == 5
    assert [program.name for program in plan.programs] == [
        "denominator",
        "mismatch",
        "threshold",
        "score",
        "gradient",
        "accumulate",
        "apply",
        "metrics",
    ]
    assert all(program.compiled.memory is not None for program in plan.programs)


def test_what_lives_between_programs_is_what_a_hand_counts(plan):
    held, parameters = plan.resident, plan.parameters
    assert held.parameters == held.accumulator == held.reference == 4 * parameters
    # Two moments, and the counters of the schedule and of Adam.
    assert held.optimizer == 2 * 4 * parameters + 2 * 4
    positions = 5 * 52 * 45
    assert held.routes == 2 * 2 * positions  # layers, slots; a byte each
    # input, target, segment, position, log-prob, advantage, lag; two masks.
    assert held.tokens == (7 * 4 + 2) * positions
    assert held.scores == 5 * 4 * positions  # four of the measured batch, and the reference's log-prob


def test_the_fullest_moment_is_at_least_what_lives_through_it(plan):
    assert plan.fullest.need >= plan.resident.all
    assert all(program.need <= plan.fullest.need for program in plan.programs)


def test_useful_flops_are_three_passes_and_the_two_that_measure(plan):
    worst = plan.loads[1]
    assert (worst.prompt, worst.response, worst.per_row, worst.sequences) == (42, 4, 1, 256)
    positions, pairs = 256 * 45, 256 * 45 * 46 / 2
    linear = 64 * 16 * 2 * (4 + 2)
    layer = 2 * positions * (linear + 64 * 4 + 3 * 2 * 64 * 64) + 4 * 4 * 16 * pairs
    head = 2 * positions * 64 * 14
    assert plan.cost("worst", "balanced").useful == pytest.approx(5 * (2 * layer + head))


def test_executed_flops_of_the_parts_without_blocks_are_what_a_hand_counts(plan):
    executed = plan.cost("worst", "balanced").executed
    positions = 5 * 52 * 45
    # Four passes over the router forward, one again, and two products backward: forward 3, again 1, backward 2.
    assert executed["router"] == 2 * 2 * positions * 64 * 4 * (3 + 1 + 2)
    # Log-probs: forward twice, measuring and by the reference; the gradient takes what was measured, and backward the
    # logits again and two products.
    assert executed["logprob"] == 2 * positions * 64 * 14 * (2 + 1 + 2)
    linear = 2 * positions * 64 * 16 * 2 * (4 + 2)
    whole = 4 * 4 * 16 * positions * 45
    # Projections: forward 3, again 1, backward 2. Rows are attended whole: scores and values forward 3 times, scores
    # again (the result is kept), and four products backward.
    assert executed["attention"] == 2 * (6 * linear + (3 * 2 + 1 + 4) * whole / 2)


def test_skewed_routing_costs_no_less(plan):
    assert plan.cost("worst", "skewed").ratio >= 1
    assert sum(plan.cost("mean", "balanced").executed.values()) > 0


def test_without_known_speeds_and_memory_nothing_is_made_up(plan):
    assert plan.available is None
    assert plan.spare is None
    assert plan.cost("mean", "balanced").seconds is None
    assert plan.pace.hidden_lag is None
    assert "not known" in as_text(plan)


def test_the_host_holds_a_window_of_completions_and_a_checkpoint(plan):
    positions = 256 * 45
    assert plan.host.routes == positions * 2 * 2
    assert plan.host.step == positions * (2 * 2 + 12)
    assert plan.host.queue == 4 * plan.host.step
    assert plan.host.published == 2 * plan.parameters
    assert plan.host.checkpoint == 3 * 4 * plan.parameters + 8
    assert plan.pace.publish_seconds == plan.host.published / 12.5e9


def test_the_papers_worst_step_carries_48_gib_of_routes():
    worst = loads(load(CONFIG.parent / "qwen3_30b_a3b_sat_gspo_r3_lag8.toml"), None)[1]
    assert worst.positions * 48 * 8 == 48 * GIB


def test_json_says_all_of_it(plan):
    told = json.loads(as_json(plan))
    assert told["fits"] is True
    assert told["fullest"] == plan.fullest.name
    assert {cost["case"] for cost in told["costs"]} == {"mean", "worst"}
    assert told["resident"]["parameters"] == 4 * plan.parameters


def with_memory(plan, available):
    return dataclasses.replace(plan, chip=dataclasses.replace(plan.chip, memory=available))


def test_the_verdict_compares_the_fullest_moment_with_the_chip(plan):
    need = plan.fullest.need
    assert with_memory(plan, need).fits
    assert with_memory(plan, 2 * need).spare == 0.5
    small = with_memory(plan, need - 1)
    assert not small.fits
    assert f"does not fit: {plan.fullest.name} needs" in as_text(small)


@pytest.fixture
def environment(monkeypatch):
    """What the command sets goes no further than a test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.usefixtures("environment")
def test_the_command_prints_the_plan_and_its_progress_apart(cache, capsys, tmp_path):
    (tmp_path / "plan-cache").symlink_to(cache)
    arguments = ["plan", str(CONFIG), "--topology", "cpu:1", "--set", "policy.remat=attention", "--runs", str(tmp_path)]
    assert main(arguments) == 0
    seen = capsys.readouterr()
    assert seen.out.splitlines()[-1].startswith("verdict: compiles; needs")
    assert "gradient: known from" in seen.err
    assert main([*arguments, "--set", "mesh.fsdp=3"]) == 1
    assert "mesh" in capsys.readouterr().err
    assert main(["plan", str(CONFIG), "--topology", "v9:1"]) == 1
    assert "v5p:NxNxN" in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize(
    ("flag", "unit"), [("--network", "GB/s"), ("--rollout-tokens-per-s", "tokens a second")], ids=["network", "rollout"]
)
def test_a_rate_that_nothing_can_be_divided_by_is_refused_before_anything_is_compiled(flag, unit, rate, capsys):
    assert main(["plan", str(CONFIG), "--topology", "cpu:1", "--no-cache", f"{flag}={rate}"]) == 1
    assert capsys.readouterr().err == f"sat-jax: error: {flag}: expected a number of {unit} above 0, got {rate}\n"


@pytest.mark.usefixtures("environment")
def test_an_error_says_nothing_of_tracebacks(capsys):
    assert main(["plan", str(CONFIG), "--topology", "cpu:4", "--no-cache", "--set", "mesh.tensor=4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sat-jax: error: vocab_size: expected a multiple of 4 (mesh: tensor 4")


@pytest.mark.slow
def test_the_largest_microbatch_fits_when_it_is_set(config, cache, plan, monkeypatch):
    memory = plan.fullest.compiled.memory
    available = plan.fullest.need - (memory.peak - memory.argument) // 3
    chips = {**topology.CHIPS, "cpu": dataclasses.replace(topology.CHIPS["cpu"], memory=available)}
    monkeypatch.setattr(topology, "CHIPS", chips)
    options, said = PlanOptions(topology="cpu:1", cache=cache, largest=True), []
    full = make_plan(config, options, said.append)
    assert not full.fits
    assert full.largest_rows is not None
    rows, compiled = full.largest_rows
    assert compiled
    assert 52 // 2 < rows < 52
    assert f"largest microbatch: trying {rows} rows" in said
    smaller = dataclasses.replace(config, batch=dataclasses.replace(config.batch, rows=rows))
    assert make_plan(smaller, dataclasses.replace(options, largest=False), lambda _line: None).fits
