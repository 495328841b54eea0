"""SAT's trust region: the tail threshold q, the Hill kernel, the contracted radii and their fixed equivalents.

Knows mismatch scores and masks, nothing of policies, losses or batches. Everything here is detached: the score, the
threshold and the radii carry no gradient.

Source: SAT (arXiv 2607.18722), equations 13-20.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from sat_jax.order_statistic import ABSENT_BITS, count, kth_smallest_bits
from sat_jax.shapes import check_shapes
from sat_jax.types import ClipRadii

_INFINITY_BITS = 0x7F800000
# Quantiles are decimals that people write; a denominator up to this holds six digits exactly.
_LARGEST_DENOMINATOR = 10**6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SatConfig:
    """Nominal clip radii and how they contract.

    Attributes:
      eps_low: nominal radius below 1, in (0, 1), dimensionless.
      eps_high: nominal radius above 1, in (0, 1), dimensionless.
      quantile: alpha, in (0, 1): the share of active tokens that is never contracted.
      exponent: exponent n > 0 of the Hill kernel 1 / (1 + (u / q)^n); the paper's is 2.
      threshold_min: lower clamp of a *positive* q, nats; None = off. Ours, not the paper's.
      threshold_max: upper clamp of q, nats; None = off. Ours, not the paper's.

    Raises:
      ValueError: a value outside its range.

    Source: SAT (arXiv 2607.18722), appendix F, for the defaults.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    quantile: float = 0.9
    exponent: float = 2.0
    threshold_min: float | None = None
    threshold_max: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("eps_low", self.eps_low), ("eps_high", self.eps_high), ("quantile", self.quantile)):
            if not 0 < value < 1:
                raise ValueError(f"{name}: expected a number in (0, 1), got {value}")
        if not (self.exponent > 0 and math.isfinite(self.exponent)):
            raise ValueError(f"exponent: expected a finite number > 0, got {self.exponent}")
        low, high = self.threshold_min, self.threshold_max
        for name, value in (("threshold_min", low), ("threshold_max", high)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a finite number of nats > 0 or None, got {value}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"threshold_min: expected at most threshold_max {high}, got {low}")


def tail_threshold(mismatch_BT: jax.Array, mask_BT: jax.Array, quantile: float) -> jax.Array:
    """Order statistic of rank ceil(quantile * N) of |mismatch| over the N active tokens, exactly.

    No interpolation, no sort, and no gather when the batch is sharded (`sat_jax.order_statistic`).

    Args:
      mismatch_BT: log pi - log mu, nats; any shape (a leading microbatch axis is welcome), read as float32.
      mask_BT: bool of the same shape; where False the mismatch has no influence, whatever it is (NaN included).
      quantile: alpha in (0, 1), a decimal of at most six digits (static).

    Returns:
      q >= 0, scalar float32, bit-equal to an element of |mismatch|; 0 when no token is active.

    Raises:
      ValueError: the shapes differ, or the quantile is outside (0, 1).

    Source: SAT (arXiv 2607.18722), equation 14: inf{x >= 0 : F(x) >= alpha}.
    """
    if mismatch_BT.shape != mask_BT.shape:
        raise ValueError(f"mask_BT: expected the mismatch's shape {mismatch_BT.shape}, got {mask_BT.shape}")
    if not 0 < quantile < 1:
        raise ValueError(f"quantile: expected a number in (0, 1), got {quantile}")
    magnitude_BT = jnp.abs(lax.stop_gradient(mismatch_BT).astype(jnp.float32))
    bits_BT = jnp.where(mask_BT, lax.bitcast_convert_type(magnitude_BT, jnp.int32), ABSENT_BITS)
    active = count(mask_BT)
    bits = kth_smallest_bits(bits_BT, tail_rank(active, quantile), active)
    return jnp.where(active > 0, lax.bitcast_convert_type(bits, jnp.float32), 0)


def tail_rank(active: jax.Array, quantile: float) -> jax.Array:
    """ceil(quantile * active) without rounding and without overflow.

    `0.9 * N` in floating point can land on the wrong side of an integer, and 9 * N overflows int32 at 2^28 tokens. So
    the quantile is taken as the fraction that was written, and multiplied bit by bit, as (quotient, remainder).

    Args:
      active: N >= 0, int32.
      quantile: alpha in (0, 1), static.

    Returns:
      The 1-based rank, int32, in [1, N] for N > 0; 0 for N = 0.
    """
    exact = Fraction(str(quantile)).limit_denominator(_LARGEST_DENOMINATOR)
    quotient = remainder = jnp.int32(0)
    for bit in bin(exact.numerator)[2:]:
        quotient, remainder = 2 * quotient, 2 * remainder
        if bit == "1":
            quotient, remainder = quotient + active // exact.denominator, remainder + active % exact.denominator
        quotient, remainder = quotient + remainder // exact.denominator, remainder % exact.denominator
    return quotient + (remainder > 0)


def hill_factor(size: jax.Array, threshold: jax.Array, exponent: float) -> jax.Array:
    """The Hill kernel psi(u; q) = 1 / (1 + (u / q)^n): 1 at 0, 1/2 at q, decreasing.

    Args:
      size: u >= 0, nats, any shape.
      threshold: q > 0, nats, scalar.
      exponent: n > 0.

    Returns:
      psi in [0, 1], float32; 0 only where (u / q)^n overflows.

    Source: SAT (arXiv 2607.18722), equation 15.
    """
    ratio = size / threshold
    power = ratio * ratio if exponent == 2 else ratio**exponent
    return 1 / (1 + power)


