"""The bounded mode's collection: samplers, each with one prompt at a time, feed the stream buffer.

A sampler takes a ticket as soon as one may be admitted, asks the fleet for the members that are missing, has them
scored as they come and hands over the group. When a request's deadline has passed, or the fleet gives it up, the
members that are there are kept and the others asked for anew. Launches no JAX computation.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator, Sequence

from rollout_bridge.errors import Retryable
from rollout_bridge.messages import Completion, SampleRequest
from train.collect import CollectSettings, OpenPrompt, Samples, check_completion, group_of, sample_lines, to_attempt
from train.data import PromptData
from train.rewards import Verifier, open_scorers, score
from train.run_folder import SampleLine
from train.seeds import derive_seed
from train.stream_buffer import StreamBuffer, Ticket
from train.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is sampled and judged, and how.

    Attributes:
      data, tokenizer, verifier, settings: as `train.collect.Collector` takes them.
      request_deadline: seconds after which a request is cut short.
      samplers: prompts that are asked for at once.
    """

    data: PromptData
    tokenizer: Tokenizer
    verifier: Verifier
    settings: CollectSettings
    request_deadline: float
    samplers: int


class StreamCollector:
    """Keeps the fleet busy. A context manager; `close` ends its threads."""

    def __init__(self, fleet: Samples, task: Task, buffer: StreamBuffer) -> None:
        """Starts the samplers; they wait until the buffer admits something."""
        self._fleet = fleet
        self._task = task
        self._buffer = buffer
        self._kept: dict[int, OpenPrompt] = {}  # of requests that were cut short, until they are taken up again
        self._newest: tuple[SampleLine, ...] = ()
        self._closing = threading.Event()
        self._scorers = open_scorers(task.verifier, task.settings.scorers)
        self._threads = [
            threading.Thread(target=self._run, name=f"sampler-{number}", daemon=True) for number in range(task.samplers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "StreamCollector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def samples(self) -> tuple[SampleLine, ...]:
        """The newest completions, oldest of them first."""
        return self._newest

    def close(self, timeout: float = 30.0) -> None:
        """Ends the samplers at their next completion. Close the fleet first if it may be stuck.

        Args:
          timeout: seconds, for all of them.

        Raises:
          TimeoutError: the fleet gave neither a completion nor an error in that time.
        """
        self._closing.set()
        self._buffer.close()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise TimeoutError(
                f"collector: expected its samplers to end within {timeout:g} s, got {len(alive)} that the fleet still "
                f"blocks ({', '.join(alive[:4])}); close the fleet first"
            )
        self._scorers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        try:
            while (ticket := self._buffer.next_ticket()) is not None:
                self._sample(ticket)
        except BaseException as error:  # raised again by the buffer, in the thread that can stop the run
            if not self._closing.is_set():
                self._buffer.fail(error)

    def _sample(self, ticket: Ticket) -> None:
        """Samples what is missing of a prompt; hands over its group, or keeps what came and says that it is late."""
        opened = self._kept.pop(ticket.number, None) or OpenPrompt(self._task.data[ticket.number], {}, {}, {})
        whole = False
        try:
            whole = self._receive(ticket, opened)
        except Retryable:
            if self._closing.is_set():
                return
        if whole:
            group = group_of(ticket.number, opened)
            # Replaced as a whole, so that `samples` needs no lock; of two at once one may be missing from the display.
            self._newest = (*self._newest, *sample_lines(opened))[-self._task.settings.shown :]
            self._buffer.put(group)
            return
        # Kept before it is said: another sampler may take the prompt up at once.
        self._kept[ticket.number] = opened
        if not (self._closing.is_set() or self._buffer.late(ticket.number)):
            del self._kept[ticket.number]

    def _receive(self, ticket: Ticket, opened: OpenPrompt) -> bool:
        """Takes completions in until all members are there, or the deadline has passed; returns which it was."""
        size = self._task.settings.group_size
        end = time.monotonic() + self._task.request_deadline
        with contextlib.closing(self._each([self._request(ticket, opened)])) as completions:
            for completion in completions:
                if self._closing.is_set():
                    return False
                self._take(ticket, opened, completion)
                self._buffer.progress()
                if time.monotonic() > end:
                    break
        return len(opened.completions) == size

    def _each(self, requests: Sequence[SampleRequest]) -> Generator[Completion]:
        yield from self._fleet.sample(requests)  # closing this one closes that one

    def _request(self, ticket: Ticket, opened: OpenPrompt) -> SampleRequest:
        settings = self._task.settings
        sampling = settings.sampling(ticket.number)
        request_id = f"t{ticket.number}"
        if ticket.attempt:
            seed = derive_seed(settings.seed, "sample", ticket.number, ticket.attempt)
            sampling, request_id = dataclasses.replace(sampling, seed=seed), f"{request_id}-{ticket.attempt}"
        return SampleRequest(
            request_id=request_id,
            prompt_tokens=opened.prompt.tokens,
            sampling=sampling,
            members=tuple(member for member in range(settings.group_size) if member not in opened.completions),
            want_trace=settings.want_trace,
        )

    def _take(self, ticket: Ticket, opened: OpenPrompt, completion: Completion) -> None:
        settings = self._task.settings
        check_completion(completion, settings.stop_ids)
        attempt = to_attempt(ticket.number, opened.prompt, completion, self._task.tokenizer)
        opened.completions[completion.member] = completion
        opened.attempts[completion.member] = attempt
        opened.rewards[completion.member] = self._scorers.submit(score, self._task.verifier, attempt, settings.overlong)
