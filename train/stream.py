"""The bounded mode's collection: samplers, each with a prompt or a few at a time, feed the stream buffer.

A sampler takes tickets as soon as one may be admitted, asks the fleet for the members that are missing, has them
scored as they come and hands over each group. When a request's deadline has passed, or the fleet gives it up, the
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
        self._whole: dict[int, OpenPrompt] = {}  # of which rewards are still to come
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
            while tickets := self._buffer.next_tickets():
                self._sample(tickets)
        except BaseException as error:  # raised again by the buffer, in the thread that can stop the run
            if not self._closing.is_set():
                self._buffer.fail(error)

    def _sample(self, tickets: Sequence[Ticket]) -> None:
        """Samples what prompts lack; hands over whole groups, and keeps what came of the others, which are late."""
        opened = {ticket: self._kept.pop(ticket.number, None) or self._open(ticket) for ticket in tickets}
        with contextlib.suppress(Retryable):
            self._receive(opened)
        if self._closing.is_set():
            return
        for ticket, prompt in opened.items():
            # Kept before it is said: another sampler may take the prompt up at once.
            self._kept[ticket.number] = prompt
            if not self._buffer.late(ticket.number):
                del self._kept[ticket.number]

    def _open(self, ticket: Ticket) -> OpenPrompt:
        return OpenPrompt(self._task.data[ticket.number], {}, {}, {})

    def _receive(self, opened: dict[Ticket, OpenPrompt]) -> None:
        """Takes completions in until all members are there, or the deadline has passed; whole groups leave `opened`."""
        requests = [self._request(ticket, prompt) for ticket, prompt in opened.items()]
        of_request = dict(zip((request.request_id for request in requests), opened, strict=True))
        end = time.monotonic() + self._task.request_deadline
        with contextlib.closing(self._each(requests)) as completions:
            for completion in completions:
                if self._closing.is_set():
                    return
                ticket = of_request[completion.request_id]
                self._take(ticket, opened[ticket], completion)
                self._buffer.progress()
                if len(opened[ticket].completions) == self._task.settings.group_size:
                    self._hand_over(ticket, opened.pop(ticket))
                if time.monotonic() > end:
                    break

    def _hand_over(self, ticket: Ticket, prompt: OpenPrompt) -> None:
        """Has a whole group put into the buffer by whoever brings its last reward: a verifier may take its time."""
        self._whole[ticket.number] = prompt
        for reward in prompt.rewards.values():
            reward.add_done_callback(lambda _: self._rewarded(ticket))  # at once, if it is there

    def _rewarded(self, ticket: Ticket) -> None:
        prompt = self._whole.get(ticket.number)
        if prompt is None or not all(reward.done() for reward in prompt.rewards.values()):
            return
        if self._whole.pop(ticket.number, None) is None:  # another one was as quick
            return
        try:
            group = group_of(ticket.number, prompt)
            # Replaced as a whole, so that `samples` needs no lock; of two at once one may be missing from the display.
            self._newest = (*self._newest, *sample_lines(prompt))[-self._task.settings.shown :]
            self._buffer.put(group)
        except BaseException as error:  # raised again by the buffer, in the thread that can stop the run
            if not self._closing.is_set():
                self._buffer.fail(error)

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
