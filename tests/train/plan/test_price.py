"""A step's price, by hand."""

import dataclasses

import pytest

from train.plan.collectives import Collective
from train.plan.load import Load
from train.plan.memory import Resident
from train.plan.price import cost, need, runs
from train.plan.programs import Compiled, Memory
from train.plan.topology import CHIPS
from train.plan.walk import Work

HELD = Resident(parameters=10, optimizer=20, accumulator=10, reference=10, routes=5, tokens=3, scores=2)
LOAD = Load(case="mean", prompt=2, response=3, sequences=4, per_row=1, microbatches=3, rows=2, row_length=4)


def compiled(argument=0, peak=0, output=0, found=()):
    memory = Memory(argument=argument, output=output, temporary=0, alias=0, peak=peak)
    return Compiled(memory=memory, required=0, available=0, collectives=found, seconds=0.0)


def test_a_program_needs_its_peak_and_what_lives_beside_its_arguments():
    # Before there is a gradient: 50 live, 12 of them are arguments.
    assert need("mismatch", compiled(argument=12, peak=30), HELD, 7) == 30 + 50 - 12
    # What scoring returns lives until every microbatch is scored.
    assert need("score", compiled(argument=12, peak=30), HELD, 7) == 30 + 57 - 12
    # The first gradient comes out of its program; afterwards it is an argument.
    assert need("gradient", compiled(argument=12, peak=30), HELD, 7) == 30 + 50 - 12
    assert need("accumulate", compiled(argument=22, peak=40), HELD, 7) == 40 + 60 - 22
    assert need("apply", compiled(argument=40, peak=41), HELD, 7) == 41 + 60 - 40


def test_a_program_that_was_refused_needs_what_the_compiler_wanted_and_what_lives_beside_it():
    refused = Compiled(memory=None, required=100, available=16, collectives=(), seconds=0.0)
    assert need("gradient", refused, HELD, 0) == 150


def test_programs_run_once_a_microbatch_or_once_a_step():
    names = ("denominator", "mismatch", "threshold", "score", "gradient", "accumulate", "apply", "metrics")
    assert list(runs(names, 3, 2).values()) == [3, 3, 1, 6, 1, 2, 1, 1]
    assert list(runs(names, 1, 1).values()) == [0, 0, 0, 1, 1, 0, 1, 1]


def test_each_program_takes_as_long_as_its_slowest_part_and_the_step_as_all_of_them():
    chip = dataclasses.replace(CHIPS["v5p"], flops=100.0, memory_bandwidth=10.0, link_bandwidth=1.0)
    sum_ = Collective(
        kind="all-reduce", axes=("fsdp",), shards=2, times=1, bytes=8, place="", at_least=False
    )  # 8 bytes on the wire
    parts = {
        "gradient": (1, Work(flops={"experts": 900.0}, bytes=50.0), compiled(found=(sum_,))),  # compute 9 s
        "apply": (2, Work(flops={}, bytes=0.0), compiled(argument=60, output=40)),  # memory 2 x 10 s
    }
    seen = cost("balanced", LOAD, 450.0, parts, chip)
    assert seen.seconds == pytest.approx(9 + 20)
    assert seen.by_binding == pytest.approx({"compute": 9.0, "memory": 5 + 20, "links": 8.0})
    assert seen.binding == "memory"
    assert seen.ratio == 2.0
    assert seen.links == {"all-reduce over fsdp": 8.0}


def test_moments_in_the_hosts_memory_pass_its_link_both_ways_at_once_and_the_chips_memory():
    chip = dataclasses.replace(CHIPS["v5p"], flops=100.0, memory_bandwidth=10.0, link_bandwidth=1.0, host_bandwidth=2.0)
    memory = Memory(argument=20, output=10, temporary=0, alias=0, peak=20, host_argument=60, host_output=50)
    parts = {"apply": (1, Work(flops={}, bytes=0.0), dataclasses.replace(compiled(), memory=memory))}
    seen = cost("balanced", LOAD, 450.0, parts, chip)
    assert seen.by_binding == pytest.approx({"compute": 0.0, "memory": 140 / 10, "links": 0.0, "host": 60 / 2})
    assert (seen.seconds, seen.binding) == (30.0, "host")
    unknown = dataclasses.replace(chip, host_bandwidth=None)
    assert cost("balanced", LOAD, 450.0, parts, unknown).seconds is None


def test_a_program_that_was_refused_leaves_the_time_unknown():
    refused = Compiled(memory=None, required=100, available=16, collectives=(), seconds=0.0)
    parts = {"gradient": (1, Work(flops={"experts": 1.0}, bytes=1.0), refused)}
    assert cost("balanced", LOAD, 1.0, parts, CHIPS["v5p"]).seconds is None
