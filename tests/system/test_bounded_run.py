"""Bounded mode on the local engine: the real program, preempted by SIGTERM and resumed."""

import json
import signal

import pytest

from tests.system.test_whole_run import lines, run, start, wait_for_version, write_config
from train.checkpoint import read_ledger, read_meta
from train.ledger import audit
from train.ledger_log import read_entries


@pytest.mark.slow
def test_a_bounded_run_that_is_preempted_saves_its_cut_and_trains_on_every_prompt_once(tmp_path):
    config = write_config(
        tmp_path,
        "schedule.mode=bounded",
        "schedule.max_lag=2",
        "steps=10",
        "eval.prompts=0",
        "data.holdout=0",
        "checkpoint.every=0",
        "warm_start.steps=0",
    )
    folder = tmp_path / "small"
    process = start(config, tmp_path)
    wait_for_version(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "preempted; the same command resumes" in output
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert saved >= 3  # where it was, although no checkpoint was due before the end
    run(config, tmp_path, "--record")
    rows = lines(folder)
    assert [row["version"] for row in rows] == list(range(1, 11))
    assert max(row["lag/max"] for row in rows) <= 2
    state = read_ledger(read_meta(folder / "checkpoints", 10))
    audit(read_entries(folder, 10), state)
    assert state.trained == 40
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "resume" and f"from version {saved}" in event["text"] for event in events)
    assert (folder / "batches" / f"v{saved:06d}.npz").exists()