def sat_radii(mismatch_BT: jax.Array, threshold: jax.Array, config: SatConfig) -> ClipRadii:
    """Contracts the clip radius on the side where the ratio has already left one.

    Args:
      mismatch_BT: log pi - log mu of the sampled token (or its sequence's score), nats, float32; detached here.
      threshold: tail threshold q >= 0 over the whole pool, nats; 0 switches contraction off.
      config: nominal radii, kernel and clamps.

    Returns:
      Radii in [0, nominal]; at most one side of a token differs from nominal, by a factor below 1/2.

    Raises:
      ValueError: an argument's shape contradicts its suffix.

    Source: SAT (arXiv 2607.18722), equations 15-17; the strict gate |d| > q.
    """
    check_shapes(mismatch_BT=mismatch_BT, threshold=threshold)
    mismatch_BT = lax.stop_gradient(mismatch_BT)
    q = clamp_threshold(lax.stop_gradient(threshold), config)
    size_BT = jnp.abs(mismatch_BT)
    gated_BT = (q > 0) & (size_BT > q)
    factor_BT = hill_factor(size_BT, jnp.where(q > 0, q, 1), config.exponent)
    low_BT = jnp.where(gated_BT & (mismatch_BT < 0), factor_BT, 1)
    high_BT = jnp.where(gated_BT & (mismatch_BT > 0), factor_BT, 1)
    return ClipRadii(low_BT=config.eps_low * low_BT, high_BT=config.eps_high * high_BT)


def clamp_threshold(threshold: jax.Array, config: SatConfig) -> jax.Array:
    """The threshold after `threshold_min` and `threshold_max`; q = 0 stays 0, that is off."""
    q = threshold
    if config.threshold_min is not None:
        q = jnp.maximum(q, config.threshold_min)
    if config.threshold_max is not None:
        q = jnp.minimum(q, config.threshold_max)
    return jnp.where(threshold > 0, q, threshold)


def effective_radii(threshold: jax.Array, config: SatConfig) -> tuple[jax.Array, jax.Array]:
    """The fixed clip radii under which PPO has SAT's gradient, token by token.

    A token with d > 0 is clipped by SAT iff e^d - 1 > eps_high * psi(d; q) and d > q. The left side grows with d and
    the right side falls, so there is one d at which clipping starts: max(q, d*), d* the root. Likewise below. The
    loss's *value* still differs from PPO's (the clipped branch returns the contracted bound).

    Args:
      threshold: q >= 0, nats, scalar, before the clamps of `config`.
      config: nominal radii, kernel and clamps.

    Returns:
      (low, high), scalars float32 in (0, nominal], accurate to about 1e-6 relative; nominal where q = 0.

    Source: our consequence of SAT (arXiv 2607.18722), equations 15-18.
    """
    q = clamp_threshold(lax.stop_gradient(jnp.asarray(threshold, jnp.float32)), config)
    safe_q = jnp.where(q > 0, q, 1)

    def high_gap(u: jax.Array) -> jax.Array:
        return jnp.expm1(u) - config.eps_high * hill_factor(u, safe_q, config.exponent)

    def low_gap(u: jax.Array) -> jax.Array:
        return -jnp.expm1(-u) - config.eps_low * hill_factor(u, safe_q, config.exponent)

    high = jnp.expm1(jnp.maximum(safe_q, _root(high_gap)))
    low = -jnp.expm1(-jnp.maximum(safe_q, _root(low_gap)))
    off = ~(q > 0)
    return (
        jnp.where(off, config.eps_low, jnp.minimum(low, config.eps_low)),
        jnp.where(off, config.eps_high, jnp.minimum(high, config.eps_high)),
    )


def _root(gap: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest positive float at which the increasing `gap` is not yet positive: bisection on its bits."""

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        below = gap(lax.bitcast_convert_type(middle, jnp.float32)) <= 0
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, _ = lax.fori_loop(0, 31, halve, (jnp.int32(1), jnp.int32(_INFINITY_BITS)))
    return lax.bitcast_convert_type(low, jnp.float32)


def sides_active(threshold: jax.Array, config: SatConfig) -> tuple[jax.Array, jax.Array]:
    """Whether SAT can clip anything on each side that the fixed clip would not.

    Above q >= log(1 + eps_high) every token that the gate lets contract is clipped by the nominal radius already, so
    the upper side is inert; below, likewise from q >= -log(1 - eps_low).

    Args:
      threshold: q >= 0, nats, scalar, before the clamps of `config`.
      config: nominal radii and clamps.

    Returns:
      (low, high): 1.0 where the side is active, else 0.0 (also at q = 0), scalars float32.
    """
    q = clamp_threshold(lax.stop_gradient(jnp.asarray(threshold, jnp.float32)), config)
    low = (q > 0) & (q < -math.log1p(-config.eps_low))
    high = (q > 0) & (q < math.log1p(config.eps_high))
    return low.astype(jnp.float32), high.astype(jnp.float32)
