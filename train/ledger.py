"""The conservation ledger: every prompt drawn is in exactly one place, and its books say so at every step.

A drawn prompt is *out* (being sampled, or waiting to be sampled again), *buffered* (its group is finished), *trained*,
or *dropped* (with a reason). Pure: no lock, no clock, no file; the buffers own one and guard it.

    undrawn --draw--> out --finish--> buffered --train--> trained
                       ^                    |
                       `----- reissue ------'     another attempt, with a seed of its own; also of what is out
                                                  drop: from out or buffered
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train.share import Share

TOO_OLD = "too_old"  # a token was older than max_lag, at admission or at use
ZERO_STD = "zero_std"  # equal rewards: no gradient
LATE = "late"  # the request's deadline passed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
    """All that a ledger knows, for a cut.

    Attributes:
      next_ticket: the first prompt that has not been drawn.
      out: prompts that are being sampled.
      buffered: prompts whose finished group waits.
      attempts: of open prompts, how often they were sampled before; absent = never.
      trained: how many were trained on.
      dropped: how many were given up, by reason.
      reissued: how many attempts were thrown away and made again, by reason.
    """

    next_ticket: int = 0
    out: tuple[int, ...] = ()
    buffered: tuple[int, ...] = ()
    attempts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    trained: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reissued: Mapping[str, int] = dataclasses.field(default_factory=dict)


def ledger_from(fields: Mapping[str, Any]) -> LedgerState:
    """The books from what JSON makes of them."""
    return LedgerState(
        next_ticket=fields["next_ticket"],
        out=tuple(fields["out"]),
        buffered=tuple(fields["buffered"]),
        attempts={int(ticket): attempt for ticket, attempt in fields["attempts"].items()},  # JSON's keys are strings
        trained=fields["trained"],
        dropped=fields["dropped"],
        reissued=fields["reissued"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """What moved since the entry before it.

    Attributes:
      trained: tickets, in the order in which they were trained on.
      dropped: (ticket, reason) each.
      reissued: (ticket, its new attempt, reason) each.
    """

    trained: tuple[int, ...] = ()
    dropped: tuple[tuple[int, str], ...] = ()
    reissued: tuple[tuple[int, int, str], ...] = ()


class Ledger:
    """The books of one run, or of the prompts that one of its processes samples."""

    def __init__(self, state: LedgerState | None = None, share: Share | None = None) -> None:
        """Opens the books.

        Args:
          state: to go on from, of this share (`train.books`); None = nothing has been drawn.
          share: whose prompts are drawn here; None = all.

        Raises:
          ValueError: the state does not add up.
        """
        self.share = share or Share()
        state = state or LedgerState(next_ticket=self.share.process)
        self.next_ticket = state.next_ticket
        self.out = set(state.out)
        self.buffered = set(state.buffered)
        self.trained = state.trained
        self.dropped: Counter[str] = Counter(state.dropped)
        self.reissued: Counter[str] = Counter(state.reissued)
        self._attempts = dict(state.attempts)
        self._moved: dict[str, list[Any]] = {"trained": [], "dropped": [], "reissued": []}
        # Parts are dealt anew on a resume, while trained and dropped prompts are mere numbers: of several processes one
        # may have closed fewer of its prompts than it counts, and another more.
        self._carried = self.drawn - self._accounted() if self.share.processes > 1 else 0
        self.check()

    @property
    def drawn(self) -> int:
        """How many prompts were drawn here."""
        return self.share.drawn(self.next_ticket)

    def draw(self) -> int:
        """Takes the next prompt; it is out."""
        ticket = self.next_ticket
        self.next_ticket += self.share.processes
        self.out.add(ticket)
        return ticket

    def attempt(self, ticket: int) -> int:
        """How often an open prompt was sampled before."""
        return self._attempts.get(ticket, 0)

    def finish(self, ticket: int) -> None:
        """A prompt that is out has its group.

        Raises:
          ValueError: it is not out (a duplicate, or never drawn).
        """
        if ticket not in self.out:
            raise ValueError(
                f"group t{ticket}: expected a prompt that is being sampled, got one that is {self.where(ticket)}"
            )
        self.out.remove(ticket)
        self.buffered.add(ticket)

    def train(self, tickets: Iterable[int]) -> None:
        """Buffered prompts are trained on, each once.

        Raises:
          ValueError: one is not buffered.
        """
        for ticket in tickets:
            if ticket not in self.buffered:
                raise ValueError(
                    f"training on t{ticket}: expected a buffered prompt, got one that is {self.where(ticket)}"
                )
            self._close(ticket)
            self.trained += 1
            self._moved["trained"].append(ticket)

    def drop(self, ticket: int, reason: str) -> None:
        """Gives up an open prompt.

        Raises:
          ValueError: it is neither out nor buffered.
        """
        self._must_be_open(ticket, "drop")
        self._close(ticket)
        self.dropped[reason] += 1
        self._moved["dropped"].append((ticket, reason))

    def reissue(self, ticket: int, reason: str) -> int:
        """Throws away what there is of an open prompt; it is out again. Returns the number of the new attempt.

        Raises:
          ValueError: it is neither out nor buffered.
        """
        self._must_be_open(ticket, "another attempt")
        self.buffered.discard(ticket)
        self.out.add(ticket)
        self._attempts[ticket] = self.attempt(ticket) + 1
        self.reissued[reason] += 1
        self._moved["reissued"].append((ticket, self._attempts[ticket], reason))
        return self._attempts[ticket]

    def where(self, ticket: int) -> str:
        """Where a prompt is, in words."""
        if ticket >= self.next_ticket:
            return "not drawn yet"
        if ticket in self.out:
            return "being sampled"
        return "buffered already" if ticket in self.buffered else "trained or dropped already"

    def check(self) -> None:
        """Every prompt drawn is in exactly one place.

        Raises:
          ValueError: the books do not add up; a defect of this program.
        """
        twice = self.out & self.buffered
        beyond = sorted(ticket for ticket in self.out | self.buffered if not 0 <= ticket < self.next_ticket)
        strange = sorted(ticket for ticket in self.out | self.buffered if not self.share.owns(ticket))
        accounted = self._accounted() + self._carried
        if (
            twice
            or beyond
            or strange
            or accounted != self.drawn
            or not self._attempts.keys() <= self.out | self.buffered
        ):
            raise ValueError(
                f"ledger: expected every prompt drawn in exactly one place, got {self.drawn} drawn, "
                f"{len(self.out)} out, {len(self.buffered)} buffered, {self.trained} trained, "
                f"{self.dropped.total()} dropped, in two places {sorted(twice)}, never drawn {beyond}, "
                f"another process's {strange}; this is a defect: keep the run folder and report it"
            )

    def state(self) -> LedgerState:
        """A copy for a cut."""
        return LedgerState(
            next_ticket=self.next_ticket,
            out=tuple(sorted(self.out)),
            buffered=tuple(sorted(self.buffered)),
            attempts=dict(self._attempts),
            trained=self.trained,
            dropped=dict(self.dropped),
            reissued=dict(self.reissued),
        )

    def entry(self) -> LedgerEntry:
        """What moved since the last call."""
        moved = LedgerEntry(**{name: tuple(moves) for name, moves in self._moved.items()})
        self._moved = {name: [] for name in self._moved}
        return moved

    def _accounted(self) -> int:
        return len(self.out) + len(self.buffered) + self.trained + self.dropped.total()

    def _must_be_open(self, ticket: int, what: str) -> None:
        if ticket not in self.out and ticket not in self.buffered:
            raise ValueError(
                f"{what} of t{ticket}: expected a prompt that is out or buffered, got one that is {self.where(ticket)}"
            )

    def _close(self, ticket: int) -> None:
        self.out.discard(ticket)
        self.buffered.discard(ticket)
        self._attempts.pop(ticket, None)


def audit(entries: Sequence[Mapping[str, Any]], state: LedgerState) -> None:
    """Compares the written entries of a whole run with the books of its last cut, prompt by prompt.

    Args:
      entries: lines of `ledger.jsonl`, all up to that cut.
      state: of the cut.

    Raises:
      ValueError: a prompt was trained on twice, is in two places, or nowhere; it is named.
    """
    trained = Counter(ticket for entry in entries for ticket in entry["trained"])
    dropped = Counter(ticket for entry in entries for ticket, _ in entry["dropped"])
    places = trained + dropped + Counter(state.out) + Counter(state.buffered)
    wrong = {ticket: places[ticket] for ticket in range(state.next_ticket) if places[ticket] != 1}
    beyond = sorted(ticket for ticket in places if ticket >= state.next_ticket)
    if wrong or beyond:
        first = ", ".join(
            f"t{ticket} (trained {trained[ticket]}, dropped {dropped[ticket]}, out {ticket in state.out}, buffered "
            f"{ticket in state.buffered})"
            for ticket in [*wrong, *beyond][:5]
        )
        raise ValueError(
            f"ledger: expected each of {state.next_ticket} prompts in one place, got {len(wrong)} that are not and "
            f"{len(beyond)} that were never drawn: {first}"
        )
    counts = (trained.total(), dropped.total())
    if counts != (state.trained, sum(state.dropped.values())):
        raise ValueError(
            f"ledger: expected {state.trained} trained and {sum(state.dropped.values())} dropped prompts in its "
            f"lines, got {counts[0]} and {counts[1]}"
        )
