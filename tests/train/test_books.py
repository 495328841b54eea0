import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.books import merge_books, merge_entries, split_books
from train.ledger import LATE, TOO_OLD, ZERO_STD, Ledger, LedgerEntry, LedgerState, ledger_from
from train.share import Share


def split(state, processes):
    return [split_books(state, Share(process=process, processes=processes)) for process in range(processes)]


@st.composite
def runs(draw):
    """Books of a run whose every step took equally many prompts of each of 12 residues: any P up to 4 may go on."""
    ledger = Ledger()
    for _ in range(draw(st.integers(0, 4))):
        for _ in range(12):
            ledger.draw()
        for ticket in sorted(ledger.out):
            what = draw(st.sampled_from(["finish", "leave", "reissue", "drop"]))
            if what == "finish":
                ledger.finish(ticket)
            elif what == "reissue":
                ledger.reissue(ticket, draw(st.sampled_from([LATE, TOO_OLD])))
            elif what == "drop":
                ledger.drop(ticket, ZERO_STD)
        if len(ledger.buffered) >= 12:
            ledger.train(sorted(ledger.buffered)[:12])
    return ledger.state()


@given(runs(), st.integers(1, 4))
def test_books_that_are_split_and_merged_are_the_same_books(state, processes):
    assert merge_books(split(state, processes)) == dataclasses.replace(
        state, attempts=dict(sorted(state.attempts.items()))
    )


@given(runs(), st.integers(1, 4), st.integers(1, 4))
def test_parts_of_any_number_of_processes_go_on_and_add_up(state, processes, others):
    ledgers = []
    for process, part in enumerate(split(state, processes)):
        ledger = Ledger(part, Share(process=process, processes=processes))
        assert ledger.draw() % processes == process
        ledger.check()
        ledgers.append(ledger)
    merged = merge_books([ledger.state() for ledger in ledgers])
    Ledger(merged)  # adds up
    assert merged.trained == state.trained
    assert state.next_ticket + processes == merged.next_ticket
    for process, part in enumerate(split(merged, others)):
        Ledger(part, Share(process=process, processes=others)).check()


def test_a_prompt_that_a_slower_process_has_not_drawn_is_out():
    fast = LedgerState(next_ticket=6, out=(4,), buffered=(2,), trained=1)
    slow = LedgerState(next_ticket=3, out=(), buffered=(), trained=1)
    merged = merge_books([fast, slow])
    assert (merged.next_ticket, merged.out, merged.buffered, merged.trained) == (5, (3, 4), (2,), 2)
    Ledger(merged)


def test_the_prompts_of_each_step_are_merged_in_the_order_of_their_tickets():
    entries = [
        LedgerEntry(trained=(0, 2, 4, 6), dropped=((8, "late"),)),
        LedgerEntry(trained=(1, 3, 5, 7), reissued=((9, 1, "late"),)),
    ]
    merged = merge_entries(entries, 2)
    assert merged.trained == (0, 1, 2, 3, 4, 5, 6, 7)
    assert (merged.dropped, merged.reissued) == (((8, "late"),), ((9, 1, "late"),))
    assert merge_entries([LedgerEntry(trained=(4, 0)), LedgerEntry(trained=(1, 5))], 1).trained == (1, 4, 0, 5)
    assert merge_entries([LedgerEntry(), LedgerEntry()], 2) == LedgerEntry()


def test_a_process_may_not_hold_what_is_another_ones():
    share = Share(process=1, processes=2)
    with pytest.raises(ValueError, match=r"another process's \[2\]"):
        Ledger(LedgerState(next_ticket=5, out=(2,)), share)
    ledger = Ledger(share=share)
    assert [ledger.draw(), ledger.draw()] == [1, 3]
    with pytest.raises(ValueError, match="group t2"):
        ledger.finish(2)


def test_books_come_back_from_what_json_makes_of_them():
    state = LedgerState(next_ticket=4, out=(1,), buffered=(2,), attempts={1: 3}, trained=2, dropped={}, reissued={})
    fields = dataclasses.asdict(state) | {"out": [1], "buffered": [2], "attempts": {"1": 3}}
    assert ledger_from(fields) == state
