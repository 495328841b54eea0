"""DAPO's rule: the last line "Answer: ..." of the completion's end, normalised, equals the normalised answer.

Source: DAPO (arXiv 2503.14476) as its released code states it, after Minerva's normalisation (arXiv 2206.14858).
"""

import re

from train.verify.latex import last_braced

TAIL = 300  # characters of the completion that are looked at
BOX_TAIL = 100  # of these, for the fallback
_CUE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# In this order: "a " and "an " go before every other space does.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_WORDS = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
]
_WRAPPED = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")


def normalise(answer: str) -> str:
    """What two answers must have in common: text after the last "=", without units, wrappers and separators."""
    text = answer.split("=")[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for word in _WORDS:
        text = text.replace(word, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for wrapper in _WRAPPED:
        text = re.sub(wrapper, r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)  # \frac12 -> \frac{1}{2}
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def extract(completion: str) -> str | None:
    """What follows the last "Answer:" within the last 300 characters, to the end of its line; None without one."""
    found = _CUE.findall(completion[-TAIL:])
    return found[-1] if found else None


def dapo(completion: str, answer: str) -> float:
    """1 if the last "Answer:" line is the answer, else 0 (the authors say 1 and -1)."""
    given = extract(completion)
    return float(given is not None and _same(given, answer))


def dapo_boxed(completion: str, answer: str) -> float:
    r"""As `dapo`; where there is no "Answer:" line, the last \boxed{} within the last 100 characters counts."""
    if extract(completion) is not None:
        return dapo(completion, answer)
    boxed = last_braced(completion[-BOX_TAIL:], ("boxed",))
    return float(boxed is not None and _same(boxed, answer))


def _same(given: str, answer: str) -> bool:
    left, right = normalise(given), normalise(answer)
    # The data's answers are integers; "007" and "7", or "7.0" and "7", are one of them.
    return left == right or (_integer(left) is not None and _integer(left) == _integer(right))


def _integer(text: str) -> int | None:
    match = re.fullmatch(r"([+-]?\d{1,300})(?:\.0*)?", text)
    return int(match.group(1)) if match else None
