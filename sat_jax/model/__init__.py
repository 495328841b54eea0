"""The Qwen3-MoE policy."""

from sat_jax.model.config import PolicyConfig
from sat_jax.model.policy import Policy

__all__ = ["Policy", "PolicyConfig"]
