"""The policy: tokens (and a routing trace) to hidden states and the trace that was used."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core
from jax.sharding import Mesh

from sat_jax.logprob import token_scores
from sat_jax.mesh import check_divides, constrain, one_device_mesh, platform
from sat_jax.model.attention import packed_attention
from sat_jax.model.config import REMAT, PolicyConfig
from sat_jax.model.layers import Layer, norm_scale, parameter, rms_norm, weight
from sat_jax.routing import free_trace
from sat_jax.shapes import check_shapes
from sat_jax.types import PolicyOutput, RoutingTrace, TokenBatch, TokenScores

_EMBEDDING = ("vocabulary", "unsharded")
_HEAD = ("unsharded", "vocabulary")
# Layers of a scan that stand written out on a CPU: more take long to compile.
_WRITTEN_OUT = 4


class Policy(nnx.Module):
    """A Qwen3-MoE or a dense Qwen3 decoder.

    Args:
      config: the architecture.
      rngs: source of the initial parameters; None = `nnx.Rngs(0)`.
      mesh: where it lives; None = one device under the four axis names. No ambient mesh is needed.

    Attributes:
      layers: the layers with experts as one `Layer`, whose parameters carry a leading axis of layers; None if there are
        none. See `over_layers`.
      dense_layers: the same of the layers without experts.

    Raises:
      ValueError: the mesh does not divide the vocabulary, the width, the heads or the experts.
    """

    def __init__(self, config: PolicyConfig, rngs: nnx.Rngs | None = None, mesh: Mesh | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        mesh = one_device_mesh() if mesh is None else mesh
        check_divides(mesh, "vocabulary", vocab_size=config.vocab_size)
        check_divides(mesh, "width", width=config.width)
        check_divides(mesh, "heads", query_heads=config.query_heads, kv_heads=config.kv_heads)
        check_divides(mesh, "expert", experts=config.experts)
        check_divides(mesh, "expert_hidden", expert_hidden=config.expert_hidden, dense_hidden=config.dense_hidden)
        self.config, self.mesh = config, mesh
        scale = 1 / math.sqrt(config.width)
        self.embedding_VD = parameter(rngs, mesh, (config.vocab_size, config.width), _EMBEDDING, scale)
        self.layers = _stack(config, config.moe_layers, rngs, mesh, sparse=True)
        self.dense_layers = _stack(config, len(config.dense_layers), rngs, mesh, sparse=False)
        self.final_norm_D = norm_scale(mesh, config.width)
        if not config.tie_embeddings:
            self.unembedding_DV = parameter(rngs, mesh, (config.width, config.vocab_size), _HEAD, scale)

    @property
    def head_DV(self) -> jax.Array:
        """The output head as it is stored (uncast): its own parameter, or the transposed embedding when tied."""
        if self.config.tie_embeddings:
            return weight(self.embedding_VD, self.mesh, _EMBEDDING).T
        return weight(self.unembedding_DV, self.mesh, _HEAD)

    def embed(self, input_BT: jax.Array) -> jax.Array:
        """Embeds tokens: x_BTD in the compute type; NaN for a token outside the vocabulary."""
        check_shapes(input_BT=input_BT)
        table_VD = weight(self.embedding_VD, self.mesh, _EMBEDDING)
        x_BTD = jnp.take(table_VD, input_BT, axis=0, mode="fill").astype(self.config.dtype)
        return constrain(x_BTD, self.mesh, "batch", "unsharded", "unsharded")

    def final(self, x_BTD: jax.Array) -> jax.Array:
        """The last norm: hidden_BTD from the residual stream after all layers."""
        check_shapes(x_BTD=x_BTD)
        return rms_norm(x_BTD, self.final_norm_D[...], self.config.norm_eps)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Next-token logits logits_BTV, float32, at temperature 1. For `score` no such array is made."""
        check_shapes(hidden_BTD=hidden_BTD)
        head_DV = self.head_DV.astype(hidden_BTD.dtype)
        return jnp.einsum("btd,dv->btv", hidden_BTD, head_DV, preferred_element_type=jnp.float32)

    def over_layers(
        self, body: Callable[[Layer, Any, jax.Array, Any], tuple[Any, Any]], carry: Any, per_moe_layer: Any
    ) -> tuple[Any, Any]:
        """Runs the layers in forward order: one scan over each stretch of layers of a kind.

        Args:
          body: `(layer, carry, number, item) -> (carry, out)`; `number` counts all layers from 0, `item` and `out` are
            of a layer with experts, and None of one without. Traced once a stretch.
          carry: e.g. the residual stream.
          per_moe_layer: a pytree whose leaves lead with the axis of layers with experts, one item each; None = nothing.

        Returns:
          The last carry, and the outs stacked along a leading axis of layers with experts; None if there are none.
        """

        def step(carry: Any, at: tuple[Layer, jax.Array, Any]) -> tuple[Any, Any]:
            layer, number, item = at
            return body(layer, carry, number, item)

        outs, begun = [], {True: 0, False: 0}
        for sparse, first, end in self.config.runs:
            own = slice(begun[sparse], begun[sparse] + end - first)  # their places among the layers of their kind
            begun[sparse] = own.stop
            layers = _part(self.layers if sparse else self.dense_layers, own)
            item = _part(per_moe_layer, own) if sparse else None
            carry, out = jax.lax.scan(
                step, carry, (layers, jnp.arange(first, end), item), unroll=self._unroll(end - first)
            )
            outs += [out] if sparse else []
        if len(outs) < 2:
            return carry, outs[0] if outs else None
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)

    def _unroll(self, layers: int) -> int:
        """How many layers of a scan stand written out: a few on a CPU, where what a scan keeps is copied in and out.

        Not in bfloat16: XLA leaves roundings out between operations that it fuses, and across layers it fuses them in
        every program differently. A probe of 257 tokens was 0.017 nats off then, between two programs of one policy.
        """
        few = layers <= _WRITTEN_OUT and self.config.dtype == "float32"
        return layers if few and platform(self.mesh) == "cpu" else 1

    def __call__(
        self,
        input_BT: jax.Array,
        segment_BT: jax.Array,
        position_BT: jax.Array,
        trace: RoutingTrace | None = None,
    ) -> tuple[jax.Array, RoutingTrace]:
        """Runs packed rows through the layers.

        Args:
          input_BT: tokens, int32.
          segment_BT: int32; 0 = padding, which influences nothing and costs no expert; equal numbers attend.
          position_BT: position within its own sequence, int32.
          trace: routes to replay; None is a trace with nothing present (and then another program than with one).

        Returns:
          hidden_BTD after the last norm, in the compute type, NaN where a token, a position or a present route is out
          of its range; and the routes that were used, present where real.

        Raises:
          ValueError: a shape contradicts its suffix or the config, or the mesh does not divide the rows; or, where the
            arrays are known (outside `jit`), a value is out of its range.
        """
        hidden_BTD, used, _ = self._run(input_BT, segment_BT, position_BT, trace)
        return hidden_BTD, used

    def score(
        self, batch: TokenBatch, temperature: float | jax.Array = 1.0, known: TokenScores | None = None
    ) -> PolicyOutput:
        """Log-prob and entropy of every target under the routes of the batch's trace.

        Args:
          batch: packed rows.
          temperature: what the logits are divided by, > 0; the sampler's.
          known: `scores` of these weights on this batch, where they were taken before: given back with a gradient, for
            which the vocabulary is then multiplied once less (`token_scores`).
        """
        hidden_BTD, used, agreement_BT = self._run(batch.input_BT, batch.segment_BT, batch.position_BT, batch.trace)
        with jax.named_scope("logprob"):
            scores = token_scores(
                hidden_BTD, self.head_DV, batch.target_BT, temperature=temperature, mesh=self.mesh, known=known
            )
        return PolicyOutput(
            logp_BT=scores.logp_BT,
            entropy_BT=scores.entropy_BT,
            normaliser_BT=scores.normaliser_BT,
            trace=used,
            agreement_BT=agreement_BT,
        )

    def _run(
        self, input_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array, trace: RoutingTrace | None
    ) -> tuple[jax.Array, RoutingTrace, jax.Array]:
        config = self.config
        rows, length = input_BT.shape
        if trace is None:
            trace = free_trace(config.moe_layers, rows, length, config.experts_per_token, config.experts)
        self._check(input_BT, segment_BT, position_BT, trace)
        real_BT = segment_BT != 0
        present_BT = trace.present_BT & real_BT

        def run_layer(layer: Layer, x_BTD: jax.Array, _: jax.Array, experts_BTK: jax.Array | None) -> tuple[Any, Any]:
            with jax.named_scope("attention"):
                q_BTHC, k_BTGC, v_BTGC = layer.project(x_BTD, position_BT)
                x_BTD = layer.merge(x_BTD, packed_attention(q_BTHC, k_BTGC, v_BTGC, segment_BT, self.mesh))
            x_BTD, used_BTK, agreement_BT = layer.feed_forward(x_BTD, experts_BTK, present_BT, real_BT)
            return constrain(x_BTD, self.mesh, "batch", "unsharded", "unsharded"), (used_BTK, agreement_BT)

        kept = REMAT[config.remat]
        body = run_layer
        if kept is not None:
            # Inside a scan nothing is there to be eliminated as common, and the barrier against it costs time.
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            body = jax.checkpoint(run_layer, prevent_cse=False, policy=policy)
        # Rope knows no end, so that a position beyond the last one would pass without a word.
        beyond_BT = real_BT & (position_BT >= config.max_positions)
        x_BTD = jnp.where(beyond_BT[..., None], jnp.nan, self.embed(input_BT))
        x_BTD, routed = self.over_layers(body, x_BTD, trace.experts_LBTK)
        # Without experts there is nothing to disagree about.
        used_LBTK, agreement_LBT = (trace.experts_LBTK, jnp.ones((1, rows, length))) if routed is None else routed
        used = RoutingTrace(experts_LBTK=used_LBTK, present_BT=real_BT)
        return self.final(x_BTD), used, agreement_LBT.mean(0)

    def _check(self, input_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array, trace: RoutingTrace) -> None:
        sizes = check_shapes(
            input_BT=input_BT,
            segment_BT=segment_BT,
            position_BT=position_BT,
            experts_LBTK=trace.experts_LBTK,
            present_BT=trace.present_BT,
        )
        expected = {"L": self.config.moe_layers, "K": self.config.experts_per_token}
        for letter, size in expected.items():
            if sizes[letter] != size:
                raise ValueError(
                    f"trace.experts_LBTK: expected {letter} = {size} (the policy's), got {sizes[letter]} in shape "
                    f"{tuple(trace.experts_LBTK.shape)}"
                )
        check_divides(self.mesh, "batch", rows=sizes["B"])
        arrays = (input_BT, segment_BT, position_BT, trace.experts_LBTK, trace.present_BT)
        if not any(_is_unknown(array) for array in arrays):
            _check_values(self.config, *map(np.asarray, arrays))


