"""Rollouts by code: one trajectory out of several calls to the fleet, with tokens in between that code inserts.

Token in, token out: what was sampled goes back into the next call as it was, never through text. Inserted tokens are
masked from the loss and have no log-prob; routes and versions are stitched by position.
"""

import asyncio
import dataclasses
import functools
import importlib
import inspect
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rollout_bridge.dispatch import Workers
from rollout_bridge.messages import Completion, Finish, SampleRequest
from rollout_bridge.stitch import stitch_traces
from train.data import Prompt
from train.seeds import derive_seed
from train.tokenizer import Tokenizer, decode_sampled
from train.trajectory import Trajectory


class Samples(Protocol):
    """What a rollout needs of a fleet; several threads call it at once."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterable[Completion]:
        """Every wanted (request, member) exactly once, as they finish."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Tokens that code inserted (if any), and the completion that was sampled after them."""

    inserted: np.ndarray
    sampled: Completion


class Conversation:
    """A trajectory in the making: what a rollout function is given. Of one thread."""

    def __init__(self, fleet: Samples, tokenizer: Tokenizer, prompt: Prompt, request: SampleRequest) -> None:
        """Begins after the prompt.

        Args:
          fleet: that samples.
          tokenizer: of the run.
          prompt: the problem.
          request: of a single member; its `max_new_tokens` bounds all tokens after the prompt, inserted ones included.
        """
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._request = request
        self._parts: list[_Part] = []
        self._inserted = np.zeros(0, np.int32)
        self._used = 0

    @property
    def prompt(self) -> str:
        """The data's prompt, without the template."""
        return self._prompt.text

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The data's. The answer is not shown: what is inserted would give it away."""
        return self._prompt.metadata

    @property
    def room(self) -> int:
        """Tokens that may still be inserted or sampled."""
        return self._request.sampling.max_new_tokens - self._used

    @property
    def stopped_by(self) -> str:
        """The token that ended the last sampled stretch, e.g. "<eos>"; empty if it ended for want of room."""
        if not self._parts or self._parts[-1].sampled.finish is not Finish.STOP:
            return ""
        return self._tokenizer.decode(self._parts[-1].sampled.tokens[-1:])

    def sample(self, *, stop: Sequence[str] = (), max_tokens: int | None = None) -> str:
        """Lets the policy go on until a stop token, or until the room is used up.

        Args:
          stop: token strings that end this stretch beside the run's own stop tokens.
          max_tokens: of this stretch; None = the room.

        Returns:
          Its text, without the token that stopped it.

        Raises:
          ValueError: there is no room, or `stop` holds what is no token.
        """
        limit = self.room if max_tokens is None else min(max_tokens, self.room)
        if limit < 1:
            raise ValueError(
                f"rollout {self._name}: expected room to sample, got none of {self._request.sampling.max_new_tokens} "
                "tokens left; look at conversation.room, or raise sampling.max_new_tokens"
            )
        extra = tuple(self._tokenizer.token_id(token) for token in stop)
        wanted = self._request.sampling
        turn = len(self._parts)
        sampling = dataclasses.replace(
            wanted,
            max_new_tokens=limit,
            stop_ids=tuple(dict.fromkeys((*wanted.stop_ids, *extra))),
            # Token t of every call draws from (seed, member, t): another turn, another seed.
            seed=derive_seed(wanted.seed, "turn", turn) if turn else wanted.seed,
        )
        request = dataclasses.replace(
            self._request,
            request_id=f"{self._name}/{turn}",
            prompt_tokens=np.concatenate([self._request.prompt_tokens, self._tokens(), self._inserted]),
            sampling=sampling,
        )
        (completion,) = self._fleet.sample([request])
        self._parts.append(_Part(self._inserted, completion))
        self._inserted = np.zeros(0, np.int32)
        self._used += len(completion.tokens)
        ended = completion.finish is Finish.STOP
        return decode_sampled(self._tokenizer, completion.tokens[:-1] if ended else completion.tokens)

    def insert(self, text: str) -> bool:
        """Puts text after what is there: a tool's answer, a user's next message.

        Returns:
          Whether there was room for it and for one sampled token; if not, nothing was inserted, and the function should
          return.

        Raises:
          ValueError: the text cannot be written in the run's vocabulary.
        """
        tokens = self._tokenizer.encode(text)
        if len(tokens) >= self.room:
            return False
        self._inserted = np.concatenate([self._inserted, tokens]).astype(np.int32)
        self._used += len(tokens)
        return True

    def finish(self) -> Trajectory:
        """The whole trajectory; what was inserted after the last sampled token is left out.

        Raises:
          ValueError: nothing was sampled.
        """
        if not self._parts:
            raise ValueError(f"rollout {self._name}: expected at least one call of sample, got none")
        last = self._parts[-1].sampled
        pieces = [piece for part in self._parts for piece in _pieces(part)]
        traces = [part.sampled.trace for part in self._parts if part.sampled.trace is not None]
        tokens = self._tokens()
        # A stretch that ended by a stop of its own did not end the answer.
        cut = last.finish is Finish.STOP and int(last.tokens[-1]) not in self._request.sampling.stop_ids
        return Trajectory(
            request_id=self._request.request_id,
            member=last.member,
            tokens=tokens,
            behavior_logp=np.concatenate([logp for logp, _, _ in pieces]),
            version=np.concatenate([version for _, version, _ in pieces]),
            trace=stitch_traces(traces, f"trace of {self._name}") if traces else None,
            finish=Finish.LENGTH if cut else last.finish,
            engine_id=last.engine_id,
            logprob=last.logprob,
            sampled=np.concatenate([sampled for _, _, sampled in pieces]),
            last_turn=len(tokens) - len(last.tokens),
            turns=len(self._parts),
        )

    @property
    def _name(self) -> str:
        return f"{self._request.request_id}/{self._request.members[0]}"

    def _tokens(self) -> np.ndarray:
        """Everything after the prompt up to the last sampled token."""
        pieces = [tokens for part in self._parts for tokens in (part.inserted, part.sampled.tokens)]
        return np.concatenate([np.zeros(0, np.int32), *pieces]).astype(np.int32)


