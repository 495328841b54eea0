import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from sat_jax.advantages import AdvantageConfig
from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from tests.reference.rollouts import EXPERTS, LAYERS, SLOTS, make_group
from train.assemble import AssembleConfig, BatchConfig, assemble, place
from train.compiles import CompileCounter
from train.state import OptimConfig, TrainState, init_policy, init_state
from train.step import Step, _Given, host_batch

ROWS, LENGTH = 4, 16
POLICY = PolicyConfig(
    vocab_size=12,
    width=16,
    layers=LAYERS,
    query_heads=2,
    kv_heads=1,
    head_dim=8,
    experts=EXPERTS,
    experts_per_token=SLOTS,
    expert_hidden=16,
    rope_theta=1e4,
)
ASSEMBLY = AssembleConfig(
    batch=BatchConfig(groups_per_step=4, minibatches=1, group_size=3, row_length=LENGTH, rows=ROWS),
    advantage=AdvantageConfig(),
    vocab_size=12,
    moe_layers=LAYERS,
    experts=EXPERTS,
    experts_per_token=SLOTS,
    temperature=1.0,
    replay=True,
)
OPTIM = OptimConfig(peak_lr=1e-2, warmup=2)


@functools.lru_cache
def build(objective="sat_grpo", devices=1, **overrides):
    """One compiled step per objective for the whole file."""
    mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
    graph, params = init_policy(POLICY, 0, mesh)
    optimizer = OPTIM.transformation()
    state = init_state(params, optimizer, mesh)
    config = ObjectiveConfig.preset(objective, **overrides)
    return Step(graph, optimizer, config, 1.0, state), state, mesh


def groups(count=4):
    return [make_group(ticket, counts=(2, 4, 3), rewards=[0, 1, 0], prompt_length=3) for ticket in range(count)]


def near(step, state, microbatches, mesh):
    """The same batch with behaviour log-probs a little away from the policy's own, so that there is a tail."""
    scored = step.score(state.params, place(microbatches, mesh))
    rng = np.random.default_rng(3)
    moved = []
    for micro, output in zip(microbatches, scored, strict=True):
        drift = 0.05 * rng.standard_t(3, micro.behavior_logp_BT.shape)
        logp_BT = np.minimum(np.asarray(output.logp_BT) + drift, -1e-3).astype(np.float32)
        moved.append(dataclasses.replace(micro, behavior_logp_BT=logp_BT))
    return tuple(moved)


def cut_rows(micro, size):
    """Cuts one microbatch into several of `size` rows."""
    flat = jax.tree_util.tree_leaves_with_path(micro)
    routed = {jax.tree_util.keystr(path) for path, leaf in flat if leaf.ndim == 4}

    def piece(first):
        def rows(path, leaf):
            wanted = slice(first, first + size)
            return leaf[:, wanted] if jax.tree_util.keystr(path) in routed else leaf[wanted]

        return jax.tree_util.tree_map_with_path(rows, micro)

    return tuple(piece(first) for first in range(0, micro.input_BT.shape[0], size))


def as_arrays(params):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def duplicate(state):
    params, opt_state = jax.tree.map(lambda leaf: leaf.copy(), (state.params, state.opt_state))
    return TrainState(state.version, params, opt_state)


def advanced(step, state, batch, references=None):
    """One update; the state it started from is copied, because it is donated."""
    copy = duplicate(state)
    return step.update(copy, batch, step.measure(copy, batch), references)


