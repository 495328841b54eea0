"""Slow, obvious twins of `sat_jax.trust_region`, in float64 with sorts and scans."""

import math
from fractions import Fraction

import numpy as np


def tail_threshold(mismatch: np.ndarray, mask: np.ndarray, quantile: float) -> float:
    """Sorts, and takes the element of rank ceil(alpha N)."""
    active = np.sort(np.abs(np.asarray(mismatch)[np.asarray(mask, bool)]))
    if active.size == 0:
        return 0.0
    rank = math.ceil(Fraction(str(quantile)) * active.size)
    return float(active[rank - 1])


def sat_factors(mismatch: float, threshold: float, exponent: float = 2.0) -> tuple[float, float]:
    """(c_low, c_high) of one token."""
    if threshold <= 0 or abs(mismatch) <= threshold:
        return 1.0, 1.0
    factor = 1 / (1 + (abs(mismatch) / threshold) ** exponent)
    return (factor, 1.0) if mismatch < 0 else (1.0, factor)


def clips(mismatch: float, sign: int, low: float, high: float) -> bool:
    """Whether the PPO minimum takes its clipped branch, for an advantage of that sign."""
    ratio = math.exp(mismatch)
    return (sign > 0 and ratio > 1 + high) or (sign < 0 and ratio < 1 - low)
