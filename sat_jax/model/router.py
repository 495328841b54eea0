"""From router scores to expert ids and weights, free or replayed. Replay is an argument, not a mode."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sat_jax.mesh import spec
from sat_jax.model.config import PolicyConfig
from sat_jax.routing import agreement
from sat_jax.shapes import check_shapes


def route(
    score_NE: jax.Array, replayed_NK: jax.Array, present_N: jax.Array, config: PolicyConfig, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses each token's experts and their weights.

    Where a route is present its ids are used, otherwise the K highest scores, the lowest id first among equals. In both
    cases the weights come from the *live* scores at the used ids, so the router learns under replay. Renormalised
    weights are computed as the softmax over the K used scores, which equals "softmax over all experts, gather,
    divide by the sum" and stays finite where every replayed expert has a vanishing live probability.

    Args:
      score_NE: the live router's scores (logits), float32.
      replayed_NK: ids to replay, any integer type; anything where absent.
      present_N: bool; whether the row of `replayed_NK` holds a route.
      config: K and whether weights are renormalised.
      mesh: whose batch axes cut the tokens; None = one device.

    Returns:
      ids_NK: the used ids, int32.
      weight_NK: their weights, float32, differentiable in `score_NE`.
      agreement_N: share of the used ids that the live router would have chosen, float32; 1 in absent rows.

    Raises:
      ValueError: an argument's shape contradicts its suffix, or K is not the config's.

    Source: R3 (arXiv 2510.11370); SAT (arXiv 2607.18722), equation 40; Qwen3-MoE for the free choice.
    """
    sizes = check_shapes(score_NE=score_NE, replayed_NK=replayed_NK, present_N=present_N)
    if sizes["K"] != config.experts_per_token:
        raise ValueError(f"replayed_NK: expected K = {config.experts_per_token}, got {sizes['K']}")
    live_NK = _live(score_NE, config.experts_per_token, mesh)
    ids_NK = jnp.where(present_N[:, None], replayed_NK.astype(jnp.int32), live_NK)
    used_NK = _gather(score_NE, ids_NK)
    if config.norm_topk:
        weight_NK = jax.nn.softmax(used_NK, axis=-1)
    else:
        weight_NK = jnp.exp(used_NK - jax.nn.logsumexp(score_NE, axis=-1, keepdims=True))
    return ids_NK, weight_NK, agreement(ids_NK, live_NK)


def _live(score_NE: jax.Array, k: int, mesh: Mesh | None) -> jax.Array:
    """`top_k`, every device of its own tokens: on a CPU the partitioner would have it gather the scores of all."""
    if mesh is None or mesh.size == 1:
        return top_k(score_NE, k)
    tokens = spec("batch", "unsharded")
    own = jax.shard_map(functools.partial(top_k, k=k), mesh=mesh, in_specs=(tokens,), out_specs=tokens, check_vma=False)
    return own(jax.lax.stop_gradient(score_NE))


def top_k(score_NE: jax.Array, k: int) -> jax.Array:
    """Ids of the k highest scores, highest first; of equal scores the lowest id first. Int32, no gradient."""
    check_shapes(score_NE=score_NE)
    # `lax.top_k` orders -0 below +0, which are equal scores.
    signless_NE = jnp.where(score_NE == 0, 0.0, jax.lax.stop_gradient(score_NE))
    return jax.lax.top_k(signless_NE, k)[1]


def _gather(score_NE: jax.Array, ids_NK: jax.Array) -> jax.Array:
    """`score_NE` at `ids_NK`, by comparison: its gradient is then a sum and no scatter, so the same bits every time."""
    chosen_NKE = ids_NK[:, :, None] == jnp.arange(score_NE.shape[-1])
    return jnp.where(chosen_NKE, score_NE[:, None, :], 0.0).sum(-1)
