"""Addition with a tool, in two turns: the policy asks a calculator, and says what it answered.

    12+34=   12+34?   46;   46<eos>
    prompt   sampled  tool  sampled

A turn that ends without "?" is the answer; one that asks for nothing sensible gets "!;" from the tool. Train with
`rollout.function = "train.tasks.calculator:rollout"` and a tokenizer of the characters `ALPHABET`.
"""

import re
from typing import TYPE_CHECKING

from train.tasks.example import Example

if TYPE_CHECKING:  # which itself needs the tasks
    from train.rollout import Conversation

ALPHABET = "0123456789+=?!;"
ASK = "?"  # the token that calls the tool
_NUMBERS = 100
_QUESTION = re.compile(r"(\d{1,4})\+(\d{1,4})")


def examples() -> list[Example]:
    """All 10,000 pairs of 0..99, e.g. "7+85=" with the answer "92"."""
    return [
        Example(
            prompt=f"{left}+{right}=",
            answer=str(left + right),
            where=f"calculator {left}+{right}",
            response=f"{left}+{right}{ASK}{left + right};{left + right}",
        )
        for left in range(_NUMBERS)
        for right in range(_NUMBERS)
    ]


def rollout(conversation: "Conversation") -> None:
    """One question to the calculator, then the answer."""
    question = conversation.sample(stop=(ASK,))
    if conversation.stopped_by == ASK and conversation.insert(calculate(question)):
        conversation.sample()


def calculate(question: str) -> str:
    """What the tool says: the sum and ";", or "!;" where it was not asked for one."""
    match = _QUESTION.fullmatch(question)
    return f"{int(match[1]) + int(match[2])};" if match else "!;"
