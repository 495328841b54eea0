"""Verifiers: what a completion is worth. Each is a pure function of one attempt.

A verifier that fails is an error of the run, never a reward: a reward of 0 would look like a policy that is wrong.
What may hang or crash runs in processes that are killed (`train.verify`).
"""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from sat_jax.advantages import OverlongConfig, overlong_penalty
from train.seeds import derive_seed
from train.verify.pool import PoolCounts, Unverified, VerifierConfig, VerifierPool
from train.verify.worker import RULES

T = TypeVar("T")

INLINE = ("exact_match", "random")
_USER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What a verifier may look at.

    Attributes:
      ticket, member: which completion of the run.
      prompt: the data's prompt, without the template.
      completion: its text, without the stop token; of several turns, the last one's.
      stopped: whether a stop token ended it; False if it was cut at max_new_tokens.
      answer: the data's answer.
      metadata: the data's, for a user's function.
      transcript: everything after the prompt, what code inserted included; equals `completion` for a single turn but
        for stop tokens between turns.
      length: tokens after the prompt, stop token included.
    """

    ticket: int
    member: int
    prompt: str
    completion: str
    stopped: bool
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    transcript: str = ""
    length: int = 0


class Verifier(Protocol):
    """Gives a finite reward; must depend on nothing but the attempt (and a seed), so that a resumed run agrees."""

    def __call__(self, attempt: Attempt, /) -> float | Unverified:
        """The reward, or that there is none: then the completion is left out."""
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


class PooledVerifier:
    """A rule or a user's function in processes of their own."""

    def __init__(self, name: str, config: VerifierConfig) -> None:
        """Starts nothing yet; see `VerifierPool`."""
        self._pool = VerifierPool(name, config)

    def __call__(self, attempt: Attempt) -> float | Unverified:
        """What the function says of prompt, completion, answer and metadata."""
        fields = {
            "prompt": attempt.prompt,
            "completion": attempt.completion,
            "answer": attempt.answer,
            "metadata": {
                "stopped": attempt.stopped,
                "transcript": attempt.transcript or attempt.completion,
                **attempt.metadata,
            },
        }
        return self._pool.ask(fields, f"completion t{attempt.ticket}/{attempt.member}")

    def check(self) -> None:
        """Loads the function once.

        Raises:
          ValueError: it cannot be loaded.
        """
        self._pool.check()

    def counts(self) -> PoolCounts:
        """What happened so far."""
        return self._pool.counts()

    def close(self) -> None:
        """Kills the processes."""
        self._pool.close()


def check_name(name: str) -> None:
    """Checks the name of a verifier.

    Raises:
      ValueError: it is neither a built-in one nor "module:function"; the nearest one is named.
    """
    known = (*INLINE, *RULES)
    if name in known or _USER.fullmatch(name):
        return
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else 'a function of yours is "module:function"'
    raise ValueError(f"reward: expected one of {', '.join(map(repr, known))}, got {name!r}; {remedy}")


def build_verifier(name: str, seed: int, config: VerifierConfig | None = None) -> Verifier:
    """The configured verifier.

    Args:
      name: built in, or "module:function".
      seed: the run's.
      config: of the processes, for those that have any.

    Raises:
      ValueError: there is no such verifier.
    """
    check_name(name)
    if name == "exact_match":
        return exact_match
    if name == "random":
        return RandomReward(seed)
    return PooledVerifier(name, config or VerifierConfig())


@contextlib.contextmanager
def open_verifier(verifier: Verifier) -> Iterator[Verifier]:
    """Loads the verifier's function, and ends its processes on the way out.

    Raises:
      ValueError: the function cannot be loaded.
    """
    if not isinstance(verifier, PooledVerifier):
        yield verifier
        return
    with contextlib.closing(verifier):
        verifier.check()
        yield verifier


def verifier_metrics(verifier: Verifier) -> dict[str, float]:
    """What the processes of a verifier did so far, as metrics; nothing where it has none."""
    if not isinstance(verifier, PooledVerifier):
        return {}
    counts = verifier.counts()
    return {
        "verify/attempts": float(counts.attempts),
        "verify/timeouts": float(counts.timeouts),
        "verify/errors": float(counts.errors),
        "verify/starts": float(counts.starts),
    }


class _AtOnce(concurrent.futures.Executor):
    """Runs what it is given in the caller's thread: for work that is shorter than its handing over."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # raised by whoever asks for the result
            done.set_exception(error)
        return done


def open_scorers(verifier: Verifier, scorers: int) -> concurrent.futures.Executor:
    """What runs `score`: threads for a verifier that may take its time, the caller's for one that compares strings.

    Args:
      verifier: that `score` will ask.
      scorers: attempts that are verified side by side.
    """
    if verifier is exact_match or isinstance(verifier, RandomReward):
        return _AtOnce()
    return concurrent.futures.ThreadPoolExecutor(scorers, thread_name_prefix="score")


def score(verifier: Verifier, attempt: Attempt, overlong: OverlongConfig | None = None) -> float | Unverified:
    """Asks the verifier, checks what it says, and adds the punishment of a long completion.

    Raises:
      ValueError: the reward is not a finite number.
      Exception: whatever the verifier raised, with a note that names the attempt.
    """
    where = f"completion t{attempt.ticket}/{attempt.member}"
    try:
        reward = verifier(attempt)
    except Exception as error:
        error.add_note(f"reward of {where}: the verifier failed on {_shown(attempt.completion)}")
        raise
    if isinstance(reward, Unverified):
        return reward
    if not isinstance(reward, int | float | np.integer | np.floating) or not math.isfinite(reward):
        raise ValueError(f"reward: expected a finite number, got {reward!r} ({where}, {_shown(attempt.completion)})")
    penalty = 0.0 if overlong is None else float(overlong_penalty(np.array(attempt.length), overlong))
    return float(reward) + penalty


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else f"...{text[-200:]}")
