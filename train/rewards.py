"""Verifiers: what a completion is worth. Each is a pure function of one attempt.

A verifier that fails is an error of the run, never a reward: a reward of 0 would look like a policy that is wrong.
"""

import dataclasses
import math
from typing import Literal, Protocol, assert_never

import numpy as np

from train.seeds import derive_seed

VerifierName = Literal["exact_match", "random"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What a verifier may look at.

    Attributes:
      ticket, member: which completion of the run.
      prompt: the data's prompt, without the template.
      completion: its text, without the stop token.
      stopped: whether a stop token ended it; False if it was cut at max_new_tokens.
      answer: the data's answer.
    """

    ticket: int
    member: int
    prompt: str
    completion: str
    stopped: bool
    answer: str


class Verifier(Protocol):
    """Gives a finite reward; must depend on nothing but the attempt (and a seed), so that a resumed run agrees."""

    def __call__(self, attempt: Attempt, /) -> float:
        """The reward."""
        ...


def exact_match(attempt: Attempt) -> float:
    """1 if the completion is the answer, character by character, and then stops; else 0."""
    return float(attempt.stopped and attempt.completion == attempt.answer)


@dataclasses.dataclass(frozen=True, slots=True)
class RandomReward:
    """A fair coin by (seed, ticket, member): a control, reward without information. Nothing may improve under it."""

    seed: int

    def __call__(self, attempt: Attempt) -> float:
        """0 or 1."""
        return float(derive_seed(self.seed, "reward", attempt.ticket, attempt.member) % 2)


def build_verifier(name: VerifierName, seed: int) -> Verifier:
    """The configured verifier; `seed` is the run's."""
    match name:
        case "exact_match":
            return exact_match
        case "random":
            return RandomReward(seed)
        case _:
            assert_never(name)


def score(verifier: Verifier, attempt: Attempt) -> float:
    """Asks the verifier and checks what it says.

    Raises:
      ValueError: the reward is not a finite number.
      Exception: whatever the verifier raised, with a note that names the attempt.
    """
    where = f"completion t{attempt.ticket}/{attempt.member}"
    try:
        reward = verifier(attempt)
    except Exception as error:
        error.add_note(f"reward of {where}: the verifier failed on {attempt.completion!r}")
        raise
    if not isinstance(reward, int | float | np.integer | np.floating) or not math.isfinite(reward):
        raise ValueError(f"reward: expected a finite number, got {reward!r} ({where}, {attempt.completion!r})")
    return float(reward)
