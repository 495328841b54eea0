import jax
import jax.numpy as jnp
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from train.abstract import abstract_state
from train.state import OptimConfig

CONFIG = PolicyConfig.tiny(width=32, experts=8)
MESH = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))


def moments(**optim):
    """Shapes of both moments and of the parameters, sharded as a run would have them."""
    _, state = abstract_state(CONFIG, OptimConfig(peak_lr=1e-3, **optim).transformation(), MESH)
    adam = state.opt_state[1][0]
    return [jax.tree.leaves(tree) for tree in (adam.mu, adam.nu, state.params)]


def test_the_first_moment_may_be_kept_in_half_the_bytes():
    for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
        mean, square, _ = moments(mu_dtype=name)
        assert {leaf.dtype for leaf in mean} == {jnp.dtype(dtype)}
        assert {leaf.dtype for leaf in square} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_moments_have_the_shardings_of_their_parameters(name):
    mean, square, params = moments(mu_dtype=name)
    assert any(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in params)
    for one, other, param in zip(mean, square, params, strict=True):
        assert one.shape == other.shape == param.shape
        assert one.sharding == other.sharding == param.sharding


def test_another_type_of_moments_is_refused():
    with pytest.raises(ValueError, match=r"optim\.mu_dtype: expected float32 or bfloat16, got int8"):
        OptimConfig(peak_lr=1.0, mu_dtype="int8")
