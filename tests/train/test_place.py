import jax
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from tests.train.test_step import ASSEMBLY, groups
from train.assemble import assemble
from train.place import check_rows, place, place_part
from train.share import Share


def test_the_only_process_places_its_own_rows_as_it_would_all():
    mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
    microbatches = assemble(groups(), 0, ASSEMBLY).microbatches
    for left, right in zip(
        jax.tree.leaves(place(microbatches, mesh)), jax.tree.leaves(place_part(microbatches, mesh)), strict=True
    ):
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim)
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("axes", [{"data": 4}, {"fsdp": 2, "tensor": 2}])
def test_one_process_may_cut_rows_as_it_likes(axes):
    check_rows(make_mesh(MeshConfig(**axes), jax.devices()[:4]), 8)


def exchange_between(parts):
    """What two processes that assemble side by side tell each other, replayed for one of them."""
    return lambda what, value: [value if part is None else part[what] for part in parts]


def test_two_processes_agree_about_lengths_and_counts_and_count_the_whole_batch():
    whole = assemble(groups(4), 0, ASSEMBLY)
    shares = [Share(process=process, processes=2) for process in range(2)]
    owned = [[group for group in groups(4) if share.owns(group.ticket)] for share in shares]
    owned[1] = owned[1] * 1
    told = [{}, {}]
    for process, own in enumerate(owned):  # what each of them says, heard alone

        def keep(what, value, process=process):
            told[process][what] = value
            return [value]

        assemble(own, 0, ASSEMBLY, keep)
    told[1]["lengths of the microbatches"] = [*told[1]["lengths of the microbatches"], 16]  # one more than the other
    told[1]["what was assembled"]["sequences_each"].append(0)
    made = assemble(owned[0], 0, ASSEMBLY, exchange_between([None, told[1]]))
    assert len(made.microbatches) == 2
    assert not made.microbatches[1].segment_BT.any()  # padding alone
    assert made.stats.sequences == whole.stats.sequences
    assert made.stats.tokens == whole.stats.tokens
    assert made.stats.reward_mean == pytest.approx(whole.stats.reward_mean)
    assert made.stats.lags == whole.stats.lags


def test_advantages_that_compare_over_the_batch_see_the_rewards_of_other_processes():
    import dataclasses

    config = dataclasses.replace(ASSEMBLY, advantage=dataclasses.replace(ASSEMBLY.advantage, std="batch"))
    made = [
        dataclasses.replace(group, reward_M=np.array(rewards, np.float32))
        for group, rewards in zip(groups(2), ([0, 1, 0], [5, 9, 1]), strict=True)
    ]
    alone = assemble(made, 0, config).microbatches[0]
    told = {}

    def keep(what, value):
        told[what] = value
        return [value]

    assemble(made[1:], 0, config, keep)
    first = assemble(made[:1], 0, config, exchange_between([None, told])).microbatches[0]
    expected = set(np.unique(alone.advantage_BT[alone.loss_mask_BT]).tolist())
    found = set(np.unique(first.advantage_BT[first.loss_mask_BT]).tolist())
    assert found < expected
    without = assemble(made[:1], 0, config).microbatches[0]
    assert not set(np.unique(without.advantage_BT[without.loss_mask_BT]).tolist()) <= expected
