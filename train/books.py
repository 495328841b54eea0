"""The books of a run of several processes: one ledger, kept in parts.

Every process keeps the books of the prompts that it samples (`train.share`); a cut and a line of the ledger hold them
merged, as one process would have written them. Pure.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from train.buffer import BufferSnapshot, BufferStats
from train.ledger import Ledger, LedgerEntry, LedgerState, ledger_from
from train.share import Share
from train.team import Team


def split_books(state: LedgerState, share: Share) -> LedgerState:
    """A process's part of the books of a whole run.

    Prompts go to whom they belong by ticket. What was trained on is counted as everybody's in equal parts, for every
    step takes equally many from each; what was dropped or sampled again is on the books of process 0.
    """
    first = share.process == 0
    return LedgerState(
        next_ticket=share.next_own(state.next_ticket),
        out=tuple(filter(share.owns, state.out)),
        buffered=tuple(filter(share.owns, state.buffered)),
        attempts={ticket: attempt for ticket, attempt in state.attempts.items() if share.owns(ticket)},
        trained=share.part(state.trained, "prompts trained on"),
        dropped=state.dropped if first else {},
        reissued=state.reissued if first else {},
    )


def merge_books(states: Sequence[LedgerState]) -> LedgerState:
    """The books of a whole run from those of its processes, in their order.

    A prompt that one process has not drawn yet, while another is past it, counts as out: it is to be sampled.
    """
    processes = len(states)
    drawn = [state.next_ticket - processes for state in states if state.next_ticket >= processes]
    next_ticket = max(drawn, default=-1) + 1
    behind = {ticket for state in states for ticket in range(state.next_ticket, next_ticket, processes)}
    return LedgerState(
        next_ticket=next_ticket,
        out=tuple(sorted(behind.union(*(state.out for state in states)))),
        buffered=tuple(sorted(ticket for state in states for ticket in state.buffered)),
        attempts={ticket: n for state in states for ticket, n in sorted(state.attempts.items())},
        trained=sum(state.trained for state in states),
        dropped=_total([state.dropped for state in states]),
        reissued=_total([state.reissued for state in states]),
    )


def merge_entries(entries: Sequence[LedgerEntry], step_groups: int) -> LedgerEntry:
    """What moved in a whole run; the prompts of each optimizer step in the order of their tickets.

    Args:
      entries: of every process.
      step_groups: groups that one process has in an optimizer step.
    """
    steps = max(-(-len(entry.trained) // step_groups) for entry in entries)
    trained = (
        sorted(ticket for entry in entries for ticket in entry.trained[step * step_groups : (step + 1) * step_groups])
        for step in range(steps)
    )
    return LedgerEntry(
        trained=tuple(ticket for tickets in trained for ticket in tickets),
        dropped=tuple(sorted(moved for entry in entries for moved in entry.dropped)),
        reissued=tuple(sorted(moved for entry in entries for moved in entry.reissued)),
    )


def _total(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def own_part(snapshot: BufferSnapshot, share: Share) -> BufferSnapshot:
    """What a process goes on with, of a cut's groups and books."""
    if share.processes == 1:
        return snapshot
    groups = tuple(group for group in snapshot.groups if share.owns(group.ticket))
    return BufferSnapshot(groups=groups, ledger=split_books(snapshot.ledger, share))


def joint_snapshot(team: Team, snapshot: BufferSnapshot, step_groups: int) -> BufferSnapshot:
    """The books of all processes beside this one's groups, for a cut; in the loop's thread.

    Args:
      team: the processes.
      snapshot: of this one.
      step_groups: groups that one process has in an optimizer step.
    """
    if team.share.processes == 1:
        return snapshot
    books = team.exchange("the books of a cut", dataclasses.asdict(snapshot.ledger))
    merged = merge_books([ledger_from(said) for said in books])
    Ledger(merged)  # it adds up, or this is an error
    return dataclasses.replace(snapshot, ledger=merged, entry=joint_entry(team, snapshot.entry, step_groups))


def joint_entry(team: Team, entry: LedgerEntry, step_groups: int) -> LedgerEntry:
    """What moved in all processes; in the loop's thread."""
    if team.share.processes == 1:
        return entry
    said = team.exchange("what moved", dataclasses.asdict(entry))
    return merge_entries([_entry_from(fields) for fields in said], step_groups)


def joint_stats(team: Team, stats: BufferStats) -> BufferStats:
    """The buffers of all processes; of waits the longest."""
    if team.share.processes == 1:
        return stats
    said = team.exchange("the buffers", dataclasses.asdict(stats))
    counts = {name: sum(fields[name] for fields in said) for name in said[0] if name not in ("waited", "reasons")}
    waited = max(fields["waited"] for fields in said)
    return BufferStats(**counts, waited=waited, reasons=_total([fields["reasons"] for fields in said]))


def _entry_from(fields: Mapping[str, Any]) -> LedgerEntry:
    return LedgerEntry(
        trained=tuple(fields["trained"]),
        dropped=tuple((ticket, reason) for ticket, reason in fields["dropped"]),
        reissued=tuple((ticket, attempt, reason) for ticket, attempt, reason in fields["reissued"]),
    )
