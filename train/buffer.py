"""The locked container between collection and training; it counts every prompt in exactly one place.

A drawn prompt is *out* (being sampled), *buffered* (its group is here), *trained* (its group was taken) or *dropped*
(with a reason). Collection calls `draw`, `progress`, `put` and `fail`; training calls `take`, `wait`, `snapshot`. This
is the batch-wise one: groups come out in ticket order. The bounded mode's is `train.stream_buffer`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from train.groups import Group
from train.ledger import LATE, TOO_OLD, ZERO_STD, Ledger, LedgerEntry, LedgerState
from train.share import Share
from train.waiting import Waiting

REASONS: Mapping[str, str] = {
    TOO_OLD: "dropped/too_old",
    ZERO_STD: "dropped/zero_std",
    LATE: "dropped/late",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """A moment of the buffer. drawn = out + buffered + trained + dropped, always.

    Attributes:
      drawn: prompts ever requested.
      out: of these, being sampled.
      buffered: of these, groups waiting to be trained on.
      trained: of these, groups handed to the trainer.
      dropped: of these, given up.
      reissued: attempts that were thrown away and made again.
      tokens: sampled tokens in the buffered groups.
      waited: seconds that `take` and `wait` have blocked, in all.
      reasons: dropped prompts by reason.
    """

    drawn: int
    out: int
    buffered: int
    trained: int
    dropped: int
    reissued: int
    tokens: int
    waited: float
    reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, ledger: Ledger, groups: Iterable[Group], waited: float) -> "BufferStats":
        """Of checked books.

        Raises:
          ValueError: they do not add up.
        """
        ledger.check()
        return cls(
            drawn=ledger.drawn,
            out=len(ledger.out),
            buffered=len(ledger.buffered),
            trained=ledger.trained,
            dropped=ledger.dropped.total(),
            reissued=ledger.reissued.total(),
            tokens=sum(group.num_tokens for group in groups),
            waited=waited,
            reasons=dict(ledger.dropped),
        )

    def metrics(self) -> dict[str, float]:
        """As metrics, `buffer/...`, and `dropped/...` of the reasons that there were."""
        counts = {
            f"buffer/{field.name}": float(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "reasons"
        }
        return counts | {REASONS[reason]: float(n) for reason, n in self.reasons.items() if reason in REASONS}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BufferSnapshot:
    """What a checkpoint keeps of a buffer.

    Attributes:
      groups: finished groups that have not been trained on.
      ledger: the books; its `out` prompts are to be sampled again.
      entry: what moved since the last entry that was written down.
    """

    groups: tuple[Group, ...] = ()
    ledger: LedgerState = dataclasses.field(default_factory=LedgerState)
    entry: LedgerEntry = dataclasses.field(default_factory=LedgerEntry)


class Kept:
    """What both buffers hold, and what they tell of it; any thread may ask."""

    _waiting: Waiting
    _ledger: Ledger
    _groups: dict[int, Group]

    def stats(self) -> BufferStats:
        """The present counts.

        Raises:
          ValueError: a prompt is nowhere, or in two places.
        """
        with self._waiting.changed:
            return BufferStats.of(self._ledger, self._groups.values(), self._waiting.waited)

    def entry(self) -> LedgerEntry:
        """What moved since the last call, and since the last snapshot."""
        with self._waiting.changed:
            return self._ledger.entry()

    def snapshot(self) -> BufferSnapshot:
        """What has to be kept so that no prompt is lost and none is trained on twice."""
        with self._waiting.changed:
            return BufferSnapshot(
                groups=tuple(self._groups[ticket] for ticket in sorted(self._groups)),
                ledger=self._ledger.state(),
                entry=self._ledger.entry(),
            )


class Buffer(Kept):
    """Groups by ticket. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        max_lag: int,
        deadline: float,
        describe: Callable[[], str] = lambda: "not asked",
        share: Share | None = None,
    ) -> None:
        """Makes an empty buffer; the first ticket is 0, or the first of its share.

        Args:
          max_lag: the oldest that a token may be when its group is taken, optimizer steps.
          deadline: seconds without any progress after which a wait is an error.
          describe: says how the engines are, for that error.
          share: whose tickets come here; None = all.
        """
        self._share = share or Share()
        self._max_lag = max_lag
        self._describe = describe
        self._waiting = Waiting(deadline)
        self._groups = {}
        self._skipped: set[int] = set()  # dropped tickets that `take` has not passed yet
        self._ledger = Ledger(share=self._share)
        self._next_taken = self._share.process

    def draw(self, tickets: Iterable[int]) -> None:
        """Marks prompts as being sampled, in ticket order without gaps.

        Raises:
          ValueError: a ticket is not the next one.
        """
        with self._waiting.changed:
            for ticket in tickets:
                if ticket != self._ledger.next_ticket:
                    raise ValueError(f"draw: expected ticket {self._ledger.next_ticket}, got {ticket}")
                self._ledger.draw()
            self._waiting.note()

    def progress(self) -> None:
        """Something arrived: the deadline of whoever waits starts anew."""
        with self._waiting.changed:
            self._waiting.note()

    def put(self, group: Group) -> None:
        """Takes in a finished group.

        Raises:
          ValueError: its prompt is not being sampled (a duplicate, or never drawn).
        """
        with self._waiting.changed:
            self._ledger.finish(group.ticket)
            self._groups[group.ticket] = group
            self._waiting.note()

    def drop(self, ticket: int, reason: str) -> None:
        """Gives up a prompt that is out or buffered; `take` passes over it.

        Raises:
          ValueError: it is neither.
        """
        with self._waiting.changed:
            self._ledger.drop(ticket, reason)
            self._groups.pop(ticket, None)
            self._skipped.add(ticket)
            self._waiting.note()

    def fail(self, error: BaseException) -> None:
        """Collection has stopped: every present and later wait raises this error."""
        self._waiting.fail(error)

    def take(self, n: int, version: int) -> list[Group]:
        """Waits for the next `n` groups in ticket order and hands them over: `choose` and `hand_over`."""
        with self._waiting.changed:
            groups = self.choose(n, version)
            self.hand_over(groups)
            return groups

    def choose(self, n: int, version: int) -> list[Group]:
        """Waits for the next `n` groups in ticket order; they stay here.

        Args:
          n: how many.
          version: of the trainer.

        Raises:
          ValueError: a token is older than max_lag, or newer than the trainer; the group stays here.
          TimeoutError: nothing arrived for the deadline.
          BaseException: what `fail` was given.
        """
        with self._waiting.changed:
            self._wait_for(lambda: self._next_tickets(n), version)
            tickets = self._next_tickets(n)
            groups = [self._groups[ticket] for ticket in tickets]
            for group in groups:
                check_fresh(group, version, self._max_lag)
            return groups

    def hand_over(self, groups: Sequence[Group]) -> None:
        """The trainer trains on these, just chosen: they are in nobody's way any more.

        Raises:
          ValueError: one is not here.
        """
        tickets = [group.ticket for group in groups]
        with self._waiting.changed:
            self._ledger.train(tickets)
            for ticket in tickets:
                del self._groups[ticket]
            after = tickets[-1] + self._share.processes
            self._skipped -= set(range(self._next_taken, after))
            self._next_taken = after

    def wait(self, tickets: Iterable[int]) -> None:
        """Waits until none of these prompts is being sampled or still to be drawn.

        Raises:
          TimeoutError, BaseException: as `take`.
        """
        wanted = list(tickets)
        with self._waiting.changed:
            self._wait_for(lambda: wanted, None)

    def restore(self, snapshot: BufferSnapshot) -> None:
        """Makes a new buffer what the snapshot was of; its `out` prompts are out again, for the caller to request.

        Raises:
          ValueError: this buffer has been used, or the snapshot's books and groups differ.
        """
        with self._waiting.changed:
            self._ledger = restored(self._ledger, snapshot)
            self._groups = {group.ticket: group for group in snapshot.groups}
            open_tickets = self._ledger.out | self._ledger.buffered
            self._next_taken = min(open_tickets, default=self._ledger.next_ticket)
            # A dropped prompt between open ones has no other trace: it is every ticket that is not open.
            closed = range(self._next_taken, self._ledger.next_ticket, self._share.processes)
            self._skipped = set(closed) - open_tickets
            self._waiting.note()

    def _next_tickets(self, n: int) -> list[int]:
        """The tickets that the next `take(n)` hands over, drawn or not."""
        tickets: list[int] = []
        ticket = self._next_taken
        while len(tickets) < n:
            if ticket not in self._skipped:
                tickets.append(ticket)
            ticket += self._share.processes
        return tickets

    def _wait_for(self, wanted: Callable[[], list[int]], version: int | None) -> None:
        """Blocks until every wanted ticket is neither out nor undrawn; the lock is held."""

        def missing() -> list[int]:
            return [t for t in wanted() if t in self._ledger.out or t >= self._ledger.next_ticket]

        self._waiting.until(lambda: not missing(), lambda: self._late(wanted(), missing(), version))

    def _late(self, wanted: list[int], missing: list[int], version: int | None) -> str:
        step = "" if version is None else f" of step {version}"
        undrawn = sum(ticket >= self._ledger.next_ticket for ticket in missing)
        unasked = f" ({undrawn} were never requested)" if undrawn else ""
        return (
            f"groups {wanted[0]}..{wanted[-1]}{step}: expected them within {self._waiting.deadline:g} s of the last "
            f"completion, got {len(wanted) - len(missing)} of {len(wanted)}, first missing t{missing[0]}{unasked}; "
            f"engines: {self._describe()}; look there, or raise rollout.deadline"
        )


def check_fresh(group: Group, version: int, max_lag: int) -> None:
    """A group may be used by a trainer at `version`.

    Raises:
      ValueError: a token is older than max_lag, or newer than the trainer.
    """
    oldest, newest = group.oldest_version, group.newest_version
    if newest > version or version - oldest > max_lag:
        raise ValueError(
            f"group t{group.ticket}: expected tokens of versions {max(version - max_lag, 0)} to {version}, "
            f"got {oldest} to {newest}"
        )


def restored(unused: Ledger, snapshot: BufferSnapshot) -> Ledger:
    """The books of a snapshot, in place of those of a buffer that is new.

    Raises:
      ValueError: the buffer has been used, or the snapshot's books and groups differ.
    """
    if unused.drawn:
        raise ValueError(f"restore: expected a buffer that is new, got one that drew {unused.drawn} prompts")
    tickets = sorted(group.ticket for group in snapshot.groups)
    if tickets != list(snapshot.ledger.buffered):
        raise ValueError(
            f"restore: expected the groups that the ledger counts as buffered, {list(snapshot.ledger.buffered)}, "
            f"got {tickets}"
        )
    return Ledger(snapshot.ledger, unused.share)
