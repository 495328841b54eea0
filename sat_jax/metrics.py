"""Metrics that merge exactly: a mean travels as (total, count), never as a quotient.

Averaging averages is wrong as soon as masks differ; `Mean` merges over microbatches, shards and steps.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean as its total and its count (both scalars, float32)."""

    total: jax.Array
    count: jax.Array

    def merge(self, other: "Mean") -> "Mean":
        """The mean over both populations."""
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> jax.Array:
        """Total / count; 0 of an empty population."""
        return self.total / jnp.maximum(self.count, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A maximum; merges by maximum."""

    largest: jax.Array

    def merge(self, other: "Max") -> "Max":
        """The maximum over both populations."""
        return Max(jnp.maximum(self.largest, other.largest))

    def value(self) -> jax.Array:
        """The maximum."""
        return self.largest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Min:
    """A minimum; merges by minimum."""

    smallest: jax.Array

    def merge(self, other: "Min") -> "Min":
        """The minimum over both populations."""
        return Min(jnp.minimum(self.smallest, other.smallest))

    def value(self) -> jax.Array:
        """The minimum."""
        return self.smallest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum; merges by addition."""

    total: jax.Array

    def merge(self, other: "Sum") -> "Sum":
        """The sum over both populations."""
        return Sum(self.total + other.total)

    def value(self) -> jax.Array:
        """The sum."""
        return self.total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EffectiveShare:
    """Effective sample size as a share of the samples, (sum w)^2 / (N sum w^2), in its mergeable parts.

    Attributes:
      total: sum of the weights.
      squares: sum of their squares.
      count: N.
    """

    total: jax.Array
    squares: jax.Array
    count: jax.Array

    def merge(self, other: "EffectiveShare") -> "EffectiveShare":
        """The share over both populations."""
        return EffectiveShare(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> jax.Array:
        """In (0, 1]: 1 when all weights are equal; 0 of an empty population, or when all are 0."""
        mean, mean_square = self.total / jnp.maximum(self.count, 1), self.squares / jnp.maximum(self.count, 1)
        return mean * mean / jnp.where(mean_square == 0, 1, mean_square)


Metric = Mean | Max | Min | Sum | EffectiveShare
Metrics = dict[str, Metric]


def merge(left: Metrics, right: Metrics) -> Metrics:
    """Merges two metric dictionaries of the same keys (inside or outside `jit`).

    Raises:
      ValueError: the keys differ.
    """
    if left.keys() != right.keys():
        raise ValueError(f"metrics: expected equal names, got {sorted(left.keys() ^ right.keys())} on one side only")
    return {name: left[name].merge(right[name]) for name in left}  # type: ignore[arg-type]


def values(metrics: Metrics) -> dict[str, float]:
    """Reads every metric back to the host as a Python float."""
    return {name: float(metric.value()) for name, metric in metrics.items()}
