"""Before and after: what a run changed, from its summary and its steps.

`summary.json` is `{"prompts": n, "before": {...}, "after": {...}, "facts": {...}}`: the number of held-out prompts,
figures by metric name in `before` and `after`, and texts by title in `facts`. What the steps themselves say is added
from the log.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from train.report_charts import figure

LABELS: Mapping[str, str] = {
    "reward/mean": "training reward",
    "eval/sampled_accuracy": "held-out accuracy, sampled",
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "entropy": "entropy, nats per token",
}
_FROM_THE_LOG = ("reward/mean", "entropy")
_SHARES = ("eval/sampled_accuracy", "eval/greedy_accuracy")
# Two standard errors: about 95% of repetitions fall within.
_ERRORS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure before and after, as it is shown.

    Attributes:
      metric: its name.
      label: its name for a reader.
      before, after: values, None where unknown.
      error_before, error_after: two standard errors of a share of the held-out prompts, None of anything else.
    """

    metric: str
    label: str
    before: float | None
    after: float | None
    error_before: float | None = None
    error_after: float | None = None

    def texts(self) -> tuple[str, str, str, str]:
        """Label, before, after and change in words."""
        change = "" if self.before is None or self.after is None else f"{self.after - self.before:+.3f}"
        before, after = self.plain()
        return self.label, before + _margin(self.error_before), after + _margin(self.error_after), change

    def plain(self) -> tuple[str, str]:
        """Before and after in words, without their margins; "-" where unknown."""
        return _words(self.before), _words(self.after)


def check_summary(summary: Mapping[str, Any]) -> None:
    """Checks a summary before it is written.

    Raises:
      ValueError: an unknown key, or a figure that is not a finite number.
    """
    unknown = summary.keys() - {"prompts", "before", "after", "facts"}
    if unknown:
        raise ValueError(f"summary: expected the keys prompts, before, after, facts, got {', '.join(sorted(unknown))}")
    for side in ("before", "after"):
        for name, value in summary.get(side, {}).items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"summary: expected a finite number as {name}, got {value!r} ({side})")


def edge_window(steps: int) -> int:
    """How many steps at each end of a run stand for "before" and "after": 20, or a quarter of a short run."""
    return max(1, min(20, steps // 4))


def changes(summary: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """The figures before and after, those of `LABELS` first; without a summary those of the log alone.

    Args:
      summary: as written, or None.
      rows: the steps.
    """
    summary = summary or {}
    before, after = dict(summary.get("before", {})), dict(summary.get("after", {}))
    labels = dict(LABELS)
    for name in _FROM_THE_LOG:
        if name not in before and name not in after:
            before[name], after[name] = _edges(name, rows)
            labels[name] += f" ({_edge_words(len(rows))})"
    prompts = summary.get("prompts", 0)
    made = []
    for name in (*LABELS, *sorted((before.keys() | after.keys()) - LABELS.keys())):
        values = (before.get(name), after.get(name))
        if values == (None, None):
            continue
        errors = [_error(value, prompts) if name in _SHARES else None for value in values]
        made.append(
            Change(
                metric=name,
                label=labels.get(name, name),
                before=values[0],
                after=values[1],
                error_before=errors[0],
                error_after=errors[1],
            )
        )
    return made


def _edges(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    window = edge_window(len(rows))
    return _mean(name, rows[:window]), _mean(name, rows[-window:])


def _edge_words(steps: int) -> str:
    window = edge_window(steps)
    return "first and last step" if window == 1 else f"first and last {window} steps"


def _mean(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    present = [row[name] for row in rows if row.get(name) is not None]
    return sum(present) / len(present) if present else None


def _error(share: float | None, prompts: int) -> float | None:
    if share is None or not prompts or not 0 <= share <= 1:
        return None
    return _ERRORS * math.sqrt(share * (1 - share) / prompts)


def _words(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1000 else figure(value)


def _margin(error: float | None) -> str:
    return "" if error is None else f" ± {error:.3f}"
