"""The objective: mismatch -> radii -> surrogate -> gates and weights -> aggregation; a method exchanges one link."""

from sat_jax.objective.aggregation import denominator
from sat_jax.objective.config import ObjectiveConfig
from sat_jax.objective.loss import first_nonfinite, mismatch, policy_loss
from sat_jax.objective.presets import METHODS, Method, preset_names
from sat_jax.objective.radii import batch_threshold

__all__ = [
    "METHODS",
    "Method",
    "ObjectiveConfig",
    "batch_threshold",
    "denominator",
    "first_nonfinite",
    "mismatch",
    "policy_loss",
    "preset_names",
]
