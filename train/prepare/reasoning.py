"""`sat-jax prepare reasoning-gym`: procedural tasks with verifiers, without a download. Needs the extra `math`."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.records import write_records


def prepare_reasoning(task: str, size: int, seed: int, settings: dict[str, Any], out: Path) -> int:
    """Writes `size` problems of a task; the same arguments give the same bytes.

    Train with `reward = "reasoning_gym"`: the library's own score of the task.

    Args:
      task: its name in the library, e.g. "chain_sum".
      size: problems; copies of a question are left out.
      seed: of the generator.
      settings: of the task, by name.
      out: file.

    Returns:
      How many were written.

    Raises:
      ValueError: the library is absent, or does not know the task or a setting.
    """
    try:
        library: Any = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ValueError(
            "prepare reasoning-gym: expected the library, got none; pip install 'sat-jax[math]'"
        ) from error
    try:
        entries = library.create_dataset(task, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"prepare reasoning-gym: expected a task and its settings, got {task!r}: {error}") from error
    return write_records(out, _records(entries, task))


def parse_settings(text: str) -> dict[str, Any]:
    """Settings of a task, from JSON.

    Raises:
      ValueError: it is no JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--with: expected a JSON object, got: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--with: expected a JSON object, got {text!r}")
    return settings


def _records(entries: Any, task: str) -> Iterator[dict[str, Any]]:
    seen = set()
    for entry in entries:
        if entry["question"] in seen or not str(entry["answer"]):
            continue
        seen.add(entry["question"])
        metadata = json.loads(json.dumps(entry["metadata"], default=str))
        yield {
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "metadata": {"source": f"reasoning_gym/{task}", "task": task, "entry": metadata},
        }
