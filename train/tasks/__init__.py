"""Built-in verifiable tasks: each a generator of every example it has, in a fixed order."""

from typing import Literal, assert_never

from train.tasks import addition
from train.tasks.example import Example

TaskName = Literal["addition"]


def generate(name: TaskName) -> list[Example]:
    """Every example of a built-in task."""
    match name:
        case "addition":
            return addition.examples()
        case _:
            assert_never(name)


__all__ = ["Example", "TaskName", "generate"]
