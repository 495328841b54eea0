"""The locked container between collection and training; it counts every prompt in exactly one place.

A drawn prompt is *out* (being sampled), *buffered* (its group is here), *trained* (its group was taken) or *dropped*
(with a reason). Collection calls `draw`, `progress`, `put` and `fail`; training calls `take`, `wait`, `snapshot`.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from train.groups import Group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """A moment of the buffer. drawn = out + buffered + trained + dropped, always.

    Attributes:
      drawn: prompts ever requested.
      out: of these, being sampled.
      buffered: of these, groups waiting to be trained on.
      trained: of these, groups handed to the trainer.
      dropped: of these, given up.
      tokens: sampled tokens in the buffered groups.
      waited: seconds that `take` and `wait` have blocked, in all.
    """

    drawn: int
    out: int
    buffered: int
    trained: int
    dropped: int
    tokens: int
    waited: float

    def metrics(self) -> dict[str, float]:
        """As metrics, `buffer/...`."""
        return {f"buffer/{field.name}": float(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BufferSnapshot:
    """What a checkpoint keeps of a buffer.

    Attributes:
      next_ticket: the first prompt that has not been drawn.
      groups: finished groups that have not been trained on, by ticket.
      lost: drawn prompts without a group, by ticket: to be sampled again.
      dropped: how many prompts were given up, by reason.
    """

    next_ticket: int
    groups: tuple[Group, ...]
    lost: tuple[int, ...]
    dropped: Mapping[str, int]

    @classmethod
    def at_frontier(cls, trained: int, next_ticket: int, groups: Iterable[Group]) -> "BufferSnapshot":
        """Of a run that drops nothing, whose tickets below `trained` have been trained on."""
        kept = tuple(sorted(groups, key=lambda group: group.ticket))
        lost = set(range(trained, next_ticket)) - {group.ticket for group in kept}
        return cls(next_ticket=next_ticket, groups=kept, lost=tuple(sorted(lost)), dropped={})


class Buffer:
    """Groups by ticket. Every method may be called from any thread."""

    def __init__(self, *, max_lag: int, deadline: float, describe: Callable[[], str] = lambda: "not asked") -> None:
        """Makes an empty buffer; the first ticket is 0.

        Args:
          max_lag: the oldest that a token may be when its group is taken, optimizer steps.
          deadline: seconds without any progress after which a wait is an error.
          describe: says how the engines are, for that error.
        """
        self._max_lag = max_lag
        self._deadline = deadline
        self._describe = describe
        self._changed = threading.Condition()
        self._groups: dict[int, Group] = {}
        self._out: set[int] = set()
        self._skipped: set[int] = set()  # dropped tickets that `take` has not passed yet
        self._dropped: Counter[str] = Counter()
        self._next_ticket = 0
        self._next_taken = 0
        self._trained = 0
        self._waited = 0.0
        self._last_progress = time.monotonic()
        self._error: BaseException | None = None

    def draw(self, tickets: Iterable[int]) -> None:
        """Marks prompts as being sampled, in ticket order without gaps.

        Raises:
          ValueError: a ticket is not the next one.
        """
        with self._changed:
            for ticket in tickets:
                if ticket != self._next_ticket:
                    raise ValueError(f"draw: expected ticket {self._next_ticket}, got {ticket}")
                self._out.add(ticket)
                self._next_ticket += 1
            self._note_progress()

    def progress(self) -> None:
        """Something arrived: the deadline of whoever waits starts anew."""
        with self._changed:
            self._note_progress()

    def put(self, group: Group) -> None:
        """Takes in a finished group.

        Raises:
          ValueError: its prompt is not being sampled (a duplicate, or never drawn).
        """
        with self._changed:
            if group.ticket not in self._out:
                raise ValueError(
                    f"group t{group.ticket}: expected a prompt that is being sampled, got one that is "
                    f"{self._whereabouts(group.ticket)}"
                )
            self._out.remove(group.ticket)
            self._groups[group.ticket] = group
            self._note_progress()

    def drop(self, ticket: int, reason: str) -> None:
        """Gives up a prompt that is out or buffered; `take` passes over it.

        Raises:
          ValueError: it is neither.
        """
        with self._changed:
            if ticket not in self._out and ticket not in self._groups:
                raise ValueError(
                    f"drop of t{ticket}: expected a prompt that is out or buffered, got one that is "
                    f"{self._whereabouts(ticket)}"
                )
            self._out.discard(ticket)
            self._groups.pop(ticket, None)
            self._skipped.add(ticket)
            self._dropped[reason] += 1
            self._note_progress()

    def fail(self, error: BaseException) -> None:
        """Collection has stopped: every present and later wait raises this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, n: int, version: int) -> list[Group]:
        """Waits for the next `n` groups in ticket order and hands them over.

        Args:
          n: how many.
          version: of the trainer.

        Raises:
          ValueError: a token is older than max_lag, or newer than the trainer; the group stays here.
          TimeoutError: nothing arrived for the deadline.
          BaseException: what `fail` was given.
        """
        with self._changed:
            self._wait_for(lambda: self._next_tickets(n), version)
            tickets = self._next_tickets(n)
            groups = [self._groups[ticket] for ticket in tickets]
            for group in groups:
                self._check_fresh(group, version)
            for ticket in tickets:
                del self._groups[ticket]
            self._skipped -= set(range(self._next_taken, tickets[-1] + 1))
            self._next_taken = tickets[-1] + 1
            self._trained += n
            return groups

    def wait(self, tickets: Iterable[int]) -> None:
        """Waits until none of these prompts is being sampled or still to be drawn.

        Raises:
          TimeoutError, BaseException: as `take`.
        """
        wanted = list(tickets)
        with self._changed:
            self._wait_for(lambda: wanted, None)

    def stats(self) -> BufferStats:
        """The present counts."""
        with self._changed:
            stats = BufferStats(
                drawn=self._next_ticket,
                out=len(self._out),
                buffered=len(self._groups),
                trained=self._trained,
                dropped=self._dropped.total(),
                tokens=sum(group.num_tokens for group in self._groups.values()),
                waited=self._waited,
            )
        assert stats.drawn == stats.out + stats.buffered + stats.trained + stats.dropped, f"lost a prompt: {stats}"
        return stats

    def snapshot(self) -> BufferSnapshot:
        """What has to be kept so that no prompt is lost and none is trained on twice."""
        with self._changed:
            return BufferSnapshot(
                next_ticket=self._next_ticket,
                groups=tuple(self._groups[ticket] for ticket in sorted(self._groups)),
                lost=tuple(sorted(self._out)),
                dropped=dict(self._dropped),
            )

    def restore(self, snapshot: BufferSnapshot) -> None:
        """Makes a new buffer what the snapshot was of; its `lost` prompts are out again, for the caller to request.

        Raises:
          ValueError: this buffer has been used.
        """
        with self._changed:
            if self._next_ticket:
                raise ValueError(
                    f"restore: expected a buffer that is new, got one that drew {self._next_ticket} prompts"
                )
            self._groups = {group.ticket: group for group in snapshot.groups}
            self._out = set(snapshot.lost)
            self._dropped = Counter(snapshot.dropped)
            self._next_ticket = snapshot.next_ticket
            open_tickets = self._out | self._groups.keys()
            self._next_taken = min(open_tickets, default=self._next_ticket)
            # A dropped prompt between open ones has no other trace: it is every ticket that is not open.
            self._skipped = set(range(self._next_taken, self._next_ticket)) - open_tickets
            self._trained = self._next_ticket - len(open_tickets) - self._dropped.total()
            self._note_progress()

    def _next_tickets(self, n: int) -> list[int]:
        """The tickets that the next `take(n)` hands over, drawn or not."""
        tickets: list[int] = []
        ticket = self._next_taken
        while len(tickets) < n:
            if ticket not in self._skipped:
                tickets.append(ticket)
            ticket += 1
        return tickets

    def _wait_for(self, wanted: Callable[[], list[int]], version: int | None) -> None:
        """Blocks until every wanted ticket is neither out nor undrawn; the lock is held."""
        began = time.monotonic()
        self._last_progress = max(self._last_progress, began)
        try:
            while True:
                if self._error is not None:
                    raise self._error
                missing = [t for t in wanted() if t in self._out or t >= self._next_ticket]
                if not missing:
                    return
                left = self._last_progress + self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._late(wanted(), missing, version))
                self._changed.wait(left)
        finally:
            self._waited += time.monotonic() - began

    def _late(self, wanted: list[int], missing: list[int], version: int | None) -> str:
        step = "" if version is None else f" of step {version}"
        undrawn = sum(ticket >= self._next_ticket for ticket in missing)
        unasked = f" ({undrawn} were never requested)" if undrawn else ""
        return (
            f"groups {wanted[0]}..{wanted[-1]}{step}: expected them within {self._deadline:g} s of the last completion"
            f", got {len(wanted) - len(missing)} of {len(wanted)}, first missing t{missing[0]}{unasked}; "
            f"engines: {self._describe()}; look there, or raise rollout.deadline"
        )

    def _check_fresh(self, group: Group, version: int) -> None:
        oldest, newest = group.oldest_version, group.newest_version
        if newest > version or version - oldest > self._max_lag:
            raise ValueError(
                f"group t{group.ticket}: expected tokens of versions {max(version - self._max_lag, 0)} to {version}, "
                f"got {oldest} to {newest}"
            )

    def _whereabouts(self, ticket: int) -> str:
        if ticket >= self._next_ticket:
            return "not drawn yet"
        if ticket in self._out:
            return "being sampled"
        return "buffered already" if ticket in self._groups else "trained or dropped already"

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()
        self._changed.notify_all()
