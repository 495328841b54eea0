"""Charts as inline SVG, drawn here so that the page needs no library and no network, and shows without scripts.

A chart is data (`Chart`, `Bars`); `draw` and `draw_bars` give HTML. Beside each SVG lies a JSON block with the pixel
positions and texts of its points, all that the page's script needs for hover values. Knows nothing of runs.
"""

import collections
import dataclasses
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

WIDTH, HEIGHT = 640.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 30.0
# More points than this are averaged into as many buckets, with a band from each bucket's least to its greatest.
MOST_POINTS = 240
# Stacked bars must be wide enough to be told apart.
MOST_BARS = 60
# A chart that may use a logarithmic axis does so from this ratio between its greatest and its low values on.
LOG_RATIO = 25.0

Values = Sequence[float | None]
Kind = Literal["line", "faint", "sparse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One series.

    Attributes:
      label: in the legend and beside hover values.
      values: one a version; None leaves a gap.
      tone: colour number of the page's palette, 1..8.
      kind: "line"; "faint" for raw values behind a smoothed line; "sparse" for values at few versions, joined.
    """

    label: str
    values: Values
    tone: int
    kind: Kind = "line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A horizontal level, labelled; `always` stretches the axis to it, else it shows when the data comes near."""

    label: str
    level: float
    always: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over versions.

    Attributes:
      title, text: heading, and one sentence of explanation.
      unit: of the vertical axis.
      lines: what is drawn; all of the length of the versions.
      marks: levels.
      may_log: whether a logarithmic axis makes sense.
      stacked: whether the lines are parts of a whole, drawn as areas on each other.
    """

    title: str
    text: str
    unit: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    may_log: bool = False
    stacked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """Counts by a whole number, e.g. tokens by lag; `unit` is that of the horizontal axis."""

    title: str
    text: str
    unit: str
    counts: Mapping[int, int]
    counted: str


@dataclasses.dataclass(frozen=True)
class Axis:
    """A vertical axis, linear or logarithmic."""

    low: float
    high: float
    log: bool

    def y(self, value: float) -> float:
        """The pixel row of a value; what a logarithmic axis is too short for is drawn at its foot."""
        if self.log:
            part = (math.log10(max(value, self.low)) - math.log10(self.low)) / math.log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """Round values to label."""
        if not self.log:
            return nice_ticks(self.low, self.high)
        exponents = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        digits = (1, 2, 5) if len(exponents) <= 2 else (1,)
        every = max(1, math.ceil(len(exponents) / 6))
        ticks = [digit * 10.0**power for power in (*exponents, exponents[-1] + 1)[::every] for digit in digits]
        return [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def nice_ticks(low: float, high: float) -> list[float]:
    """Some four to seven round values in [low, high], low < high."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor((high - first * step) / step + 1e-9) + 1
    return [round((first + index) * step, 12) for index in range(count)]


def make_axis(values: Sequence[float], marks: Sequence[Mark], *, may_log: bool) -> Axis:
    """An axis that shows the values, and the marks that are near them or asked for."""
    low, high = min(values), max(values)
    shown = [mark.level for mark in marks if mark.always or low / 3 <= mark.level <= high * 1.5]
    low, high = min([low, *shown]), max([high, *shown])
    positive = sorted(value for value in (*values, *shown) if value > 0)
    if may_log and low >= 0 and positive:
        floor = positive[len(positive) // 50]
        if high / floor >= LOG_RATIO:
            return Axis(10.0 ** math.floor(math.log10(floor)), 10.0 ** math.ceil(math.log10(high)), log=True)
    if low == high:
        return Axis(min(low * 1.1, 0.0), max(high * 1.1, 0.0) if low else 1.0, log=False)
    room = (high - low) * 0.06
    return Axis(0.0 if 0 <= low < 0.4 * high else low - room, high + room, log=False)


def draw(chart: Chart, versions: Sequence[int]) -> str:
    """A figure with heading, sentence, legend, SVG and hover data; "" when no line has a value."""
    lines = tuple(line for line in chart.lines if any(value is not None for value in line.values))
    if not lines or not versions:
        return ""
    buckets = list(_buckets(len(versions), MOST_BARS if chart.stacked else MOST_POINTS))
    x = [_x((versions[part.start] + versions[part.stop - 1]) / 2, versions) for part in buckets]
    reduced = [[_reduce(line.values[part]) for part in buckets] for line in lines]
    tops = _running_sums(reduced) if chart.stacked else reduced
    shown = [value for points in tops for point in points if point for value in point]
    axis = make_axis([0.0, *shown] if chart.stacked else shown, chart.marks, may_log=chart.may_log)
    body = [*_grid(axis), *_versions_axis(versions), *_marks(chart.marks, axis)]
    below: Sequence[Point | None] = [None] * len(x)
    for line, points in zip(lines, tops, strict=True):
        body += _stack(line.tone, x, below, points, axis) if chart.stacked else _curve(line, x, points, axis)
        below = points
    hover = {
        "x": [round(at, 1) for at in x],
        "name": [_step_words(versions, part) for part in buckets],
        "lines": [
            {
                "label": line.label,
                "tone": line.tone,
                "y": [round(axis.y(top[0]), 1) if top else None for top in heights],
                "text": [figure(point[0]) if point else "-" for point in points],
            }
            for line, points, heights in zip(lines, reduced, tops, strict=True)
        ],
    }
    unit = f"{chart.unit}, logarithmic" if axis.log else chart.unit
    return _figure(chart.title, chart.text, unit, _legend(lines), "".join(body), hover)


def draw_bars(bars: Bars) -> str:
    """A figure of vertical bars; "" when nothing was counted."""
    total = sum(bars.counts.values())
    if not total:
        return ""
    keys = range(min(bars.counts), max(bars.counts) + 1)
    shares = [bars.counts.get(key, 0) / total for key in keys]
    axis = make_axis([0.0, *shares], (), may_log=False)
    slot = (WIDTH - LEFT - RIGHT) / len(keys)
    body, x = list(_grid(axis, percent=True)), []
    every = math.ceil(len(keys) / 24)
    for index, (key, share) in enumerate(zip(keys, shares, strict=True)):
        middle = LEFT + (index + 0.5) * slot
        x.append(round(middle, 1))
        wide, y = min(slot * 0.7, 56.0), axis.y(share)
        body.append(
            f'<rect class="bar tone1" x="{middle - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" '
            f'height="{max(axis.y(0) - y, 0):.1f}" rx="2"/>'
        )
        if index % every == 0:
            body.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 11:.0f}" text-anchor="middle">{key}</text>')
    hover = {
        "x": x,
        "name": [f"{bars.unit} {key}" for key in keys],
        "lines": [
            {
                "label": bars.counted,
                "tone": 1,
                "y": [round(axis.y(share), 1) for share in shares],
                "text": [f"{bars.counts.get(key, 0):,} ({share:.1%})" for key, share in zip(keys, shares, strict=True)],
            }
        ],
    }
    return _figure(bars.title, bars.text, f"share of {bars.counted} by {bars.unit}", "", "".join(body), hover)


def figure(value: float | None) -> str:
    """A number as a reader wants it: `0.0312`, `1,234`, `3.1e-05`; "not finite" of None."""
    if value is None:
        return "not finite"
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.2g}"


