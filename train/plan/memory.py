"""What lives on a device during a step, by group; and on the host, in the queue and on disk."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from sat_jax.logprob import chunk_width
from sat_jax.model import PolicyConfig
from sat_jax.routing import id_dtype
from sat_jax.types import TokenBatch
from train.config import RunConfig
from train.moments import grouped, is_hosted
from train.plan.load import Load
from train.state import TrainState

# Of a token on the host beside its routes: id, log-prob and version of the completion, four bytes each.
_TOKEN_BYTES = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """Bytes a device, of what outlives a single program.

    Attributes:
      parameters: of the policy, float32.
      optimizer: its moments, where they are not in the host's memory.
      accumulator: the gradient, float32.
      reference: frozen weights of the k3 term; 0 without.
      routes: experts to replay, of all microbatches of the step.
      tokens: all other arrays of the microbatches.
      scores: log-probs and the like that are kept from one program for another, of all microbatches.
    """

    parameters: int
    optimizer: int
    accumulator: int
    reference: int
    routes: int
    tokens: int
    scores: int

    @property
    def between(self) -> int:
        """What lives while the batch is measured, before there is a gradient."""
        return self.parameters + self.optimizer + self.reference + self.routes + self.tokens + self.scores

    @property
    def all(self) -> int:
        """With the gradient."""
        return self.between + self.accumulator


def resident(state: TrainState, micro: TokenBatch, config: RunConfig, load: Load) -> Resident:
    """The groups.

    Args:
      state: shapes and shardings (`train.abstract`).
      micro: those of one microbatch.
      config: decides what is kept.
      load: how many microbatches there are.
    """
    objective = config.objective.config
    parameters = shard_bytes(state.params)
    routes = shard_bytes(micro.trace.experts_LBTK)
    measures = objective.needs_measure and load.microbatches > 1
    # Of a batch that is measured: the mismatch, and the log-prob, entropy and normaliser that the gradient takes again.
    kept = 4 * measures + objective.needs_reference + objective.needs_proximal
    return Resident(
        parameters=parameters,
        optimizer=shard_bytes([leaf for leaf in jax.tree.leaves(state.opt_state) if not is_hosted(leaf)]),
        accumulator=parameters,
        reference=parameters if objective.needs_reference else 0,
        routes=load.microbatches * routes,
        tokens=load.microbatches * (shard_bytes(micro) - routes),
        scores=load.microbatches * kept * shard_bytes(micro.behavior_logp_BT),
    )


def visiting(state: TrainState) -> int:
    """What `apply` would have of moments in the host's memory at a time: the largest group's slices, in and out.

    As much again is beside them: 0.33 GiB were compiled for slices of 0.09 GiB.

    Args:
      state: shapes and shardings; where its moments are does not matter.
    """
    leaves, moments = jax.tree.leaves(state.params), shard_bytes(state.opt_state)
    share = moments / max(1, shard_bytes(state.params))
    groups = grouped(state.params)
    return int(4 * share * max(shard_bytes([leaves[p] for p in group.members]) / group.cuts for group in groups))


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shards of shape structs with shardings (whole arrays where there is none)."""
    return sum(
        leaf.dtype.itemsize
        * math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(tuple(leaf.shape)))
        for leaf in jax.tree.leaves(tree)
    )


def saved_bytes(policy: PolicyConfig, positions: int, heads_shards: int) -> int | None:
    """What the backward pass finds saved of all layers, by hand; None where nothing is recomputed.

    Args:
      policy: with its `remat`.
      positions: of one device and microbatch.
      heads_shards: that the heads are cut into.
    """
    size = jnp.dtype(policy.dtype).itemsize
    heads = policy.query_heads // heads_shards
    attention = heads * (policy.head_dim * size + 4)  # the output and a float32 logsumexp
    projections = (policy.query_heads + 2 * policy.kv_heads) // heads_shards * policy.head_dim * size
    projections += policy.width * size  # what attention adds to the residual stream
    extra = {"full": 0, "attention": attention, "projections": attention + projections}.get(policy.remat)
    return None if extra is None else policy.layers * positions * (policy.width * size + extra)


def logits_bytes(policy: PolicyConfig, positions: int, gathered: int) -> int:
    """One chunk of float32 logits, the only ones that exist.

    Args:
      policy: for its vocabulary.
      positions: of one device and microbatch.
      gathered: devices that put their columns together.
    """
    columns = min(-(-chunk_width(positions) // gathered) * gathered, policy.vocab_size)
    return 4 * positions * columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Bytes off the devices.

    Attributes:
      routes: of one step's completions.
      step: one step's completions with their routes.
      queue: the most that waits: every step that is sampled while others are trained.
      checkpoint: one, on disk: parameters and optimizer state.
      published: the tensors of a push.
      moments: of the optimizer, by one host for all of its devices; 0 where they are on the devices.
    """

    routes: int
    step: int
    queue: int
    checkpoint: int
    published: int
    moments: int


def host(state: TrainState, policy: PolicyConfig, config: RunConfig, load: Load, devices: int) -> Host:
    """The host's share of a step of this load.

    Args:
      state: shapes and shardings.
      policy: the architecture.
      config: decides what is kept.
      load: of the step.
      devices: of one host.
    """
    width = policy.moe_layers * policy.experts_per_token * jnp.dtype(id_dtype(policy.experts)).itemsize
    routes = load.positions * width if config.objective.replay else 0
    step = routes + load.positions * _TOKEN_BYTES
    schedule = config.schedule
    ahead = schedule.max_lag + 1 if schedule.mode == "bounded" else max(1, schedule.lag)
    whole = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves((state.params, state.opt_state)))
    return Host(
        routes=routes,
        step=step,
        queue=step * ahead,
        checkpoint=whole,
        published=policy.num_parameters() * jnp.dtype(config.rollout.dtype).itemsize,
        moments=devices * shard_bytes([leaf for leaf in jax.tree.leaves(state.opt_state) if is_hosted(leaf)]),
    )
