"""One decoder layer in the pieces that training and sampling share: norm, rope, projections, experts.

Parameters are stored as they are given (float32 when trained) and used in the compute type of the config; norms, rope,
softmax, the router and every accumulation are float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from sat_jax.mesh import constrain, spec
from sat_jax.model.config import PolicyConfig
from sat_jax.model.dispatch import ExpertWeights
from sat_jax.model.experts import DOWN_AXES, UP_AXES, apply_experts
from sat_jax.model.router import route
from sat_jax.routing import id_dtype
from sat_jax.shapes import check_shapes

# Logical axes of the attention's weights.
_INWARD = ("width", "heads", "unsharded")
_OUTWARD = ("heads", "unsharded", "width")


def parameter(rngs: nnx.Rngs, mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...], scale: float) -> nnx.Param:
    """A float32 parameter, normal with standard deviation `scale`, sharded along its logical axes."""
    value = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, out_sharding=spec(*axes), mesh=mesh)


def weight(parameter: nnx.Param, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """A parameter's value, pinned to its sharding where it is used, so that its gradient is sharded alike."""
    return constrain(parameter[...], mesh, *axes)


def norm_scale(mesh: Mesh, size: int) -> nnx.Param:
    """The scale of an RMSNorm: ones, unsharded."""
    return nnx.Param(jnp.ones(size, jnp.float32), out_sharding=spec("unsharded"), mesh=mesh)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * scale, in float32; the type of `x` comes back."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def linear(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """An einsum in the type of `x`, accumulated in float32.

    The weight's gradient leaves its product in float32, as the weight is stored: were the weight cast outside, its
    gradient would be rounded before it is summed over the devices.

    Args:
      equation: of `x` and `weight`, e.g. "btd,dhc->bthc"; no letter stands in one of the three terms alone.
      x: float32 or bfloat16.
      weight: any float type.
    """
    product: Any = _linear(equation, x, weight)
    return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    product = jnp.einsum(equation, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _linear_forward(equation: str, x: jax.Array, weight: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    return _linear(equation, x, weight), (x, weight)


def _linear_backward(equation: str, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dx = product(f"{out},{right}->{left}", grad, weight.astype(x.dtype))
    dweight = product(f"{left},{out}->{right}", x, grad)
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


_linear.defvjp(_linear_forward, _linear_backward)


def frequencies(channels: int, theta: float) -> np.ndarray:
    """theta^(-2c/C) of the channels c < C/2, radians a position, float32.

    Rounded where Hugging Face rounds: exponent, power and its inverse. A position multiplies every other rounding: with
    XLA's power, up to 1e-6 away, an angle at position 32,768 was 2e-3 from what engines and checkpoints are used to.
    """
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    return np.float32(1) / np.power(theta, exponent.astype(np.float64)).astype(np.float32)


def rope(x_BTHC: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
    """Turns channel c against channel c + C/2 by position * theta^(-2c/C) (Hugging Face's half rotation)."""
    sizes = check_shapes(x_BTHC=x_BTHC, position_BT=position_BT)
    angle = position_BT.astype(jnp.float32)[:, :, None, None] * frequencies(sizes["C"], theta)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BTHC.dtype)


