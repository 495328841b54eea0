"""How much work a step is, worked by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from train.config import load
from train.plan.load import experts, loads, pairs

CONFIGS = Path(__file__).parents[3] / "configs"
MESH = make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def config():
    return load(CONFIGS / "qwen3_30b_a3b_sat_gspo_r3_lag8.toml")


def test_a_row_of_the_papers_longest_responses_holds_one_of_them(config):
    _, worst = loads(config, None)
    assert (worst.prompt, worst.response, worst.sequence) == (1025, 31744, 32768)
    assert (worst.sequences, worst.per_row, worst.microbatches, worst.fill) == (4096, 1, 64, 1.0)


def test_shorter_sequences_share_rows(config):
    mean, _ = loads(config, 7000)
    assert mean.sequence == 256 + 7000 - 1
    assert (mean.per_row, mean.microbatches) == (4, 16)
    assert mean.fill == pytest.approx(4 * 7255 / 32768)


def test_the_mean_is_a_quarter_of_the_longest_where_nobody_says(config):
    assert loads(config, None)[0].response == 7936


@pytest.mark.parametrize("tokens", [0, 31745])
def test_a_mean_beyond_the_longest_is_an_error(config, tokens):
    with pytest.raises(ValueError, match="1 to 31744"):
        loads(config, tokens)


def test_pairs_are_those_within_each_sequence_and_the_whole_square_where_rows_are_short(config):
    short = dataclasses.replace(loads(config, 7000)[0], row_length=10, per_row=3, prompt=2, response=2)
    seen = pairs(short, MESH)
    assert short.sequence == 3
    assert seen.useful == 3 * (1 + 2 + 3)
    assert seen.executed == 100


def test_long_rows_are_multiplied_by_blocks_that_share_a_sequence(config):
    long = dataclasses.replace(loads(config, 7000)[0], row_length=2048, per_row=2, prompt=1, response=1024)
    # Two sequences of 1024: two blocks of 512 each, three pairs of blocks each.
    assert pairs(long, MESH).executed == 2 * 3 * 512 * 512


def fake_mesh(**axes) -> Any:
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | axes

    class Device:
        platform = "tpu"

    class Mesh:
        shape = sizes
        devices = np.array([Device()], dtype=object)

    return Mesh()


def test_balanced_routing_shares_the_choices_of_all_gathered_tokens(config):
    policy = PolicyConfig.qwen3_30b_a3b()
    load = loads(config, None)[1]
    held = experts(load, policy, fake_mesh(fsdp=8, expert=8), skewed=False)
    # 64 rows over 8 x 8 devices, gathered over `expert`: 8 rows of 32768, 8 choices each, an eighth of them here.
    assert held.held == 8 * 32768 * 8 / 8
    assert (held.chunk, held.chunks, held.rounds, held.busy) == (65536, 4, 1, 16)
    assert held.executed(512) == (262144 + 15 * 512) / 4


def test_the_worst_routing_sends_every_choice_to_one_shard(config):
    policy = PolicyConfig.qwen3_30b_a3b()
    held = experts(loads(config, None)[1], policy, fake_mesh(fsdp=8, expert=8), skewed=True)
    assert (held.held, held.chunks, held.busy) == (8 * 32768 * 8, 32, 8)


def test_beyond_as_many_shards_as_slots_the_worst_routing_takes_more_rounds(config):
    policy = PolicyConfig.qwen3_30b_a3b()
    load = loads(config, None)[1]
    even = experts(load, policy, fake_mesh(fsdp=4, expert=16), skewed=False)
    skewed = experts(load, policy, fake_mesh(fsdp=4, expert=16), skewed=True)
    assert (even.rounds, skewed.rounds) == (1, 2)
    assert even.held == 32768 * 8
    assert skewed.held == 16 * 32768 * 8 / 2
