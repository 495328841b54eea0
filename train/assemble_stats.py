"""What a batch holds, in figures that add up over the processes that assembled it."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AssembleStats:
    """What was assembled.

    Attributes:
      sequences: completions.
      sequences_each: completions of each microbatch.
      positions: input positions in use.
      fill: share of the microbatches' positions that are in use, in [0, 1].
      tokens: active (trained) tokens.
      unverified: completions without a reward, which are trained on nowhere.
      missing: positions that were to be replayed and had no route.
      truncated: completions cut at max_new_tokens.
      reward_mean: over all completions that have one; 0 if none has.
      zero_std: share of groups whose advantages are all zero, in [0, 1].
      lags: active tokens by lag.
    """

    sequences: int
    sequences_each: tuple[int, ...]
    positions: int
    fill: float
    tokens: int
    unverified: int
    missing: int
    truncated: int
    reward_mean: float
    zero_std: float
    lags: Mapping[int, int]

    def metrics(self) -> dict[str, float]:
        """As metrics of the step that trains on it; what the loss itself reports (tokens, lag, routes) is not here."""
        return {
            "reward/mean": self.reward_mean,
            "reward/zero_std": self.zero_std,
            "reward/unverified": self.unverified / self.sequences,
            "length/mean": self.tokens / self.sequences,
            "length/truncated": self.truncated / self.sequences,
            "pack/fill": self.fill,
        }


def merge_parts(parts: Sequence[Mapping[str, Any]], *, replay: bool) -> AssembleStats:
    """What all processes assembled, from what each of them says of itself."""

    def total(name: str) -> Any:
        return sum(part[name] for part in parts)

    lags: Counter[int] = Counter()
    for part in parts:
        lags.update(dict(part["lags"]))
    return AssembleStats(
        sequences=total("sequences"),
        sequences_each=tuple(map(sum, zip(*(part["sequences_each"] for part in parts), strict=True))),
        positions=total("positions"),
        fill=total("positions") / total("size"),
        tokens=lags.total(),
        unverified=total("sequences") - total("rewards"),
        missing=total("positions") - total("replayed") if replay else 0,
        truncated=total("truncated"),
        reward_mean=total("reward") / total("rewards") if total("rewards") else 0.0,
        zero_std=1 - total("signal") / total("groups"),
        lags=dict(sorted(lags.items())),
    )
