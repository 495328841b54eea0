"""Group-relative advantages, on the host: NumPy, float64 inside, float32 out.

Also what DAPO does to rewards and groups before that. Knows rewards and lengths, nothing of tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import overload

import numpy as np

from sat_jax.objective.presets import find


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How a group's rewards become advantages: (reward - baseline) / (std + epsilon).

    Attributes:
      std: group: the group's sample standard deviation (ddof = 1); batch: that of all rewards; none: no division.
      baseline: group: the group's mean, the member included; leave_one_out: the mean of the others.
      epsilon: added to the standard deviation, reward units, >= 0.
      tolerance: a group whose largest and smallest reward differ by at most this has advantages of exactly 0.

    Raises:
      ValueError: an unknown choice, or a negative number.

    Source: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783, std none); epsilon and ddof as slime and verl.
    """

    std: str = "group"
    baseline: str = "group"
    epsilon: float = 1e-6
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        if self.std not in ("group", "batch", "none"):
            raise ValueError(f"std: expected group, batch or none, got {self.std!r}")
        if self.baseline not in ("group", "leave_one_out"):
            raise ValueError(f"baseline: expected group or leave_one_out, got {self.baseline!r}")
        for name, value in (("epsilon", self.epsilon), ("tolerance", self.tolerance)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value}")

    @classmethod
    def for_objective(cls, name: str) -> "AdvantageConfig":
        """What the authors of that objective preset use.

        Raises:
          ValueError: there is no such preset.
        """
        return cls(std=find(name).std)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverlongConfig:
    """DAPO's soft punishment of long completions.

    Attributes:
      max_length: longest completion, tokens; the penalty is full from here.
      cache: width of the ramp below it, tokens, in (0, max_length].
      factor: size of the full penalty, reward units, >= 0.

    Raises:
      ValueError: a value outside its range.

    Source: DAPO (arXiv 2503.14476), equation 13 and section 4.1 for the defaults.
    """

    max_length: int = 20480
    cache: int = 4096
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise ValueError(f"cache: expected a number in (0, max_length = {self.max_length}], got {self.cache}")
        if not (self.factor >= 0 and math.isfinite(self.factor)):
            raise ValueError(f"factor: expected a finite number >= 0, got {self.factor}")


@overload
def group_advantages(reward_PM: np.ndarray, config: AdvantageConfig) -> np.ndarray: ...


@overload
def group_advantages(
    reward_PM: Sequence[Sequence[float] | np.ndarray], config: AdvantageConfig
) -> list[np.ndarray]: ...


def group_advantages(
    reward_PM: np.ndarray | Sequence[Sequence[float] | np.ndarray], config: AdvantageConfig
) -> np.ndarray | list[np.ndarray]:
    """Advantages of every member of every group.

    Args:
      reward_PM: rewards, one row a group; a list of rows where groups have unequal sizes.
      config: how.

    Returns:
      float32, in the form of the input: an array [P, M], or one array a group. A group without differences gives
      exactly 0.

    Raises:
      ValueError: a group of fewer than two members, or a reward that is not finite (named by group and member).
    """
    rows = [np.asarray(row, np.float64) for row in reward_PM]
    for group, row in enumerate(rows):
        _check_group(group, row)
    if not rows:
        return np.zeros((0, 0), np.float32) if isinstance(reward_PM, np.ndarray) else []
    pooled_std = np.concatenate(rows).std(ddof=1)
    advantages = [_centred(row, config) / _divisor(row, pooled_std, config) for row in rows]
    result = [row.astype(np.float32) for row in advantages]
    return np.stack(result) if isinstance(reward_PM, np.ndarray) else result


def informative_groups(
    reward_PM: np.ndarray | Sequence[Sequence[float] | np.ndarray], tolerance: float = 1e-8
) -> np.ndarray:
    """Which groups have any difference to learn from: what dynamic sampling keeps.

    Args:
      reward_PM: rewards, one row a group.
      tolerance: largest difference that counts as none, reward units.

    Returns:
      bool[P].

    Source: DAPO (arXiv 2503.14476), section 3.2.
    """
    return np.array([np.ptp(np.asarray(row, np.float64)) > tolerance for row in reward_PM], bool)


def overlong_penalty(length: np.ndarray, config: OverlongConfig) -> np.ndarray:
    """What to add to the reward of a completion of that length.

    Args:
      length: completion lengths in *tokens*, integers, any shape.
      config: the ramp.

    Returns:
      float64 in [-factor, 0]: 0 up to max_length - cache, then falling linearly.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    excess = (np.asarray(length, np.float64) - (config.max_length - config.cache)) / config.cache
    return -config.factor * np.clip(excess, 0, 1)


def _check_group(group: int, row: np.ndarray) -> None:
    if row.ndim != 1 or row.size < 2:
        raise ValueError(
            f"rewards of group {group}: expected at least 2 members (a group of one has no baseline), "
            f"got shape {row.shape}"
        )
    wrong = np.flatnonzero(~np.isfinite(row))
    if wrong.size:
        member = int(wrong[0])
        raise ValueError(
            f"reward: expected a finite number, got {row[member]} (group {group}, member {member}); repair the "
            "verifier, or leave the completion out of its group"
        )


def _centred(row: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    if np.ptp(row) <= config.tolerance:
        return np.zeros_like(row)
    centred = row - row.mean()
    return centred * (row.size / (row.size - 1)) if config.baseline == "leave_one_out" else centred


def _divisor(row: np.ndarray, pooled_std: float, config: AdvantageConfig) -> float:
    if config.std == "none":
        return 1.0
    # Rows without differences are 0 / (0 + epsilon); with epsilon 0 they would be 0 / 0.
    std = row.std(ddof=1) if config.std == "group" else pooled_std
    return float(std + config.epsilon) or 1.0
