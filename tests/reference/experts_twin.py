"""Every expert on every token, in float32: the value of the experts' feed-forward and, by `jax.grad`, its gradients."""

import jax
import jax.numpy as jnp


def every_expert(x_ND, ids_NK, weight_NK, used_N, weights):
    out_ND = jnp.zeros(x_ND.shape, jnp.float32)
    x_ND = x_ND.astype(jnp.float32)
    for expert in range(weights.gate_EDF.shape[0]):
        gate, up, down = (w[expert] for w in (weights.gate_EDF, weights.up_EDF, weights.down_EFD))
        y_ND = (jax.nn.silu(x_ND @ gate) * (x_ND @ up)) @ down
        scale_N = jnp.where(ids_NK == expert, weight_NK, 0).sum(-1) * used_N
        out_ND += scale_N[:, None] * y_ND
    return out_ND
