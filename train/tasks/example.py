"""The record that every source of prompts gives."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One problem.

    Attributes:
      prompt: what the data says, before any template; not empty.
      answer: what a right completion says, stop token excluded; not empty.
      where: where it came from ("file:line"), for messages.
    """

    prompt: str
    answer: str
    where: str
