r"""PrimeMath's rule, the reward that SAT was trained with: find the answer, then compare as strings, then by sympy.

Stricter than a computer algebra system on purpose: an integer must be given as an integer, a fraction reduced.

Source: PRIME (arXiv 2502.01456) as its released code states the rule; SAT (arXiv 2607.18722), appendix F. Stricter than
that code in three places: what has no digit fails, factorials and attributes are never evaluated, and the last,
numeric comparison takes neither an integer for one that is near it nor 50 for 50 %.
"""

import importlib
import math
import re
from typing import Any

from train.verify.latex import last_braced

_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_CUTS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_UNITS = (
    r"(?:degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)"
    r"(?:es)?s? *(?:\^[0-9]+)?"
)
_NEVER_EVALUATED = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+|\*\*|!|__|\.[a-z]|[\[\]'\"]")
_BRACKETS = "()[]"
_TOLERANCE = 1e-4  # relative, of the numeric comparison


def extract(completion: str) -> str | None:
    """The answer that a completion gives, or None if what is found there has no digit.

    It keeps only the text before the last ". ", as the authors' rule does.
    """
    text = completion
    for cue in _BEFORE:
        index = text.lower().rfind(cue)
        text = text[index + len(cue) :].strip() if index >= 0 else text
    for cue in _AFTER:
        index = text.lower().rfind(cue)
        text = text[:index].strip() if index >= 0 else text
    text = last_braced(text, ("boxed", "fbox")) or text
    text = text.rpartition(". ")[0].strip() if ". " in text else text
    for cue in _CUTS:
        index = text.lower().rfind(cue)
        text = text[index + len(cue) :].strip() if index >= 0 else text
    return text if any(character.isdigit() for character in text) else None


def prime_math(completion: str, answer: str) -> float:
    """1 if the extracted answer equals the data's, else 0."""
    given = extract(completion)
    return float(given is not None and equal(given, answer))


def equal(given: str, answer: str) -> bool:
    """Whether two answers agree: as text, element by element, or within 1e-4 of a number that is no integer."""
    if _squeeze(given) == _squeeze(answer):
        return True
    left, right = _normalise(given), _normalise(answer)
    if not left or not right:
        return False
    if left == right:
        return True
    lefts, rights = _split(left), _split(right)
    if len(lefts) != len(rights):
        return False
    if len(rights) > 1 and (left[0] != right[0] or left[-1] != right[-1]):
        return False
    return all(_same_element(one, other) for one, other in zip(lefts, rights, strict=True))


def _same_element(given: str, answer: str) -> bool:
    if given == answer:
        return True
    if _is_fraction(given) and _is_fraction(answer):
        return False  # equal only when written alike: both reduced
    if _is_integer(given) != _is_integer(answer):
        return False
    numbers = _number(given), _number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return math.isclose(numbers[0], numbers[1], rel_tol=_TOLERANCE, abs_tol=0.0)
    return _sympy_equal(given, answer)


def _sympy_equal(given: str, answer: str) -> bool:
    expression = f"({answer})-({given})"
    letters = {c for c in expression.replace("sqrt", "").replace("pi", "") if c.isalpha()}
    if len(letters) > 2 or _NEVER_EVALUATED.search(expression):
        return False
    sympy: Any = importlib.import_module("sympy")
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    rules = (*parser.standard_transformations, parser.implicit_multiplication_application, parser.convert_xor)
    try:
        difference = parser.parse_expr(expression, transformations=rules)
        return bool(sympy.simplify(difference) == 0)
    except (SyntaxError, TypeError, ValueError, ArithmeticError, AttributeError, parser.TokenError):
        return False  # what sympy cannot read is no answer; anything else is the verifier's own failure


def _squeeze(text: str) -> str:
    """The string comparison: LaTeX spelling aside, equal character by character."""
    text = re.sub(r"^\\text\{(.+?)\}$", r"\1", text.strip())
    for before, after in (("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", ""), (r"\!", "")):
        text = text.replace(before, after)
    text = text.replace(r"^{\circ}", "").replace(r"^\circ", "").replace(r"\$", "").replace("$", "")
    text = text.replace(r"\%", "").replace("%", "")
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(\s|^|\{)\.(\d)", r"\g<1>0.\2", text)
    text = text.split("=")[-1] if text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2 else text
    return re.sub(r"\s+", "", text).rstrip(".")


def _normalise(text: str) -> str:
    text = re.sub(r"^\\text\{(.+?)\}$", r"\1", text.strip())
    text = text.replace(r"\%", "").replace(r"\$", "").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = re.sub(_UNITS, "", text)
    text = re.sub(r"\^ *(?:\\circ|\{\\circ\})", "", text)
    text = re.sub(r",\\! *", "", text).strip()
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    text = _plain(text) if "\\" in text else text
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is a mixed number
    text = text.lower().strip()
    return str(int(float(_ungroup(text)))) if _is_integer(text) else text


def _plain(text: str) -> str:
    r"""LaTeX as sympy reads it: \frac{a}{b} -> (a)/(b), \sqrt{a} -> sqrt(a), and the usual symbols."""
    text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").replace(r"\left", "").replace(r"\right", "")
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    for _ in range(20):  # innermost first; deeper nesting is no answer
        simpler = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", lambda m: f" {_group(m[1])}/{_group(m[2])}", text)
        simpler = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", simpler)
        if simpler == text:
            break
        text = simpler
    for before, after in ((r"\pi", " pi "), (r"\cdot", "*"), (r"\times", "*"), (r"\infty", "inf"), (r"\cup", "U")):
        text = text.replace(before, after)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,;:! ]", "", text)
    return text.strip()


def _group(text: str) -> str:
    return text if re.fullmatch(r"-?[0-9]+|[a-z]", text.strip()) else f"({text})"


def _split(text: str) -> list[str]:
    text = _ungroup(text)
    inside = text[1:-1]
    bracketed = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if bracketed and not any(bracket in inside for bracket in _BRACKETS):
        return [element.strip() for element in inside.split(",")]
    return [text]


def _ungroup(text: str) -> str:
    """1,234,567 -> 1234567; the commas of a tuple stay."""
    while (simpler := re.sub(r"(\d),(\d\d\d)($|\D)", r"\1\2\3", text)) != text:
        text = simpler
    return text


def _number(text: str) -> float | None:
    try:
        value = float(_ungroup(text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_integer(text: str) -> bool:
    value = _number(text)
    return value is not None and abs(value) < 1e15 and abs(value - round(value)) <= 1e-7


def _is_fraction(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+/0*[1-9][0-9]*", text) is not None
