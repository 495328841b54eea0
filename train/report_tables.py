"""The page's tables: samples, alarms, events, what was run and where its files are.

Every text of a run is escaped: a policy may sample markup.
"""

import datetime
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train import run_folder
from train.alarms import ALARM, WARNING, Span
from train.console import visible
from train.report_charts import figure
from train.report_source import Folder

_EVENTS_SHOWN = 200
_SAMPLES_SHOWN = 8
_TEXT_SHOWN = 1200


def samples_table(folder: Folder) -> str:
    """What was asked and answered at the first and the last recorded step."""
    if not folder.samples:
        return ""
    first, last = folder.samples[0], folder.samples[-1]
    shown = [first, last] if first is not last else [last]
    both = "".join(_sample_table(line) for line in shown)
    text = "What the policy was asked and what it answered, at the first and the last recorded step."
    return f'<p>{text}</p><div class="grid">{both}</div>'


def _sample_table(line: Mapping[str, Any]) -> str:
    rows = []
    for sample in line["samples"][:_SAMPLES_SHOWN]:
        tone = "good" if sample["reward"] > 0 else "bad"
        texts = (safe_text(sample[key]) for key in ("prompt", "completion", "answer"))
        rows.append((*texts, f'<b class="{tone}">{figure(sample["reward"])}</b>'))
    return draw_table(
        "samples", ("prompt", "completion", "expected", "reward"), rows, title=f"Step {line['version']:,}"
    )


def alarms_table(folder: Folder) -> str:
    """Every level that the run passed, and every value that was not finite."""
    rows = [*_not_finite_rows(folder.rows), *map(_alarm_row, folder.spans)]
    if not rows:
        return "<p>No level was passed.</p>" if folder.rows else ""
    head = ("", "rule", "steps", "worst", "what it means, and what to do")
    return f"<p>{_ALARMS}</p>{draw_table('alarms', head, rows)}"


def _alarm_row(span: Span) -> Sequence[str]:
    level = span.level
    return (
        _chip(level.severity),
        f"<code>{html.escape(level.text())}</code>",
        f"{span.steps:,} of {span.of:,}, from {span.first:,} to {span.last:,}",
        figure(span.worst),
        f"{html.escape(level.meaning)} {html.escape(level.remedy)} <small>Source: {html.escape(level.source)}.</small>",
    )


def not_finite(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Versions at which a metric was not finite, by metric."""
    found: dict[str, list[int]] = {}
    for row in rows:
        for name in (name for name, value in row.items() if value is None):
            found.setdefault(name, []).append(row["version"])
    return found


def _not_finite_rows(rows: Sequence[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    for name, versions in not_finite(rows).items():
        yield (
            _chip(ALARM),
            f"<code>{safe_text(name)} not finite</code>",
            f"{len(versions):,} of {len(rows):,}, from {versions[0]:,} to {versions[-1]:,}",
            "-",
            "The value was NaN or infinite; it is null in the log and a gap in the charts.",
        )


def events_table(folder: Folder) -> str:
    """What happened beside the steps."""
    if not folder.events:
        return ""
    shown = folder.events[-_EVENTS_SHOWN:]
    hidden = len(folder.events) - len(shown)
    rows = [
        (_clock(event["time"]), f"{event['version']:,}", _chip(event["kind"]), safe_text(event["text"]))
        for event in reversed(shown)
    ]
    said = (
        "1 event"
        if len(shown) == 1
        else f"{len(shown)} events, latest first"
        + (f"; {hidden:,} earlier ones are in {run_folder.EVENTS}" if hidden else "")
    )
    table = draw_table("events", ("time (UTC)", "step", "", "what happened"), rows)
    return f"<details{' open' if len(shown) <= 12 else ''}><summary>{said}</summary>{table}</details>"


def run_tables(folder: Folder) -> str:
    """What was run, where its files are, its config, and the words of the page."""
    facts = dict(folder.summary.get("facts", {})) if folder.summary else {}
    if (run := folder.run) is not None:
        facts |= {
            "model": f"{run.model}, {run.parameters:,} parameters",
            "objective": f"{run.objective}; radii {run.radii}, {run.eps_low:g} below and {run.eps_high:g} above",
            "schedule": f"{run.mode}, {run.lag_words}; routes {'replayed' if run.replay else 'not replayed'}",
            "seed": str(run.seed),
            "device": run.device,
            "software": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
            "to go on with it": run.resume_command,
        }
    about = [(safe_text(name), safe_text(str(value))) for name, value in facts.items()]
    there = [(f"<code>{name}</code>", text) for name, text in _FILES if (folder.path / name).exists()]
    config = (
        f"<details><summary>config.toml, as resolved</summary><pre>{safe_text(folder.config, 100_000)}</pre></details>"
    )
    set_up = draw_table("facts", (), about, title="Set-up") if about else ""
    files = draw_table("facts", (), there, title="Files beside this page")
    return f'<div class="grid">{set_up}{files}</div>{config if folder.config else ""}{_WORDS}'


def draw_table(
    kind: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", note: str = ""
) -> str:
    """A card with a table; cells are HTML, the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return (
        f'<div class="card scroll">{f"<h3>{title}</h3>" if title else ""}<table class="{kind}">'
        f"{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
        f"{f'<p class=note>{note}</p>' if note else ''}</div>"
    )


def _chip(kind: str) -> str:
    return f'<span class="chip {_TONES.get(kind, "plain")}">{safe_text(kind)}</span>'


def safe_text(text: str, limit: int = _TEXT_SHOWN) -> str:
    """Text of a run, safe in HTML; line breaks stay."""
    return "\n".join(html.escape(visible(line, limit)) for line in text.split("\n"))


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


_TONES = {ALARM: "bad", "error": "bad", WARNING: "warn", "stopped": "warn"}
_ALARMS = (
    "What drifts is watched against these levels. They are where others saw trouble, most of them with models of "
    "billions of parameters; a small model at a high learning rate passes some of them without harm."
)
_FILES = (
    (run_folder.CONFIG, "the complete configuration, defaults and overrides resolved"),
    (run_folder.METRICS, "one JSON line a step; docs/metrics.md says what each name means"),
    (run_folder.SAMPLES, "a few completions of each step"),
    (run_folder.EVENTS, "restarts, alarms and other events"),
    (run_folder.WARM_START, "progress of the supervised phase"),
    (run_folder.SUMMARY, "the figures before and after"),
    (run_folder.RUN, "what was run: model, device, versions"),
    (run_folder.TENSORBOARD, "the same figures for TensorBoard: <code>tensorboard --logdir</code> with this folder"),
    (run_folder.CHECKPOINTS, "what the run goes on from"),
)
_WORDS = """<details><summary>Words used here</summary><dl>
<dt>version</dt><dd>optimizer steps applied to the weights; step s makes version s</dd>
<dt>lag</dt><dd>trainer version minus the version that sampled a token, in steps</dd>
<dt>mismatch d</dt><dd>log-probability of a sampled token now, minus the one that the sampler reported, in nats</dd>
<dt>threshold q</dt><dd>the 90th percentile (unless configured otherwise) of |d| over the batch's active tokens</dd>
<dt>radius</dt><dd>how far the ratio of probabilities may leave one before the token stops contributing</dd>
<dt>group</dt><dd>the completions of one prompt; each is judged against the group's mean reward</dd>
</dl></details>"""
