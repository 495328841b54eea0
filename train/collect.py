"""Prompt -> fleet -> reward -> Group, in a thread of its own. Launches no JAX computation.

A window of tickets is requested; its prompts go to the fleet as one stream; as the last member of a prompt arrives the
group is put into the buffer. What goes wrong here is handed to the buffer, whose next `take` raises it.
"""

import concurrent.futures
import dataclasses
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from rollout_bridge.messages import Completion, Finish, SampleRequest, Sampling
from sat_jax.advantages import OverlongConfig
from train.buffer import Buffer
from train.data import Prompt, PromptData
from train.groups import Group
from train.rewards import Attempt, Verifier, open_scorers, score
from train.run_folder import SampleLine
from train.seeds import derive_seed
from train.tokenizer import Tokenizer, decode_sampled
from train.trajectory import Trajectory
from train.verify.pool import Unverified

_LOOK_SECONDS = 0.25  # how soon closing is noticed while rewards are awaited


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectSettings:
    """How prompts are sampled.

    Attributes:
      seed: of the run; ticket t is sampled with `derive_seed(seed, "sample", t)`.
      group_size: M, completions of one prompt.
      temperature: logits are divided by it.
      max_new_tokens: bound on a completion, stop token included.
      stop_ids: tokens that end a completion.
      want_trace: whether routes are to be returned.
      shown: how many of the newest completions are kept for the display.
      scorers: completions that are verified side by side.
      overlong: how long completions are punished, or None.
    """

    seed: int
    group_size: int
    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    want_trace: bool
    shown: int = 4
    scorers: int = 1
    overlong: OverlongConfig | None = None

    def sampling(self, ticket: int) -> Sampling:
        """How the prompt of this ticket is sampled."""
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            seed=derive_seed(self.seed, "sample", ticket),
        )


class Samples(Protocol):
    """What collection needs of a fleet."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterable[Completion]:
        """Every wanted (request, member) exactly once, as they finish."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Tickets to sample, and the version that every token must be of (None: any)."""

    tickets: tuple[int, ...]
    version: int | None


@dataclasses.dataclass(slots=True)
class OpenPrompt:
    """A prompt that is being sampled, and what has come of it, by member."""

    prompt: Prompt
    completions: dict[int, Completion]
    attempts: dict[int, Attempt]
    rewards: dict[int, concurrent.futures.Future[float | Unverified]]


class Collector:
    """Samples what is requested. A context manager; `close` ends its thread."""

    def __init__(
        self,
        fleet: Samples,
        data: PromptData,
        tokenizer: Tokenizer,
        verifier: Verifier,
        buffer: Buffer,
        settings: CollectSettings,
    ) -> None:
        """Starts the thread; it does nothing before the first `request`."""
        self._fleet = fleet
        self._data = data
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._buffer = buffer
        self._settings = settings
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._newest: tuple[SampleLine, ...] = ()
        self._closing = threading.Event()
        # A verifier may take its time: completions are scored beside their arrival, and whole groups handed on in turn.
        self._scorers = open_scorers(verifier, settings.scorers)
        self._finisher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="finish")
        self._finishing: list[concurrent.futures.Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="collect", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, tickets: Iterable[int], version: int | None = None) -> None:
        """Queues prompts that have not been drawn yet, in ticket order; returns at once.

        Args:
          tickets: the next ones, without gaps.
          version: that samples them: a token of another one is then an error. None = any.

        Raises:
          ValueError: a ticket is not the next one.
        """
        wanted = tuple(tickets)
        self._buffer.draw(wanted)
        self._jobs.put(_Job(wanted, version))

    def request_again(self, tickets: Iterable[int], version: int | None = None) -> None:
        """Queues prompts that were drawn before a restart and are out in the restored buffer; returns at once."""
        self._jobs.put(_Job(tuple(tickets), version))

    def samples(self) -> tuple[SampleLine, ...]:
        """The newest completions, oldest of them first."""
        return self._newest

    def close(self, timeout: float = 30.0) -> None:
        """Ends the thread at its next completion. Close the fleet first if it may be stuck: its error ends the thread.

        Args:
          timeout: seconds.

        Raises:
          TimeoutError: the fleet gave neither a completion nor an error in that time.
        """
        self._closing.set()
        self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"collector: expected its thread to end within {timeout:g} s, got a fleet that still blocks it; "
                "close the fleet first"
            )
        self._scorers.shutdown(wait=False, cancel_futures=True)
        self._finisher.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._closing.is_set():
                try:
                    self._collect(job)
                finally:
                    self._settle()
        except BaseException as error:  # raised again by the buffer, in the thread that can stop the run
            if not self._closing.is_set():
                self._buffer.fail(error)

    def _settle(self) -> None:
        """Waits until every whole group of the job was handed on, also when the job fails: they are not lost."""
        while not self._closing.is_set() and concurrent.futures.wait(self._finishing, _LOOK_SECONDS).not_done:
            pass
        self._finishing.clear()

    def _collect(self, job: _Job) -> None:
        pending: dict[str, tuple[int, OpenPrompt]] = {}
        requests = []
        for ticket in job.tickets:
            prompt = self._data[ticket]
            request_id = f"t{ticket}"
            pending[request_id] = (ticket, OpenPrompt(prompt, {}, {}, {}))
            requests.append(
                SampleRequest(
                    request_id=request_id,
                    prompt_tokens=prompt.tokens,
                    sampling=self._settings.sampling(ticket),
                    members=tuple(range(self._settings.group_size)),
                    want_trace=self._settings.want_trace,
                )
            )
        for completion in self._fleet.sample(requests) if requests else ():
            if self._closing.is_set():
                return
            self._receive(completion, job.version, pending)
            self._buffer.progress()
        if pending:
            request_id, (_, opened) = next(iter(pending.items()))
            raise ValueError(
                f"samples of {len(requests)} prompts: expected all {self._settings.group_size} members of each, got "
                f"{len(opened.completions)} of {request_id} and {len(pending)} prompts unfinished when the fleet ended"
            )

    def _receive(self, completion: Completion, version: int | None, pending: dict[str, tuple[int, OpenPrompt]]) -> None:
        """Takes in one completion; the last of its group makes the group."""
        self._check(completion, version)
        ticket, opened = pending.get(completion.request_id, (-1, None))
        size = self._settings.group_size
        if opened is None or completion.member in opened.completions or not 0 <= completion.member < size:
            raise ValueError(f"{_where(completion)}: expected a wanted member, each once, got one that is not open")
        attempt = to_attempt(ticket, opened.prompt, completion, self._tokenizer)
        opened.completions[completion.member] = completion
        opened.attempts[completion.member] = attempt
        opened.rewards[completion.member] = self._scorers.submit(
            score, self._verifier, attempt, self._settings.overlong
        )
        if len(opened.completions) == size:
            del pending[completion.request_id]
            self._finishing.append(self._finisher.submit(self._finish, ticket, opened))

    def _finish(self, ticket: int, opened: OpenPrompt) -> None:
        """Waits for the rewards of a whole group and hands it on, in the finisher's thread."""
        try:
            group = group_of(ticket, opened)
            # Replaced as a whole, so that `samples` needs no lock.
            self._newest = (*self._newest, *sample_lines(opened))[-self._settings.shown :]
            self._buffer.put(group)
        except BaseException as error:  # raised again by the buffer, in the thread that can stop the run
            if not self._closing.is_set():
                self._buffer.fail(error)

    def _check(self, completion: Completion, version: int | None) -> None:
        check_completion(completion, self._settings.stop_ids)
        if version is not None and (completion.version != version).any():
            got = np.unique(completion.version).tolist()
            raise ValueError(f"{_where(completion)}: expected every token of version {version}, got {got}")


