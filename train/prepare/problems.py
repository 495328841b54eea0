r"""One record of a public data set -> one problem: the shapes, and the instructions around the question.

Known shapes (by their keys):
  DAPO-Math-17k       {"prompt": [messages], "reward_model": {"ground_truth": ...}, "extra_info": {"index": ...}}
  the same in slime   {"prompt": [messages], "label": ...}
  Dolci-RL-Zero-Math  {"prompt": text, "ground_truth": text or a list of one}
  AIME and the like   {"problem": text, "answer": ...}
  ours                {"prompt": text, "answer": ...}
"""

import dataclasses
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, assert_never

from train.records import read_records, text_of
from train.tasks.example import Example

Instruction = Literal["keep", "none", "boxed", "answer"]

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
BOXED_SUFFIX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_KNOWN_PREFIXES = (DAPO_PREFIX,)
_KNOWN_SUFFIXES = (DAPO_SUFFIX, BOXED_SUFFIX, BOXED_SUFFIX.strip())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question and its answer.

    Attributes:
      question: without any instruction.
      asked: as the source puts it.
      answer: text.
      response: a worked solution, for supervised examples; empty where there is none.
      source: name of the data set, empty where the record does not say.
      where: file and line.
    """

    question: str
    asked: str
    answer: str
    response: str
    source: str
    where: str

    def prompt(self, instruction: Instruction) -> str:
        """The question with the wanted instruction; "keep" leaves the source's own words."""
        match instruction:
            case "keep":
                return self.asked
            case "none":
                return self.question
            case "boxed":
                return f"{self.question}{BOXED_SUFFIX}"
            case "answer":
                return f"{DAPO_PREFIX}{self.question}{DAPO_SUFFIX}"
            case _:
                assert_never(instruction)

    @property
    def key(self) -> str:
        """What two copies of a question have in common: letters, digits and signs, however spaced and cased."""
        return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", self.question)).strip().casefold()


def read_problem(record: Mapping[str, Any], where: str) -> Problem:
    """Reads a record of any known shape.

    Raises:
      ValueError: it has none of them, or a text is missing, empty or null; the place is named.
    """
    asked = _question(record, where)
    return Problem(
        question=strip_instruction(asked),
        asked=asked,
        answer=_answer(record, where),
        response=_response(record),
        source=str(record.get("data_source") or record.get("dataset") or ""),
        where=where,
    )


def read_problems(path: Path) -> list[Example]:
    """Problems to be judged on, in any known shape, as the source puts them.

    Raises:
      ValueError: the file is empty, or a record has no known shape; file and line are named.
    """
    found = [
        Example(prompt=problem.asked, answer=problem.answer, where=problem.where, metadata=record.get("metadata") or {})
        for record, where in read_records(path)
        if (problem := read_problem(record, where))
    ]
    if not found:
        raise ValueError(f"{path}: expected problems, got an empty file")
    return found


def strip_instruction(text: str) -> str:
    """The question without a known instruction before or after it.

    Whole instructions are removed, never characters: `lstrip` with a text takes away every leading letter that the text
    holds, and has corrupted published copies of these problems.
    """
    for prefix in _KNOWN_PREFIXES:
        text = text.removeprefix(prefix)
    for suffix in _KNOWN_SUFFIXES:
        text = text.removesuffix(suffix)
    return text.strip()


def _question(record: Mapping[str, Any], where: str) -> str:
    key = next((key for key in ("prompt", "problem", "Problem", "question", "messages") if key in record), None)
    if key is None:
        raise ValueError(
            f"{where}: expected one of the keys prompt, problem, question or messages, got "
            f"{', '.join(map(repr, record)) or 'none'}"
        )
    value = record[key]
    if not isinstance(value, list):
        return text_of(record, key, where)
    users = [message for message in value if isinstance(message, dict) and message.get("role") == "user"]
    if len(users) != 1:
        raise ValueError(f"{where}: expected one message of role user in {key!r}, got {len(users)} of {len(value)}")
    return text_of(users[0], "content", where)


def _answer(record: Mapping[str, Any], where: str) -> str:
    holder, key = record, "answer"
    model = record.get("reward_model")
    if isinstance(model, dict):
        holder, key = model, "ground_truth"
    else:
        key = next((key for key in ("ground_truth", "label", "answer", "Answer") if key in record), "answer")
    value = holder.get(key)
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{where}: expected {key!r} to be one answer, got a list of {len(value)}")
        holder = {key: value[0]}
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    answer = text_of(holder, key, where, numbers=True).strip()
    if not answer:
        raise ValueError(f"{where}: expected {key!r} to hold an answer, got blanks")
    return answer


def _response(record: Mapping[str, Any]) -> str:
    for key in ("response", "solution", "Solution"):
        if isinstance(record.get(key), str) and record[key].strip():
            return record[key]
    messages = record.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        return last["content"]
    return ""
