import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rollout_bridge.messages import LogprobDefinition
from sat_jax.advantages import AdvantageConfig, group_advantages
from sat_jax.mesh import MeshConfig, make_mesh
from tests.reference import assemble_twin
from tests.reference.rollouts import EXPERTS, LAYERS, SLOTS, make_completion, make_group, make_trace
from train.assemble import AssembleConfig, BatchConfig, assemble, pack, place


def config(*, group_size=2, row_length=12, rows=2, groups=3, buckets=(), **changes):
    sizes = BatchConfig(
        groups_per_step=groups,
        minibatches=1,
        group_size=group_size,
        row_length=row_length,
        rows=rows,
        buckets=buckets,
    )
    base = AssembleConfig(
        batch=sizes,
        advantage=AdvantageConfig(),
        vocab_size=12,
        moe_layers=LAYERS,
        experts=EXPERTS,
        experts_per_token=SLOTS,
        temperature=1.0,
        replay=True,
    )
    return dataclasses.replace(base, **changes)


def with_completion(group, index, /, **changes):
    made = list(group.completions)
    made[index] = dataclasses.replace(made[index], **changes)
    return dataclasses.replace(group, completions=tuple(made))


def routes(completion):
    assert completion.trace is not None
    return completion.trace.experts_TLK


def test_one_group_worked_by_hand():
    group = make_group(5, counts=(2, 1), prompt_length=3, version=4, rewards=[1, 0])
    prompt, (first, second) = group.prompt_tokens, group.completions
    (micro,) = assemble([group], 9, config(rows=1, row_length=9)).microbatches
    # Sequences of 5 and 4 tokens: 4 and 3 positions; longest first; two free positions at the end.
    assert micro.input_BT.tolist() == [[*prompt, first.tokens[0], *prompt, 0, 0]]
    assert micro.target_BT.tolist() == [[*prompt[1:], *first.tokens, *prompt[1:], *second.tokens, 0, 0]]
    assert micro.segment_BT.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0]]
    assert micro.position_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0]]
    assert micro.loss_mask_BT.astype(int).tolist() == [[0, 0, 1, 1, 0, 0, 1, 0, 0]]
    assert micro.behavior_logp_BT[0, [2, 3, 6]].tolist() == [*first.behavior_logp, *second.behavior_logp]
    # Rewards 1 and 0: mean 1/2, sample deviation sqrt(1/2), so +-1/sqrt(2).
    np.testing.assert_allclose(micro.advantage_BT[0, [2, 3, 6]], np.array([1, 1, -1]) / np.sqrt(2), rtol=1e-5)
    assert micro.lag_BT[0, [2, 3, 6]].tolist() == [5, 5, 5]
    assert micro.trace.present_BT.astype(int).tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert np.array_equal(micro.trace.experts_LBTK[:, 0, :4], routes(first).transpose(1, 0, 2))
    assert np.array_equal(micro.trace.experts_LBTK[:, 0, 4:7], routes(second).transpose(1, 0, 2))


def test_leaves_have_the_types_of_the_contract():
    (micro,) = assemble([make_group()], 0, config(rows=1)).microbatches
    dtypes = {f.name: getattr(micro, f.name).dtype.name for f in dataclasses.fields(micro) if f.name != "trace"}
    integers = dict.fromkeys(["input_BT", "target_BT", "segment_BT", "position_BT", "lag_BT"], "int32")
    floats = dict.fromkeys(["behavior_logp_BT", "advantage_BT"], "float32")
    assert dtypes == integers | floats | {"loss_mask_BT": "bool"}
    assert (micro.trace.experts_LBTK.dtype, micro.trace.present_BT.dtype) == (np.uint8, bool)
    wide = dataclasses.replace(config(rows=1), experts=300)
    assert assemble([make_group()], 0, wide).microbatches[0].trace.experts_LBTK.dtype == np.uint16


@st.composite
def batches(draw):
    prompt_length = draw(st.integers(1, 5))
    groups = []
    for ticket in range(draw(st.integers(1, 5))):
        counts = draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)))
        group = make_group(ticket, counts=counts, prompt_length=prompt_length, version=draw(st.integers(0, 3)))
        for member, count in enumerate(counts):
            positions = prompt_length + count - 1
            first_row = draw(st.integers(0, positions))
            trace = make_trace(prompt_length, count, first_row=first_row, seed=[ticket, member])
            versions = np.sort(np.random.default_rng([ticket, member]).integers(0, 4, count)).astype(np.int32)
            kept = draw(st.sampled_from([trace, None]))
            group = with_completion(group, member, trace=kept, version=versions)
        groups.append(dataclasses.replace(group, reward_M=np.array(draw(st.permutations([0, 0, 1])), np.float32)))
    return groups


