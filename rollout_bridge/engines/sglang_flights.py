"""Members at the server: each started, awaited, and let out when all weights that had a part in it are verified."""

import dataclasses
import queue
import threading
import uuid
from concurrent.futures import Future

from rollout_bridge.engines.sglang_http import Refused, SglangHttp
from rollout_bridge.engines.sglang_samples import NOTHING, completion, payload, read_answer
from rollout_bridge.engines.sglang_watch import Instance
from rollout_bridge.errors import Retryable
from rollout_bridge.messages import Completion, SampleRequest

LOOK_SECONDS = 0.25  # how soon a cancelled call is noticed: nothing wakes whoever waits for it
_CONTROL_SECONDS = 20.0


@dataclasses.dataclass(kw_only=True, eq=False)
class Flight:
    """One member at the server, by the server's name for it."""

    rid: str
    request: SampleRequest
    member: int
    instance: Instance
    aborted: bool = False
    answer: "Future[bytes]" = dataclasses.field(default_factory=Future)


Landed = queue.SimpleQueue[Flight]


class Flights:
    """All members at the server. `pending` is the tag of weights whose verdict is awaited."""

    def __init__(self, http: SglangHttp, changed: threading.Condition, seconds: float) -> None:
        """Begins without any.

        Args:
          http: the server.
          changed: guards everything here, `pending` too; notified when a member has landed.
          seconds: deadline of one member.
        """
        self._http = http
        self._changed = changed
        self._seconds = seconds
        self._open: dict[str, Flight] = {}
        self.pending: str | None = None

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: SampleRequest, member: int, instance: Instance, tag: str, landed: Landed) -> Flight:
        """Sends a member off under the weights of this tag; it comes back through `landed`. `changed` is held."""
        rid = f"{request.request_id}-{member}-{uuid.uuid4().hex}"
        flight = Flight(rid=rid, request=request, member=member, instance=instance)
        self._open[rid] = flight

        def land(_answer: "Future[bytes]") -> None:
            with self._changed:
                self._open.pop(rid, None)
                self._changed.notify_all()
            landed.put(flight)

        flight.answer = self._http.start("/generate", payload(request, member, rid=rid, tag=tag), self._seconds)
        flight.answer.add_done_callback(land)
        return flight

    def judge(self, flight: Flight, cancelled: threading.Event) -> Completion | None:
        """The completion of a member that has landed; None once cancelled.

        Raises:
          Retryable: the server failed, or weights that were not verified had a part in it.
          Fatal: the answer is not as it must be.
        """
        request, member, instance = flight.request, flight.member, flight.instance
        where = f"completion {request.request_id}/{member} of {instance.engine_id}"
        try:
            answer = read_answer(self._http.result(flight.answer), where)
        except Refused:
            if not flight.aborted:
                raise
            answer = NOTHING  # aborted before it had begun
        with self._changed:
            while self.pending in answer.tags and not cancelled.is_set():
                self._changed.wait(LOOK_SECONDS)
            unknown = answer.tags - instance.verified.keys()
        if cancelled.is_set():
            return None
        if unknown:
            raise Retryable(
                f"{where}: expected tokens of verified weights, got some of {sorted(unknown)}; sample it again"
            )
        model, versions = instance.facts.model, instance.verified
        return completion(answer, request, member, model=model, versions=versions, engine_id=instance.engine_id)

    def await_idle(self, what: str, seconds: float) -> None:
        """Until every member has landed; whoever calls lets none begin.

        Raises:
          Retryable: some are still out after `seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, seconds):
                raise Retryable(
                    f"{what}: expected running requests to end within {seconds} s, got {len(self._open)} that run; "
                    "commit with retract or abort"
                )

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Ends the members of these requests (all, if None) with what they have."""
        with self._changed:
            chosen = [f for f in self._open.values() if request_ids is None or f.request.request_id in request_ids]
            for flight in chosen:
                flight.aborted = True
        for flight in chosen:
            self._http.post("/abort_request", {"rid": flight.rid}, _CONTROL_SECONDS)

    def forget(self, flights: list[Flight]) -> None:
        """Nobody waits for these any more."""
        for flight in flights:
            flight.answer.cancel()
            self._http.start("/abort_request", {"rid": flight.rid}, _CONTROL_SECONDS)

    def hang_up(self) -> None:
        """Ends every call; the server notices by itself."""
        with self._changed:
            flights = list(self._open.values())
        for flight in flights:
            flight.answer.cancel()
