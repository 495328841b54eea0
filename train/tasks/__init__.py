"""Built-in verifiable tasks: each a generator of every example it has, in a fixed order."""

from typing import Literal, assert_never

from train.tasks import addition, calculator
from train.tasks.example import Example

TaskName = Literal["addition", "calculator"]


def generate(name: TaskName) -> list[Example]:
    """Every example of a built-in task."""
    match name:
        case "addition":
            return addition.examples()
        case "calculator":
            return calculator.examples()
        case _:
            assert_never(name)


__all__ = ["Example", "TaskName", "generate"]
