"""The bounded mode's buffer: admission, freshness and the ledger under one lock.

Samplers pull: `next_tickets` blocks until a prompt may be admitted, or one is to be sampled again, so that capacity is
counted at the moment at which it is used. The trainer takes the oldest groups first, whatever their tickets: a
straggler keeps nobody waiting, and what is too old by then is sampled again.
"""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from train.buffer import BufferSnapshot, Kept, restored
from train.groups import Group
from train.ledger import LATE, TOO_OLD, ZERO_STD, Ledger
from train.share import Share
from train.staleness import BoundedSchedule
from train.waiting import Waiting


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What becomes of groups that are too old, without signal, or late, as in `ScheduleConfig`.

    And how many prompts a sampler takes at once, when there are so many.
    """

    too_old: Literal["reissue", "mask"] = "reissue"
    zero_std: Literal["keep", "drop"] = "keep"
    resample_rounds: int = 2
    attempts: int = 8
    together: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """A prompt to sample, and how often it was sampled before."""

    number: int
    attempt: int


class StreamBuffer(Kept):
    """Groups as they come. Every method may be called from any thread."""

    def __init__(
        self,
        schedule: BoundedSchedule,
        settings: StreamSettings,
        *,
        deadline: float,
        describe: Callable[[], str] = lambda: "not asked",
        share: Share | None = None,
    ) -> None:
        """Makes an empty buffer; nothing is admitted before `serve`.

        Args:
          schedule: for capacity and the largest lag; of several processes, with this one's part of a step's groups.
          settings: policies.
          deadline: seconds without any progress after which `take` is an error.
          describe: says how the engines are, for that error.
          share: whose tickets are drawn here; None = all.
        """
        self._schedule = schedule
        self._settings = settings
        self._describe = describe
        self._waiting = Waiting(deadline)
        # Idle samplers wait apart: every completion would wake all of them otherwise.
        self._admissible = threading.Condition(self._waiting.lock)
        self._ledger = Ledger(share=share)
        self._groups = {}
        self._again: deque[Ticket] = deque()  # out, but with no sampler yet
        self._served: int | None = None
        self._use = 0  # version of the trainer when it takes the next batch
        self._without_signal = 0  # dropped since the last `take`
        self._closed = False

    @property
    def served(self) -> int | None:
        """The version that the fleet serves, at least; None before the first."""
        return self._served

    def serve(self, version: int) -> None:
        """The fleet serves this version, or a later one, from now on."""
        with self._waiting.changed:
            self._served = max(version, -1 if self._served is None else self._served)
            self._note()

    def next_tickets(self) -> list[Ticket]:
        """Waits until a prompt may be sampled, and has it out, with others that may be, too; none once closed.

        One that was sampled before comes alone: what was wrong with it must not cost others an attempt again.
        """
        with self._waiting.changed:
            self._admissible.wait_for(lambda: self._closed or self._again or self._capacity() > 0)
            if self._closed:
                return []
            tickets = [self._next()]
            while len(tickets) < self._settings.together and self._joins(tickets[0]):
                tickets.append(self._next())
            self._wake()  # whoever takes what is left
            return tickets

    def close(self) -> None:
        """Ends every `next_tickets`."""
        with self._waiting.changed:
            self._closed = True
            self._admissible.notify_all()

    def progress(self) -> None:
        """Something arrived: the deadline of whoever waits starts anew."""
        with self._waiting.changed:
            self._waiting.note()

    def put(self, group: Group) -> None:
        """Takes in a finished group, unless it is too old by now or has no signal.

        Raises:
          ValueError: its prompt is not being sampled.
        """
        with self._waiting.changed:
            self._ledger.finish(group.ticket)
            self._groups[group.ticket] = group
            if not self._usable(group, self._use):
                self._sample_again(group.ticket, TOO_OLD)
            elif self._unwanted(group):
                self._without_signal += 1
                self._drop(group.ticket, ZERO_STD)
            self._waiting.note()

    def late(self, ticket: int) -> bool:
        """A request ended before its members were there; returns whether it will be given out again.

        Raises:
          ValueError: its prompt is not being sampled.
        """
        with self._waiting.changed:
            if ticket not in self._ledger.out:
                raise ValueError(
                    f"late t{ticket}: expected a prompt that is being sampled, got one that is "
                    f"{self._ledger.where(ticket)}"
                )
            return self._sample_again(ticket, LATE)

    def fail(self, error: BaseException) -> None:
        """Collection has stopped: every present and later wait raises this error."""
        self._waiting.fail(error)

    def ready(self, n: int) -> bool:
        """Whether `take(n)` would not wait."""
        with self._waiting.changed:
            return len(self._groups) >= n

    def take(self, n: int, version: int) -> list[Group]:
        """Waits for `n` groups and hands over the oldest: `choose` and `hand_over`."""
        with self._waiting.changed:
            groups = self.choose(n, version)
            self.hand_over(groups)
            return groups

    def choose(self, n: int, version: int) -> list[Group]:
        """Waits for `n` groups; gives the oldest, in the order in which the batch trains on them. They stay.

        Args:
          n: how many, a whole batch.
          version: of the trainer.

        Raises:
          ValueError: a token is newer than the trainer.
          TimeoutError: nothing arrived for the deadline.
          BaseException: what `fail` was given.
        """
        with self._waiting.changed:
            self._use = version
            while True:
                self._waiting.until(lambda: len(self._groups) >= n, lambda: self._missing(n, version))
                chosen = sorted(self._groups.values(), key=lambda group: (group.oldest_version, group.ticket))[:n]
                stale = [group for place, group in enumerate(chosen) if not self._usable(group, self._step(place))]
                if not stale:
                    break
                for group in stale:
                    self._sample_again(group.ticket, TOO_OLD)
            for group in chosen:
                if group.newest_version > version:
                    raise ValueError(
                        f"group t{group.ticket}: expected tokens of at most version {version}, got one of "
                        f"{group.newest_version}"
                    )
            return chosen

    def hand_over(self, groups: Sequence[Group]) -> None:
        """The trainer trains on these, just chosen.

        Raises:
          ValueError: one is not here.
        """
        with self._waiting.changed:
            self._ledger.train(group.ticket for group in groups)
            for group in groups:
                del self._groups[group.ticket]
            self._use += self._schedule.minibatches
            self._without_signal = 0
            self._waiting.note()

    def restore(self, snapshot: BufferSnapshot) -> None:
        """Makes a new buffer what the snapshot was of; what was out is given out again, with the same attempt.

        Raises:
          ValueError: this buffer has been used, or the snapshot's books and groups differ.
        """
        with self._waiting.changed:
            self._ledger = restored(self._ledger, snapshot)
            self._groups = {group.ticket: group for group in snapshot.groups}
            self._again.extend(Ticket(number, self._ledger.attempt(number)) for number in sorted(self._ledger.out))
            self._note()

    def _capacity(self) -> int:
        if self._served is None:
            return 0
        return self._schedule.capacity(
            self._served, self._ledger.trained + len(self._ledger.buffered), len(self._ledger.out)
        )

    def _next(self) -> Ticket:
        return self._again.popleft() if self._again else Ticket(self._ledger.draw(), 0)

    def _joins(self, first: Ticket) -> bool:
        """Whether there is another prompt to sample, and both are new."""
        if self._again:
            return first.attempt == self._again[0].attempt == 0
        return first.attempt == 0 and self._capacity() > 0

    def _step(self, place: int) -> int:
        """The trainer's version when it trains on the group at this place of the next batch."""
        return self._use + place // self._schedule.groups_per_step

    def _usable(self, group: Group, version: int) -> bool:
        oldest = group.newest_version if self._settings.too_old == "mask" else group.oldest_version
        return version - oldest <= self._schedule.max_lag

    def _unwanted(self, group: Group) -> bool:
        room = self._settings.resample_rounds * self._schedule.batch_groups - self._without_signal
        return self._settings.zero_std == "drop" and room > 0 and bool(np.ptp(group.reward_M) == 0)

    def _sample_again(self, ticket: int, reason: str) -> bool:
        self._groups.pop(ticket, None)
        if self._ledger.attempt(ticket) + 1 >= self._settings.attempts:
            self._drop(ticket, reason)
            return False
        self._again.append(Ticket(ticket, self._ledger.reissue(ticket, reason)))
        self._note()
        return True

    def _drop(self, ticket: int, reason: str) -> None:
        self._groups.pop(ticket, None)
        self._ledger.drop(ticket, reason)
        self._note()

    def _note(self) -> None:
        """Something happened that may let samplers begin."""
        self._waiting.note()
        self._wake()

    def _wake(self) -> None:
        """Wakes a sampler if there is something for one; it wakes the next, so that none wakes for nothing."""
        if self._again or self._capacity() > 0:
            self._admissible.notify()

    def _missing(self, n: int, version: int) -> str:
        return (
            f"{n} groups of step {version}: expected them within {self._waiting.deadline:g} s of the last completion, "
            f"got {len(self._groups)}; {len(self._ledger.out)} prompts are out, version {self._served} serves, "
            f"{self._capacity()} more may be admitted; engines: {self._describe()}; look there, or raise "
            "rollout.deadline"
        )
