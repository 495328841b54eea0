"""Pytrees that cross rooms.

All are frozen dataclasses registered with JAX. None validates in `__post_init__`: JAX rebuilds them with tracers,
`None` and shape structs. The host boundary checks (`train.assemble`), functions check with `check_shapes`.
"""

import dataclasses

import jax

from sat_jax.metrics import Metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTrace:
    """The experts that each position was (or is to be) routed to.

    Attributes:
      experts_LBTK: expert ids, uint8 or uint16 (the smallest that holds E), one row per MoE layer in forward order.
      present_BT: bool; where False the row holds nothing and the position routes freely.
    """

    experts_LBTK: jax.Array
    present_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Packed rows, split once into input and target: every `_BT` array shares t and nobody shifts afterwards.

    Attributes:
      input_BT: token fed at t, int32.
      target_BT: token to predict at t, int32.
      segment_BT: int32; 0 = padding, 1.. = the row's sequences, contiguous and ascending.
      position_BT: int32; position within its own sequence, from 0.
      loss_mask_BT: bool; True where the target was sampled and is trained on (an *active* token).
      behavior_logp_BT: log mu of the target as the engine reported it, nats, float32; anything where inactive.
      advantage_BT: float32; anything where inactive.
      lag_BT: int32; trainer version minus the version that sampled the target; anything where inactive.
      trace: the rollout engine's routes, to replay; always passed (free routing is `present_BT` all False).
    """

    input_BT: jax.Array
    target_BT: jax.Array
    segment_BT: jax.Array
    position_BT: jax.Array
    loss_mask_BT: jax.Array
    behavior_logp_BT: jax.Array
    advantage_BT: jax.Array
    lag_BT: jax.Array
    trace: RoutingTrace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What one pass over the vocabulary says of every token; nats, float32.

    Attributes:
      logp_BT: log-prob of the target, <= 0.
      entropy_BT: of the distribution, >= 0.
      normaliser_BT: logsumexp of the tempered logits; without a gradient.
    """

    logp_BT: jax.Array
    entropy_BT: jax.Array
    normaliser_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOutput:
    """What scoring a batch gives.

    Attributes:
      logp_BT: log pi of the target at the sampling temperature, nats, float32.
      entropy_BT: entropy of the predicted distribution at that temperature, nats, float32.
      normaliser_BT: logsumexp of the logits at that temperature, nats, float32, without a gradient.
      trace: the routes that were used.
      agreement_BT: share in [0, 1] of the used (layer, slot) choices that the live router would have made itself,
        float32; 1 where nothing was replayed.
    """

    logp_BT: jax.Array
    entropy_BT: jax.Array
    normaliser_BT: jax.Array
    trace: RoutingTrace
    agreement_BT: jax.Array

    @property
    def scores(self) -> TokenScores:
        """What was said of every token, without the routes."""
        return TokenScores(logp_BT=self.logp_BT, entropy_BT=self.entropy_BT, normaliser_BT=self.normaliser_BT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipRadii:
    """Clip radii (not bounds) per token: the ratio is clipped to [1 - low, 1 + high]; dimensionless, float32."""

    low_BT: jax.Array
    high_BT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What `measure` saw, detached; `update` gates on this and not on its own recomputation.

    Attributes:
      mismatch_BT: the score (log ratio of the objective's unit), nats, float32, of *this* microbatch.
      threshold: SAT's q over the whole optimizer batch, nats, scalar float32.
    """

    mismatch_BT: jax.Array
    threshold: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossReport:
    """Scalar loss and mergeable metrics."""

    loss: jax.Array
    metrics: Metrics
