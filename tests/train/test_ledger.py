import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.ledger import LATE, TOO_OLD, ZERO_STD, Ledger, LedgerEntry, LedgerState, audit


def places(ledger):
    return (ledger.next_ticket, sorted(ledger.out), sorted(ledger.buffered), ledger.trained, dict(ledger.dropped))


def test_a_prompt_goes_from_drawn_to_trained():
    ledger = Ledger()
    assert [ledger.draw() for _ in range(3)] == [0, 1, 2]
    ledger.finish(1)
    assert places(ledger) == (3, [0, 2], [1], 0, {})
    ledger.train([1])
    ledger.drop(0, ZERO_STD)
    assert ledger.reissue(2, TOO_OLD) == 1
    assert places(ledger) == (3, [2], [], 1, {"zero_std": 1})
    assert ledger.attempt(2) == 1
    assert ledger.entry() == LedgerEntry(trained=(1,), dropped=((0, ZERO_STD),), reissued=((2, 1, TOO_OLD),))
    assert ledger.entry() == LedgerEntry()


def test_a_finished_group_that_is_sampled_again_is_out_and_nowhere_else():
    ledger = Ledger()
    ledger.draw()
    ledger.finish(0)
    assert [ledger.reissue(0, TOO_OLD), ledger.reissue(0, LATE)] == [1, 2]
    assert places(ledger) == (1, [0], [], 0, {})
    ledger.check()
    ledger.finish(0)
    ledger.train([0])
    assert ledger.state() == LedgerState(next_ticket=1, trained=1, reissued={TOO_OLD: 1, LATE: 1})


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda ledger: ledger.finish(0), "group t0: .* trained or dropped already"),
        (lambda ledger: ledger.finish(1), "group t1: .* buffered already"),
        (lambda ledger: ledger.finish(9), "group t9: .* not drawn yet"),
        (lambda ledger: ledger.train([1, 1]), "training on t1: .* trained or dropped already"),
        (lambda ledger: ledger.train([2]), "training on t2: .* being sampled"),
        (lambda ledger: ledger.drop(0, LATE), "drop of t0: .* trained or dropped already"),
        (lambda ledger: ledger.reissue(0, LATE), "another attempt of t0: .* trained or dropped already"),
    ],
)
def test_no_prompt_goes_where_it_may_not(move, message):
    ledger = Ledger()
    for _ in range(3):
        ledger.draw()
    ledger.finish(0)
    ledger.train([0])
    ledger.finish(1)
    with pytest.raises(ValueError, match=message):
        move(ledger)
    ledger.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"next_ticket": 6},  # one is nowhere
        {"out": (1, 2)},  # and buffered as well
        {"trained": 3},
        {"out": (1, 7)},  # never drawn
        {"attempts": {0: 1}},  # of a prompt that is closed
        {"dropped": {}},
    ],
)
def test_books_that_do_not_add_up_are_an_error(wrong):
    right = LedgerState(next_ticket=5, out=(1,), buffered=(2,), attempts={1: 2}, trained=2, dropped={LATE: 1})
    assert Ledger(right).state() == right
    with pytest.raises(ValueError, match=r"expected every prompt drawn in exactly one place.*a defect"):
        Ledger(dataclasses.replace(right, **wrong))


moves = st.lists(
    st.tuples(st.sampled_from(["draw", "finish", "train", "drop", "reissue", "kill", "save"]), st.integers(0, 5)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(moves=moves)
def test_the_books_and_the_written_lines_account_for_every_prompt_over_kills(moves):
    """A cut holds the books; lines after it are removed when a killed run goes on from it."""
    ledger, lines, cut = Ledger(), [], LedgerState()
    written = []  # lines as of the cut

    def write(into):
        into.append(dataclasses.asdict(ledger.entry()))

    for move, which in moves:
        out, ready = sorted(ledger.out), sorted(ledger.buffered)
        if move == "draw":
            ledger.draw()
        elif move == "finish" and out:
            ledger.finish(out[which % len(out)])
        elif move == "train" and ready:
            ledger.train([ready[which % len(ready)]])
            write(lines)
        elif move in ("drop", "reissue") and out + ready:
            getattr(ledger, move)((out + ready)[which % len(out + ready)], LATE)
        elif move == "save":
            write(lines)
            cut, written = ledger.state(), list(lines)
        elif move == "kill":
            ledger, lines = Ledger(cut), list(written)
        ledger.check()
        assert ledger.next_ticket == len(ledger.out) + len(ledger.buffered) + ledger.trained + ledger.dropped.total()
    write(lines)
    audit(lines, ledger.state())
    trained = [ticket for line in lines for ticket in line["trained"]]
    assert len(trained) == len(set(trained)) == ledger.trained


def line(trained=(), dropped=()):
    return {"trained": list(trained), "dropped": [list(pair) for pair in dropped], "reissued": []}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line([0, 1]), line([1])], r"1 that are not .*t1 \(trained 2, dropped 0, out False"),
        ([line([0])], r"t1 \(trained 0, dropped 0, out False, buffered False\)"),
        ([line([0, 1, 2])], r"t2 \(trained 1, dropped 0, out True"),
        ([line([0, 1, 9])], "1 that were never drawn: t9"),
        ([line([0]), line([], [(1, "late")])], "expected 2 trained and 0 dropped"),
    ],
)
def test_an_audit_names_what_is_twice_or_nowhere(lines, message):
    state = LedgerState(next_ticket=3, out=(2,), trained=2)
    audit([line([0]), line([1])], state)
    with pytest.raises(ValueError, match=message):
        audit(lines, state)