@pytest.mark.sharded  # three quarters of a minute of compiling each
@pytest.mark.parametrize("objective", ["gspo", "sat_grpo"])
def test_an_update_does_not_depend_on_how_the_batch_is_cut(objective):
    step, state, mesh = build(objective)
    whole = near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)
    assert len(whole) == 1
    one, seen_one = advanced(step, state, place(whole, mesh))
    two, seen_two = advanced(step, state, place(cut_rows(whole[0], 2), mesh))
    assert seen_two.metrics["microbatches"] == 2
    for left, right in zip(as_arrays(one.params), as_arrays(two.params), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
    # Where the radii are fixed nobody measures a threshold of the whole batch: what is reported is a microbatch's.
    exact = ("sat/threshold", "sat/gate_rate") if objective.startswith("sat") else ()
    for name in (*exact, "loss", "grad_norm", "mismatch/abs_mean"):
        assert seen_one.metrics[name] == pytest.approx(seen_two.metrics[name], rel=1e-4, abs=1e-6), name


def lengthened(micro, extra):
    """The same microbatch in rows that are `extra` positions longer."""

    def pad(leaf):
        axis = 2 if leaf.ndim == 4 else 1
        return np.pad(leaf, [(0, extra if n == axis else 0) for n in range(leaf.ndim)])

    return jax.tree.map(pad, micro)


def test_microbatches_of_two_lengths_make_the_step_of_one_length():
    step, state, mesh = build("sat_grpo")
    pieces = cut_rows(near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)[0], 2)
    one, seen_one = advanced(step, state, place(pieces, mesh))
    two, seen_two = advanced(step, state, place((pieces[0], lengthened(pieces[1], 4)), mesh))
    for left, right in zip(as_arrays(one.params), as_arrays(two.params), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
    for name in ("sat/threshold", "sat/gate_rate", "loss", "grad_norm"):
        assert seen_one.metrics[name] == pytest.approx(seen_two.metrics[name], rel=1e-4, abs=1e-6), name


def test_the_microbatch_scope_takes_each_threshold_of_its_own():
    step, state, mesh = build("sat_grpo", quantile_scope="microbatch")
    whole = near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)
    pieces = place(cut_rows(whole[0], 2), mesh)
    assert step.measure(state, pieces).measured == (None, None)
    batch_step, *_ = build("sat_grpo")
    thresholds = [advanced(step, state, (piece,))[1].metrics["sat/threshold"] for piece in pieces]
    _, whole_seen = advanced(batch_step, state, pieces)
    assert thresholds[0] != thresholds[1]
    assert (
        whole_seen.metrics["sat/threshold"] not in thresholds or min(thresholds) < whole_seen.metrics["sat/threshold"]
    )


def test_update_gates_on_what_measure_saw():
    step, state, mesh = build("sat_grpo")
    whole = near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)
    batch = place(cut_rows(whole[0], 2), mesh)
    measurement = step.measure(state, batch)
    assert all(measured is not None for measured in measurement.measured)
    zero = tuple(
        dataclasses.replace(measured, threshold=np.float32(0)) for measured in measurement.measured if measured
    )
    copy = duplicate(state)
    _, off = step.update(copy, batch, dataclasses.replace(measurement, measured=zero))
    _, on = advanced(step, state, batch)
    assert on.metrics["sat/gate_rate"] > 0
    assert off.metrics["sat/gate_rate"] == 0


def test_the_gradient_takes_the_log_probs_that_measure_saw():
    step, state, mesh = build("sat_grpo")
    whole = near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)
    batch = place(cut_rows(whole[0], 2), mesh)
    measurement = step.measure(state, batch)
    anew = dataclasses.replace(measurement, scores=(None, None))
    gradients, seen = step.gradients(state.params, batch, measurement)
    wanted, seen_anew = step.gradients(state.params, batch, anew)
    chex.assert_trees_all_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    assert float(seen["loss"].value()) == pytest.approx(float(seen_anew["loss"].value()), rel=1e-5, abs=1e-7)
    moved = tuple(
        dataclasses.replace(scores, entropy_BT=scores.entropy_BT + 1) for scores in measurement.scores if scores
    )
    _, seen_moved = step.gradients(state.params, batch, dataclasses.replace(measurement, scores=moved))
    assert float(seen_moved["entropy"].value()) == pytest.approx(float(seen["entropy"].value()) + 1, rel=1e-5)


