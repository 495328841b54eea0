import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from sat_jax.mesh import MeshConfig, batch_sharding, make_mesh
from sat_jax.model import Policy, PolicyConfig, hf
from sat_jax.routing import free_trace
from sat_jax.types import RoutingTrace, TokenBatch

CONFIG = PolicyConfig.tiny(width=32, head_dim=8, experts=8, expert_hidden=32)
ROWS, LENGTH = 8, 12


def batch_of(seed):
    draw = np.random.default_rng(seed)
    token_BT = jnp.asarray(draw.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)), jnp.int32)
    segment_BT = jnp.asarray(np.tile([1] * 5 + [2] * 4 + [0] * 3, (ROWS, 1)), jnp.int32)
    zero_BT = jnp.zeros((ROWS, LENGTH), jnp.float32)
    free = free_trace(CONFIG.layers, ROWS, LENGTH, CONFIG.experts_per_token, CONFIG.experts)
    foreign = np.argsort(draw.random((CONFIG.layers, ROWS, LENGTH, CONFIG.experts)), -1)[..., :2]
    return TokenBatch(
        input_BT=token_BT,
        target_BT=jnp.roll(token_BT, 1, 0),
        segment_BT=segment_BT,
        position_BT=jnp.asarray(np.tile([*range(5), *range(4), 0, 0, 0], (ROWS, 1)), jnp.int32),
        loss_mask_BT=segment_BT > 0,
        behavior_logp_BT=zero_BT,
        advantage_BT=zero_BT,
        lag_BT=jnp.zeros_like(token_BT),
        trace=RoutingTrace(
            experts_LBTK=jnp.asarray(foreign, free.experts_LBTK.dtype), present_BT=jnp.asarray(segment_BT == 2)
        ),
    )


def scored(policy, mesh):
    """Loss, output and gradients of one compiled program on `mesh` (None: one device)."""
    graph, params = nnx.split(policy, nnx.Param)
    batch = batch_of(0)
    if mesh is not None:
        batch = jax.tree.map(lambda a: jax.device_put(a, batch_sharding(mesh, 1 if a.ndim == 4 else 0)), batch)

    def loss(params, batch):
        output = nnx.merge(graph, params).score(batch, 0.9)
        return jnp.where(batch.loss_mask_BT, output.logp_BT, 0).sum(), output

    (value, output), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    return value, output, gradient


@pytest.fixture(scope="module")
def policy():
    return Policy(CONFIG, nnx.Rngs(3))


@pytest.fixture(scope="module")
def unsharded(policy):
    return scored(policy, None)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_a_sharded_policy_equals_the_unsharded_one(axes, policy, unsharded, capfd):
    mesh = make_mesh(MeshConfig(**axes))
    moved = hf.import_tensors(CONFIG, dict(hf.export_tensors(policy, CONFIG)), mesh=mesh)
    value, output, gradient = scored(moved, mesh)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    np.testing.assert_allclose(value, unsharded[0], rtol=1e-6)
    chex.assert_trees_all_close(output, unsharded[1], rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(nnx.to_pure_dict(gradient), nnx.to_pure_dict(unsharded[2]), rtol=1e-4, atol=1e-4)
    assert output.trace.experts_LBTK.sharding.is_equivalent_to(batch_sharding(mesh, 1), 4)
    for path, leaf in nnx.to_flat_state(gradient):
        expected = jax.sharding.NamedSharding(mesh, PartitionSpec(*leaf.out_sharding))
        assert leaf[...].sharding.is_equivalent_to(expected, leaf[...].ndim), path


def test_initial_parameters_are_sharded_as_the_table_says_and_the_same_on_any_mesh(policy):
    sharded = Policy(CONFIG, nnx.Rngs(3), make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    expected = {
        "gate_EDF": (CONFIG.layers, 4, 16, 16),
        "down_EFD": (CONFIG.layers, 4, 16, 16),
        "query_DHC": (CONFIG.layers, 16, 2, 8),
        "key_DGC": (CONFIG.layers, 16, 1, 8),
        "output_HCD": (CONFIG.layers, 2, 8, 16),
        "router_DE": (CONFIG.layers, 32, 8),
    }
    for name, shape in expected.items():
        assert getattr(sharded.layers, name)[...].addressable_shards[0].data.shape == shape, name
    assert sharded.embedding_VD[...].addressable_shards[0].data.shape == (2, 32)
    assert sharded.unembedding_DV[...].addressable_shards[0].data.shape == (32, 2)
    one, other = (nnx.to_pure_dict(nnx.state(which, nnx.Param)) for which in (policy, sharded))
    chex.assert_trees_all_equal(one, other)


def test_a_policy_needs_no_mesh_in_the_surroundings_to_be_abstract():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    state = nnx.state(nnx.eval_shape(lambda: Policy(CONFIG, nnx.Rngs(0), mesh)), nnx.Param)
    structs = {path: leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)}
    assert all(isinstance(struct, jax.ShapeDtypeStruct) and struct.sharding.mesh == mesh for struct in structs.values())
    assert structs["layers", "query_DHC"].sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert structs["layers", "query_DHC"].shape == (CONFIG.layers, 32, 4, 8)


@pytest.mark.parametrize(
    ("axes", "change", "named"),
    [
        (
            {"tensor": 8},
            {},
            r"query_heads: expected a multiple of 8 \(mesh: tensor 8\), got 4; use .* one of 1, 2, 4, or",
        ),
        ({"tensor": 4, "data": 2}, {}, r"kv_heads: expected a multiple of 4 \(mesh: tensor 4\), got 2"),
        ({"expert": 8}, {"experts": 6}, r"experts: expected a multiple of 8 \(mesh: expert 8\), got 6"),
        ({"fsdp": 8}, {"width": 36}, r"width: expected a multiple of 8 \(mesh: fsdp 8\), got 36"),
        (
            {"fsdp": 8},
            {"vocab_size": 14},
            r"vocab_size: expected a multiple of 8 \(mesh: tensor 1 \* fsdp 8 \* expert 1\), got 14",
        ),
        ({"tensor": 2, "data": 4}, {"expert_hidden": 33}, r"expert_hidden: expected a multiple of 2"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(axes, change, named):
    sizes = {"width": 32, "head_dim": 8, "experts": 8, "expert_hidden": 32} | change
    with pytest.raises(ValueError, match=named):
        Policy(PolicyConfig.tiny(**sizes), mesh=make_mesh(MeshConfig(**axes)))


def test_rows_that_the_mesh_does_not_divide_are_refused():
    policy = Policy(CONFIG, mesh=make_mesh(MeshConfig(data=8)))
    token_BT = jnp.ones((6, LENGTH), jnp.int32)
    with pytest.raises(
        ValueError, match=r"rows: expected a multiple of 8 \(mesh: data 8 \* fsdp 1 \* expert 1\), got 6"
    ):
        policy(token_BT, token_BT, token_BT)