def check_completion(completion: Completion, stop_ids: tuple[int, ...]) -> None:
    """A completion that the fleet calls whole is.

    Raises:
      ValueError: it is empty or cut off, or its end is not what its last token says.
    """
    if completion.finish is Finish.ABORT or not len(completion.tokens):
        raise ValueError(
            f"{_where(completion)}: expected a whole completion, got {len(completion.tokens)} tokens that ended by "
            f"{completion.finish.value}"
        )
    stopped = int(completion.tokens[-1]) in stop_ids
    if stopped != (completion.finish is Finish.STOP):
        raise ValueError(
            f"{_where(completion)}: expected to end by stop exactly when its last token is one of {stop_ids}, "
            f"got {completion.finish.value} after token {int(completion.tokens[-1])}; check prompt.stop"
        )


def to_attempt(ticket: int, prompt: Prompt, completion: Completion, tokenizer: Tokenizer) -> Attempt:
    """What a verifier is shown of a completion: its text up to the stop token, which is left out."""
    stopped = completion.finish is Finish.STOP
    tokens = completion.tokens[:-1] if stopped else completion.tokens
    transcript = decode_sampled(tokenizer, tokens)
    last = decode_sampled(tokenizer, _last_turn(completion)) if isinstance(completion, Trajectory) else transcript
    return Attempt(
        ticket=ticket,
        member=completion.member,
        prompt=prompt.text,
        completion=last,
        stopped=stopped,
        answer=prompt.answer,
        metadata=prompt.metadata,
        transcript=transcript,
        length=len(completion.tokens),
    )


def _last_turn(trajectory: Trajectory) -> np.ndarray:
    """Tokens of the last sampled stretch, without the stop token."""
    return trajectory.tokens[trajectory.last_turn : len(trajectory.tokens) - (trajectory.finish is Finish.STOP)]


def _where(completion: Completion) -> str:
    return f"completion {completion.request_id}/{completion.member} of engine {completion.engine_id}"


def sample_lines(opened: OpenPrompt) -> list[SampleLine]:
    """What the report shows of a whole group; waits for its rewards."""
    return [
        SampleLine(prompt=attempt.prompt, completion=attempt.transcript, answer=attempt.answer, reward=reward)
        for member, attempt in opened.attempts.items()
        if not isinstance(reward := opened.rewards[member].result(), Unverified)
    ]


def group_of(ticket: int, opened: OpenPrompt) -> Group:
    """The group of a prompt whose members are all there; waits for their rewards.

    Raises:
      BaseException: what the verifier raised.
    """
    rewards = {member: reward.result() for member, reward in opened.rewards.items()}
    members = sorted(opened.completions)
    trained = tuple(_trained(opened.completions[member], rewards[member]) for member in members)
    return Group(
        ticket=ticket,
        prompt_tokens=opened.prompt.tokens,
        answer=opened.prompt.answer,
        completions=tuple(opened.completions[member] for member in members),
        reward_M=np.array([0.0 if isinstance(rewards[m], Unverified) else rewards[m] for m in members], np.float32),
        trained=() if all(mask.all() for mask in trained) else trained,
    )


def _trained(completion: Completion, reward: float | Unverified) -> np.ndarray:
    """Which tokens are trained on: those that the policy sampled, if it is known what they are worth."""
    sampled = completion.sampled if isinstance(completion, Trajectory) else np.ones(len(completion.tokens), bool)
    return np.zeros_like(sampled) if isinstance(reward, Unverified) else sampled
