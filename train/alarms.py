"""What drifts is a metric with an alarm: the levels, their sources, and the watch over a run's steps.

The one table of levels is `LEVELS`; `docs/metrics.md` shows the same numbers. A level is where others saw trouble, not
a law: a small model at a high learning rate lives above some of them, and its config may say so (`RunHeader.levels`).
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from train.run_folder import RunHeader

Bad = Literal["above", "below", "at least", "at most", "rising"]

WARNING = "warning"
ALARM = "alarm"

_SAT_PAPER = "SAT, arXiv 2607.18722, appendix"
_VERL = "verl documentation, rollout correction"
_NEMO = "NeMo-RL documentation, token_mult_prob_error"
_DEFINITION = "follows from the definition"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A level of one metric that asks for attention.

    Attributes:
      metric: its name.
      bad: which side of `level` is bad; "rising" compares with the step before.
      level: in the metric's unit.
      window: number of the latest steps that are looked at.
      share: the alarm is raised when more than this share of a full window is bad; with window 1, when the step is.
      severity: "warning" (look at it) or "alarm" (something is wrong).
      meaning: what it says, one sentence.
      remedy: what to do, one sentence.
      source: where the number comes from.
    """

    metric: str
    bad: Bad
    level: float
    window: int = 1
    share: float = 0.0
    severity: str = WARNING
    meaning: str
    remedy: str
    source: str

    def text(self) -> str:
        """The rule in words, e.g. "mismatch/abs_mean above 0.03"."""
        rule = f"{self.metric} {self.bad}" if self.bad == "rising" else f"{self.metric} {self.bad} {self.level:g}"
        return rule if self.window == 1 else f"{rule} on more than {self.share:.0%} of {self.window} steps"


LEVELS = (
    Level(
        metric="mismatch/abs_mean",
        bad="above",
        level=0.03,
        meaning="The policy has moved far from the one that sampled.",
        remedy="Compare lag, routing/agreement and the sampler's dtype; lower the lag or the learning rate.",
        source=_SAT_PAPER + ": 0.006 to 0.011 is healthy at 30B, above 0.03 precedes collapse",
    ),
    Level(
        metric="mismatch/k3",
        bad="above",
        level=2.8e-3,
        meaning="The estimated divergence between sampler and policy is where lag-8 runs of the paper collapsed.",
        remedy="As for mismatch/abs_mean.",
        source=_SAT_PAPER,
    ),
    Level(
        metric="mismatch/k1",
        bad="above",
        level=0.1,
        meaning="The mean log-ratio is large: the policy finds its own samples unlikely.",
        remedy="Check that sampler and trainer use the same temperature; lower the lag.",
        source=_VERL + ": |KL| above 0.1",
    ),
    Level(
        metric="mismatch/mult_prob_error",
        bad="above",
        level=1.05,
        meaning="Probabilities are off by more than 5% on average.",
        remedy="At lag 0 this points to a push that did not take; see publish/probe_mean_abs.",
        source=_NEMO + ": dump the batch above 1.05",
    ),
    Level(
        metric="mismatch/ess",
        bad="below",
        level=0.3,
        meaning="Few tokens carry most of the importance weight.",
        remedy="Lower the lag, or truncate the weights (the tis preset).",
        source=_VERL + ": effective sample size below 0.3",
    ),
    Level(
        metric="routing/missing",
        bad="above",
        level=0.0,
        severity=ALARM,
        meaning="Positions arrived without the sampler's routes and were routed freely.",
        remedy="Serve with routed experts returned; check that no gateway drops the flag.",
        source=_DEFINITION + " (replay is on)",
    ),
    Level(
        metric="sat/active_high",
        bad="at most",
        level=0.0,
        window=5,
        share=0.5,
        meaning="SAT is switched off on the upper side: q >= log(1 + eps_high), so its gradient is the fixed clip's.",
        remedy="Drift is at its worst here: lower the lag or the learning rate, or set threshold_max.",
        source="arXiv 2607.18722, equations 15 to 17; the bound is ours",
    ),
    Level(
        metric="sat/active_low",
        bad="at most",
        level=0.0,
        window=5,
        share=0.5,
        meaning="SAT is switched off on the lower side: q >= -log(1 - eps_low), so its gradient is the fixed clip's.",
        remedy="Drift is at its worst here: lower the lag or the learning rate, or set threshold_max.",
        source="arXiv 2607.18722, equations 15 to 17; the bound is ours",
    ),
    Level(
        metric="sat/threshold",
        bad="at most",
        level=0.0,
        window=20,
        share=0.5,
        meaning="Nine tokens in ten have a ratio of exactly one, so SAT does nothing.",
        remedy="Check that the denominator is the sampler's log-prob and not the trainer's own.",
        source=_DEFINITION + ": q = 0 switches the gate off",
    ),
    Level(
        metric="reward/zero_std",
        bad="at least",
        level=1.0,
        severity=ALARM,
        meaning="No group had two different rewards: the step had no policy gradient.",
        remedy="Look at the samples: the verifier or the stop tokens may be wrong, or the task is solved.",
        source=_DEFINITION,
    ),
    Level(
        metric="tokens",
        bad="at most",
        level=0.0,
        severity=ALARM,
        meaning="The step trained on no token.",
        remedy="Look for empty completions.",
        source=_DEFINITION,
    ),
    Level(
        metric="compiles",
        bad="rising",
        level=0.0,
        window=20,
        share=0.5,
        meaning="Most steps compile a program again.",
        remedy="Shapes change between steps: fix batch.rows and batch.row_length.",
        source=_DEFINITION,
    ),
)


