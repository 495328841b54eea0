r"""What the answer rules share: finding \boxed{...} and fractions in text. Pure functions of strings."""

import re


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


def _balanced(text: str, begin: int) -> str | None:
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None