@settings(max_examples=50, deadline=None)
@given(groups=batches(), replay=st.booleans(), rows=st.integers(1, 3))
def test_unpacking_gives_what_the_twin_says_of_every_position(groups, replay, rows):
    settings = config(group_size=3, row_length=11, rows=rows, replay=replay)
    made = assemble(groups, 3, settings)
    advantage_PM = group_advantages(np.stack([g.reward_M for g in groups]), AdvantageConfig())
    expected = assemble_twin.positions(groups, 3, advantage_PM, replay)
    assert sorted(map(repr, assemble_twin.unpacked(made.microbatches))) == sorted(map(repr, expected))
    flat = [row for sequence in expected for row in sequence]
    capacity = len(made.microbatches) * rows * 11
    assert made.stats.positions == len(flat)
    assert made.stats.fill == len(flat) / capacity
    assert made.stats.tokens == sum(row[3] for row in flat) == sum(made.stats.lags.values())
    assert made.stats.missing == (sum(row[7] is None for row in flat) if replay else 0)
    assert {lag: sum(row[3] and row[6] == lag for row in flat) for lag in made.stats.lags} == made.stats.lags


@settings(max_examples=50, deadline=None)
@given(groups=batches(), rows=st.integers(1, 3))
def test_segments_are_contiguous_and_ascending_and_padding_is_empty(groups, rows):
    for micro in assemble(groups, 3, config(group_size=3, row_length=11, rows=rows)).microbatches:
        assert micro.input_BT.shape == (rows, 11)
        for row in micro.segment_BT:
            used = row[row > 0]
            assert np.array_equal(row[: len(used)], used)  # padding only at the end
            assert (np.diff(used) >= 0).all()
            assert set(used) == set(range(1, len(set(used)) + 1))
        padding = micro.segment_BT == 0
        assert not micro.loss_mask_BT[padding].any()
        assert not micro.trace.present_BT[padding].any()
        for name in ("input_BT", "target_BT", "position_BT", "behavior_logp_BT", "advantage_BT", "lag_BT"):
            assert not getattr(micro, name)[padding].any()