def levels_for(run: RunHeader) -> tuple[Level, ...]:
    """The levels that make sense for a run, with its own numbers where it sets them.

    Raises:
      ValueError: the run sets a level of a metric that has none; the known ones are listed.
    """
    unknown = run.levels.keys() - {level.metric for level in LEVELS}
    if unknown:
        known = ", ".join(level.metric for level in LEVELS)
        raise ValueError(f"alarm levels: expected one of {known}, got {', '.join(sorted(unknown))}")
    chosen = [
        dataclasses.replace(level, level=run.levels.get(level.metric, level.level))
        for level in LEVELS
        if (run.contracts or not level.metric.startswith("sat/")) and (run.replay or level.metric != "routing/missing")
    ]
    if run.max_lag is not None:
        chosen.append(
            Level(
                metric="lag/max",
                bad="above",
                level=float(run.max_lag),
                severity=ALARM,
                meaning="A token is older than the schedule allows.",
                remedy="This is a defect of the schedule or of a version's label; keep the run folder and report it.",
                source="the run's own schedule",
            )
        )
    return tuple(chosen)


def too_few_sequences(sequences_each: Sequence[int], quantile: float, scope: str) -> str | None:
    """What to say of a batch in which SAT on a *sequence* ratio has too small a pool to contract anything.

    The threshold is the quantile over the active tokens, and all tokens of a sequence have the same ratio: fewer than
    1 / (1 - quantile) sequences, of about one length, hold no sequence whose tokens all lie beyond it.

    Args:
      sequences_each: sequences of every microbatch of an optimizer batch.
      quantile: SAT's, in (0, 1).
      scope: the pool: "batch" or "microbatch".

    Returns:
      A sentence, or None where the pool is large enough.
    """
    needed = math.ceil(round(1 / (1 - quantile), 6))
    pool = sum(sequences_each) if scope == "batch" else min(sequences_each)
    if pool >= needed:
        return None
    remedy = "set quantile_scope = batch" if sum(sequences_each) >= needed else "train on more sequences a step"
    return (
        f"SAT on a sequence ratio: expected at least {needed} sequences in a {scope} (quantile {quantile:g}), got "
        f"{pool}: of about equal length, none can lie beyond the threshold; {remedy}, or lower the quantile"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An alarm at the step that raised it."""

    severity: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where a level was passed in a run.

    Attributes:
      level: which one.
      steps: number of bad steps.   of: number of steps that had the metric.
      first, last: versions of the first and last bad step.
      worst: the value farthest on the bad side.
    """

    level: Level
    steps: int
    of: int
    first: int
    last: int
    worst: float


class Watch:
    """Follows a run's steps and says when a level is passed.

    An alarm is raised once, and again only after `quiet` good steps, so that a value that lives at its level does not
    flood the log.
    """

    def __init__(self, levels: Sequence[Level], quiet: int = 20) -> None:
        """Starts with no history.

        Args:
          levels: what to watch.
          quiet: good steps after which an alarm may be raised again.
        """
        self._judges = [_Judge(level) for level in levels]
        self._quiet = quiet
        self._good_steps: dict[str, int] = {}

    def update(self, metrics: Mapping[str, Any]) -> list[Raised]:
        """Takes a step's metrics (None = not finite) and returns what is newly wrong."""
        raised = []
        for name, value in metrics.items():
            text = f"{name}: expected a finite number, got none; the value is written as null"
            if self._passed(f"finite {name}", bad=value is None):
                raised.append(Raised(severity=ALARM, text=text))
        for judge in self._judges:
            value = metrics.get(judge.level.metric)
            if value is not None and self._passed(judge.level.text(), bad=judge.bad(value)):
                raised.append(
                    Raised(
                        severity=judge.level.severity,
                        text=f"{judge.level.text()}: got {value:.4g}. {judge.level.meaning} {judge.level.remedy}",
                    )
                )
        return raised

    def _passed(self, key: str, *, bad: bool) -> bool:
        good_steps = self._good_steps.get(key, self._quiet)
        self._good_steps[key] = 0 if bad else good_steps + 1
        return bad and good_steps >= self._quiet


def spans(levels: Sequence[Level], rows: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Every level that a run passed, alarms before warnings, the most often passed first."""
    found = []
    for level in levels:
        judge = _Judge(level)
        seen = [(int(row["version"]), row[level.metric]) for row in rows if row.get(level.metric) is not None]
        bad = [(version, value) for version, value in seen if judge.bad(value)]
        if bad:
            worst = min if level.bad in ("below", "at most") else max
            found.append(
                Span(
                    level=level,
                    steps=len(bad),
                    of=len(seen),
                    first=bad[0][0],
                    last=bad[-1][0],
                    worst=worst(value for _, value in bad),
                )
            )
    return sorted(found, key=lambda span: (span.level.severity != ALARM, -span.steps))


class _Judge:
    """One level and as much of the past as it needs."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._recent: collections.deque[bool] = collections.deque(maxlen=level.window)
        self._previous: float | None = None

    def bad(self, value: float) -> bool:
        self._recent.append(self._bad_now(value))
        self._previous = value
        return len(self._recent) == self.level.window and sum(self._recent) > self.level.share * self.level.window

    def _bad_now(self, value: float) -> bool:
        match self.level.bad:
            case "above":
                return value > self.level.level
            case "below":
                return value < self.level.level
            case "at least":
                return value >= self.level.level
            case "at most":
                return value <= self.level.level
            case "rising":
                return self._previous is not None and value > self._previous
