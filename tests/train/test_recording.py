import dataclasses
import types

import jax
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.objective import ObjectiveConfig
from tests.train.test_step import ASSEMBLY, OPTIM, POLICY, as_arrays, build, duplicate, groups, near
from train.assemble import assemble, place
from train.recording import Replayer, batch_path, load_batch, save_batch
from train.state import TrainState, init_policy, init_state
from train.step import Step, StepReport, host_batch

ROOMY = dataclasses.replace(ASSEMBLY, batch=dataclasses.replace(ASSEMBLY.batch, rows=8))


def saved(folder, steps=2, assembly=ASSEMBLY):
    """Batches of made-up groups."""
    for version in range(steps):
        made = [dataclasses.replace(group, ticket=group.ticket + 10 * version) for group in groups()]
        save_batch(batch_path(folder, version), assemble(made, 0, assembly).microbatches)
    return [batch_path(folder, version) for version in range(steps)]


def replayer(step, mesh, **changes):
    fields = {"step": step, "mesh": mesh, "reference": None, "minibatches": 1, "proximal": False}
    return Replayer(**(fields | changes))


def test_a_batch_comes_back_bit_for_bit(tmp_path):
    (path,) = saved(tmp_path, 1)
    expected = host_batch(assemble(groups(), 0, ASSEMBLY).microbatches)
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
    paths = saved(tmp_path)
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
    calls = []

    def at(version):
        return TrainState(version, f"v{version}", None)  # pyright: ignore[reportArgumentType]

    class Recorder:
        def score(self, params, batch):
            calls.append(("score", params))
            return [types.SimpleNamespace(logp_BT=params) for _ in batch]

        def measure(self, state, batch):
            return None

        def update(self, state, batch, measurement, references, prox_logps):
            calls.append(("update", state.version, prox_logps))
            return at(state.version + 1), StepReport(finite=True, metrics={})

    paths = saved(tmp_path, 3)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    made = replayer(Recorder(), mesh, minibatches=2, proximal=True)
    assert [path for path, _, _ in made.run(at(0), iter(paths))] == paths
    assert calls == [
        ("score", "v0"),
        ("score", "v0"),
        ("update", 0, ("v0",)),
        ("update", 1, ("v0",)),
        ("score", "v2"),
        ("update", 2, ("v2",)),
    ]


def test_a_step_that_is_not_finite_is_reproduced_and_ends_the_replay(tmp_path):
    paths = saved(tmp_path)
    batch = load_batch(paths[0])
    logp_BT = batch[0].behavior_logp_BT.copy()
    logp_BT[batch[0].loss_mask_BT] = np.nan
    save_batch(paths[0], (dataclasses.replace(batch[0], behavior_logp_BT=logp_BT),))
    step, state, mesh = build()
    ((_, after, done),) = replayer(step, mesh).run(duplicate(state), iter(paths))
    assert (done.finite, after.version) == (False, 0)
    for left, right in zip(as_arrays(after.params), as_arrays(state.params), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
def test_recorded_batches_with_replayed_routes_give_the_same_parameters_on_another_mesh(tmp_path):
    step, state, mesh = build()
    for version, path in enumerate(saved(tmp_path, 2, ROOMY)):
        save_batch(path, near(step, state, load_batch(path), mesh))  # log-probs near the policy's: there is a tail
        assert load_batch(path)[0].trace.present_BT.any(), version
    paths = [batch_path(tmp_path, 0)]
    other_mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2), jax.devices())
    graph, params = init_policy(POLICY, 0, other_mesh)
    optimizer = OPTIM.transformation()
    start = init_state(params, optimizer, other_mesh)
    for left, right in zip(as_arrays(params), as_arrays(state.params), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-7)
    other = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, start)
    one = list(replayer(step, mesh).run(duplicate(state), iter(paths)))[-1]
    two = list(replayer(other, other_mesh).run(start, iter(paths)))[-1]
    for left, right in zip(as_arrays(one[1].params), as_arrays(two[1].params), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert one[2].metrics["grad_norm"] == pytest.approx(two[2].metrics["grad_norm"], rel=1e-5)
