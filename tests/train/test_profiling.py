"""Traces of some steps: which, where, and by which names their programs are read."""

import contextlib
import gzip
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sat_jax.mesh import one_device_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from train import loop
from train.abstract import abstract_batch, abstract_state
from train.cli import main
from train.profiling import ProfileConfig, profiling
from train.run import Options, Run
from train.state import OptimConfig
from train.step import Step


def test_steps_are_read_from_two_numbers():
    assert ProfileConfig.parse("10:12") == ProfileConfig(first=10, last=12)


@pytest.mark.parametrize("text", ["10", "12:10", "0:3", "a:b", "1:2:3", ""])
def test_what_is_no_range_of_steps_is_an_error(text):
    with pytest.raises(ValueError, match="FIRST:LAST"):
        ProfileConfig.parse(text)


def test_steps_that_a_run_does_not_have_are_an_error():
    ProfileConfig.parse("12:20").check(12)
    with pytest.raises(
        ValueError, match=r"--profile: expected steps of the run, which has 11, got 12:20; take earlier"
    ):
        ProfileConfig.parse("12:20").check(11)


@pytest.fixture
def seen(monkeypatch):
    """What becomes of traces, in order."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: found.append(f"start {path}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def steps(config, versions, folder, seen):
    """Makes these steps; returns what was said."""
    said = []
    with profiling(config, folder, versions[0], lambda *words: said.append(words)) as profiler:
        for version in versions:
            with profiler.step(version):
                seen.append(f"step {version + 1}")
    return said


def is_in(folder, what):
    return ("profile", f"a trace of {what} is in {folder}/profile; read it with `xprof --logdir {folder}/profile`")


def test_the_trace_holds_the_steps_that_were_asked_for_and_is_told(seen, tmp_path):
    said = steps(ProfileConfig(first=2, last=3), range(5), tmp_path, seen)
    assert seen == ["step 1", f"start {tmp_path}/profile", "step 2", "step 3", "stop", "step 4", "step 5"]
    assert said == [is_in(tmp_path, "steps 2 to 3")]


def test_a_run_that_ends_in_the_middle_still_writes_its_trace(seen, tmp_path):
    said = steps(ProfileConfig(first=2, last=9), range(3), tmp_path, seen)
    assert seen == ["step 1", f"start {tmp_path}/profile", "step 2", "step 3", "stop"]
    assert said == [is_in(tmp_path, "steps 2 to 3")]


def test_so_does_one_that_fails_in_a_step(seen, tmp_path):
    said = []
    with (
        pytest.raises(RuntimeError, match="of the step"),
        profiling(ProfileConfig(first=2, last=9), tmp_path, 1, lambda *words: said.append(words)) as profiler,
        profiler.step(1),
    ):
        raise RuntimeError("of the step")
    assert seen == [f"start {tmp_path}/profile", "stop"]
    assert said == [is_in(tmp_path, "a part of step 2")]


def test_a_run_that_begins_in_the_middle_traces_what_is_left(seen, tmp_path):
    said = steps(ProfileConfig(first=2, last=4), range(2, 5), tmp_path, seen)
    assert seen == [f"start {tmp_path}/profile", "step 3", "step 4", "stop", "step 5"]
    assert said == [is_in(tmp_path, "steps 3 to 4")]


def test_one_that_begins_behind_them_says_that_there_is_no_trace(seen, tmp_path):
    said = steps(ProfileConfig(first=2, last=3), range(3, 5), tmp_path, seen)
    assert seen == ["step 4", "step 5"]
    assert said == [("warning", "--profile 2:3: the run goes on from 3; no trace")]


def test_without_a_range_nothing_is_traced_or_said(seen, tmp_path):
    assert steps(None, range(2), tmp_path, seen) == []
    assert seen == ["step 1", "step 2"]


def test_a_trace_that_is_written_names_its_steps_and_phases(tmp_path):
    quiet = SimpleNamespace(phase=lambda _: contextlib.nullcontext(), doing=lambda _: contextlib.nullcontext())
    run: Any = SimpleNamespace(report=quiet, watchdog=quiet, state=SimpleNamespace(version=6))
    with profiling(ProfileConfig(first=7, last=7), tmp_path, 6, lambda *_: None) as profiler, profiler.step(6):
        for phase in ("measure", "update"):
            with Run.phase(run, phase):
                jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
    (path,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("name") in ("train", "measure", "update")]
    assert [event["name"] for event in sorted(named, key=lambda event: event["ts"])] == ["train", "measure", "update"]
    assert next(event for event in named if event["name"] == "train")["args"]["step_num"] == "7"


class FakeRun:
    """Three steps that do nothing."""

    def __init__(self):
        self.state = SimpleNamespace(version=0)
        self.report = SimpleNamespace(event=lambda *_: None)

    def begin(self):
        pass

    def leave_if_asked(self):
        pass

    def finish(self):
        pass


def test_the_loop_asks_before_every_step(seen, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "open_run", lambda *_: contextlib.nullcontext(FakeRun()))

    def step(r, version):
        seen.append(f"step {version + 1}")
        r.state.version += 1

    monkeypatch.setattr(loop, "_step", step)
    options = Options(profile=ProfileConfig(first=2, last=2))
    config: Any = SimpleNamespace(steps=3)
    loop.train(config, tmp_path, options)
    assert seen == ["step 1", f"start {tmp_path}/profile", "step 2", "stop", "step 3"]


def test_the_command_refuses_what_is_no_range_before_anything_starts(capsys, tmp_path):
    assert main(["train", "configs/quickstart.toml", "--profile", "12", "--runs", str(tmp_path)]) == 1
    assert "FIRST:LAST" in capsys.readouterr().err
    assert main(["train", "configs/quickstart.toml", "--profile", "281:290", "--runs", str(tmp_path)]) == 1
    assert "which has 280, got 281:290" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def lowered():
    config, mesh = PolicyConfig.tiny(), one_device_mesh()
    optimizer = OptimConfig(peak_lr=1e-3).transformation()
    graph, state = abstract_state(config, optimizer, mesh)
    step = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, state)
    programs = step.lower(state, abstract_batch(config, 2, 16, mesh))
    return {name: programs[name].as_text(debug_info=True) for name in ("gradient", "apply")}


@pytest.mark.parametrize("room", ["attention", "router", "experts", "logprob", "objective"])
def test_every_room_of_the_gradient_is_named_in_the_lowered_program(lowered, room):
    assert f"{room}/" in lowered["gradient"]


def test_the_optimizer_is_named_in_the_lowered_program(lowered):
    assert "optimizer/" in lowered["apply"]