class Layer(nnx.Module):
    """A decoder layer. `Policy` holds those of a kind stacked along a leading axis and scans over it.

    Args:
      config: the architecture.
      rngs: source of the initial parameters.
      mesh: where they live.
      sparse: whether its feed-forward is routed to experts; else it is a single one.
    """

    def __init__(self, config: PolicyConfig, rngs: nnx.Rngs, mesh: Mesh, sparse: bool = True) -> None:
        self.config, self.mesh, self.sparse = config, mesh, sparse
        width, head = config.width, config.head_dim
        inward, outward = 1 / math.sqrt(width), 1 / math.sqrt(2 * config.layers)
        self.attention_norm_D = norm_scale(mesh, width)
        self.query_DHC = parameter(rngs, mesh, (width, config.query_heads, head), _INWARD, inward)
        self.key_DGC = parameter(rngs, mesh, (width, config.kv_heads, head), _INWARD, inward)
        self.value_DGC = parameter(rngs, mesh, (width, config.kv_heads, head), _INWARD, inward)
        self.query_norm_C = norm_scale(mesh, head)
        self.key_norm_C = norm_scale(mesh, head)
        self.output_HCD = parameter(
            rngs,
            mesh,
            (config.query_heads, head, width),
            _OUTWARD,
            outward / math.sqrt(config.query_heads * head),
        )
        self.feed_norm_D = norm_scale(mesh, width)
        if sparse:
            hidden = config.expert_hidden
            self.router_DE = parameter(rngs, mesh, (width, config.experts), ("unsharded", "unsharded"), inward)
            self.gate_EDF = parameter(rngs, mesh, (config.experts, width, hidden), UP_AXES, inward)
            self.up_EDF = parameter(rngs, mesh, (config.experts, width, hidden), UP_AXES, inward)
            self.down_EFD = parameter(
                rngs, mesh, (config.experts, hidden, width), DOWN_AXES, outward / math.sqrt(hidden)
            )
        else:
            hidden = config.dense_hidden
            self.gate_DF = parameter(rngs, mesh, (width, hidden), UP_AXES[1:], inward)
            self.up_DF = parameter(rngs, mesh, (width, hidden), UP_AXES[1:], inward)
            self.down_FD = parameter(rngs, mesh, (hidden, width), DOWN_AXES[1:], outward / math.sqrt(hidden))

    def project(self, x_BTD: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of normed `x_BTD`: per-head norm of queries and keys, then rope.

        Args:
          x_BTD: the residual stream.
          position_BT: position within its own sequence, int32.

        Returns:
          q_BTHC, k_BTGC, v_BTGC in the compute type.
        """
        check_shapes(x_BTD=x_BTD, position_BT=position_BT)
        eps, theta = self.config.norm_eps, self.config.rope_theta
        normed_BTD = rms_norm(x_BTD, self.attention_norm_D[...], eps)
        q_BTHC = linear("btd,dhc->bthc", normed_BTD, weight(self.query_DHC, self.mesh, _INWARD))
        k_BTGC = linear("btd,dgc->btgc", normed_BTD, weight(self.key_DGC, self.mesh, _INWARD))
        v_BTGC = linear("btd,dgc->btgc", normed_BTD, weight(self.value_DGC, self.mesh, _INWARD))
        # Named before norm and rope, whose backward passes need what goes into them.
        q_BTHC, k_BTGC, v_BTGC = (checkpoint_name(array, "projections") for array in (q_BTHC, k_BTGC, v_BTGC))
        q_BTHC = rope(rms_norm(q_BTHC, self.query_norm_C[...], eps), position_BT, theta)
        k_BTGC = rope(rms_norm(k_BTGC, self.key_norm_C[...], eps), position_BT, theta)
        return q_BTHC, k_BTGC, v_BTGC

    def merge(self, x_BTD: jax.Array, attended_BTHC: jax.Array) -> jax.Array:
        """Adds the projected attention to the residual stream."""
        check_shapes(x_BTD=x_BTD, attended_BTHC=attended_BTHC)
        added_BTD = linear("bthc,hcd->btd", attended_BTHC, weight(self.output_HCD, self.mesh, _OUTWARD))
        return x_BTD + checkpoint_name(added_BTD, "projections")

    def feed_forward(
        self,
        x_BTD: jax.Array,
        experts_BTK: jax.Array | None,
        present_BT: jax.Array,
        real_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Sends the normed residual stream through the feed-forward and adds the result.

        Args:
          x_BTD: the residual stream.
          experts_BTK: ids to replay; None in a layer without experts, which looks at nothing but `x_BTD`.
          present_BT: bool; where False the position routes freely. Where True, an id that is no expert's gives NaN.
          real_BT: bool; where False (padding, an idle slot) the experts are not run; None = all are real.

        Returns:
          x_BTD, the used ids experts_BTK (smallest unsigned type), and agreement_BT (see `router.route`); None in place
          of the last two in a layer without experts.
        """
        check_shapes(x_BTD=x_BTD, experts_BTK=experts_BTK, present_BT=present_BT, real_BT=real_BT)
        normed_BTD = rms_norm(x_BTD, self.feed_norm_D[...], self.config.norm_eps)
        if experts_BTK is None:
            return x_BTD + self._dense(normed_BTD), None, None
        normed_ND, present_N = normed_BTD.reshape(-1, x_BTD.shape[-1]), present_BT.reshape(-1)
        out_ND, ids_NK, agreement_N = self._routed(
            normed_ND, experts_BTK.reshape(len(normed_ND), -1), present_N, real_BT
        )
        used_BTK = ids_NK.astype(id_dtype(self.config.experts)).reshape(experts_BTK.shape)
        return x_BTD + out_ND.reshape(x_BTD.shape), used_BTK, agreement_N.reshape(present_BT.shape)

    def _dense(self, normed_BTD: jax.Array) -> jax.Array:
        gate_DF, up_DF = (weight(w, self.mesh, UP_AXES[1:]) for w in (self.gate_DF, self.up_DF))
        gate_BTF, up_BTF = (linear("btd,df->btf", normed_BTD, w_DF) for w_DF in (gate_DF, up_DF))
        hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
        return linear("btf,fd->btd", hidden_BTF, weight(self.down_FD, self.mesh, DOWN_AXES[1:]))

    def _routed(
        self, normed_ND: jax.Array, experts_NK: jax.Array, present_N: jax.Array, real_BT: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        with jax.named_scope("router"):
            score_NE = jnp.matmul(
                normed_ND.astype(jnp.float32),
                self.router_DE[...].astype(jnp.float32),
                precision=jax.lax.Precision.HIGHEST,
            )
            ids_NK, weight_NK, agreement_N = route(score_NE, experts_NK, present_N, self.config, self.mesh)
        used_N = jnp.ones(len(normed_ND), bool) if real_BT is None else real_BT.reshape(-1)
        weights = ExpertWeights(gate_EDF=self.gate_EDF[...], up_EDF=self.up_EDF[...], down_EFD=self.down_EFD[...])
        with jax.named_scope("experts"):
            out_ND = apply_experts(normed_ND, ids_NK, weight_NK, used_N, weights, self.mesh)
        # The experts leave such an id out, which would pass for a small difference.
        unknown_N = used_N & (ids_NK >= self.config.experts).any(-1)
        return jnp.where(unknown_N[:, None], jnp.nan, out_ND), ids_NK, agreement_N
