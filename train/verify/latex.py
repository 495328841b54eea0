r"""What the answer rules share: finding \boxed{...} and fractions in text. Pure functions of strings."""

import re

_SHORT = 64  # characters of a completion that is nothing but an answer


def last_braced(text: str, commands: tuple[str, ...]) -> str | None:
    r"""The content of the last `\command{...}`, braces matched, or None.

    Args:
      text: anything.
      commands: names without the backslash, e.g. ("boxed", "fbox"); the first one that occurs at all is taken.

    Returns:
      What is inside the outer braces; None if no command occurs or its braces never close.
    """
    for command in commands:
        found = list(re.finditer(rf"\\{command}\s*\{{", text))
        if found:
            return _balanced(text, found[-1].end())
    return None


def final_answer(text: str) -> str | None:
    r"""What a completion answers, for a vote: its last box, else its last "Answer:" line, else all of it if short."""
    found = last_braced(text, ("boxed", "fbox"))
    if found is None:
        lines = re.findall(r"answer\s*:\s*([^\n]+)", text, re.IGNORECASE)
        found = lines[-1] if lines else text if len(text) <= _SHORT else ""
    return re.sub(r"\s+", "", found).strip("$.").removesuffix(".") or None


def _balanced(text: str, begin: int) -> str | None:
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None