def test_the_same_groups_give_the_same_bits():
    groups = [make_group(ticket, counts=(3, 5)) for ticket in range(4)]
    first, second = (assemble(groups, 2, config()).microbatches for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_is_first_fit_decreasing(lengths):
    rows = pack(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 20
    # A row is opened only by a sequence that had no room, in any earlier row, beside what was placed before it.
    for number, (opener, *_) in enumerate(rows):
        turn = (-lengths[opener], opener)
        for row in rows[:number]:
            placed = sum(lengths[index] for index in row if (-lengths[index], index) < turn)
            assert placed + lengths[opener] > 20
    # And none went into a later row than it had to.
    for number, row in enumerate(rows):
        assert row == sorted(row, key=lambda index: (-lengths[index], index))
        for index in row:
            for earlier in rows[:number]:
                before = sum(lengths[i] for i in earlier if (-lengths[i], i) < (-lengths[index], index))
                assert before + lengths[index] > 20


def test_packing_worked_by_hand():
    assert pack([4, 7, 3, 6], 10) == [[1, 2], [3, 0]]
    assert pack([5, 5, 5], 10) == [[0, 1], [2]]


def test_what_does_not_fit_one_microbatch_fills_as_many_as_it_needs():
    groups = [make_group(ticket, counts=(6, 6), prompt_length=5) for ticket in range(3)]
    made = assemble(groups, 0, config(rows=4, row_length=12))  # six sequences of 10 positions, one a row
    assert [int((micro.segment_BT.max(axis=1) > 0).sum()) for micro in made.microbatches] == [4, 2]
    assert made.stats.fill == 60 / 96


def test_statistics_worked_by_hand():
    groups = [
        make_group(0, counts=(2, 3), rewards=[1, 0], version=1),
        make_group(1, counts=(2, 2), rewards=[1, 1], version=2),
    ]
    groups[1] = with_completion(groups[1], 0, finish=make_completion(stop=False).finish)
    stats = assemble(groups, 5, config()).stats
    assert stats.lags == {3: 4, 4: 5}
    assert (stats.sequences, stats.tokens, stats.truncated, stats.missing) == (4, 9, 1, 0)
    assert stats.metrics() == {
        "reward/mean": 0.75,
        "reward/zero_std": 0.5,
        "reward/unverified": 0.0,
        "length/mean": 2.25,
        "length/truncated": 0.25,
        "pack/fill": (4 + 5 + 4 + 4) / 24,
    }


def test_without_replay_no_route_is_present_and_none_is_missing():
    made = assemble([make_group()], 0, config(replay=False))
    assert not any(micro.trace.present_BT.any() for micro in made.microbatches)
    assert made.stats.missing == 0


def test_a_completion_without_a_trace_is_counted_as_missing_position_by_position():
    group = with_completion(make_group(counts=(2, 3)), 1, trace=None)
    assert assemble([group], 0, config()).stats.missing == 5


bad = [
    ({"tokens": np.array([2, 12], np.int32)}, r"completion t7/1 of engine e: expected at least one .* got 2 to 12"),
    ({"tokens": np.array([-1, 2], np.int32)}, "got -1 to 2"),
    ({"tokens": np.zeros(0, np.int32)}, "got none"),
    (
        {"behavior_logp": np.array([-1, np.nan], np.float32)},
        "expected finite log-probs of at most 0, got nan at token 1",
    ),
    ({"behavior_logp": np.array([-1, 0.5], np.float32)}, "got 0.5 at token 1"),
    ({"behavior_logp": np.array([-1], np.float32)}, "expected 2 of behavior_logp, got 1"),
    ({"version": np.array([0], np.int32)}, "expected 2 of version, got 1"),
    ({"version": np.array([3, 4], np.int32)}, r"expected versions 0 to 3, got \[3, 4\]"),
    ({"version": np.array([-1, 0], np.int32)}, r"expected versions 0 to 3, got \[-1, 0\]"),
    ({"logprob": LogprobDefinition(temperature=0.7)}, "expected log-probs at temperature 1.0 before truncation"),
    ({"logprob": LogprobDefinition(temperature=1.0, after_truncation=True)}, "before truncation"),
    ({"trace": make_trace(3, 3)}, r"trace of completion t7/1 of engine e: expected .* \[4, 2, 2\] .* got \[5, 2, 2\]"),
    ({"trace": make_trace(3, 1)}, r"got \[3, 2, 2\]"),
    ({"member": 2}, r"group t7: expected members 0 to 1 in order, got \[0, 2\]"),
]


@pytest.mark.parametrize(("changes", "message"), bad)
def test_a_bad_completion_is_refused_with_group_and_member(changes, message):
    group = make_group(7, counts=(2, 2))
    assemble([group], 3, config())
    with pytest.raises(ValueError, match=message):
        assemble([with_completion(group, 1, **changes)], 3, config())


def test_ids_that_the_device_would_clamp_are_refused():
    group = make_group(7, counts=(2, 2))
    trace = make_trace(3, 2)
    wrong = trace.experts_TLK.copy()
    wrong[1, 0, 0] = EXPERTS
    with pytest.raises(ValueError, match=r"trace of completion t7/0 .*: expected ids below 4, got 4"):
        assemble([with_completion(group, 0, trace=dataclasses.replace(trace, experts_TLK=wrong))], 3, config())


@pytest.mark.parametrize("rewards", [[1.0, np.nan], [np.inf, 0.0], [1.0]])
def test_rewards_are_finite_and_one_a_member(rewards):
    group = dataclasses.replace(make_group(7), reward_M=np.array(rewards, np.float32))
    with pytest.raises(ValueError, match="group t7: expected 2 finite rewards"):
        assemble([group], 0, config())


def test_a_sequence_longer_than_a_row_is_refused_and_never_split():
    group = make_group(7, counts=(2, 10), prompt_length=4)
    with pytest.raises(ValueError, match=r"completion t7/1 .*expected at most 12 positions, got 13"):
        assemble([group], 0, config(row_length=12))


def test_a_prompt_outside_the_vocabulary_is_refused():
    group = dataclasses.replace(make_group(7), prompt_tokens=np.array([3, 99, 4], np.int32))
    with pytest.raises(ValueError, match=r"prompt t7: .* got 3 to 99"):
        assemble([group], 0, config())


def test_a_batch_of_no_groups_is_refused():
    with pytest.raises(ValueError, match="batch: expected at least one group, got none"):
        assemble([], 0, config())


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="groups of one have none to compare with"):
        config(group_size=1)


@pytest.mark.parametrize("name", ["groups_per_step", "group_size", "rows"])
def test_sizes_are_positive(name):
    sizes: Any = {"groups_per_step": 2, "minibatches": 1, "group_size": 2, "row_length": 4, "rows": 2} | {name: 0}
    with pytest.raises(ValueError, match=rf"batch\.{name}: expected at least 1, got 0"):
        BatchConfig(**sizes)


def test_the_last_microbatch_takes_the_shortest_bucket_in_which_its_sequences_fit():
    # Nine sequences of 6 positions, two a row of 12: two rows a microbatch, and one sequence is left for the third.
    groups = [make_group(t, counts=(2, 2, 2), prompt_length=5) for t in range(3)]
    made = assemble(groups, 0, config(group_size=3, buckets=(4, 6, 8)))
    assert [micro.input_BT.shape for micro in made.microbatches] == [(2, 12), (2, 12), (2, 6)]
    assert made.stats.fill == pytest.approx(9 * 6 / (2 * 24 + 12))
    assert made.microbatches[2].trace.experts_LBTK.shape == (LAYERS, 2, 6, SLOTS)
    plain = assemble(groups, 0, config(group_size=3))
    assert sorted(map(str, assemble_twin.unpacked(made.microbatches))) == sorted(
        map(str, assemble_twin.unpacked(plain.microbatches))
    )
    assert plain.stats.fill < made.stats.fill


def test_a_microbatch_that_fits_no_bucket_keeps_the_whole_length():
    # Three sequences of 6 positions need three rows of 6, but two of 12.
    made = assemble([make_group(0, counts=(2, 2, 2), prompt_length=5)], 0, config(group_size=3, buckets=(6, 8)))
    assert [micro.input_BT.shape for micro in made.microbatches] == [(2, 12)]


@pytest.mark.parametrize("buckets", [(8, 4), (4, 4), (1,), (12,)])
def test_buckets_are_ascending_and_shorter_than_a_row(buckets):
    with pytest.raises(ValueError, match=r"batch\.buckets: expected lengths from 2 to below row_length = 12"):
        config(buckets=buckets)


def test_placing_cuts_rows_along_the_batch_axes_and_changes_no_value():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    made = assemble([make_group(t, counts=(6, 6), prompt_length=5) for t in range(3)], 0, config(rows=4))
    placed = place(made.microbatches, mesh)
    assert len(placed) == 2
    jax.tree.map(np.testing.assert_array_equal, placed, made.microbatches)
    sharding = placed[0].input_BT.sharding
    assert isinstance(sharding, NamedSharding)
    assert sharding.spec == PartitionSpec(("data", "fsdp", "expert"))
    assert placed[0].input_BT.addressable_shards[0].data.shape == (1, 12)
    assert placed[0].trace.experts_LBTK.addressable_shards[0].data.shape == (LAYERS, 1, 12, SLOTS)
    assert placed[0].trace.present_BT.addressable_shards[0].data.shape == (1, 12)


def test_tokens_that_code_inserted_are_masked_one_by_one():
    group = dataclasses.replace(
        make_group(counts=(4, 2)), trained=(np.array([True, False, False, True]), np.ones(2, bool))
    )
    made = assemble([group], 0, config())
    (micro,) = made.microbatches
    row, column = np.argwhere(np.asarray(micro.segment_BT) > 0)[0]
    # The longer one comes first; its prompt is 3 tokens: position 2 predicts the first sampled token.
    assert micro.loss_mask_BT[row, column : column + 6].tolist() == [False, False, True, False, False, True]
    assert made.stats.tokens == 4
    assert made.stats.unverified == 0


def test_an_unverified_completion_trains_nothing_and_leaves_its_groups_baseline():
    whole = make_group(counts=(2, 2, 2), rewards=[1, 0, 0])
    masked = dataclasses.replace(whole, trained=(np.ones(2, bool), np.ones(2, bool), np.zeros(2, bool)))
    settings = dataclasses.replace(config(), batch=dataclasses.replace(config().batch, group_size=3))
    stats, (micro, *_) = (made := assemble([masked], 0, settings)).stats, made.microbatches
    active = np.asarray(micro.loss_mask_BT)
    # Of rewards 1 and 0: mean 1/2, sample standard deviation 1/sqrt 2.
    assert np.unique(np.asarray(micro.advantage_BT)[active]) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert (stats.unverified, stats.tokens, stats.reward_mean) == (1, 4, 0.5)
    alone = dataclasses.replace(whole, trained=(np.ones(2, bool), np.zeros(2, bool), np.zeros(2, bool)))
    assert not assemble([alone], 0, settings).microbatches[0].advantage_BT.any()


def test_a_mask_of_another_length_is_refused():
    group = dataclasses.replace(make_group(counts=(2, 3)), trained=(np.ones(2, bool), np.ones(2, bool)))
    with pytest.raises(ValueError, match=r"group t0: expected a mask as long as each completion, got \[2, 2\] for"):
        assemble([group], 0, config())
