"""What to change, in order of what it frees."""

import dataclasses
from pathlib import Path

import pytest

from train.config import load
from train.plan.advice import advise, enough
from train.plan.memory import Resident
from train.plan.plan import policy_of

CONFIG = Path(__file__).parents[3] / "configs" / "qwen3_30b_a3b_sat_gspo_r3_lag8.toml"
GIB = 2**30
HELD = Resident(
    parameters=2 * GIB, optimizer=4 * GIB, accumulator=2 * GIB, reference=2 * GIB, routes=GIB, tokens=0, scores=0
)


def settings(config, temporary=0):
    return [one.settings for one in advise(config, policy_of(config), HELD, temporary, 4 * GIB)]


# Of 48 layers and 32768 positions: attention's output and logsumexp of 32 heads, which "full" computes again; and
# queries, keys and values of 32, 4 and 4 heads with what attention adds to a width of 2048, which "attention" does too.
ATTENTION = 48 * 32768 * 32 * (128 * 2 + 4)
PROJECTIONS = 48 * 32768 * ((32 + 4 + 4) * 128 + 2048) * 2


def test_advice_comes_in_order_of_what_it_frees():
    config = load(CONFIG, ["policy.remat=attention"])
    found = advise(config, policy_of(config), HELD, 30 * GIB, 4 * GIB)
    assert [one.frees for one in found] == sorted((one.frees for one in found), reverse=True)
    assert found[0].settings == ("sampling.max_new_tokens=15360", "batch.row_length=16384")
    assert found[0].frees == 15 * GIB
    assert found[1].settings == ("policy.remat=full",)
    assert found[1].frees == ATTENTION
    assert found[2].settings == ("optim.moments_memory=host",)
    assert found[2].frees == 4 * GIB
    assert found[3].settings == ("optim.mu_dtype=bfloat16",)
    assert found[3].frees == GIB


def test_where_a_device_has_several_rows_it_gets_fewer_before_shorter_ones():
    config = load(CONFIG, ["batch.rows=192"])
    assert ("batch.rows=128",) in settings(config, 30 * GIB)


def test_copies_of_the_model_become_shards():
    config = load(CONFIG, ["mesh.data=2", "mesh.fsdp=4"])
    found = {one.settings: one.frees for one in advise(config, policy_of(config), HELD, 0, 4 * GIB)}
    assert found["mesh.data=1", "mesh.fsdp=8"] == 5 * GIB
    # Half of the moments would be left there, so that both together free what they say.
    assert found["optim.moments_memory=host",] == 2 * GIB


def test_what_is_done_already_is_not_advised():
    config = load(CONFIG, ["policy.remat=full", "optim.mu_dtype=bfloat16"])
    assert settings(config) == [("optim.moments_memory=host",)]
    # There the mean of gradients takes no byte of a device, in whatever type it is.
    assert settings(load(CONFIG, ["policy.remat=full", "optim.moments_memory=host"])) == []


@pytest.mark.parametrize("remat", ["none", "projections", "attention"])
def test_every_policy_of_recomputation_has_one_that_keeps_less(remat):
    config = load(CONFIG, [f"policy.remat={remat}"])
    assert any(setting.startswith("policy.remat=") for one in settings(config) for setting in one)


@pytest.mark.parametrize(
    ("remat", "frees"),
    [
        ("projections", {"attention": PROJECTIONS, "full": PROJECTIONS + ATTENTION}),
        ("attention", {"full": ATTENTION}),
        ("full", {}),
    ],
)
def test_every_policy_that_keeps_less_is_advised_with_what_it_frees(remat, frees):
    config = load(CONFIG, [f"policy.remat={remat}"])
    found = {one.settings: one.frees for one in advise(config, policy_of(config), HELD, 0, 0)}
    assert {name[0].removeprefix("policy.remat="): found[name] for name in found if "remat" in name[0]} == frees


def test_of_two_policies_of_recomputation_the_one_that_computes_less_again_is_advised_where_it_does():
    config = load(CONFIG, ["policy.remat=projections"])
    found = {one.settings: one for one in advise(config, policy_of(config), HELD, 0, 0)}
    attention, full = found["policy.remat=attention",], found["policy.remat=full",]
    assert enough((full, attention), PROJECTIONS) == (attention,)
    assert enough((full, attention), PROJECTIONS + 1) == (full,)
    # Both would free no more than the one that frees more.
    assert enough((full, attention), 100 * GIB) == (full,)


def test_no_more_is_advised_than_is_missing():
    config = load(CONFIG, ["policy.remat=attention"])
    found = advise(config, policy_of(config), HELD, 30 * GIB, 4 * GIB)
    assert enough(found, 14 * GIB) == found[:1]
    assert enough(found, 16 * GIB) == found[:2]
    assert enough(found, 100 * GIB) == found[:3]
    assert dataclasses.astuple(found[0])[0] == found[0].settings


def test_of_two_answers_about_the_moments_the_lesser_is_advised_where_it_does_and_never_both():
    config = load(CONFIG, ["policy.remat=full"])
    host, shorter, half = advise(config, policy_of(config), HELD, 3 * GIB, 4 * GIB)
    assert (host.settings, half.settings) == (("optim.moments_memory=host",), ("optim.mu_dtype=bfloat16",))
    assert enough((host, shorter, half), GIB) == (half,)
    assert enough((host, shorter, half), GIB + 1) == (host,)
    assert enough((host, shorter, half), 100 * GIB) == (host, shorter)
