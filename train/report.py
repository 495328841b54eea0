"""A run's report: one line a step in `metrics.jsonl`, TensorBoard, the console, and the page `report.html`.

The loop tells the report what happened; the report judges it against the alarm levels and shows it. Whatever it shows
can be made again from the run folder alone (`regenerate`). It never computes a metric of the policy.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from train import run_folder
from train.alarms import Watch, levels_for
from train.board import Board
from train.console import Display, make_display
from train.outcome import changes, check_summary
from train.report_page import write_page
from train.run_folder import JsonLines, RunHeader, SampleLine, encode, last_version, read_lines, rewrite, write_atomic

__all__ = ["Report", "RunHeader", "SampleLine", "regenerate"]

HISTOGRAM = "lag/histogram"
STEP_SECONDS = "seconds/step"
# A running page is at most this old, seconds, unless drawing it would take more than 2% of the run's time.
_PAGE_AGE = 60.0
_PAGE_SHARE = 0.02


class Report:
    """Writes and shows a run. A context manager; used from the loop's thread, but for `event`, which any may call."""

    def __init__(
        self,
        folder: Path,
        run: RunHeader,
        *,
        console: bool,
        tensorboard: bool = True,
        output: Console | None = None,
    ) -> None:
        """Opens the folder; lines that are there stay, and later steps are added to them.

        Args:
          folder: the run's; made if absent.
          run: what is run.
          console: whether to show the run: live on a terminal, as plain lines elsewhere.
          tensorboard: whether to write scalars under `tb/`.
          output: where to show it, in place of standard output.

        Raises:
          ValueError: the folder's files are damaged, or `run.levels` names a metric without a level.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._run = run
        self._levels = levels_for(run)
        # Read first, so that a damaged file is an error before anything is opened.
        rows, supervised = read_lines(folder / run_folder.METRICS), read_lines(folder / run_folder.WARM_START)
        self._warm_step = max((line["step"] for line in supervised), default=0)
        self._watch = Watch(self._levels)
        self._version = 0
        self._replay(rows)
        self._lock = threading.Lock()
        self._metrics = JsonLines(folder / run_folder.METRICS)
        self._events = JsonLines(folder / run_folder.EVENTS)
        self._samples = JsonLines(folder / run_folder.SAMPLES)
        self._warm_start = JsonLines(folder / run_folder.WARM_START)
        self._board: Board | None = None
        self._wants_board = tensorboard
        self._display: Display | None = make_display(run, output or Console()) if console else None
        self._seconds: dict[str, float] = {}
        self._phases: list[str] = []
        self._mark = self._step_began = time.perf_counter()
        self._page_due = time.monotonic() + _PAGE_AGE
        self._summary: Mapping[str, Any] | None = None
        write_atomic(folder / run_folder.RUN, encode(dataclasses.asdict(run)) + "\n")

    def __enter__(self) -> "Report":
        """Begins to show the run."""
        if self._display is not None:
            self._display.start()
        self._mark = self._step_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the display and writes the page; what stopped the run is its last event."""
        try:
            if error is not None:
                self.event(*_ending(error))
            self._stop_display()
            self.write_page()
        except Exception as failure:
            # What stopped the run matters more than what this report could not say about it, but neither is hidden.
            if error is None:
                raise
            error.add_note(f"besides, the report could not be finished: {type(failure).__name__}: {failure}")
        finally:
            self._close()

    def write(
        self,
        version: int,
        metrics: Mapping[str, float],
        samples: Sequence[SampleLine] = (),
        histogram: Mapping[int, int] | None = None,
    ) -> None:
        """Records an optimizer step. The seconds of the phases since the last one are added, and `seconds/step`.

        Args:
          version: the version that the step made.
          metrics: figures by name, see docs/metrics.md. One that is not finite is written as null and raises an alarm.
          samples: a few completions of the step.
          histogram: number of trained tokens by lag, stored as `lag/histogram`.

        Raises:
          ValueError: the version is not later than the last one written, so that a step would count twice.
          OSError: the line could not be written, for example to a full disk.
        """
        if version <= self._version:
            raise ValueError(
                f"{self._folder / run_folder.METRICS}: expected a version after {self._version}, got {version}; "
                "resume the run at the version that its checkpoint holds"
            )
        now = time.perf_counter()
        timed = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        figures = {STEP_SECONDS: now - self._step_began, **timed, **metrics}
        clean = {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
        self._seconds, self._step_began = {}, now
        row: dict[str, Any] = {"version": version, "time": round(time.time(), 3), **clean}
        if histogram is not None:
            row[HISTOGRAM] = {str(lag): int(tokens) for lag, tokens in sorted(histogram.items())}
        self._metrics.append(row)
        if samples:
            lines = [dataclasses.asdict(sample) for sample in samples]
            self._samples.append({"version": version, "samples": lines})
        self._version = version
        self._write_board(version, clean)
        if self._display is not None:
            self._display.step(version, clean, samples)
        for raised in self._watch.update(clean):
            self.event(raised.severity, raised.text)
        if time.monotonic() >= self._page_due:
            self.write_page()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the loop as `seconds/<name>` of the next step; within another phase, that one pauses."""
        self._charge()
        self._phases.append(name)
        self._show_phase()
        try:
            yield
        finally:
            self._charge()
            self._phases.pop()
            self._show_phase()

    def warm_start(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """Records the progress of the supervised phase.

        Args:
          step: supervised steps made; at most the one before means that the phase has begun again.
          loss: cross entropy, nats per answer token.
          accuracy: share of answer tokens that are predicted, if known.

        Raises:
          ValueError: a figure is not finite: the warm start has failed.
        """
        figures = {"loss": float(loss)} | ({} if accuracy is None else {"accuracy": float(accuracy)})
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ValueError(f"warm start: expected a finite {name}, got {value} (step {step}); lower its peak_lr")
        if step <= self._warm_step:
            path = self._folder / run_folder.WARM_START
            self._warm_start = _replace(self._warm_start, path, [r for r in read_lines(path) if r["step"] < step])
        self._warm_start.append({"step": step, **figures})
        self._warm_step = step
        if self._display is not None:
            self._display.warm_start(step, figures)
        self._step_began = time.perf_counter()

    def resume(self, version: int) -> None:
        """Drops what the folder says of later versions, so that each is there once; files are replaced as a whole.

        Events stay, for they happened; alarms of the dropped steps go, for they come again.

        Args:
          version: that the run goes on from; 0 = from its beginning.
        """
        path = self._folder / run_folder.METRICS
        rows = read_lines(path)
        kept = [row for row in rows if row["version"] <= version]
        samples = [line for line in read_lines(self._folder / run_folder.SAMPLES) if line["version"] <= version]
        events = [
            event
            for event in read_lines(self._folder / run_folder.EVENTS)
            if event["version"] <= version or event["kind"] not in ("alarm", "warning")
        ]
        self._metrics = _replace(self._metrics, path, kept)
        self._samples = _replace(self._samples, self._folder / run_folder.SAMPLES, samples)
        with self._lock:
            self._events = _replace(self._events, self._folder / run_folder.EVENTS, events)
        self._watch = Watch(self._levels)
        self._replay(kept)
        self._step_began = time.perf_counter()
        gap = version - max(last_version(kept), 0)
        self._version = version
        if version == 0 and not rows:
            return
        said = f"from version {version}; {len(rows) - len(kept)} later lines dropped"
        self.event("resume", said + (f"; {gap} steps before it have no line" if gap else ""))

    def event(self, kind: str, text: str) -> None:
        """Records what happened beside the steps: a restart, a push again, a warning. Any thread may call it.

        Args:
          kind: one word, e.g. "restart", "publish", "warning", "error".
          text: what happened, one or two sentences.
        """
        with self._lock:
            record = {"time": round(time.time(), 3), "version": self._version, "kind": kind, "text": text}
            self._events.append(record)
            if self._display is not None:
                self._display.event(kind, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`; the console shows it when the run ends. A later call replaces it.

        Args:
          summary: `{"prompts": count, "before": figures, "after": figures, "facts": texts}`, each of them optional: see
            `train.outcome`.

        Raises:
          ValueError: an unknown key, or a figure that is not a finite number.
        """
        check_summary(summary)
        write_atomic(self._folder / run_folder.SUMMARY, encode(summary) + "\n")
        self._summary = summary

    def write_page(self) -> Path:
        """Writes `report.html` from what the folder holds now; `write` does so about once a minute."""
        began = time.monotonic()
        page = write_page(self._folder)
        now = time.monotonic()
        self._page_due = now + max(_PAGE_AGE, (now - began) / _PAGE_SHARE)
        return page

    def _replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Lets the watch see the steps that are already there; what they raised has been said."""
        for row in rows:
            self._watch.update(_figures(row))
        self._version = max(last_version(rows), 0)

    def _write_board(self, version: int, metrics: Mapping[str, float | None]) -> None:
        if not self._wants_board:
            return
        if self._board is None:
            # Of a resumed run, TensorBoard then forgets the steps that are made again.
            self._board = Board(self._folder / run_folder.TENSORBOARD, version)
        self._board.scalars(version, metrics)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._phases:
            name = self._phases[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    def _show_phase(self) -> None:
        if self._display is not None:
            self._display.phase(self._phases[-1] if self._phases else "")

    def _stop_display(self) -> None:
        if self._display is None:
            return
        self._display.stop()
        if self._summary is not None:
            rows = read_lines(self._folder / run_folder.METRICS)
            self._display.outcome([change.texts() for change in changes(self._summary, rows)])

    def _close(self) -> None:
        for file in (self._metrics, self._events, self._samples, self._warm_start):
            file.close()
        if self._board is not None:
            self._board.close()


def regenerate(folder: Path) -> Path:
    """Writes `report.html` of a run folder anew, also of one that is still running or was killed.

    Returns:
      The page's path.

    Raises:
      ValueError: the folder is not a run's, or a file of it is damaged.
    """
    if not (folder / run_folder.METRICS).exists():
        raise ValueError(f"{folder}: expected a run folder, got none with {run_folder.METRICS}; name that of a run")
    return write_page(folder)


def _ending(error: BaseException) -> tuple[str, str]:
    """Kind and text of the event that ends a run before its time."""
    if isinstance(error, SystemExit):
        return "stopped", f"asked to stop, exit code {error.code}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted from the keyboard"
    return "error", f"{type(error).__name__}: {error}"


def _replace(file: JsonLines, path: Path, records: Sequence[Mapping[str, Any]]) -> JsonLines:
    file.close()
    rewrite(path, records)
    return JsonLines(path)


def _figures(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in row.items() if name not in ("version", "time", HISTOGRAM)}
