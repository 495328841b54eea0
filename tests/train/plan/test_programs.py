"""What a compiler says when a program does not fit, and what is kept of one that does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from train.plan.programs import Where, compile_program, too_large


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
