"""The files of a run folder that tell its story, and the records in them.

`metrics.jsonl` holds one line a step, `events.jsonl` what happened beside the steps, `samples.jsonl` a few completions
a step, `warm_start.jsonl` the supervised phase, `run.json` what was run, `summary.json` before and after. All are
strict JSON: `NaN` is not a number here. Knows nothing of consoles, charts or JAX.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
WARM_START = "warm_start.jsonl"
RUN = "run.json"
SUMMARY = "summary.json"
CONFIG = "config.toml"
PAGE = "report.html"
TENSORBOARD = "tb"
CHECKPOINTS = "checkpoints"

_PACKAGES = ("sat-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "grpcio", "numpy")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers, by name; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What was run, in the words that the report uses.

    Attributes:
      name: of the run.
      steps: optimizer steps planned.
      objective: name of the preset, e.g. "sat_grpo".
      radii: the radius rule, "fixed", "sat" or "m2po"; alarms about SAT need "sat".
      eps_low, eps_high: nominal clip radii, dimensionless.
      mode: schedule, "batch_wise" or "bounded".
      lag: n, optimizer steps between publications; 0 = synchronous.
      max_lag: largest lag that the schedule allows a token, steps; None if there is no bound.
      replay: whether the sampler's routes are replayed.
      reward: name of the verifier; "random" marks a control run.
      seed: of the run.
      model: the policy in one line.
      parameters: number of parameters.
      device: accelerators in one line, e.g. "1 x cpu".
      warm_start_steps: supervised steps before version 0; 0 = none.
      warm_start_noise: share in [0, 1] of answer tokens that the warm start replaced on purpose.
      resume_command: what a user types to go on with this run.
      versions: of Python and packages, by name.
      levels: alarm levels that this run sets itself, by metric, in place of `train.alarms.LEVELS`.
    """

    name: str
    steps: int
    objective: str
    radii: str
    eps_low: float
    eps_high: float
    mode: str
    lag: int
    max_lag: int | None
    replay: bool
    reward: str
    seed: int
    model: str
    parameters: int
    device: str
    warm_start_steps: int
    warm_start_noise: float
    resume_command: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)
    levels: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def contracts(self) -> bool:
        """Whether the clip radii follow the batch's mismatch (SAT)."""
        return self.radii == "sat"

    @property
    def lag_words(self) -> str:
        """The schedule in words."""
        if self.mode != "batch_wise":
            return f"{self.mode}, lag at most {self.max_lag}"
        return "synchronous" if self.lag == 0 else f"lag {self.lag} to {2 * self.lag - 1}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleLine:
    """One sampled completion as a reader sees it.

    Attributes:
      prompt, completion, answer: text.
      reward: what the verifier gave.
    """

    prompt: str
    completion: str
    answer: str
    reward: float


def read_header(folder: Path) -> RunHeader | None:
    """The header of `run.json`, or None where there is none.

    Raises:
      ValueError: the file is not the header that this version writes.
    """
    path = folder / RUN
    record = read_json(path)
    if record is None:
        return None
    known = {field.name for field in dataclasses.fields(RunHeader)}
    if record.keys() != known:
        raise ValueError(
            f"{path}: expected the fields of a run header, got {sorted(record.keys() ^ known)} on one side only; "
            "it was written by another version of sat-jax"
        )
    return RunHeader(**record)


def read_json(path: Path) -> dict[str, Any] | None:
    """One JSON object, or None where there is no such file.

    Raises:
      ValueError: the file is not one JSON object.
    """
    if not path.exists():
        return None
    return _parse(path.read_text(encoding="utf-8"), str(path))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a JSON-lines file; none where there is no such file.

    A last line without its newline was cut off by a kill, and is left out.

    Raises:
      ValueError: a complete line is not a JSON object; file and line are named.
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON; ASCII, so that any text of a policy survives it.

    Raises:
      ValueError: a value is not finite.
    """
    return json.dumps(dict(record), allow_nan=False, separators=(",", ":"))


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file's content as a whole, or leaves the old content; what UTF-8 cannot hold is written as an escape.

    Raises:
      OSError: the text could not be written; the path is named.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def rewrite(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces a JSON-lines file as a whole."""
    write_atomic(path, "".join(encode(record) + "\n" for record in records))


class JsonLines:
    """An append-only JSON-lines file; every line is handed to the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        """Opens for appending; a last line that a kill cut off is removed.

        Args:
          path: of the file; made if absent.
        """
        self._path = path
        if path.exists():
            content = path.read_bytes()
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                os.truncate(path, complete)
        self._file = path.open("a", encoding="ascii")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
          OSError: it could not be written (for example a full disk); the path is named.
          ValueError: a value is not finite.
        """
        try:
            self._file.write(encode(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def last_version(rows: Sequence[Mapping[str, Any]]) -> int:
    """Version of the last row; -1 of none."""
    return int(rows[-1]["version"]) if rows else -1


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"{where}: expected one JSON object, got {error}; repair or remove the line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected one JSON object, got {type(record).__name__}")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which is not JSON")


def _unwritable(path: Path, error: OSError) -> OSError:
    said = f"expected to write it, got '{error.strerror}'; free space or choose another folder"
    return OSError(error.errno, said, str(path))
