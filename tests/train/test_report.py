import errno
import io
import json
import math
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboardX.proto import event_pb2

from tests.reference.runs import make_header, make_metrics, make_samples
from train.report import Report, regenerate
from train.run_folder import read_header, read_json, read_lines


def quiet(folder, **changes):
    return Report(folder, make_header(**changes), console=False, tensorboard=False)


def write_steps(folder, versions):
    with quiet(folder) as report:
        for version in versions:
            report.write(version, make_metrics(version), make_samples(), {4: 10, 5: version})


def versions_in(folder, name="metrics.jsonl"):
    return [row["version"] for row in read_lines(folder / name)]


def board_events(folder):
    """Events of every TensorBoard file: each is framed as length (8 bytes), crc (4), data, crc (4)."""
    for path in sorted((folder / "tb").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            yield event_pb2.Event.FromString(  # pyright: ignore[reportAttributeAccessIssue]
                content[at + 12 : at + 12 + size]
            )
            at += size + 16


def test_a_step_is_one_line_with_everything_it_was_told(tmp_path):
    write_steps(tmp_path, [1, 2])
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first["version"] == 1
    assert {name: second[name] for name in make_metrics(2)} == make_metrics(2)
    assert second["lag/histogram"] == {"4": 10, "5": 2}
    assert second["seconds/step"] > 0
    assert abs(second["time"] - time.time()) < 60
    assert read_lines(tmp_path / "samples.jsonl")[1] == {
        "version": 2,
        "samples": [
            {"prompt": "12+34=", "completion": "64", "answer": "64", "reward": 1.0},
            {"prompt": "7+85=", "completion": "28", "answer": "29", "reward": 0.0},
        ],
    }


def test_a_line_is_on_disk_before_write_returns(tmp_path):
    with quiet(tmp_path) as report:
        report.write(1, {"reward/mean": 0.5})
        report.event("restart", "x")
        assert versions_in(tmp_path) == [1]
        assert len(read_lines(tmp_path / "events.jsonl")) == 1


def test_a_value_that_is_not_finite_is_null_and_an_alarm(tmp_path):
    with quiet(tmp_path) as report:
        report.write(1, {"grad_norm": math.nan, "loss": math.inf, "entropy": 0.5})
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert (row["grad_norm"], row["loss"], row["entropy"]) == (None, None, 0.5)
    events = read_lines(tmp_path / "events.jsonl")
    assert [(event["kind"], event["text"].split(":")[0]) for event in events] == [
        ("alarm", "grad_norm"),
        ("alarm", "loss"),
    ]
    assert all(event["version"] == 1 for event in events)


def test_a_level_that_is_passed_is_an_event_once(tmp_path):
    with quiet(tmp_path) as report:
        for version in range(1, 31):
            report.write(version, make_metrics(version) | {"mismatch/abs_mean": 0.05})
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["version"]) == ("warning", 1)
    assert event["text"].startswith("mismatch/abs_mean above 0.03: got 0.05. ")


def test_a_run_may_set_its_own_level(tmp_path):
    with quiet(tmp_path, levels={"mismatch/abs_mean": 0.1}) as report:
        report.write(1, make_metrics(1) | {"mismatch/abs_mean": 0.05})
    assert read_lines(tmp_path / "events.jsonl") == []


def test_a_version_is_never_written_twice(tmp_path):
    write_steps(tmp_path, [1, 2])
    with (
        quiet(tmp_path) as report,
        pytest.raises(ValueError, match=r"metrics\.jsonl: expected a version after 2, got 2; resume"),
    ):
        report.write(2, {})
    assert versions_in(tmp_path) == [1, 2]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6))
def test_a_resumed_run_has_every_version_exactly_once(tmp_path_factory, killed_at, restored):
    folder = tmp_path_factory.mktemp("run")
    restored = min(restored, killed_at)
    write_steps(folder, range(1, killed_at + 1))
    with quiet(folder) as report:
        report.resume(restored)
        for version in range(restored + 1, 8):
            report.write(version, make_metrics(version), make_samples())
    assert versions_in(folder) == list(range(1, 8))
    assert versions_in(folder, "samples.jsonl") == list(range(1, 8))