def trailing_mean(values: Values, window: int) -> list[float | None]:
    """Mean of the last `window` values that are there; None until there is one."""
    means: list[float | None] = []
    recent: collections.deque[float] = collections.deque()
    for index, value in enumerate(values):
        leaving = values[index - window] if index >= window else None
        if leaving is not None:
            recent.popleft()
        if value is not None:
            recent.append(value)
        means.append(math.fsum(recent) / len(recent) if recent else None)
    return means


Point = tuple[float, float, float]
"""Mean, least and greatest of a bucket."""


def _buckets(count: int, most: int) -> Iterator[slice]:
    parts = min(count, most)
    for index in range(parts):
        yield slice(index * count // parts, (index + 1) * count // parts)


def _reduce(values: Values) -> Point | None:
    present = [value for value in values if value is not None]
    return (sum(present) / len(present), min(present), max(present)) if present else None


def _running_sums(reduced: Sequence[Sequence[Point | None]]) -> list[list[Point | None]]:
    height = [0.0] * len(reduced[0])
    tops: list[list[Point | None]] = []
    for points in reduced:
        height = [under + (point[0] if point else 0.0) for under, point in zip(height, points, strict=True)]
        tops.append([(top, top, top) for top in height])
    return tops


def _stack(
    tone: int, x: Sequence[float], below: Sequence[Point | None], tops: Sequence[Point | None], axis: Axis
) -> Iterator[str]:
    wide = min(0.8 * (WIDTH - LEFT - RIGHT) / len(x), 40.0)
    for at, base, top in zip(x, below, tops, strict=True):
        high, low = axis.y(top[0] if top else 0.0), axis.y(base[0] if base else 0.0)
        if low - high > 0.05:
            yield (
                f'<rect class="bar tone{tone}" x="{at - wide / 2:.1f}" y="{high:.1f}" width="{wide:.1f}" '
                f'height="{low - high:.1f}"/>'
            )


def _x(version: float, versions: Sequence[int]) -> float:
    first, last = versions[0], versions[-1]
    part = (version - first) / (last - first) if last > first else 0.5
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _step_words(versions: Sequence[int], part: slice) -> str:
    first, last = versions[part.start], versions[part.stop - 1]
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}, mean"


