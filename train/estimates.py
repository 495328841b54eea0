"""Accuracy from several completions a problem: avg@k, pass@k, majority@k, and how sure they are. Pure NumPy.

Problems are the unit of every interval: completions of one problem are not independent of each other.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

_RESAMPLES = 10_000
_BLOCK = 1 << 22  # resampled values held at once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over problems and where it may lie.

    Attributes:
      mean: of the problems at hand.
      low, high: bounds of the percentile bootstrap interval over problems.
    """

    mean: float
    low: float
    high: float


def pass_at_k(right: Sequence[int], samples: int, k: int) -> np.ndarray:
    """Chance that at least one of k completions is right, by problem, without bias.

    Args:
      right: right completions of each problem.
      samples: completions of each problem, n.
      k: in 1..n.

    Returns:
      float64[P]: 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: k is not in 1..n, or a count not in 0..n.

    Source: Chen et al. (arXiv 2107.03374), equation 1.
    """
    right_P = np.asarray(right, np.int64)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k: expected k in 1 to {samples} (the samples), got {k}")
    if right_P.size and not (right_P.min() >= 0 and right_P.max() <= samples):
        raise ValueError(f"pass@k: expected 0 to {samples} right completions, got {right_P.min()} to {right_P.max()}")
    # C(n - c, k) / C(n, k) as a product of k factors, each in [0, 1]: no factorial to overflow.
    factors_PK = (samples - right_P[:, None] - np.arange(k)) / (samples - np.arange(k))
    return 1 - np.prod(np.clip(factors_PK, 0, 1), axis=1)


def majority(answers: Sequence[Hashable], right: Sequence[bool]) -> float:
    """Whether the most frequent answer of a problem is right.

    Args:
      answers: what each completion answers; None = no answer, which has no vote.
      right: whether that is right.

    Returns:
      1 or 0; where several answers are equally frequent, the share of these that are right: the expectation of a fair
      choice. 0 without any answer.
    """
    votes: dict[Hashable, list[bool]] = {}
    for answer, verdict in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(verdict)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    # A verifier may judge spellings of one answer differently; the answer is what most of its votes say.
    return float(np.mean([np.mean(verdicts) > 0.5 for verdicts in votes.values() if len(verdicts) == most]))


def interval(value_P: np.ndarray, seed: int, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of a mean over problems.

    Args:
      value_P: one figure a problem, at least one.
      seed: of the resamples; the same seed gives the same interval.
      level: of confidence, in (0, 1).

    Raises:
      ValueError: no problem.
    """
    value_P = np.asarray(value_P, np.float64)
    if not len(value_P):
        raise ValueError("interval: expected at least one problem, got none")
    rng = np.random.default_rng(seed)
    size = max(1, _BLOCK // len(value_P))
    means = []
    for first in range(0, _RESAMPLES, size):
        rows = min(size, _RESAMPLES - first)
        means.append(value_P[rng.integers(0, len(value_P), (rows, len(value_P)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(value_P.mean()), low=float(low), high=float(high))


def paired_difference(one_P: np.ndarray, other_P: np.ndarray, seed: int, level: float = 0.95) -> Interval:
    """Interval of the mean difference `one - other` over the same problems, in the same order.

    Pairing takes the difficulty of the problems out: far narrower than two intervals side by side.

    Raises:
      ValueError: other problems, or none.
    """
    if len(one_P) != len(other_P):
        raise ValueError(f"paired difference: expected the same problems, got {len(one_P)} and {len(other_P)}")
    return interval(np.asarray(one_P, np.float64) - np.asarray(other_P, np.float64), seed, level)