def test_resuming_keeps_what_happened_and_drops_alarms_that_come_again(tmp_path):
    with quiet(tmp_path) as report:
        report.write(1, make_metrics(1))
        report.write(2, make_metrics(2) | {"tokens": 0.0})
        report.event("restart", "engine died")
    with quiet(tmp_path) as report:
        report.resume(1)
        report.write(2, make_metrics(2) | {"tokens": 0.0})
    events = [(event["kind"], event["version"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert events == [("restart", 2), ("resume", 1), ("alarm", 2)]
    assert "from version 1; 1 later lines dropped" in (tmp_path / "events.jsonl").read_text()


def test_an_alarm_before_the_restored_version_is_not_raised_again(tmp_path):
    for start in (1, 6):
        with quiet(tmp_path) as report:
            report.resume(start - 1)
            for version in range(start, start + 5):
                report.write(version, make_metrics(version) | {"mismatch/ess": 0.1})
    events = read_lines(tmp_path / "events.jsonl")
    assert [(event["kind"], event["version"]) for event in events] == [("warning", 1), ("resume", 5)]


def test_a_line_missing_before_the_restored_version_is_said(tmp_path):
    write_steps(tmp_path, [1, 2])
    with quiet(tmp_path) as report:
        report.resume(3)
        report.write(4, make_metrics(4))
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["text"] == "from version 3; 0 later lines dropped; 1 steps before it have no line"


def test_resuming_an_empty_folder_from_the_beginning_says_nothing(tmp_path):
    with quiet(tmp_path) as report:
        report.resume(0)
    assert read_lines(tmp_path / "events.jsonl") == []


def test_a_line_that_a_kill_cut_off_is_gone_after_reopening(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version":2,"rew')
    write_steps(tmp_path, [2])
    assert versions_in(tmp_path) == [1, 2]


def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected one JSON object"):
        quiet(tmp_path)


def test_phases_are_timed_for_the_next_step_and_each_second_counts_once(tmp_path):
    with quiet(tmp_path) as report:
        with report.phase("collect"):
            time.sleep(0.02)
            with report.phase("publish"):
                time.sleep(0.05)
        with report.phase("collect"):
            time.sleep(0.02)
        report.write(1, {})
        with report.phase("update"):
            time.sleep(0.01)
        report.write(2, {})
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert 0.04 <= first["seconds/collect"] < first["seconds/step"]
    assert 0.05 <= first["seconds/publish"] < first["seconds/step"]
    assert first["seconds/collect"] + first["seconds/publish"] <= first["seconds/step"]
    assert second.keys() & {"seconds/collect", "seconds/publish"} == set()
    assert 0.01 <= second["seconds/update"] <= second["seconds/step"]


def test_a_phase_that_fails_is_still_left(tmp_path):
    with quiet(tmp_path) as report:
        with pytest.raises(KeyError), report.phase("collect"):
            raise KeyError
        with report.phase("update"):
            pass
        report.write(1, {})
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert row.keys() >= {"seconds/collect", "seconds/update"}


def test_the_first_step_is_not_charged_for_the_warm_start(tmp_path):
    with quiet(tmp_path) as report:
        time.sleep(0.5)
        report.warm_start(1000, loss=0.5)
        report.write(1, {})
    assert read_lines(tmp_path / "metrics.jsonl")[0]["seconds/step"] < 0.5


def test_the_warm_start_is_recorded_and_may_begin_again(tmp_path):
    with quiet(tmp_path) as report:
        for step in (50, 100, 150):
            report.warm_start(step, loss=1.0 / step, accuracy=0.5)
    with quiet(tmp_path) as report:
        report.warm_start(100, loss=0.25)
        report.warm_start(150, loss=0.125)
    lines = read_lines(tmp_path / "warm_start.jsonl")
    assert lines == [
        {"step": 50, "loss": 0.02, "accuracy": 0.5},
        {"step": 100, "loss": 0.25},
        {"step": 150, "loss": 0.125},
    ]


def test_a_warm_start_that_diverges_is_an_error(tmp_path):
    with (
        quiet(tmp_path) as report,
        pytest.raises(ValueError, match=r"warm start: expected a finite loss, got nan \(step 50"),
    ):
        report.warm_start(50, loss=math.nan)


def test_any_thread_may_report_an_event(tmp_path):
    with quiet(tmp_path) as report:
        threads = [
            threading.Thread(target=lambda n=n: [report.event("note", f"{n}-{k}") for k in range(25)]) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    texts = [event["text"] for event in read_lines(tmp_path / "events.jsonl")]
    assert sorted(texts) == sorted(f"{n}-{k}" for n in range(8) for k in range(25))


def test_scalars_reach_tensorboard_and_a_resumed_run_purges_what_comes_again(tmp_path):
    header = make_header()
    with Report(tmp_path, header, console=False) as report:
        report.write(1, {"reward/mean": 0.25, "grad_norm": math.nan})
        report.write(2, {"reward/mean": 0.5})
    with Report(tmp_path, header, console=False) as report:
        report.resume(1)
        report.write(2, {"reward/mean": 0.75})
    events = list(board_events(tmp_path))
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert [s for s in scalars if s[1] == "reward/mean"] == [
        (1, "reward/mean", 0.25),
        (2, "reward/mean", 0.5),
        (2, "reward/mean", 0.75),
    ]
    assert "grad_norm" not in {tag for _, tag, _ in scalars}
    assert 2 in {event.step for event in events if event.HasField("session_log")}


def test_a_run_that_fails_says_so_in_its_events_and_on_its_page(tmp_path):
    with pytest.raises(ValueError, match="port 7 is in use"), quiet(tmp_path) as report:
        report.write(1, make_metrics(1))
        raise ValueError("port 7 is in use")
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["text"]) == ("error", "ValueError: port 7 is in use")
    page = (tmp_path / "report.html").read_text()
    assert "failed at step 1 of 240" in page
    assert "To go on: sat-jax train runs/quickstart/config.toml" in page


@pytest.mark.parametrize(
    ("error", "text"),
    [(SystemExit(75), "asked to stop, exit code 75"), (KeyboardInterrupt(), "interrupted from the keyboard")],
)
def test_a_run_that_is_stopped_is_not_called_failed(tmp_path, error, text):
    with pytest.raises(type(error)), quiet(tmp_path) as report:
        report.write(1, make_metrics(1))
        raise error
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["text"]) == ("stopped", text)
    assert "stopped at step 1 of 240" in (tmp_path / "report.html").read_text()


def test_what_stopped_the_run_is_not_hidden_by_a_report_that_cannot_be_written(tmp_path, monkeypatch):
    def full(self, *_arguments, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match="the cause") as failed, quiet(tmp_path):
        monkeypatch.setattr(Path, "replace", full)
        raise ValueError("the cause")
    assert "the report could not be finished: OSError" in failed.value.__notes__[0]


def test_a_report_that_cannot_be_finished_is_an_error_of_its_own(tmp_path, monkeypatch):
    def full(self, *_arguments, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"report\.html"), quiet(tmp_path):
        monkeypatch.setattr(Path, "replace", full)


def test_the_folder_alone_makes_the_page_again(tmp_path):
    write_steps(tmp_path, range(1, 6))
    page = tmp_path / "report.html"
    page.unlink()
    assert regenerate(tmp_path) == page
    assert "step 5 of 240" in page.read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a run folder, got none with metrics\.jsonl"):
        regenerate(tmp_path)


def test_the_header_is_in_the_folder_from_the_start(tmp_path):
    with quiet(tmp_path):
        assert read_header(tmp_path) == make_header()


def test_the_summary_is_written_checked_and_shown_at_the_end(tmp_path):
    said = io.StringIO()
    output = Console(file=said, width=100)
    summary = {
        "prompts": 512,
        "before": {"eval/sampled_accuracy": 0.5},
        "after": {"eval/sampled_accuracy": 0.75},
        "facts": {"peak memory": "1.5 GB"},
    }
    with Report(tmp_path, make_header(), console=True, tensorboard=False, output=output) as report:
        report.write(1, {"reward/mean": 0.5})
        report.write_summary(summary)
        with pytest.raises(ValueError, match="summary: expected the keys"):
            report.write_summary({"befor": {}})
    assert read_json(tmp_path / "summary.json") == summary
    text = said.getvalue()
    assert "outcome held-out accuracy, sampled: before=0.500 ± 0.044 after=0.750 ± 0.038 change=+0.250" in text


def test_the_console_says_steps_events_and_warm_start(tmp_path):
    said = io.StringIO()
    output = Console(file=said, width=100)
    with Report(tmp_path, make_header(), console=True, tensorboard=False, output=output) as report:
        report.warm_start(50, loss=1.0)
        report.write(1, make_metrics(1) | {"tokens": 0.0})
    text = said.getvalue()
    for wanted in ("run quickstart", "warm_start 50/1000 loss=1", "step 1/240", "event alarm: tokens at most 0: got 0"):
        assert wanted in text


def test_the_live_display_runs_over_a_whole_run(tmp_path):
    said = io.StringIO()
    output = Console(file=said, width=120, force_terminal=True)
    with Report(tmp_path, make_header(steps=3), console=True, tensorboard=False, output=output) as report:
        report.warm_start(1000, loss=1.0)
        for version in range(1, 4):
            with report.phase("collect"):
                report.event("restart", "engine local-1")
            report.write(version, make_metrics(version), make_samples())
    assert "3/3" in said.getvalue()


def test_the_page_is_renewed_while_the_run_goes_on(tmp_path, monkeypatch):
    with quiet(tmp_path) as report:
        report.write(1, make_metrics(1))
        assert not (tmp_path / "report.html").exists()
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "monotonic", lambda: later)
        report.write(2, make_metrics(2))
        assert "step 2 of 240" in (tmp_path / "report.html").read_text()
        report.write(3, make_metrics(3))
        assert "step 2 of 240" in (tmp_path / "report.html").read_text()


def test_a_line_is_strict_json(tmp_path):
    write_steps(tmp_path, [1])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