def _is_unknown(array: jax.Array | np.ndarray) -> bool:
    """Whether its values cannot be read here: inside `jit`, or on other hosts."""
    return isinstance(array, core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable)


def _check_values(
    config: PolicyConfig,
    input_BT: np.ndarray,
    segment_BT: np.ndarray,
    position_BT: np.ndarray,
    experts_LBTK: np.ndarray,
    present_BT: np.ndarray,
) -> None:
    real_BT = segment_BT != 0
    routed_LBTK = present_BT[None, :, :, None] & np.ones_like(experts_LBTK, bool)
    expert_BT = np.max(experts_LBTK, axis=(0, 3), where=routed_LBTK, initial=0)
    for name, value_BT, bound in (
        ("input_BT", input_BT, config.vocab_size),
        ("position_BT", position_BT, config.max_positions),
        ("trace.experts_LBTK", expert_BT, max(config.experts, 1)),
    ):
        bad_BT = real_BT & ((value_BT < 0) | (value_BT >= bound))
        if bad_BT.any():
            row, place = (int(at) for at in np.argwhere(bad_BT)[0])
            raise ValueError(
                f"{name}: expected numbers from 0 to {bound - 1} (the policy's), got {value_BT[row, place]} in row "
                f"{row} at {place}"
            )


def _stack(config: PolicyConfig, count: int, rngs: nnx.Rngs, mesh: Mesh, *, sparse: bool) -> Any:
    """`count` layers of a kind as one `Layer`; None for none."""
    if not count:
        return None
    stack = nnx.vmap(
        lambda layer_rngs: Layer(config, layer_rngs, mesh, sparse),
        in_axes=0,
        out_axes=0,
        axis_size=count,
        transform_metadata={nnx.PARTITION_NAME: None},
    )
    return stack(rngs.split(count))


def _part(stacked: Any, own: slice) -> Any:
    """Some layers of a stack; the stack itself where these are all, so that nothing is copied."""
    leaves = jax.tree.leaves(stacked)
    if not leaves or own == slice(0, len(leaves[0])):
        return stacked
    return jax.tree.map(lambda leaf: leaf[own], stacked)
