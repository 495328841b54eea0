"""What a jaxpr does not say about our programs: trip counts of loops over data, and products inside Pallas kernels."""

import functools
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from sat_jax.model import PolicyConfig
from sat_jax.model.attention import attention_block
from sat_jax.model.grouped import tile_rows
from train.plan.load import Experts, Load, Pairs, experts, pairs
from train.plan.walk import Rules

# Matrix products of one pair of blocks in the passes of splash attention: scores and values forward; backward
# the scores again, d weight, d query; and the scores again, d value, d weight, d key.
_SPLASH_PRODUCTS = MappingProxyType({"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4})


def rules_of(load: Load, policy: PolicyConfig, mesh: Mesh, *, skewed: bool) -> Rules:
    """The rules of a microbatch of this load.

    Args:
      load: the step that it is of.
      policy: the architecture.
      mesh: real or of a topology.
      skewed: worst-case routing; see `train.plan.load.experts`.
    """
    seen = pairs(load, mesh)
    block = attention_block(load.row_length, mesh)
    visits = seen.executed / (block * -(-load.row_length // block) * block)
    loops = {"attention_blocks": visits}
    kernels: dict[str, Any] = {
        name: functools.partial(_splash, products, seen) for name, products in _SPLASH_PRODUCTS.items()
    }
    if policy.moe_layers:
        held = experts(load, policy, mesh, skewed=skewed)
        loops |= {
            "expert_chunks": held.chunks,
            "expert_blocks": held.chunks,
            "exchange_rounds": held.rounds,
        }
        kernels |= {"gmm": functools.partial(_gmm, held), "tgmm": functools.partial(_tgmm, held)}
    return Rules(loops=loops, kernels=kernels)


def _splash(products: int, seen: Pairs, inputs: list[Any], _outputs: list[Any]) -> float:
    """One row of queries, heads first: `products` products for each pair that is multiplied."""
    heads, _, channels = next(a.shape for a in inputs if len(a.shape) == 3 and jnp.issubdtype(a.dtype, jnp.floating))
    return 2.0 * products * heads * channels * seen.executed


def _gmm(held: Experts, inputs: list[Any], outputs: list[Any]) -> float:
    """[rows, k] by [experts, k, n]: the rows that one chunk holds."""
    left = next(a for a in inputs if len(a.shape) == 2)
    return 2.0 * held.executed(tile_rows(left.shape[0])) * left.shape[1] * outputs[0].shape[-1]


def _tgmm(held: Experts, inputs: list[Any], outputs: list[Any]) -> float:
    """[k, rows] by [rows, n] to [experts, k, n]."""
    left = next(a for a in inputs if len(a.shape) == 2)
    return 2.0 * held.executed(tile_rows(left.shape[0])) * outputs[0].shape[-2] * outputs[0].shape[-1]