def _grid(axis: Axis, *, percent: bool = False) -> Iterator[str]:
    for tick in axis.ticks():
        y = axis.y(tick)
        label = f"{tick:.0%}" if percent else figure(tick)
        yield f'<line class="grid" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _versions_axis(versions: Sequence[int]) -> Iterator[str]:
    first, last = versions[0], versions[-1]
    wanted = [tick for tick in nice_ticks(first, last) if tick == int(tick)] if last > first else [first]
    for tick in wanted:
        x = _x(tick, versions)
        yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 11:.0f}" text-anchor="middle">{int(tick):,}</text>'


def _marks(marks: Sequence[Mark], axis: Axis) -> Iterator[str]:
    placed: list[float] = []
    for mark in sorted(marks, key=lambda mark: -mark.level):
        if not axis.low <= mark.level <= axis.high:
            continue
        y = axis.y(mark.level)
        # Labels of levels that lie close to each other would overlap: the lower one goes below its line.
        crowded = (bool(placed) and y - placed[-1] < 14) or y < TOP + 10
        placed.append(y)
        yield f'<line class="mark" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        at = y + 13 if crowded else y - 5
        text = html.escape(f"{mark.label} {figure(mark.level)}")
        yield f'<text class="mark-label" x="{WIDTH - RIGHT - 4:.0f}" y="{at:.1f}" text-anchor="end">{text}</text>'


def _curve(line: Line, x: Sequence[float], points: Sequence[Point | None], axis: Axis) -> Iterator[str]:
    runs: list[list[tuple[float, Point]]] = [[]]
    for at, point in zip(x, points, strict=True):
        if point is not None:
            runs[-1].append((at, point))
        elif line.kind != "sparse" and runs[-1]:
            runs.append([])
    for run in runs:
        if line.kind == "sparse" or len(run) == 1:
            for at, point in run:
                yield f'<circle class="dot tone{line.tone}" cx="{at:.1f}" cy="{axis.y(point[0]):.1f}" r="3"/>'
        if len(run) < 2:
            continue
        if any(point[1] != point[2] for _, point in run):
            edge = [f"{at:.1f},{axis.y(point[2]):.1f}" for at, point in run]
            edge += [f"{at:.1f},{axis.y(point[1]):.1f}" for at, point in reversed(run)]
            yield f'<polygon class="band tone{line.tone}" points="{" ".join(edge)}"/>'
        path = " ".join(f"{at:.1f},{axis.y(point[0]):.1f}" for at, point in run)
        yield f'<polyline class="{line.kind} tone{line.tone}" points="{path}"/>'


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) == 1:
        return ""
    shown = [line for line in lines if line.kind != "faint"] if len(lines) > 2 else lines
    items = (f'<span class="key tone{line.tone} {line.kind}">{html.escape(line.label)}</span>' for line in shown)
    return f'<div class="legend">{"".join(items)}</div>'


def _figure(title: str, text: str, unit: str, legend: str, body: str, hover: Mapping[str, object]) -> str:
    # "</" inside the JSON would end the script element.
    data = json.dumps(hover, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<figure class="card chart"><figcaption><h3>{html.escape(title)}</h3><p>{html.escape(text)}</p></figcaption>'
        f'<div class="legend-row">{legend}<span class="unit">{html.escape(unit)}</span></div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" tabindex="0" aria-label="{html.escape(title)}: '
        f'{html.escape(text)}">{body}<g class="cursor"></g></svg>'
        f'<script type="application/json">{data}</script></figure>'
    )
