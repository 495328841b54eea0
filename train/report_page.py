"""The page `report.html`: one self-contained file that explains a run to someone who did not start it.

Made from the run folder alone. Style, script and frame lie beside this file as `report_page.css`, `.js` and `.html`.
Every text of a run is escaped: a policy may sample markup.
"""

import dataclasses
import datetime
import html
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train import run_folder
from train.alarms import ALARM, WARNING
from train.console import duration
from train.outcome import LABELS, Change, changes
from train.report_charts import Chart, Line, draw, figure
from train.report_figures import Section, Story
from train.report_source import Folder, read_folder
from train.report_tables import alarms_table, draw_table, events_table, not_finite, run_tables, safe_text, samples_table
from train.run_folder import RunHeader, write_atomic


def write_page(path: Path) -> Path:
    """Writes the page of a run folder; it is replaced as a whole.

    Raises:
      ValueError: a file of the folder is damaged.
      OSError: the page could not be written.
    """
    page = path / run_folder.PAGE
    write_atomic(page, render(read_folder(path)))
    return page


def render(folder: Folder) -> str:
    """The page as HTML."""
    here = Path(__file__)
    frame = string.Template(here.with_suffix(".html").read_text(encoding="utf-8"))
    parts = [
        _Part("outcome", "Outcome", _outcome(folder)),
        *(_Part(section.key, section.title, _section(section)) for section in _story(folder)),
        _Part("samples", "Samples", samples_table(folder)),
        _Part("events", "Alarms and events", alarms_table(folder) + events_table(folder)),
        _Part("run", "The run", run_tables(folder)),
    ]
    parts = [part for part in parts if part.body]
    name = folder.path.name if folder.run is None else folder.run.name
    return frame.substitute(
        title=safe_text(name),
        lead=_lead(folder),
        chips=_chips(folder),
        callout=_callout(folder),
        nav="".join(f'<a href="#{part.key}">{html.escape(part.title)}</a>' for part in parts),
        parts="".join(
            f'<section id="{part.key}"><h2>{html.escape(part.title)}</h2>{part.body}</section>' for part in parts
        ),
        written=html.escape(_now()),
        style=here.with_suffix(".css").read_text(encoding="utf-8"),
        script=here.with_suffix(".js").read_text(encoding="utf-8"),
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    key: str
    title: str
    body: str


def _story(folder: Folder) -> list[Section]:
    return Story(folder.rows, folder.run, folder.levels).sections()


def _lead(folder: Folder) -> str:
    run = folder.run
    if run is None:
        return "This folder has no run.json, so only its figures can be shown."
    schedule = (
        "in step with its sampler"
        if run.mode == "batch_wise" and run.lag == 0
        else f"while a separate fleet sampled with older weights ({run.lag_words})"
    )
    words = (
        f"A mixture-of-experts policy of {_amount(run.parameters)} parameters was trained by reinforcement learning "
        f"{schedule}. Objective {run.objective}, reward {run.reward}, {run.steps:,} steps planned."
    )
    if run.reward == "random":
        words += " This is a control: the reward carries no information, so held-out accuracy must not improve."
    return safe_text(words)


def _chips(folder: Folder) -> str:
    state, tone = _state(folder)
    chips = [(state, tone)]
    severities = [span.level.severity for span in folder.spans]
    broken = not_finite(folder.rows)
    for count, word, colour in (
        (severities.count(ALARM) + len(broken), "alarm", "bad"),
        (severities.count(WARNING), "warning", "warn"),
    ):
        chips.append((f"{count or 'no'} {word}{'' if count == 1 else 's'}", colour if count else "good"))
    return "".join(f'<span class="chip {tone}">{safe_text(text)}</span>' for text, tone in chips)


def _state(folder: Folder) -> tuple[str, str]:
    """How the run stands, in words, and the tone to say it in."""
    steps = folder.run.steps if folder.run is not None else None
    at = f"{folder.version:,}" if steps is None else f"{folder.version:,} of {steps:,}"
    end = _end(folder)
    if end is not None:
        failed = end["kind"] == "error"
        return (f"failed at step {at}", "bad") if failed else (f"stopped at step {at}", "warn")
    if steps is not None and folder.version >= steps:
        return f"finished, {folder.version:,} steps", "good"
    return f"step {at}", "plain"


def _end(folder: Folder) -> Mapping[str, Any] | None:
    """The event that ended the run before its time, unless it has gone on since."""
    ends = [event for event in folder.events if event["kind"] in ("error", "stopped", "resume")]
    return ends[-1] if ends and ends[-1]["kind"] != "resume" else None


def _callout(folder: Folder) -> str:
    end = _end(folder)
    if end is None:
        return ""
    again = "" if folder.run is None else f"\nTo go on: {folder.run.resume_command}"
    return f'<p class="callout">{safe_text(end["text"] + again)}</p>'


def _outcome(folder: Folder) -> str:
    found = changes(folder.summary, folder.rows)
    if not found:
        return "<p>No step has finished yet.</p>" + _warm_start(folder)
    rows = []
    for change in found:
        label, before, after, difference = change.texts()
        rows.append((safe_text(label), before, f"<b>{after}</b>", difference))
    note = "± is two standard errors over the held-out prompts." if any(c.error_before for c in found) else ""
    table = draw_table("figures", ("", "before", "after", "change"), rows, note=note)
    return (
        f'<div class="tiles">{"".join(map(_tile, found))}{_cost_tile(folder)}</div>'
        + ("" if folder.summary and folder.summary.get("after") else f'<p class="note">{_NO_SUMMARY}</p>')
        + _warm_start(folder, table)
    )


def _tile(change: Change) -> str:
    if change.before is None or change.after is None:
        return ""
    before, after = change.plain()
    label = safe_text(LABELS.get(change.metric, change.metric))
    return f'<div class="tile"><span>{label}</span><div><i>{before}</i><em>→</em><b>{after}</b></div></div>'


def _cost_tile(folder: Folder) -> str:
    seconds = [row["seconds/step"] for row in folder.rows if row.get("seconds/step") is not None]
    tokens = sum(row.get("tokens") or 0 for row in folder.rows)
    if not seconds:
        return ""
    said = f"{figure(sum(seconds) / len(seconds))} s a step, {_amount(tokens)} tokens"
    total = duration(sum(seconds))
    return f'<div class="tile"><span>time in steps</span><div><b>{total}</b></div><small>{said}</small></div>'


def _warm_start(folder: Folder, table: str = "") -> str:
    """The table of the outcome, how to read it, and the curve of the supervised phase beside them."""
    words = _warm_start_words(folder.run)
    chart = draw(
        Chart(
            title="Warm start",
            text="The supervised phase: cross entropy of the answers, and the share of answer tokens predicted.",
            unit="nats per token; share",
            lines=tuple(
                Line(label=name, values=[line.get(name) for line in folder.warm_start], tone=tone)
                for name, tone in (("loss", 2), ("accuracy", 1))
            ),
        ),
        [line["step"] for line in folder.warm_start],
    )
    aside = f'<div class="card aside"><h3>How to read the gain</h3><p>{html.escape(words)}</p></div>' if words else ""
    left = f'<div class="stack">{table}{aside}</div>' if chart else table + aside
    return f'<div class="grid">{left}{chart}</div>'


def _warm_start_words(run: RunHeader | None) -> str:
    if run is None or not run.warm_start_steps:
        return ""
    words = f"Before the first step, {run.warm_start_steps:,} supervised steps taught the policy the form of the task."
    if not run.warm_start_noise:
        return words
    return (
        f"{words} {run.warm_start_noise:.0%} of their answer tokens were replaced by others on purpose, so that "
        "sampling starts out poor although the policy knows the answers. Part of the gain is therefore this noise, "
        "removed: read sampled accuracy and reward together with the greedy accuracy, which such noise hardly lowers, "
        "and with the entropy, which falls as the noise goes."
    )


def _section(section: Section) -> str:
    return f'<p>{html.escape(section.text)}</p><div class="grid">{"".join(section.figures)}</div>'


def _amount(count: float) -> str:
    for size, unit in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


_NO_SUMMARY = (
    "The run has not come to its end, so there is no evaluation after it; the figures are those of the steps so far."
)
