"""One call of Fleet.sample: every wanted (request, member) to some engine, and each completion back exactly once."""

import collections
import contextlib
import dataclasses
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence

from rollout_bridge.client import Stream
from rollout_bridge.endpoint import Endpoint, State
from rollout_bridge.errors import Busy, Fatal, Retryable
from rollout_bridge.messages import Completion, Finish, ModelInfo, SampleRequest
from rollout_bridge.stitch import continuation, stitch

_NAMED = 4  # how many missing completions an error names
_RETRY_SECONDS = (0.02, 2.0)
_TOGETHER = 8  # requests of a call: more would save little
_TOGETHER_TOKENS = 4096  # that they may sample in all: what a call that breaks loses must be little


def most_together(members: int, max_new_tokens: int) -> int:
    """How many requests like this one may share a call, which costs both sides about half a millisecond.

    Args:
      members: of the request.
      max_new_tokens: bound on each.
    """
    return max(min(_TOGETHER, _TOGETHER_TOKENS // (members * max_new_tokens)), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a sample call.

    Attributes:
      progress_seconds: without any completion, while the caller waits for one, after which it is an error.
      max_failures: of one request in a row, without any progress, after which it is an error.
      max_streams: requests at once at one engine.
    """

    progress_seconds: float
    max_failures: int
    max_streams: int


class Counts:
    """What happened so far, by name; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to one."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)


class Router:
    """Chooses who serves a request: of those that are READY and have a stream free, the least loaded."""

    def __init__(self, endpoints: Sequence[Endpoint], changed: threading.Condition, limits: Limits) -> None:
        self.endpoints = endpoints
        self.changed = changed
        self.limits = limits
        self.closed = False

    def lease(self, requests: int, members: int, avoid: Endpoint | None, cancelled: threading.Event) -> Endpoint | None:
        """Waits for an endpoint and counts requests on it; None once cancelled or closed. `release` it afterwards.

        Args:
          requests: of the call, at most `max_streams`.
          members: that they will sample.
          avoid: one that just failed; chosen only when it is the only one.
          cancelled: ends the wait, once the condition is notified.

        Raises:
          Exception: what made an endpoint fail for good.
        """
        with self.changed:
            while not (cancelled.is_set() or self.closed):
                for endpoint in self.endpoints:
                    if endpoint.failure is not None:
                        raise endpoint.failure
                most = self.limits.max_streams - requests
                free = [e for e in self.endpoints if e.state is State.READY and e.streams <= most]
                if free:
                    endpoint = min(free, key=lambda endpoint: (endpoint is avoid, endpoint.load))
                    endpoint.streams += requests
                    endpoint.load += members
                    return endpoint
                self.changed.wait(1.0)
        return None

    def release(self, endpoint: Endpoint, requests: int, members: int) -> None:
        """The call has ended."""
        with self.changed:
            endpoint.streams -= requests
            endpoint.load -= members
            self.changed.notify_all()

    def describe(self) -> str:
        """Every endpoint's state."""
        return "; ".join(endpoint.describe() for endpoint in self.endpoints)


class Workers:
    """Daemon threads, started as they are needed: a stream that nobody ends cannot keep the process alive."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition()
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Runs it as soon as a thread is free, in order. It must not raise."""
        with self._condition:
            self._work.append(work)
            if self._idle < len(self._work) and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._run, name=f"fleet-sample-{self._threads}", daemon=True).start()
            self._condition.notify()

    def allow(self, limit: int) -> None:
        """At most so many from now on; those that there are stay."""
        with self._condition:
            self._limit = limit

    def close(self) -> None:
        """Lets idle threads end."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._work and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._work:
                    return
                work = self._work.popleft()
            work()


@dataclasses.dataclass(kw_only=True)
class _Task:
    """Members of one request that are still missing, and what there is of them."""

    request: SampleRequest
    members: set[int]
    parts: list[Completion] = dataclasses.field(default_factory=list)  # of its single member, when it is a continuation
    failures: int = 0
    avoid: Endpoint | None = None

    def ask(self) -> SampleRequest:
        """The request for what is missing."""
        if self.parts:
            (member,) = self.members
            return continuation(self.request, member, self.parts)
        return dataclasses.replace(self.request, members=tuple(m for m in self.request.members if m in self.members))


class SampleCall:
    """Runs requests over a router's endpoints; iterate `completions` once."""

    def __init__(
        self, requests: Sequence[SampleRequest], model: ModelInfo, router: Router, workers: Workers, counts: Counts
    ) -> None:
        self._tasks = [_Task(request=request, members=set(request.members)) for request in requests]
        self._model = model
        self._router = router
        self._workers = workers
        self._counts = counts
        self._lock = threading.Lock()
        self._missing = {(request.request_id, member) for request in requests for member in request.members}
        self._streams: set[Stream[Completion]] = set()
        self._cancelled = threading.Event()
        self._arrived: queue.SimpleQueue[list[Completion] | Exception] = queue.SimpleQueue()

    def completions(self) -> Iterator[Completion]:
        """Each wanted completion once, as they arrive.

        Raises:
          Retryable: no progress for too long; says what is missing and where every engine stands.
          Fatal: a completion or an engine is not as it must be.
        """
        limit, wanted = self._router.limits.progress_seconds, len(self._missing)
        try:
            for tasks in self._calls():
                self._submit(tasks)
            while wanted:
                try:
                    item = self._arrived.get(timeout=limit)
                except queue.Empty:
                    raise Retryable(
                        f"sample: expected a completion within {limit} s, got none; {self._where()}"
                    ) from None
                if isinstance(item, Exception):
                    raise item
                wanted -= len(item)
                yield from item
        finally:
            self.cancel()

    def fail(self, error: Exception) -> None:
        """Makes the caller raise."""
        self._arrived.put(error)

    def cancel(self) -> None:
        """Ends every stream."""
        self._cancelled.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        with self._router.changed:
            self._router.changed.notify_all()

    def _calls(self) -> Iterator[list[_Task]]:
        """The tasks in their order, as many together as may share a call."""
        fair = -(-len(self._tasks) // max(len(self._router.endpoints), 1))  # no engine waits while another has two
        most = min(fair, _TOGETHER, self._router.limits.max_streams)
        tasks, room = [], _TOGETHER_TOKENS
        for task in self._tasks:
            tokens = len(task.members) * task.request.sampling.max_new_tokens
            if tasks and (len(tasks) == most or tokens > room):
                yield tasks
                tasks, room = [], _TOGETHER_TOKENS
            tasks.append(task)
            room -= tokens
        if tasks:
            yield tasks

    def _submit(self, tasks: list[_Task]) -> None:
        self._workers.submit(lambda: self._serve(tasks))

    def _serve(self, tasks: list[_Task]) -> None:
        """Gives tasks to engines until nothing of them is missing: together once, what that leaves one by one."""
        try:
            while tasks and not self._cancelled.is_set():
                self._back_off(tasks[0].failures)
                asked, members = len(tasks), sum(len(task.members) for task in tasks)
                endpoint = self._router.lease(asked, members, tasks[0].avoid, self._cancelled)
                if endpoint is None:
                    return
                try:
                    self._stream(endpoint, tasks)
                except Retryable as error:
                    tasks = [task for task in tasks if task.members]
                    self._note_failure(tasks, endpoint, error)
                    for task in tasks[1:]:
                        self._submit([task])
                    tasks = tasks[:1]
                else:
                    return
                finally:
                    self._router.release(endpoint, asked, members)
        except Exception as error:  # raised by whoever waits for the completions
            self.fail(error)

    def _stream(self, endpoint: Endpoint, tasks: Sequence[_Task]) -> None:
        of_request = {task.request.request_id: task for task in tasks}
        whole: list[Completion] = []
        requests = [task.ask() for task in tasks]
        with endpoint.client.sample_all(requests, self._model) as stream, self._registered(stream):
            try:
                for completion in stream:
                    endpoint.admit(completion)
                    whole += self._take(of_request[completion.request_id], completion)
                    if not stream.pending:  # those of a message wake the caller once
                        self._deliver(whole)
                        whole = []
            finally:
                self._deliver(whole)
        left = {task.request.request_id: sorted(task.members) for task in tasks if task.members}
        if left:
            wanted = {request.request_id: request.members for request in requests if request.request_id in left}
            raise Retryable(
                f"sample at {endpoint.address}: expected members {wanted}, the stream ended without tokens of {left}"
            )

    def _take(self, task: _Task, completion: Completion) -> list[Completion]:
        """Takes in what a task was answered; returns it if that makes its member whole."""
        if completion.member not in task.members:
            self._counts.add("duplicates")
            return []
        if completion.finish is Finish.ABORT and not len(completion.tokens):
            return []  # nothing gained: it stays missing
        task.members.remove(completion.member)
        task.failures = 0
        parts = [*task.parts, completion]
        if completion.finish is Finish.ABORT:
            self._counts.add("continued")
            self._submit([_Task(request=task.request, members={completion.member}, parts=parts)])
            return []
        try:
            return [stitch(task.request, parts)]
        except ValueError as error:
            raise Fatal(str(error)) from error

    def _deliver(self, completions: list[Completion]) -> None:
        if not completions:
            return
        with self._lock:
            for completion in completions:
                self._missing.remove((completion.request_id, completion.member))
        self._counts.add("completions", len(completions))
        self._arrived.put(completions)

    def _note_failure(self, tasks: Sequence[_Task], endpoint: Endpoint, error: Retryable) -> None:
        """A call has failed: what it leaves missing will be asked for again, unless that was done too often."""
        if self._cancelled.is_set():
            return
        if not isinstance(error, Busy):
            endpoint.suspect(error)
        for task in tasks:
            task.failures += 1
            task.avoid = endpoint
            self._counts.add("reissued", len(task.members))
            if task.failures > self._router.limits.max_failures:
                raise Retryable(
                    f"sample of {task.request.request_id!r}: expected members {sorted(task.members)} within "
                    f"{self._router.limits.max_failures} repetitions, got none; last: {error}; {self._where()}"
                ) from error

    def _back_off(self, failures: int) -> None:
        """Waits before what failed is asked for again."""
        if failures:
            first, longest = _RETRY_SECONDS
            self._cancelled.wait(random.uniform(0.5, 1.0) * min(first * 2**failures, longest))

    @contextlib.contextmanager
    def _registered(self, stream: Stream[Completion]) -> Iterator[None]:
        """Has a stream among those that a cancellation ends."""
        with self._lock:
            self._streams.add(stream)
        try:
            if self._cancelled.is_set():  # too late to be among them
                stream.cancel()
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _where(self) -> str:
        with self._lock:
            missing = sorted(self._missing)
        names = ", ".join(f"{request_id}/{member}" for request_id, member in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return f"missing: {names}{more}; engines: {self._router.describe()}"
