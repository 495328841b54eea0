"""What a compiler says when a program does not fit, and what is kept of one that does."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from train.plan.programs import Where, compile_program, open_cache, too_large


@pytest.mark.parametrize(
    ("message", "bytes_"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (34.00G) "
            "exceeds available HBM (15.75G).",
            (34 * 2**30, int(15.75 * 2**30)),
        ),
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded",
            (int(20.5 * 2**30), int(15.75 * 2**30)),
        ),
        ("INVALID_ARGUMENT: something else", (0, 0)),
    ],
)
def test_what_was_wanted_and_had_is_read_from_the_refusal(message, bytes_):
    assert too_large(message) == bytes_


def test_a_program_is_compiled_once_for_a_topology_and_read_from_the_cache_then(tmp_path):
    said = []
    where = Where(topology="cpu:1", kind="cpu", shape={"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, cache=tmp_path)
    traced = jax.jit(lambda x: x @ x).trace(jnp.ones((8, 8)))
    first = compile_program("square", traced, where, said.append)
    again = compile_program("square", traced, where, said.append)
    assert first == again
    assert [line.split(",")[0].split(" from")[0] for line in said] == [
        "square: compiling for cpu:1",
        "square: compiled",
        "square: known",
    ]
    assert first.memory is not None
    assert first.memory.argument == 8 * 8 * 4
    assert first.memory.peak == 2 * 8 * 8 * 4 + first.memory.temporary

    other = dataclasses.replace(where, topology="cpu:2")
    compile_program("square", traced, other, said.append)
    assert said[-1].startswith("square: compiled")


@pytest.mark.parametrize(
    "damage", ["garbage", "[]", '{"format": 2}', '{"format": 2, "memory": 3, "collectives": []}', ""]
)
def test_a_damaged_result_is_told_and_compiled_anew(tmp_path, damage):
    said = []
    where = Where(topology="cpu:1", kind="cpu", shape={"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, cache=tmp_path)
    traced = jax.jit(lambda x: x @ x).trace(jnp.ones((8, 8)))
    first = compile_program("square", traced, where, said.append)
    (path,) = tmp_path.iterdir()
    path.write_text(damage, encoding="utf-8")
    again = compile_program("square", traced, where, said.append)
    assert dataclasses.replace(again, seconds=first.seconds) == first
    assert said[2:4] == [f"{path} is damaged, and is replaced", "square: compiling for cpu:1"]
    assert compile_program("square", traced, where, said.append) == again
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_two_plans_of_the_same_write_beside_each_other(tmp_path, monkeypatch):
    where = Where(topology="cpu:1", kind="cpu", shape={"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, cache=tmp_path)
    traced = jax.jit(lambda x: x @ x).trace(jnp.ones((8, 8)))
    original = Path.replace

    def replace(path, target):
        # Between this one's writing and renaming, another process does both.
        monkeypatch.setattr(Path, "replace", original)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            compile_program("square", traced, where, lambda _line: None)
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    compile_program("square", traced, where, lambda _line: None)
    assert [one.suffix for one in tmp_path.iterdir()] == [".json"]


def test_a_cache_that_cannot_be_written_is_an_error_before_anything_is_compiled(tmp_path):
    open_cache(None)
    open_cache(tmp_path / "runs" / "plan-cache")
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "plan-cache"]
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"plan's cache: expected a folder .* got .*/file/c: Not a directory; .* --runs"
    ):
        open_cache(tmp_path / "file" / "c")
