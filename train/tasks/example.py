"""The record that every source of prompts gives."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One problem.

    Attributes:
      prompt: what the data says, before any template; not empty.
      answer: what a right completion says, stop token excluded; not empty.
      where: where it came from ("file:line"), for messages.
      response: what a supervised example says in place of the answer, such as a call of a tool; empty = the answer.
      metadata: JSON that a user's reward function is shown.
    """

    prompt: str
    answer: str
    where: str
    response: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
