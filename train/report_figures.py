"""From the steps of a run to the sections of its page; what each chart says is in `report_plots`."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from train.alarms import Level
from train.report_charts import Bars, Chart, Line, Mark, Values, draw, draw_bars, trailing_mean
from train.report_plots import GATES, LEARNING, MISMATCH, OPTIMIZER, ROUTING, THROUGHPUT, TRUST_REGION, WORK, Plot
from train.run_folder import RunHeader

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: anchor, heading, introduction and figures (HTML)."""

    key: str
    title: str
    text: str
    figures: tuple[str, ...]


# The order in which a step goes through its phases; others follow by name.
PHASES = ("collect", "assemble", "measure", "update", "publish", "evaluate", "checkpoint")


class Story:
    """The steps of a run as columns, and the levels that its charts show."""

    def __init__(self, rows: Rows, run: RunHeader | None, levels: Sequence[Level]) -> None:
        """Takes the rows of `metrics.jsonl`.

        Args:
          rows: one a version, ascending.
          run: the header, or None if the folder has none.
          levels: alarm levels, drawn where they are near the data.
        """
        self.rows = rows
        self.run = run
        self.versions = [int(row["version"]) for row in rows]
        self._window = max(1, min(len(rows) // 12, 50))
        self._marks = {
            level.metric: (Mark(label=_LEVEL_WORDS.get(level.metric, "alarm level"), level=level.level),)
            for level in levels
            if level.bad in ("above", "below") and level.level > 0
        } | _radius_marks(run)

    def column(self, name: str) -> Values:
        """A metric by step; None where it is absent or was not finite."""
        if name == THROUGHPUT:
            pairs = zip(self.column("tokens"), self.column("seconds/step"), strict=True)
            return [tokens / seconds if tokens is not None and seconds else None for tokens, seconds in pairs]
        values = [row.get(name) for row in self.rows]
        return [value if isinstance(value, int | float) and math.isfinite(value) else None for value in values]

    def sections(self) -> list[Section]:
        """All sections that have something to show, in reading order."""
        made = (
            self._section("learning", "Learning", _LEARNING_TEXT, self._plots(LEARNING)),
            self._mismatch(),
            self._trust_region(),
            self._section("routing", "Routing replay", _ROUTING_TEXT, self._plots(ROUTING) if self._replays() else ()),
            self._section("optimizer", "Optimizer", "What the optimizer saw.", self._plots(OPTIMIZER)),
            self._time(),
        )
        return [section for section in made if section.figures]

    def _section(self, key: str, title: str, text: str, figures: Sequence[str]) -> Section:
        return Section(key=key, title=title, text=text, figures=tuple(figure for figure in figures if figure))

    def _plots(self, plots: Sequence[Plot]) -> list[str]:
        return [self._plot(plot) for plot in plots]

    def _plot(self, plot: Plot) -> str:
        smooth = plot.smooth and self._window > 1
        leading, alone = plot.series[0][0], len(plot.series) == 1
        said = f"mean of {self._window} steps"
        lines: list[Line] = []
        for name, label, tone in plot.series:
            values = self.column(name)
            if plot.unless is not None and all(value in (plot.unless, None) for value in values):
                continue
            if 2 * sum(value is not None for value in values) < len(values):
                lines.append(Line(label=label, values=values, tone=tone, kind="sparse"))
            elif not smooth:
                lines.append(Line(label=label, values=values, tone=tone))
            else:
                means = trailing_mean(values, self._window)
                raw_label = "each step" if alone else f"{label}, this step"
                lines.append(Line(label=raw_label, values=values, tone=tone, kind="faint"))
                lines.append(Line(label=said if alone else label, values=means, tone=tone))
        chart = Chart(
            title=plot.title,
            text=plot.text,
            unit=f"{plot.unit}, {said}" if smooth and not alone else plot.unit,
            lines=tuple(lines),
            marks=self._marks.get(leading, ()),
            may_log=plot.may_log,
        )
        return draw(chart, self.versions)

    def _mismatch(self) -> Section:
        counts: collections.Counter[int] = collections.Counter()
        for row in self.rows:
            counts.update({int(lag): tokens for lag, tokens in (row.get("lag/histogram") or {}).items()})
        histogram = Bars(
            title="Age of the tokens, whole run",
            text="How old the trained tokens were. The first windows are younger: nothing had been trained yet.",
            unit="lag",
            counts=counts,
            counted="tokens",
        )
        *others, age = self._plots(MISMATCH)
        figures = (*others, draw_bars(histogram), age)
        return self._section("mismatch", "Lag and mismatch", _MISMATCH_TEXT, figures)

    def _time(self) -> Section:
        phases = Chart(
            title="Seconds per step, by phase",
            text="What the training loop did or waited for. Collect is waiting for the sampler: at zero, sampling is "
            "hidden behind training.",
            unit="seconds",
            lines=self._phases(),
            stacked=True,
        )
        figures = (draw(phases, self.versions), *self._plots(WORK))
        return self._section("time", "Time and work", "Where the time of a step goes, and what it buys.", figures)

    def _phases(self) -> tuple[Line, ...]:
        seconds = self.column("seconds/step")
        present = {name for row in self.rows for name in row if name.startswith("seconds/")} - {"seconds/step"}
        ordered = [f"seconds/{phase}" for phase in PHASES if f"seconds/{phase}" in present]
        ordered += sorted(present - set(ordered))
        columns = [self.column(name) for name in ordered]
        named = [sum(column[index] or 0.0 for column in columns) for index in range(len(seconds))]
        other = [None if whole is None else max(whole - part, 0.0) for whole, part in zip(seconds, named, strict=True)]
        parts = [
            Line(label=name.removeprefix("seconds/"), values=column, tone=1 + index % 7)
            for index, (name, column) in enumerate(zip(ordered, columns, strict=True))
        ]
        return (*parts, Line(label="other", values=other, tone=8))

    def _trust_region(self) -> Section:
        contracts = self.run is None or self.run.contracts
        plots = [plot for plot in TRUST_REGION if contracts or not plot.only_sat]
        text = _SAT_TEXT if contracts else _FIXED_TEXT
        return self._section("trust", "Trust region", text, self._plots((*plots, *GATES)))

    def _replays(self) -> bool:
        return self.run is None or self.run.replay


def _radius_marks(run: RunHeader | None) -> dict[str, tuple[Mark, ...]]:
    """Where SAT switches itself off, and the nominal radii that it contracts from."""
    if run is None or not run.contracts:
        return {}
    low, high = run.eps_low, run.eps_high
    switch_off = (Mark(label="off above, upper side:", level=math.log1p(high), always=True),)
    if low < 1:
        switch_off += (Mark(label="off above, lower side:", level=-math.log1p(-low), always=True),)
    if low == high:
        nominal = (Mark(label="nominal", level=high, always=True),)
    else:
        nominal = tuple(
            Mark(label=f"nominal, {side}:", level=eps, always=True) for side, eps in (("upper", high), ("lower", low))
        )
    return {"sat/threshold": switch_off, "sat/effective_high": nominal}


_LEVEL_WORDS = {"lag/max": "bound of the schedule"}
_LEARNING_TEXT = "Whether the policy gets better at the task, and what it gives up for that."
_MISMATCH_TEXT = (
    "Asynchronous training learns from samples of older weights that another program computed. The mismatch d is a "
    "sampled token's log-probability now minus the one that the sampler reported. At zero lag it shows the difference "
    "of the two programs alone; what grows with lag is staleness."
)
_SAT_TEXT = (
    "The ratio of new to old probability is clipped to a radius around one. SAT (arXiv 2607.18722) contracts that "
    "radius for the tokens that have drifted farthest, by the standard of the batch itself."
)
_FIXED_TEXT = "This objective's radii do not follow the threshold; it is measured for information only."
_ROUTING_TEXT = "The trainer replays the experts that the sampler chose, so that both compute the same function."
