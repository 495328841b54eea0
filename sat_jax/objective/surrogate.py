"""The third link: what is maximised per token, given the log-ratio, the advantage and the radii."""

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.ratio import Ratios, bounded_exp
from sat_jax.types import ClipRadii


def surrogate(
    ratios: Ratios, advantage_BT: jax.Array, radii: ClipRadii, config: ObjectiveConfig
) -> tuple[jax.Array, jax.Array]:
    """The surrogate S (to be maximised) and where its bound is what counts.

    Args:
      ratios: log-ratios.
      advantage_BT: float32, 0 where inactive.
      radii: of the clip.
      config: which surrogate.

    Returns:
      (surrogate_BT float32, bounded_BT bool). For ppo and dual_clip a bounded token has no gradient.
    """
    ratio_BT = bounded_exp(ratios.clipped_BT)
    if config.surrogate == "cispo":
        capped_BT = jnp.clip(ratio_BT, config.cispo_low, config.cispo_high)
        return lax.stop_gradient(capped_BT) * advantage_BT * ratios.logp_BT, capped_BT != ratio_BT
    if config.surrogate == "sapo":
        tau_BT = jnp.where(advantage_BT > 0, config.tau_positive, config.tau_negative)
        return 4 / tau_BT * jax.nn.sigmoid(tau_BT * (ratio_BT - 1)) * advantage_BT, jnp.zeros_like(ratio_BT, bool)
    free_BT = ratio_BT * advantage_BT
    bound_BT, bounded_BT = clip_bound(lax.stop_gradient(ratio_BT), advantage_BT, radii)
    if config.surrogate == "dual_clip":
        floor_BT = config.dual_cap * advantage_BT
        floored_BT = (advantage_BT < 0) & (floor_BT > lax.stop_gradient(free_BT))
        bound_BT, bounded_BT = jnp.where(floored_BT, floor_BT, bound_BT), floored_BT | bounded_BT
    # A select instead of a minimum: the same value, and at the tie inside the radii the gradient is all the ratio's.
    return jnp.where(bounded_BT, bound_BT, free_BT), bounded_BT


def clip_bound(ratio_BT: jax.Array, advantage_BT: jax.Array, radii: ClipRadii) -> tuple[jax.Array, jax.Array]:
    """The clipped branch of the PPO minimum, and where it is strictly the smaller one.

    Source: PPO (arXiv 1707.06347), equation 7.
    """
    bound_BT = jnp.clip(ratio_BT, 1 - radii.low_BT, 1 + radii.high_BT) * advantage_BT
    return bound_BT, bound_BT < ratio_BT * advantage_BT


def kl_to_reference(ratios: Ratios, ref_logp_BT: jax.Array, config: ObjectiveConfig) -> jax.Array:
    """Per-token estimate of KL(pi || reference), differentiable, nats; always of the token, whatever the unit.

    Args:
      ratios: log-ratios.
      ref_logp_BT: log-probs under the frozen reference, 0 where inactive; detached here.
      config: `kl_kind`, and `kl_importance`.

    Returns:
      kl_BT, float32, 0 where inactive.

    Source: Schulman, "Approximating KL divergence"; the factor pi / mu: DeepSeek-V3.2.
    """
    log_ratio_BT = ratios.logp_BT - lax.stop_gradient(ref_logp_BT)
    if config.kl_kind == "k1":
        kl_BT = log_ratio_BT
    elif config.kl_kind == "k2":
        kl_BT = log_ratio_BT * log_ratio_BT / 2
    else:
        kl_BT = bounded_exp(-log_ratio_BT) - 1 + log_ratio_BT
    if config.kl_importance:
        kl_BT = kl_BT * bounded_exp(ratios.logp_BT - ratios.behavior_BT)
    return kl_BT
