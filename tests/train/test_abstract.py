import jax
import jax.numpy as jnp
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from train.abstract import abstract_batch, abstract_state
from train.state import OptimConfig
from train.step import Step

CONFIG = PolicyConfig.tiny(width=32, experts=8, layers=1)
UPDATE = ("gradient", "accumulate", "apply", "metrics")
MESH = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))


def test_an_abstract_batch_is_cut_as_a_placed_one():
    batch = abstract_batch(CONFIG, 8, 16, MESH)
    assert batch.input_BT.sharding.shard_shape((8, 16)) == (2, 16)
    ids = batch.trace.experts_LBTK
    assert (ids.shape, ids.dtype) == ((CONFIG.layers, 8, 16, CONFIG.experts_per_token), jnp.uint8)
    assert ids.sharding.shard_shape(ids.shape) == (CONFIG.layers, 2, 16, CONFIG.experts_per_token)


@pytest.mark.parametrize(
    ("preset", "overrides", "names"),
    [
        ("sat_grpo", {"kl_coef": 0.1}, ["denominator", "mismatch", "threshold", "score", *UPDATE]),
        ("decoupled_ppo", {}, ["denominator", "score", *UPDATE]),
        ("grpo", {}, ["denominator", *UPDATE]),
    ],
)
def test_every_program_of_a_step_lowers_from_shapes_alone_in_the_order_of_the_step(preset, overrides, names):
    optimizer = OptimConfig(peak_lr=1e-3).transformation()
    graph, state = abstract_state(CONFIG, optimizer, MESH)
    step = Step(graph, optimizer, ObjectiveConfig.preset(preset, **overrides), 1.0, state)
    micro = abstract_batch(CONFIG, 8, 16, MESH)
    assert list(step.lower(state, micro, microbatches=2)) == names
    only = step.lower(state, micro)
    assert list(only) == [name for name in names if name in ("score", "gradient", "apply", "metrics")]
    gradient, _ = only["gradient"].out_info
    for got, param in zip(jax.tree.leaves(gradient), jax.tree.leaves(state.params), strict=True):
        assert (got.shape, got.dtype) == (param.shape, param.dtype)
