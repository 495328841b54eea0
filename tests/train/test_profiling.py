"""Traces of some steps: which, where, and by which names their programs are read."""

import contextlib
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
from train.run import Options
from train.state import OptimConfig
from train.step import Step


def test_steps_are_read_from_two_numbers():
    assert ProfileConfig.parse("10:12") == ProfileConfig(first=10, last=12)


@pytest.mark.parametrize("text", ["10", "12:10", "0:3", "a:b", "1:2:3", ""])
def test_what_is_no_range_of_steps_is_an_error(text):
    with pytest.raises(ValueError, match="FIRST:LAST"):
        ProfileConfig.parse(text)


def traced(monkeypatch, config, versions, folder):
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: seen.append(f"start {path}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    with profiling(config, folder) as profiler:
        for version in versions:
            profiler.at(version)
            seen.append(f"step {version + 1}")
    return seen


def test_the_trace_holds_the_steps_that_were_asked_for(monkeypatch, tmp_path):
    seen = traced(monkeypatch, ProfileConfig(first=2, last=3), range(5), tmp_path)
    assert seen == ["step 1", f"start {tmp_path}/profile", "step 2", "step 3", "stop", "step 4", "step 5"]


def test_a_run_that_ends_in_the_middle_or_begins_there_still_writes_its_trace(monkeypatch, tmp_path):
    ends = traced(monkeypatch, ProfileConfig(first=2, last=9), range(3), tmp_path)
    assert ends == ["step 1", f"start {tmp_path}/profile", "step 2", "step 3", "stop"]
    begins = traced(monkeypatch, ProfileConfig(first=2, last=4), range(2, 5), tmp_path)
    assert begins == [f"start {tmp_path}/profile", "step 3", "step 4", "stop", "step 5"]
    assert traced(monkeypatch, ProfileConfig(first=2, last=3), range(3, 5), tmp_path) == ["step 4", "step 5"]
    assert traced(monkeypatch, None, range(2), tmp_path) == ["step 1", "step 2"]


def test_a_trace_is_written(tmp_path):
    with profiling(ProfileConfig(first=1, last=1), tmp_path) as profiler:
        profiler.at(0)
        jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


class FakeRun:
    """Three steps that do nothing."""

    def __init__(self):
        self.state = SimpleNamespace(version=0)

    def begin(self):
        pass

    def leave_if_asked(self):
        pass

    def finish(self):
        pass


def test_the_loop_asks_before_every_step(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: seen.append(f"start {path}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
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
