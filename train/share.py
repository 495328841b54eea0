"""Which prompts a process samples: every P-th ticket, so that all have equally many of any step's.

Pure arithmetic. With one process the share is everything, and nothing here changes anything.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One process's part of a run.

    Attributes:
      process: its number.
      processes: P, how many there are.
    """

    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
          ValueError: the number is not one of P.
        """
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process: expected 0 to {self.processes - 1}, got {self.process}")

    def owns(self, ticket: int) -> bool:
        """Whether this process samples the prompt of this ticket."""
        return ticket % self.processes == self.process

    def own(self, tickets: range) -> range:
        """Those of consecutive tickets that this process samples."""
        return range(self.next_own(tickets.start), max(tickets.stop, tickets.start), self.processes)

    def next_own(self, ticket: int) -> int:
        """The first of its tickets that is not before this one."""
        return ticket + (self.process - ticket) % self.processes

    def drawn(self, next_ticket: int) -> int:
        """How many of its tickets are before this one."""
        return len(self.own(range(next_ticket)))

    def part(self, count: int, what: str) -> int:
        """Its part of a number that all share equally.

        Raises:
          ValueError: that cannot be.
        """
        if count % self.processes:
            raise ValueError(
                f"{what}: expected a multiple of the {self.processes} processes, got {count}; use "
                f"{-(-count // self.processes) * self.processes}"
            )
        return count // self.processes

    def deal(self, items: Sequence[T]) -> tuple[T, ...]:
        """Its part of a list that all processes hold in the same order."""
        return tuple(items[self.process :: self.processes])
