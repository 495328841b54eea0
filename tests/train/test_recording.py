import dataclasses

import jax
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.objective import ObjectiveConfig
from tests.train.test_step import ASSEMBLY, OPTIM, POLICY, as_arrays, build, duplicate, groups, near
from train.assemble import assemble, place
from train.recording import Replayer, batch_path, load_batch, save_batch
from train.state import init_policy, init_state
from train.step import Step, host_batch


def recorded(folder, steps=2):
    """Batches with a tail, as a run at version 0 would have had them."""
    step, state, mesh = build()
    for version in range(steps):
        made = [dataclasses.replace(group, ticket=group.ticket + 10 * version) for group in groups()]
        save_batch(batch_path(folder, version), near(step, state, assemble(made, 0, ASSEMBLY).microbatches, mesh))
    return [batch_path(folder, version) for version in range(steps)]


def replayer(step, mesh, **changes):
    fields = {"step": step, "mesh": mesh, "reference": None, "minibatches": 1, "proximal": False}
    return Replayer(**(fields | changes))


def test_a_batch_comes_back_bit_for_bit(tmp_path):
    (path,) = recorded(tmp_path, 1)
    step, state, mesh = build()
    expected = host_batch(near(step, state, assemble(groups(), 0, ASSEMBLY).microbatches, mesh))
    found = host_batch(load_batch(path))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert [file.name for file in path.parent.iterdir()] == ["v000000.npz"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weights": np.zeros(1)}, "expected arrays of microbatches, got 'weights'"),
        ({"micro0.input_BT": np.zeros((1, 1), np.int32)}, "expected the arrays .* got .'input_BT'."),
    ],
)
def test_what_is_no_batch_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_batch(tmp_path / "x.npz")


def test_a_replayed_step_is_the_step_that_was_made(tmp_path):
    paths = recorded(tmp_path)
    step, state, mesh = build()
    expected = duplicate(state)
    for path in paths:
        batch = load_batch(path)
        placed = place(batch, mesh)
        expected, _ = step.update(expected, placed, step.measure(expected, placed))
    *_, (last, found, done) = replayer(step, mesh).run(duplicate(state), iter(paths))
    assert (last, found.version, done.finite) == (paths[-1], 2, True)
    for left, right in zip(as_arrays(found.params), as_arrays(expected.params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_minibatches_of_a_batch_are_replayed_with_the_log_probs_of_its_start(tmp_path):
    paths = recorded(tmp_path)
    step, state, mesh = build("decoupled_ppo")
    seen = [
        path for path, _, _ in replayer(step, mesh, minibatches=2, proximal=True).run(duplicate(state), iter(paths))
    ]
    assert seen == paths


def test_a_step_that_is_not_finite_is_reproduced_and_ends_the_replay(tmp_path):
    paths = recorded(tmp_path)
    batch = load_batch(paths[0])
    logp_BT = batch[0].behavior_logp_BT.copy()
    logp_BT[batch[0].loss_mask_BT] = np.nan
    save_batch(paths[0], (dataclasses.replace(batch[0], behavior_logp_BT=logp_BT),))
    step, state, mesh = build()
    ((_, after, done),) = replayer(step, mesh).run(duplicate(state), iter(paths))
    assert (done.finite, after.version) == (False, 0)
    for left, right in zip(as_arrays(after.params), as_arrays(state.params), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}])
def test_recorded_batches_with_replayed_routes_give_the_same_parameters_on_another_mesh(tmp_path, axes):
    paths = recorded(tmp_path)
    step, state, mesh = build()
    mesh_config = MeshConfig(**axes)
    other_mesh = make_mesh(mesh_config, jax.devices()[: int(np.prod(list(axes.values())))])
    graph, params = init_policy(POLICY, 0, other_mesh)
    optimizer = OPTIM.transformation()
    start = init_state(params, optimizer, other_mesh)
    for left, right in zip(as_arrays(params), as_arrays(state.params), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-7)
    other = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, start)
    one = list(replayer(step, mesh).run(duplicate(state), iter(paths[:1])))[-1]
    two = list(replayer(other, other_mesh).run(start, iter(paths[:1])))[-1]
    for left, right in zip(as_arrays(one[1].params), as_arrays(two[1].params), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert one[2].metrics["grad_norm"] == pytest.approx(two[2].metrics["grad_norm"], rel=1e-5)
