"""The quickstart's shape at small sizes, trained asynchronously by several processes with local engines."""

import os
import signal
import time

import pytest

from tests.multihost.live import (
    engine_of,
    ledger,
    paused,
    rows,
    run,
    start,
    wait_for,
    wait_for_steps,
    write_config,
)
from train.checkpoint import read_ledger, read_meta
from train.ledger import audit
from train.ledger_log import read_entries

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(580)]

LONG = 40  # steps, so that no run is at its end when it is struck


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with two devices."""
    return run(write_config(tmp_path_factory.mktemp("alone"), f"steps={LONG}"), 1, 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes with a device each."""
    return run(write_config(tmp_path_factory.mktemp("pair"), f"steps={LONG}"), 2, 1)


def test_two_processes_make_the_run_of_one(alone, pair):
    ours, theirs = rows(pair), rows(alone)
    assert [row["version"] for row in ours] == list(range(1, LONG + 1))
    for name in ("lag/max", "buffer/trained"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    # What version 0 sampled is the same to the last token; later versions differ by rounding, and tokens by chance.
    for mine, other in zip(ours[:4], theirs[:4], strict=True):
        for name in ("tokens", "reward/mean", "length/mean"):
            assert mine[name] == pytest.approx(other[name], rel=1e-12), name
        for name in ("loss", "grad_norm", "mismatch/abs_mean", "sat/threshold", "entropy"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def test_their_ledger_is_that_of_one_and_names_every_prompt_once(alone, pair):
    assert ledger(pair) == ledger(alone)
    assert [ticket for line in ledger(pair) for ticket in line["trained"]] == list(range(4 * LONG))


def test_only_process_0_writes_the_story_of_a_run(pair):
    assert sorted(path.name for path in (pair / "process-1").iterdir()) == ["engine.log"]
    assert "error" not in (pair.parent / "output-1.txt").read_text()
    assert any("process 1 (" in event["text"] for event in rows(pair, "events.jsonl") if event["kind"] == "ready")


def test_a_run_goes_on_with_another_number_of_processes_and_says_who_was_lost(alone, tmp_path):
    config = write_config(tmp_path, f"steps={LONG}")
    folder = tmp_path / "small"
    one = start(config, 1, 2)
    wait_for_steps(folder, 5, one)
    one.processes[0].send_signal(signal.SIGTERM)
    assert one.wait() == [75], one.said(0)[-3000:]

    two = start(config, 2, 1)
    wait_for_steps(folder, 5, two)
    two.processes[1].kill()
    _must_end_soon(two, 0, "process 1 (")

    wider = write_config(tmp_path, f"steps={LONG}", "mesh.data=4", file="wider.toml")
    four = start(wider, 4, 1, "--allow-changed", "mesh")
    wait_for_steps(folder, 5, four)
    four.processes[2].send_signal(signal.SIGTERM)
    assert four.wait() == [75] * 4, four.said(0)[-3000:]

    two = start(config, 2, 1, "--allow-changed", "mesh")
    wait_for_steps(folder, 3, two)
    two.processes[0].kill()
    _must_end_soon(two, 1, "process 0 (")

    assert run(config, 1, 2) == folder
    assert [row["version"] for row in rows(folder)] == list(range(1, LONG + 1))
    assert ledger(folder) == ledger(alone)


def _must_end_soon(started, survivor, name, seconds=60):
    started.processes[survivor].wait(seconds)
    assert started.processes[survivor].returncode == 1
    said = started.said(survivor)
    assert "sat-jax: error:" in said, said[-3000:]
    assert name in said.partition("sat-jax: error:")[2], said[-3000:]
    started.wait()


def test_a_stalled_fleet_of_one_process_is_waited_for_and_then_stops_the_run_by_its_name(tmp_path):
    config = write_config(tmp_path, f"steps={LONG}", "rollout.deadline=40", "eval.prompts=0", "data.holdout=0")
    folder = tmp_path / "small"
    two = start(config, 2, 1)
    wait_for_steps(folder, 3, two)
    with paused(engine_of(two.processes[1])):
        stood, before = len(rows(folder)), -1
        while stood != before:  # what was sampled before is trained on, and then nothing moves
            time.sleep(3)
            stood, before = len(rows(folder)), stood
        assert stood < LONG
        assert [process.poll() for process in two.processes] == [None, None]
    wait_for(lambda: len(rows(folder)) > stood, two)  # nothing was lost meanwhile
    assert not os.path.exists(folder / "stacks.txt")
    with paused(engine_of(two.processes[1])):
        _must_end_soon(two, 0, "process 1 (", 40 + 60)
    assert "TimeoutError: groups" in two.said(0)


def test_a_bounded_run_keeps_its_books_over_preemptions_and_other_numbers_of_processes(tmp_path):
    bounded = ("schedule.mode=bounded", "schedule.max_lag=2", "eval.prompts=0", "data.holdout=0", "checkpoint.every=0")
    config = write_config(tmp_path, f"steps={LONG}", *bounded)
    folder = tmp_path / "small"
    for processes in (2, 1):
        started = start(config, processes, 2 // processes)
        wait_for_steps(folder, 6, started)
        started.processes[-1].send_signal(signal.SIGTERM)
        assert started.wait() == [75] * processes, started.said(0)[-3000:]
        cut = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
        state = read_ledger(read_meta(folder / "checkpoints", cut))
        assert state.trained == 4 * cut == 4 * len(rows(folder))  # where it was, although no checkpoint was due
        audit(read_entries(folder, cut), state)
    assert run(config, 2, 1) == folder
    assert [row["version"] for row in rows(folder)] == list(range(1, LONG + 1))
    assert max(row["lag/max"] for row in rows(folder)) <= 2
    state = read_ledger(read_meta(folder / "checkpoints", LONG))
    assert state.trained == 4 * LONG
    audit(read_entries(folder, LONG), state)


def test_a_mesh_whose_rows_two_processes_share_is_refused_by_both(tmp_path):
    config = write_config(tmp_path, "mesh.data=1", "mesh.tensor=2", "policy.kv_heads=2")
    two = start(config, 2, 1)
    assert two.wait() == [1, 1]
    for process in range(2):
        assert "mesh: expected every process's devices to hold rows of their own" in two.said(process)
