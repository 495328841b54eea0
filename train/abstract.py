"""A run's arguments without their values: what `jax.jit(...).lower` needs for a mesh that is not there."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from sat_jax.mesh import batch_sharding
from sat_jax.model import Policy, PolicyConfig
from sat_jax.routing import id_dtype
from sat_jax.types import RoutingTrace, TokenBatch
from train.moments import DEVICE, in_memory
from train.state import TrainState, shardings


def abstract_state(
    config: PolicyConfig, optimizer: optax.GradientTransformation, mesh: Mesh, moments_memory: str = DEVICE
) -> tuple[nnx.GraphDef, TrainState]:
    """The policy's static part and a train state of shapes, types and shardings.

    Args:
      config: the policy.
      optimizer: decides the optimizer state.
      mesh: real, or of a topology's devices.
      moments_memory: as `OptimConfig` has it.
    """
    policy = nnx.eval_shape(lambda: Policy(config, nnx.Rngs(0), mesh))
    graph, params = nnx.split(policy, nnx.Param)
    opt_state = jax.eval_shape(optimizer.init, params)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (params, opt_state),
        (shardings(params, mesh), in_memory(opt_state, shardings(opt_state, mesh), moments_memory)),
    )
    return graph, TrainState(version=0, params=placed[0], opt_state=placed[1])


def abstract_batch(config: PolicyConfig, rows: int, length: int, mesh: Mesh) -> TokenBatch:
    """One microbatch's shapes, types and shardings.

    Args:
      config: the policy that it is for.
      rows: B, over the whole mesh.
      length: T.
      mesh: real, or of a topology's devices.
    """

    def of(dtype: Any, *trailing: int, layers: tuple[int, ...] = ()) -> Any:
        sharding = batch_sharding(mesh, leading=len(layers))
        return jax.ShapeDtypeStruct((*layers, rows, length, *trailing), dtype, sharding=sharding)

    return TokenBatch(
        input_BT=of(jnp.int32),
        target_BT=of(jnp.int32),
        segment_BT=of(jnp.int32),
        position_BT=of(jnp.int32),
        loss_mask_BT=of(bool),
        behavior_logp_BT=of(jnp.float32),
        advantage_BT=of(jnp.float32),
        lag_BT=of(jnp.int32),
        trace=RoutingTrace(
            experts_LBTK=of(id_dtype(config.experts), config.experts_per_token, layers=(config.layers,)),
            present_BT=of(bool),
        ),
    )
