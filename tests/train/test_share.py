import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.share import Share

COUNTS = st.integers(1, 5)


def shares(processes):
    return [Share(process=process, processes=processes) for process in range(processes)]


@given(COUNTS, st.integers(0, 40), st.integers(0, 40))
def test_every_ticket_belongs_to_exactly_one_process(processes, first, count):
    tickets = range(first, first + count)
    dealt = sorted(ticket for share in shares(processes) for ticket in share.own(tickets))
    assert dealt == list(tickets)
    for share in shares(processes):
        assert all(map(share.owns, share.own(tickets)))
        assert share.drawn(first) == len(share.own(range(first)))


@given(COUNTS, st.integers(0, 40))
def test_equally_many_tickets_of_a_step_belong_to_each(processes, step):
    groups = 3 * processes
    tickets = range(step * groups, (step + 1) * groups)
    assert {len(share.own(tickets)) for share in shares(processes)} == {3}


@given(COUNTS, st.lists(st.integers(), max_size=12))
def test_a_list_is_dealt_out_whole(processes, items):
    assert sorted(item for share in shares(processes) for item in share.deal(items)) == sorted(items)


def test_one_process_has_everything():
    share = Share()
    assert share.own(range(3, 7)) == range(3, 7)
    assert share.part(7, "anything") == 7
    assert share.next_own(5) == 5


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match=r"batch\.rows: expected a multiple of the 4 processes, got 6; use 8"):
        Share(process=1, processes=4).part(6, "batch.rows")
    with pytest.raises(ValueError, match="process: expected 0 to 1, got 2"):
        Share(process=2, processes=2)
