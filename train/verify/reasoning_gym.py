"""The score that reasoning-gym gives an answer of one of its tasks. Needs the extra `math`."""

import importlib
import re
from collections.abc import Mapping
from typing import Any

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def reasoning_gym(completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """The library's score, in [0, 1], of the last `<answer>...</answer>`, else "Answer:" line, else all of it.

    Args:
      completion: of the policy.
      answer: the data's.
      metadata: as `sat-jax prepare reasoning-gym` wrote it.

    Raises:
      KeyError: the data is of another source.
    """
    library: Any = importlib.import_module("reasoning_gym")
    found = _TAGGED.findall(completion) or _LINE.findall(completion) or [completion]
    entry = {"question": "", "answer": answer, "metadata": metadata["entry"]}
    return float(library.get_score_answer_fn(metadata["task"])(answer=found[-1].strip(), entry=entry))