def test_eight_devices_give_the_update_of_one():
    step_one, state_one, mesh_one = build()
    step_two, state_two, mesh_two = build(devices=4)
    whole = near(step_one, state_one, assemble(groups(), 0, ASSEMBLY).microbatches, mesh_one)
    one, seen_one = advanced(step_one, state_one, place(whole, mesh_one))
    two, seen_two = advanced(step_two, state_two, place(whole, mesh_two))
    for left, right in zip(as_arrays(one.params), as_arrays(two.params), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
    assert seen_one.metrics["sat/threshold"] == pytest.approx(seen_two.metrics["sat/threshold"], rel=1e-5)
    specs = [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(two.params)]
    moments = [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(two.opt_state) if leaf.ndim]
    assert sorted(map(str, moments)) == sorted(map(str, specs * 2))


def test_a_step_that_is_not_finite_keeps_the_state_and_its_version():
    step, state, mesh = build()
    whole = near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh)
    logp_BT = whole[0].behavior_logp_BT.copy()
    row, position = np.argwhere(whole[0].loss_mask_BT)[0]
    logp_BT[row, position] = np.nan
    before = as_arrays(state.params)
    poisoned = place((dataclasses.replace(whole[0], behavior_logp_BT=logp_BT),), mesh)
    after, seen = advanced(step, state, poisoned)
    assert not seen.finite
    assert after.version == state.version
    for left, right in zip(before, as_arrays(after.params), strict=True):
        np.testing.assert_array_equal(left, right)
    later, seen = advanced(step, after, place(whole, mesh))
    assert seen.finite
    assert later.version == 1


def test_update_donates_the_state_and_never_compiles_twice():
    step, state, mesh = build()
    whole = place(near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh), mesh)
    state = duplicate(state)
    leaf = jax.tree.leaves(state.params)[0]
    state, _ = step.update(state, whole, step.measure(state, whole))
    assert leaf.is_deleted()
    with CompileCounter() as compiles:
        for _ in range(3):
            state, seen = step.update(state, whole, step.measure(state, whole))
    assert compiles.count == 0
    assert state.version == 4
    assert seen.finite


def test_the_router_learns_under_replay():
    step, state, mesh = build()
    whole = place(near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh), mesh)
    gradients, _ = step._grad_jit(state.params, None, whole[0], _Given())
    router = np.asarray(gradients["layers"]["router_DE"][...])
    assert np.abs(router).max() > 0


def test_agreement_and_missing_routes_are_counted():
    step, state, mesh = build()
    micro = assemble(groups(), 0, ASSEMBLY).microbatches[0]
    real_BT = micro.segment_BT > 0
    present_BT = real_BT.copy()
    row, position = np.argwhere(real_BT)[0]
    present_BT[row, position] = False
    partial = dataclasses.replace(micro, trace=dataclasses.replace(micro.trace, present_BT=present_BT))
    _, seen = advanced(step, state, place((partial,), mesh))
    assert seen.metrics["routing/missing"] == pytest.approx(1 / real_BT.sum())
    own = step.score(
        state.params,
        place(
            (dataclasses.replace(micro, trace=dataclasses.replace(micro.trace, present_BT=np.zeros_like(real_BT))),),
            mesh,
        ),
    )[0].trace
    replay = dataclasses.replace(micro, trace=jax.tree.map(np.asarray, own))
    _, seen = advanced(step, state, place((replay,), mesh))
    assert seen.metrics["routing/agreement"] == 1.0
    assert seen.metrics["routing/missing"] == 0.0


def test_a_batch_is_saved_under_the_names_of_its_fields():
    _, _, mesh = build()
    saved = host_batch(place(assemble(groups(), 0, ASSEMBLY).microbatches, mesh))
    assert "micro0.input_BT" in saved
    assert "micro0.trace.experts_LBTK" in saved


def test_the_optimizer_warms_up_from_a_fraction():
    rate = OptimConfig(peak_lr=1.0, warmup=4).learning_rate()
    assert [np.asarray(rate(step)).item() for step in (0, 1, 2, 3, 4, 100)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    )
    assert np.asarray(OptimConfig(peak_lr=1.0, warmup=1).learning_rate()(0)).item() == 1.0


def test_a_misplaced_optimizer_setting_is_named():
    with pytest.raises(ValueError, match=r"optim.clip_norm: expected > 0, got 0"):
        OptimConfig(peak_lr=1.0, clip_norm=0)


def test_the_policy_is_made_on_its_mesh():
    mesh = make_mesh(MeshConfig(expert=2), jax.devices()[:2])
    graph, params = init_policy(POLICY, 0, mesh)
    spec = params["layers"]["gate_EDF"][...].sharding.spec
    assert spec[1] == "expert"
    assert nnx.merge(graph, params).mesh == mesh
