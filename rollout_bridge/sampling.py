"""A Sample call on the engine's side: how many requests there may be, and those of a call side by side."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

from rollout_bridge.engine import Engine, Gathering
from rollout_bridge.errors import Busy, Retryable
from rollout_bridge.messages import Completion, SampleRequest


class Slots:
    """So many of something at once and no more; safe from any thread."""

    def __init__(self, most: int, what: str) -> None:
        """All of them are free.

        Args:
          most: how many there may be.
          what: of what, for the error.
        """
        self._most = most
        self._what = what
        self._lock = threading.Lock()
        self._taken = 0

    @contextlib.contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Has `count` of them, all or none.

        Raises:
          Busy: there are not so many free. That may never be; a fleet asks for less at a time then.
        """
        with self._lock:
            if self._taken + count > self._most:
                got = f"{count} beside {self._taken}"
                raise Busy(f"call: expected at most {self._most} {self._what} at once, got {got}; try again")
            self._taken += count
        try:
            yield
        finally:
            with self._lock:
                self._taken -= count


def sampled(
    engine: Engine, requests: Sequence[SampleRequest], cancelled: threading.Event, threads: futures.Executor
) -> Iterator[Sequence[Completion]]:
    """What an engine samples of the requests of a call, as many at a time as are known to be there.

    Args:
      engine: samples.
      requests: one or more, with distinct ids.
      cancelled: ends all of them; set when one of several fails.
      threads: for several requests to an engine that takes one at a time.

    Raises:
      Retryable: the threads take none, for the server stops.
      Exception: what the engine raised for one of them.
    """
    if isinstance(engine, Gathering):
        yield from engine.sample_ready(requests, cancelled)
    elif len(requests) == 1:
        for completion in engine.sample(requests[0], cancelled):
            yield (completion,)
    else:
        yield from _side_by_side(engine, requests, cancelled, threads)


def _side_by_side(
    engine: Engine, requests: Sequence[SampleRequest], cancelled: threading.Event, threads: futures.Executor
) -> Iterator[list[Completion]]:
    said: queue.SimpleQueue[Completion | BaseException | None] = queue.SimpleQueue()  # None: a request is over

    def run(request: SampleRequest) -> None:
        try:
            for completion in engine.sample(request, cancelled):
                said.put(completion)
        except BaseException as error:  # raised by whoever answers the call
            said.put(error)
        said.put(None)

    running = len(requests)
    try:
        for request in requests:
            _submit(threads, run, request)
        while running:
            news = [said.get()]
            while not said.empty():  # nobody else takes from it
                news.append(said.get())
            if ready := [one for one in news if isinstance(one, Completion)]:
                yield ready
            for one in news:
                if isinstance(one, BaseException):
                    raise one
            running -= news.count(None)
    finally:
        cancelled.set()


def _submit(threads: futures.Executor, run: Callable[[SampleRequest], None], request: SampleRequest) -> None:
    try:
        threads.submit(run, request)
    except RuntimeError as error:  # a call that comes while the server stops; or the system has no thread left
        raise Retryable(f"sample: expected an engine that takes requests, got: {error}; it may be stopping") from error
