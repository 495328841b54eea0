"""How often the devices of a mesh wait for each other in a step: read from the compiled programs."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import sat_jax.everywhere
import train.step
from sat_jax.mesh import AXES, MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from sat_jax.routing import free_trace
from sat_jax.types import TokenBatch
from train.place import place
from train.plan.collectives import collectives
from train.state import OptimConfig, init_policy, init_state
from train.step import Step

pytestmark = pytest.mark.sharded  # a minute of compiling

ROWS, LENGTH = 8, 12
POLICY = PolicyConfig.tiny(width=32, head_dim=8, experts=8, expert_hidden=32)


def texts(preset, microbatches, names) -> dict[str, Any]:
    """Compiled programs of a step over two devices of `data`."""
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    graph, params = init_policy(POLICY, 0, mesh)
    optimizer = OptimConfig(peak_lr=1e-3).transformation()
    state = init_state(params, optimizer, mesh)
    zeros = functools.partial(np.zeros, (ROWS, LENGTH))
    arrays = {field: zeros(np.int32) for field in ("input_BT", "target_BT", "segment_BT", "position_BT", "lag_BT")}
    arrays |= {field: zeros(np.float32) for field in ("behavior_logp_BT", "advantage_BT")}
    trace = free_trace(POLICY.layers, ROWS, LENGTH, POLICY.experts_per_token, POLICY.experts)
    (micro,) = place((TokenBatch(**arrays, loss_mask_BT=zeros(bool), trace=trace),), mesh)  # type: ignore[arg-type]
    step = Step(graph, optimizer, ObjectiveConfig.preset(preset), 1.0, state)
    lowered = step.lower(state, micro, microbatches)
    return {name: lowered[name].compile().as_text() for name in names}


def programs(preset, microbatches, names):
    """Their collectives."""
    sizes: dict[str, int] = dict(zip(AXES, MeshConfig(data=2).shape, strict=True))
    return {name: collectives(text, sizes) for name, text in texts(preset, microbatches, names).items()}


@pytest.mark.parametrize("preset", ["sat_grpo", "gspo"])
def test_a_small_step_waits_for_one_gather_and_for_the_sum_of_the_gradients(preset):
    (found,) = programs(preset, 1, ["gradient"]).values()
    assert sorted(one.kind for one in found) == ["all-gather", "all-reduce"]
    assert not any(one.at_least for one in found)
    gather = next(one for one in found if one.kind == "all-gather")
    assert gather.bytes <= ROWS * LENGTH * 4 * 12  # a dozen numbers a token at most


def test_the_gradients_of_small_arrays_are_summed_as_one(monkeypatch):
    """A sum of several arrays is one collective in the program, and gloo takes its arrays one by one."""
    joined = texts("sat_grpo", 1, ["gradient"])["gradient"]
    monkeypatch.setattr(sat_jax.everywhere, "_TOGETHER", 0)
    apart = texts("sat_grpo", 1, ["gradient"])["gradient"]
    assert [len(re.findall(r" = \(.* all-reduce\(", text)) for text in (joined, apart)] == [0, 1]
    assert " all-reduce(" in joined


def test_a_small_batch_of_several_is_measured_in_a_gather_a_program():
    found = programs("sat_gspo", 2, ["denominator", "mismatch", "threshold", "accumulate", "apply", "metrics"])
    assert {name: len(of) for name, of in found.items()} == {
        "denominator": 1,
        "mismatch": 0,
        "threshold": 1,
        "accumulate": 2,
        "apply": 0,
        "metrics": 0,
    }


def test_a_large_batch_is_not_gathered(monkeypatch):
    monkeypatch.setattr(train.step, "_SMALL", ROWS * LENGTH - 1)
    (found,) = programs("sat_grpo", 1, ["gradient"]).values()
    assert {one.kind for one in found} == {"all-reduce"}
    assert any(one.at_least for one in found)  # the passes of the threshold, each a sum over the devices
