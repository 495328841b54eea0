r"""Equality by the math-verify library. Its own time limits are off: they need the main thread; the pool kills instead.

Needs the extra `math`.
"""

import importlib
import re
from typing import Any

TAIL = 2000  # characters of the completion that are looked at
_EVERY_BOX = re.compile(r"\\boxed\s*\{")


def math_verify(completion: str, answer: str) -> float:
    r"""1 if the completion's final answer equals the data's, else 0.

    Where the completion boxes anything, its last box alone counts: a completion that boxes every number it can think of
    has given one answer, the last.

    Raises:
      ValueError: the library cannot parse the data's answer; no completion could be right.
    """
    library: Any = importlib.import_module("math_verify")
    gold = library.parse(_delimited(answer), parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"answer: expected one that math-verify parses, got {answer!r}; use another verifier or drop it"
        )
    text = completion[-TAIL:]
    boxes = [match.start() for match in _EVERY_BOX.finditer(text)]
    given = library.parse(text[boxes[-1] :] if boxes else text, parsing_timeout=None)
    return float(bool(library.verify(gold, given, timeout_seconds=None)))


def _delimited(answer: str) -> str:
    r"""A bare answer is boxed, so that it is read as mathematics and not searched for in prose."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
