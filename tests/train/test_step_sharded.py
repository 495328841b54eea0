"""A whole optimizer step on many meshes of eight fake devices equals that of one device."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from sat_jax.routing import free_trace
from sat_jax.types import RoutingTrace, TokenBatch
from train.assemble import place
from train.state import OptimConfig, init_policy, init_state, shardings
from train.step import Step

pytestmark = pytest.mark.sharded

ROWS, LENGTH = 8, 12
POLICY = PolicyConfig.tiny(width=32, head_dim=8, experts=8, expert_hidden=32, remat="attention")
# A large eps: Adam would turn rounding of vanishing gradients into steps of the full learning rate.
OPTIM = OptimConfig(peak_lr=1e-2, warmup=0, eps=1e-2)
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"expert": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
)


def microbatch(seed):
    """Two sequences and padding in each row; half of the positions replay foreign routes."""
    draw = np.random.default_rng(seed)
    token_BT = draw.integers(0, POLICY.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    segment_BT = np.tile(np.array([1] * 5 + [2] * 4 + [0] * 3, np.int32), (ROWS, 1))
    free: Any = free_trace(POLICY.layers, ROWS, LENGTH, POLICY.experts_per_token, POLICY.experts)
    foreign = np.argsort(draw.random((POLICY.layers, ROWS, LENGTH, POLICY.experts)), -1)[..., :2]
    trace: Any = {"experts_LBTK": foreign.astype(free.experts_LBTK.dtype), "present_BT": segment_BT == 2}
    arrays: Any = dict(
        input_BT=token_BT,
        target_BT=np.roll(token_BT, -1, 1),
        segment_BT=segment_BT,
        position_BT=np.tile(np.array([*range(5), *range(4), 0, 0, 0], np.int32), (ROWS, 1)),
        loss_mask_BT=segment_BT > 0,
        behavior_logp_BT=(-np.log(16) + 0.3 * draw.standard_t(3, (ROWS, LENGTH))).clip(max=-1e-3).astype(np.float32),
        advantage_BT=np.repeat(draw.normal(size=(ROWS, 1)), LENGTH, 1).astype(np.float32),
        lag_BT=np.zeros((ROWS, LENGTH), np.int32),
        trace=RoutingTrace(**trace),
    )
    return TokenBatch(**arrays)


def advanced(mesh, dtype="float32"):
    """The state after one step of two microbatches, and what the step said."""
    config = dataclasses.replace(POLICY, dtype=dtype)
    graph, params = init_policy(config, 0, mesh)
    optimizer = OPTIM.transformation()
    state = init_state(params, optimizer, mesh)
    step = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, state)
    batch = place((microbatch(0), microbatch(1)), mesh)
    return step.update(state, batch, step.measure(state, batch))


@functools.lru_cache
def on_one_device(dtype):
    state, report = advanced(one_device_mesh(), dtype)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state.params)), jax.tree.leaves(state.opt_state), report.metrics


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_one_step_is_the_step_of_one_device(axes, capfd):
    mesh = make_mesh(MeshConfig(**axes))
    state, report = advanced(mesh)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    params, opt_state, metrics = on_one_device("float32")
    chex.assert_trees_all_close(nnx.to_pure_dict(state.params), params, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state.opt_state), opt_state, strict=True):
        scale = max(float(np.abs(theirs).max()), 1e-12)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=2e-5 * scale)
    assert report.finite
    assert metrics["sat/gate_rate"] > 0
    for name, value in metrics.items():
        assert report.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
    expected = jax.tree.leaves((shardings(state.params, mesh), shardings(state.opt_state, mesh)))
    for leaf, sharding in zip(jax.tree.leaves((state.params, state.opt_state)), expected, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    gate = jax.tree.leaves(state.opt_state[1][0].mu["layers"]["gate_EDF"])[0]
    cut = PartitionSpec(None, "expert", "fsdp", "tensor")
    assert gate.sharding.is_equivalent_to(NamedSharding(mesh, cut), 4)


def test_bfloat16_differs_between_meshes_by_its_rounding_alone():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    state, report = advanced(mesh, "bfloat16")
    params, _, metrics = on_one_device("bfloat16")
    chex.assert_trees_all_close(nnx.to_pure_dict(state.params), params, atol=2e-3)
    assert report.metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=0.02)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
