"""Moments in the host's memory make the step of moments on the device, and stay where they are put."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from train import moments as module
from train.abstract import abstract_state
from train.moments import Group, grouped, is_hosted, memory_of
from train.state import OptimConfig, init_policy, init_state
from train.step import Step

POLICY = PolicyConfig.tiny(width=16, layers=4, experts=2)
FOUR = {"fsdp": 2, "expert": 2}
# A sixth of what the stacked layers of `POLICY` take on one device, so that they visit it in slices.
SLICE = 6000


def made(memory, axes, **optim):
    """A step and its state; nothing is compiled yet."""
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: int(np.prod(list(axes.values())))])
    graph, params = init_policy(POLICY, 0, mesh)
    optimizer = OptimConfig(peak_lr=1e-2, warmup=2, **optim).transformation()
    state = init_state(params, optimizer, mesh, memory)
    return Step(graph, optimizer, ObjectiveConfig.preset("grpo"), 1.0, state), state


def gradients(params, seed):
    """Made up, as large as makes the clip work in some steps and not in others."""
    draw = np.random.default_rng(seed)

    def of(leaf):
        values = 0.004 * (2 * seed + 1) * draw.normal(size=leaf.shape)
        return jax.device_put(values.astype(np.float32), leaf.sharding)

    return jax.tree.map(of, params)


def applied(memory, axes, losses, **optim):
    """Parameters and optimizer state after a step for each loss."""
    step, state = made(memory, axes, **optim)
    params, opt_state = state.params, state.opt_state
    for seed, loss in enumerate(losses):
        before = jax.tree.leaves((params, opt_state))
        params, opt_state, (norm, _) = step._apply_jit(params, opt_state, gradients(params, seed), jnp.float32(loss))
        assert (norm > 1.0) == (seed > 0)
        assert all(leaf.is_deleted() for leaf in before)
    return params, opt_state


def assert_same(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def compare(axes, mu_dtype):
    """Steps from either memory; of a process without fused multiply-adds, see the test."""
    module._SLICE_BYTES = SLICE
    losses = (0.5, 0.25, 0.125)
    device = applied("device", axes, losses, mu_dtype=mu_dtype)
    host = applied("host", axes, losses, mu_dtype=mu_dtype)
    assert_same(host, device)
    counters = [leaf for leaf in jax.tree.leaves(host[1]) if not leaf.ndim]
    assert [int(leaf) for leaf in counters] == [3, 3]
    for here, there in zip(jax.tree.leaves(host[1]), jax.tree.leaves(device[1]), strict=True):
        assert is_hosted(here) == (here.ndim > 0)
        assert not is_hosted(there)
        assert here.sharding.is_equivalent_to(there.sharding.with_memory_kind(here.sharding.memory_kind), here.ndim)


@pytest.mark.parametrize(
    ("axes", "mu_dtype"), [({}, "float32"), (FOUR, "float32"), (FOUR, "bfloat16")], ids=["one", "four", "four-bfloat16"]
)
def test_steps_from_the_hosts_memory_are_those_from_the_devices_bit_for_bit(axes, mu_dtype):
    """Where a processor multiplies and adds at once, XLA decides of each program which sums are rounded once.

    With jax 0.12 the parameters of the two programs differ by that, in their last bit. Therefore in a process whose
    programs know x86's first vector extension alone, which has no such instruction.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_cpu_max_isa=AVX"
    code = f"from tests.train.test_moments import compare; compare({axes!r}, {mu_dtype!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_step_that_is_not_finite_leaves_the_hosts_moments_as_they_were(monkeypatch):
    monkeypatch.setattr(module, "_SLICE_BYTES", SLICE)
    assert_same(applied("host", {}, (0.5, float("nan"))), applied("device", {}, (0.5,)))


def test_the_stacked_layers_visit_in_slices_and_the_rest_whole(monkeypatch):
    _, state = made("host", {})
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    assert grouped(state.params) == (Group(members=tuple(range(len(shapes))), cuts=1),)
    stacked = [place for place, shape in enumerate(shapes) if len(shape) > 2]
    size = 4 * sum(int(np.prod(shapes[place])) for place in stacked)
    for limit, cuts in ((size, 1), (size - 1, 2), (size // 2 - 1, 4), (1, 4)):
        monkeypatch.setattr(module, "_SLICE_BYTES", limit)
        whole, *sliced = grouped(state.params)
        assert [(list(group.members), group.cuts) for group in sliced] == ([(stacked, cuts)] if cuts > 1 else [])
        assert sorted([*whole.members, *(place for group in sliced for place in group.members)]) == list(
            range(len(shapes))
        )


def test_a_slice_is_measured_by_what_one_device_holds(monkeypatch):
    mesh = make_mesh(MeshConfig(**FOUR), jax.devices()[:4])
    _, state = abstract_state(POLICY, OptimConfig(peak_lr=1e-2).transformation(), mesh, "host")
    whole = 4 * sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.params) if len(leaf.shape) > 2)
    monkeypatch.setattr(module, "_SLICE_BYTES", whole // 2)
    assert len(grouped(state.params)) == 1
    assert memory_of(state.opt_state) == "host"


def test_another_memory_is_refused():
    with pytest.raises(ValueError, match=r"optim\.moments_memory: expected device or host, got disk"):
        OptimConfig(peak_lr=1.0, moments_memory="disk")
