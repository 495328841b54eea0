"""What a run shows while it runs: a live display on a terminal, greppable plain lines anywhere else.

Both say the same; both are driven by `train.report.Report` alone and never read a file.
"""

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from train.run_folder import RunHeader, SampleLine

FIGURES: Mapping[str, tuple[str, ...]] = {
    "policy": ("reward/mean", "reward/zero_std", "entropy", "grad_norm", "kl/reference"),
    "mismatch": ("mismatch/abs_mean", "mismatch/k3", "mismatch/ess", "lag/mean", "lag/max"),
    "trust region": ("sat/threshold", "sat/effective_low", "sat/effective_high", "sat/active_low", "sat/active_high"),
    "clipping": ("sat/gate_rate", "clip/fraction", "clip/newly", "routing/agreement", "routing/missing"),
}
_EVENTS_SHOWN = 3
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 48


class Display(Protocol):
    """Shows a run. `event` may be called from any thread, the rest from the loop's only."""

    def start(self) -> None:
        """Begins to show."""
        ...

    def stop(self) -> None:
        """Ends the display; what it showed last stays on the screen."""
        ...

    def warm_start(self, step: int, figures: Mapping[str, float]) -> None:
        """The supervised phase has done `step` steps."""
        ...

    def phase(self, name: str) -> None:
        """The loop is now in this phase ("" = in none)."""
        ...

    def step(self, version: int, metrics: Mapping[str, Any], samples: Sequence[SampleLine]) -> None:
        """An optimizer step has finished."""
        ...

    def event(self, kind: str, text: str) -> None:
        """Something happened beside the steps."""
        ...

    def outcome(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """Before and after: rows of (what, before, after, change). Called after `stop`."""
        ...


def make_display(run: RunHeader, console: Console) -> Display:
    """A live display on a terminal, plain lines anywhere else."""
    return LiveDisplay(run, console) if console.is_terminal else PlainDisplay(run, console)


class Pace:
    """Estimates the time left from the latest steps."""

    def __init__(self, steps: int) -> None:
        """Takes the number of steps planned."""
        self._steps = steps
        self._recent: collections.deque[float] = collections.deque(maxlen=20)

    def add(self, seconds: float | None) -> None:
        """Takes the wall-clock seconds of a step."""
        if seconds is not None:
            self._recent.append(seconds)

    def left(self, version: int) -> str:
        """Time left after this version, in words; "?" before the first step."""
        if not self._recent:
            return "?"
        return duration(sum(self._recent) / len(self._recent) * max(self._steps - version, 0))


class PlainDisplay:
    """One line every few steps: `step 120/240 eta=42s reward/mean=0.781 ...`, with the names of metrics.jsonl."""

    def __init__(self, run: RunHeader, console: Console, every: int = 10, at_least: float = 30.0) -> None:
        """Says nothing yet.

        Args:
          run: what is run.
          console: where to.
          every: steps between lines.
          at_least: seconds after which a line comes even if fewer steps were made.
        """
        self._run = run
        self._console = console
        self._every = every
        self._at_least = at_least
        self._pace = Pace(run.steps)
        self._spoke = time.monotonic()

    def start(self) -> None:
        """Names the run."""
        self._say("run " + " | ".join(_title(self._run)))

    def stop(self) -> None:
        """Nothing is to be ended."""

    def warm_start(self, step: int, figures: Mapping[str, float]) -> None:
        """One line a call; the caller decides how often."""
        self._say(f"warm_start {step}/{self._run.warm_start_steps} {_pairs(figures)}")

    def phase(self, name: str) -> None:
        """Nothing; the seconds of each phase are in the step's line."""

    def step(self, version: int, metrics: Mapping[str, Any], samples: Sequence[SampleLine]) -> None:
        """A line for the first step, the last, every few, and after a long silence."""
        self._pace.add(metrics.get("seconds/step"))
        silent = time.monotonic() - self._spoke
        if version not in (1, self._run.steps) and version % self._every and silent < self._at_least:
            return
        wanted = [name for names in FIGURES.values() for name in names]
        wanted += [name for name in metrics if name.startswith("seconds/")]
        shown = {name: metrics[name] for name in wanted if name in metrics}
        self._say(f"step {version}/{self._run.steps} eta={self._pace.left(version)} {_pairs(shown)}")
        for sample in samples[:1]:
            self._say(
                f'sample {version} prompt="{visible(sample.prompt)}" completion="{visible(sample.completion)}" '
                f'answer="{visible(sample.answer)}" reward={sample.reward:g}'
            )

    def event(self, kind: str, text: str) -> None:
        """One line."""
        self._say(f"event {kind}: {visible(text, 2000)}")

    def outcome(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """One line a row."""
        for name, before, after, change in rows:
            self._say(f"outcome {name}: before={before} after={after} change={change}")

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Progress, reward, the important figures and the last samples, redrawn in place."""

    def __init__(self, run: RunHeader, console: Console) -> None:
        """Draws nothing yet."""
        self._run = run
        self._console = console
        self._pace = Pace(run.steps)
        self._rewards: list[float] = []
        self._version = 0
        self._metrics: Mapping[str, Any] = {}
        self._samples: Sequence[SampleLine] = ()
        self._phase = ("", time.monotonic())
        self._warm: tuple[int, Mapping[str, float]] | None = None
        self._events: collections.deque[tuple[str, str]] = collections.deque(maxlen=_EVENTS_SHOWN)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def start(self) -> None:
        """Begins to redraw, in a thread of its own."""
        self._live.start()

    def stop(self) -> None:
        """Draws once more and leaves it on the screen."""
        self._phase = ("", time.monotonic())
        self._live.stop()

    def warm_start(self, step: int, figures: Mapping[str, float]) -> None:
        """Moves the supervised phase's bar."""
        self._warm = (step, dict(figures))

    def phase(self, name: str) -> None:
        """Shows where the loop is, and for how long."""
        self._phase = (name, time.monotonic())

    def step(self, version: int, metrics: Mapping[str, Any], samples: Sequence[SampleLine]) -> None:
        """Takes a step's figures; the next redraw shows them."""
        self._pace.add(metrics.get("seconds/step"))
        reward = metrics.get("reward/mean")
        self._rewards += [reward] if reward is not None else []
        self._version, self._metrics, self._warm = version, dict(metrics), None
        self._samples = tuple(samples) or self._samples

    def event(self, kind: str, text: str) -> None:
        """Shows the latest few below the figures."""
        self._events.append((kind, text))

    def outcome(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """Prints the table below what the display left on the screen."""
        table = Table(box=box.SIMPLE_HEAD, title="before and after", title_justify="left", title_style="bold")
        for column, justify in (("", "left"), ("before", "right"), ("after", "right"), ("change", "right")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for name, before, after, change in rows:
            table.add_row(name, before, Text(after, style="bold"), change)
        self._console.print(table)

    def render(self) -> RenderableType:
        """The whole display, from what is known now."""
        made = (self._progress(), self._reward(), self._figures(), self._seconds(), self._last_samples())
        parts = [part for part in made if part]
        for kind, text in tuple(self._events):
            style = "bold red" if kind in ("alarm", "error") else "yellow"
            parts.append(Text.assemble((f"{kind} ", style), visible(text, 300)))
        title = Text("  ·  ".join(_title(self._run)), style="bold")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", box=box.ROUNDED)

    def _progress(self) -> RenderableType:
        run, (phase, since) = self._run, self._phase
        done, total, name, said = self._version, run.steps, "step", f"{self._pace.left(self._version)} left"
        if self._warm is not None:
            done, total, name, said = self._warm[0], run.warm_start_steps, "warm start", _pairs(self._warm[1])
        if phase:
            said += f"   {phase} {time.monotonic() - since:.0f}s"
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(name, style="bold"),
            ProgressBar(total=max(total, 1), completed=done, width=40),
            f"{done}/{total}",
            said,
        )
        return row

    def _reward(self) -> RenderableType | None:
        if not self._rewards:
            return None
        return Text.assemble(
            ("reward ", "bold"),
            (sparkline(self._rewards, _SPARKLINE), "green"),
            f"  {self._rewards[0]:.3f} at first, ",
            (f"{self._rewards[-1]:.3f} now", "bold"),
        )

    def _figures(self) -> RenderableType | None:
        row = Table.grid(padding=(1, 3))
        cells = [cell for title, names in FIGURES.items() if (cell := self._block(title, names)) is not None]
        # As many blocks beside each other as the terminal is wide for.
        beside = max(1, (self._console.width - 4) // 30)
        for start in range(0, len(cells), beside):
            row.add_row(*cells[start : start + beside])
        return row if cells else None

    def _block(self, title: str, names: Sequence[str]) -> RenderableType | None:
        shown = [name for name in names if name in self._metrics]
        if not shown:
            return None
        table = Table.grid(padding=(0, 1))
        table.add_row(Text(title, style="dim italic"), "")
        for name in shown:
            table.add_row(Text(name), Text(number(self._metrics[name]), style="bold", justify="right"))
        return table

    def _seconds(self) -> RenderableType | None:
        line = Text()
        for name, value in self._metrics.items():
            if name.startswith("seconds/"):
                line.append("seconds  " if not line else "  ", style="dim italic")
                line.append(name.removeprefix("seconds/") + " ")
                line.append("none" if value is None else f"{value:.2f}", style="bold")
        return line or None

    def _last_samples(self) -> RenderableType | None:
        if not self._samples:
            return None
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim italic")
        for column in ("prompt", "completion", "answer", "reward"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for sample in self._samples[:4]:
            cells = [Text(visible(text, 60)) for text in (sample.prompt, sample.completion, sample.answer)]
            table.add_row(*cells, Text(f"{sample.reward:g}", style="green" if sample.reward > 0 else "red"))
        return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, averaged down to at most `width` of them, from their least to their greatest."""
    means = list(_averaged(values, width))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(int((mean - low) / span * len(_BARS)), len(_BARS) - 1)] for mean in means)


def _averaged(values: Sequence[float], width: int) -> Iterator[float]:
    count = min(len(values), width)
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        yield sum(part) / len(part)


def number(value: float | None) -> str:
    """Four significant digits; "none" of a value that was not finite."""
    return "none" if value is None else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m05s` or `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def visible(text: str, limit: int = 200) -> str:
    """The text on one line, control characters shown by escapes, its middle left out where it is long.

    A policy may sample anything, terminal escapes included.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-(limit // 2) :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _title(run: RunHeader) -> tuple[str, ...]:
    return (run.name, run.objective, run.lag_words, f"{run.parameters:,} parameters", run.device)


def _pairs(figures: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in figures.items())
