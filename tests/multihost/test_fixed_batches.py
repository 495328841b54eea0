"""On recorded batches with replayed routes, every mesh and number of processes makes the same gradients and steps."""

import dataclasses

import numpy as np
import pytest

from tests.multihost.processes import Processes, positional
from tests.train.test_step import ASSEMBLY, build, groups, near
from train.assemble import assemble
from train.recording import batch_path, load_batch, save_batch

pytestmark = pytest.mark.multihost

BATCHES = 2


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Recorded batches of two microbatches each, near the policy's own log-probs: there is a tail."""
    folder = tmp_path_factory.mktemp("recorded")
    step, state, mesh = build()
    for version in range(BATCHES):
        made = [dataclasses.replace(group, ticket=group.ticket + 10 * version) for group in groups(8)]
        micros = assemble(made, 0, ASSEMBLY).microbatches
        path = batch_path(folder, version)
        save_batch(path, near(step, state, micros, mesh))
        assert all(micro.trace.present_BT.any() for micro in load_batch(path))
        assert len(load_batch(path)) == 2
    return folder / "batches"


def computed(batches, folder, processes, devices, axes, memory="device"):
    out = folder / f"{processes}x{devices}.npz"
    command = ["tests.multihost.fixed_batches", str(batches), str(out), axes, memory]
    Processes(folder, command, positional(processes), devices).must_end_well()
    with np.load(out) as file:
        return dict(file)


@pytest.fixture(scope="module")
def of_one_device(batches, tmp_path_factory):
    found = computed(batches, tmp_path_factory.mktemp("one"), 1, 1, "data=1")
    assert any(found[f"gate_rate{number}"] > 0 for number in range(BATCHES))
    return found


@pytest.mark.parametrize(
    ("processes", "devices", "axes", "memory"),
    [
        (1, 4, "fsdp=2,expert=2", "device"),
        (2, 2, "fsdp=2,expert=2", "device"),
        (2, 2, "fsdp=2,expert=2", "host"),
        (2, 1, "data=2", "device"),
        (2, 1, "expert=2", "device"),
        (4, 1, "fsdp=2,expert=2", "device"),
    ],
)
def test_gradients_and_parameters_are_those_of_one_device(
    batches, of_one_device, tmp_path, processes, devices, axes, memory
):
    found = computed(batches, tmp_path, processes, devices, axes, memory)
    assert found.keys() == of_one_device.keys()
    compared = 0
    for name, expected in of_one_device.items():
        if name.startswith(("gradient", "parameters")):
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5, err_msg=name)
            compared += np.abs(expected).max() > 1e-3  # not nothing
    assert compared > 4 * BATCHES
    for name in ("metric/loss", "metric/grad_norm", "metric/sat/threshold", "metric/sat/gate_rate"):
        assert found[name] == pytest.approx(of_one_device[name], rel=1e-4, abs=1e-6), name