RolloutFunction = Callable[[Conversation], Any]


class CodeRollouts:
    """A fleet whose completions are trajectories that a function makes; see `Samples`."""

    def __init__(
        self,
        function: RolloutFunction,
        fleet: Samples,
        tokenizer: Tokenizer,
        find: Callable[[str], Prompt],
        workers: int,
    ) -> None:
        """Takes its parts.

        Args:
          function: called with a conversation, in a thread of its own; may be a coroutine function. What it returns is
            not looked at.
          fleet: that samples.
          tokenizer: of the run.
          find: the problem of a request, by its id.
          workers: trajectories that are made at once.
        """
        self._function = function
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._find = find
        self._workers = workers

    def sample(self, requests: Sequence[SampleRequest]) -> Generator[Trajectory, None, None]:
        """Yields the trajectory of every (request, member), as they finish.

        Raises:
          Exception: what the function or the fleet raised, with a note that names the trajectory.
        """
        single = [dataclasses.replace(request, members=(member,)) for request in requests for member in request.members]
        made: queue.SimpleQueue[Trajectory | BaseException] = queue.SimpleQueue()
        closed = threading.Event()

        def work(request: SampleRequest) -> None:
            if not closed.is_set():
                made.put(self._make(request))

        # Daemon threads: a function that hangs must not keep the process from ending.
        workers = Workers(self._workers)
        try:
            for request in single:
                workers.submit(functools.partial(work, request))
            for _ in single:
                outcome = made.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            closed.set()
            workers.close()

    def _make(self, request: SampleRequest) -> Trajectory | BaseException:
        """The trajectory, or what went wrong, which `sample` raises in its caller's thread."""
        try:
            conversation = Conversation(self._fleet, self._tokenizer, self._find(request.request_id), request)
            result = self._function(conversation)
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
            return conversation.finish()
        except BaseException as error:
            error.add_note(f"rollout of {request.request_id}/{request.members[0]}: the function failed")
            return error


def load_rollout(name: str) -> RolloutFunction:
    """Imports a rollout function.

    Raises:
      ValueError: there is none of that name.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f'rollout.function: expected "module:function" that can be imported, got {name!r}: {error}'
        ) from error
    if not callable(function):
        raise ValueError(f"rollout.function: expected {name!r} to be a function, got {type(function).__name__}")
    return function


def _pieces(part: _Part) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(log-probs, versions, sampled) of the inserted and of the sampled tokens."""
    count, sampled = len(part.inserted), part.sampled
    # An inserted token was first fed by the call after it, to weights of that call's version.
    version = np.full(count, sampled.version[0], np.int32)
    return [
        (np.zeros(count, np.float32), version, np.zeros(count, bool)),
        (sampled.behavior_logp, sampled.version, np.ones(len(sampled.tokens), bool)),
    ]


async def _wait(result: Any) -> Any:
    return await result
