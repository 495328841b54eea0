import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.rollouts import make_group
from train.buffer import Buffer


def make_buffer(*, deadline=5.0, max_lag=100, **options):
    return Buffer(max_lag=max_lag, deadline=deadline, **options)


def filled(tickets, **options):
    buffer = make_buffer(**options)
    buffer.draw(tickets)
    for ticket in tickets:
        buffer.put(make_group(ticket))
    return buffer


def taken(buffer, n, version=0):
    return [group.ticket for group in buffer.take(n, version)]


def test_groups_come_out_in_ticket_order_whatever_order_they_arrived_in():
    buffer = make_buffer()
    buffer.draw(range(4))
    for ticket in (3, 1, 0, 2):
        buffer.put(make_group(ticket))
    assert taken(buffer, 2) == [0, 1]
    assert taken(buffer, 2) == [2, 3]


def test_take_waits_for_the_next_ticket_and_not_for_any_group():
    buffer = make_buffer()
    buffer.draw(range(3))
    buffer.put(make_group(1))
    buffer.put(make_group(2))
    result = []
    thread = threading.Thread(target=lambda: result.append(taken(buffer, 2)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    buffer.put(make_group(0))
    thread.join(30)
    assert result == [[0, 1]]
    assert buffer.stats().waited > 0


def test_a_late_group_is_an_error_that_says_what_is_missing():
    buffer = make_buffer(deadline=0.1, describe=lambda: "e1 serving version 3")
    buffer.draw(range(3))
    buffer.put(make_group(0))
    with pytest.raises(TimeoutError) as caught:
        buffer.take(4, version=7)
    assert str(caught.value) == (
        "groups 0..3 of step 7: expected them within 0.1 s of the last completion, got 1 of 4, first missing t1 "
        "(1 were never requested); engines: e1 serving version 3; look there, or raise rollout.deadline"
    )


def test_the_deadline_counts_from_the_last_progress():
    buffer = make_buffer(deadline=1.0)
    buffer.draw(range(1))

    def trickle():
        for _ in range(5):
            time.sleep(0.25)
            buffer.progress()
        buffer.put(make_group(0))

    thread = threading.Thread(target=trickle)
    thread.start()
    assert taken(buffer, 1) == [0]  # after 1.25 s, never 1 s without progress
    thread.join()


def test_a_wait_that_begins_late_has_its_whole_deadline():
    buffer = make_buffer(deadline=0.8)
    buffer.draw(range(1))
    time.sleep(0.9)  # the trainer was busy
    threading.Timer(0.05, lambda: buffer.put(make_group(0))).start()
    assert taken(buffer, 1) == [0]


@pytest.mark.parametrize("ticket", [0, 5])
def test_a_group_that_is_not_being_sampled_is_refused(ticket):
    buffer = filled(range(2))
    place = {0: "buffered already", 5: "not drawn yet"}[ticket]
    with pytest.raises(ValueError, match=f"group t{ticket}: expected a prompt that is being sampled, got .* {place}"):
        buffer.put(make_group(ticket))


def test_a_group_is_refused_after_its_prompt_was_trained_on():
    buffer = filled(range(2))
    buffer.take(2, 0)
    with pytest.raises(ValueError, match="trained or dropped already"):
        buffer.put(make_group(1))


@pytest.mark.parametrize("tickets", [[1], [0, 2], [0, 0]])
def test_prompts_are_drawn_in_order_without_gaps(tickets):
    with pytest.raises(ValueError, match=r"draw: expected ticket \d, got \d"):
        make_buffer().draw(tickets)


def test_the_failure_of_collection_is_raised_by_every_wait():
    buffer = make_buffer()
    buffer.draw(range(1))
    error = OSError("fleet gone")
    threading.Timer(0.05, lambda: buffer.fail(error)).start()
    for wait in (lambda: buffer.take(1, 0), lambda: buffer.wait(range(1)), lambda: buffer.take(1, 0)):
        with pytest.raises(OSError, match="fleet gone") as caught:
            wait()
        assert caught.value is error


def test_the_first_failure_is_the_one_that_is_raised():
    buffer = make_buffer()
    buffer.fail(ValueError("first"))
    buffer.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        buffer.take(1, 0)


@pytest.mark.parametrize(("version", "fine"), [(2, False), (3, True), (6, True), (7, False)])
def test_only_tokens_within_the_largest_lag_are_handed_over(version, fine):
    buffer = make_buffer(max_lag=3)
    buffer.draw(range(1))
    group = make_group(0, version=3)
    mixed = dataclasses.replace(group.completions[0], version=np.array([3, 3], np.int32))
    buffer.put(dataclasses.replace(group, completions=(mixed, *group.completions[1:])))
    if fine:
        assert taken(buffer, 1, version) == [0]
        return
    low = max(version - 3, 0)
    with pytest.raises(ValueError, match=f"group t0: expected tokens of versions {low} to {version}, got 3 to 3"):
        buffer.take(1, version)
    assert buffer.stats().buffered == 1


def test_wait_returns_when_nothing_wanted_is_out():
    buffer = make_buffer(deadline=0.1)
    buffer.draw(range(3))
    buffer.put(make_group(0))
    buffer.put(make_group(1))
    buffer.wait(range(2))
    with pytest.raises(
        TimeoutError, match=r"groups 0\.\.2: expected them within 0\.1 s .* got 2 of 3, first missing t2"
    ):
        buffer.wait(range(3))
    buffer.wait(range(0))


def test_a_dropped_prompt_is_counted_by_reason_and_passed_over():
    buffer = make_buffer()
    buffer.draw(range(4))
    for ticket in (0, 2, 3):
        buffer.put(make_group(ticket))
    buffer.drop(1, "too old")
    buffer.drop(2, "no signal")
    assert taken(buffer, 2) == [0, 3]
    assert buffer.snapshot().ledger.dropped == {"too old": 1, "no signal": 1}
    for ticket, place in ((1, "trained or dropped"), (9, "not drawn")):
        with pytest.raises(ValueError, match=f"drop of t{ticket}: .* {place}"):
            buffer.drop(ticket, "again")


def test_a_drop_wakes_whoever_waits_for_that_prompt():
    buffer = make_buffer()
    buffer.draw(range(2))
    buffer.put(make_group(1))
    threading.Timer(0.05, lambda: buffer.drop(0, "lost")).start()
    assert taken(buffer, 1) == [1]


def test_metrics_are_named_after_the_buffer():
    buffer = filled(range(3))
    buffer.take(1, 0)
    metrics = buffer.stats().metrics()
    assert metrics["buffer/buffered"] == 2.0
    assert metrics["buffer/tokens"] == 10.0
    assert set(metrics) == {
        f"buffer/{name}" for name in ("drawn", "out", "buffered", "trained", "dropped", "reissued", "tokens", "waited")
    }


moves = st.lists(st.tuples(st.sampled_from(["draw", "put", "drop", "take", "restart"]), st.integers(0, 3)), max_size=40)


@settings(max_examples=80, deadline=None)
@given(moves=moves)
def test_every_drawn_prompt_is_in_exactly_one_place_also_over_restarts(moves):
    buffer = make_buffer(deadline=0.0)
    state = {"out": set(), "buffered": set(), "trained": [], "dropped": set()}
    drawn = 0
    for move, which in moves:
        out, waiting = sorted(state["out"]), sorted(state["buffered"])
        if move == "draw":
            buffer.draw(range(drawn, drawn + which))
            state["out"] |= set(range(drawn, drawn + which))
            drawn += which
        elif move == "put" and out:
            ticket = out[which % len(out)]
            buffer.put(make_group(ticket))
            state["out"].remove(ticket)
            state["buffered"].add(ticket)
        elif move == "drop" and out + waiting:
            ticket = (out + waiting)[which % len(out + waiting)]
            buffer.drop(ticket, "reason")
            state["out"].discard(ticket)
            state["buffered"].discard(ticket)
            state["dropped"].add(ticket)
        elif move == "take" and which:
            still_open = sorted(state["out"] | state["buffered"])[:which]
            if len(still_open) == which and set(still_open) <= state["buffered"]:
                assert taken(buffer, which) == still_open
                state["buffered"] -= set(still_open)
                state["trained"] += still_open
            else:
                with pytest.raises(TimeoutError):
                    buffer.take(which, 0)
        elif move == "restart":
            snapshot = buffer.snapshot()
            assert snapshot.ledger.out == tuple(out)
            buffer = make_buffer(deadline=0.0)
            buffer.restore(snapshot)
        stats = buffer.stats()
        assert (stats.drawn, stats.out, stats.buffered, stats.trained, stats.dropped) == (
            drawn,
            len(state["out"]),
            len(state["buffered"]),
            len(state["trained"]),
            len(state["dropped"]),
        )
    assert state["trained"] == sorted(set(state["trained"]))


def test_a_snapshot_holds_what_is_behind_the_trained_frontier():
    buffer = filled(range(6))
    buffer.draw(range(6, 9))
    buffer.put(make_group(7))
    buffer.take(4, 0)
    buffer.draw(range(9, 10))
    buffer.put(make_group(9))
    buffer.put(make_group(8))
    snapshot = buffer.snapshot()
    assert snapshot.ledger.out == (6,)
    assert [group.ticket for group in snapshot.groups] == [4, 5, 7, 8, 9]
    assert snapshot.ledger.buffered == (4, 5, 7, 8, 9)
    assert (snapshot.ledger.next_ticket, snapshot.ledger.trained, snapshot.ledger.dropped) == (10, 4, {})
    assert snapshot.entry.trained == (0, 1, 2, 3)


def test_a_buffer_in_use_is_not_restored_over():
    buffer = filled(range(1))
    with pytest.raises(ValueError, match="expected a buffer that is new, got one that drew 1"):
        buffer.restore(buffer.snapshot())


def test_producers_and_a_consumer_lose_nothing():
    buffer = make_buffer(deadline=20)
    count = 200
    buffer.draw(range(count))
    order = np.random.default_rng(0).permutation(count)
    threads = [
        threading.Thread(target=lambda part=part: [buffer.put(make_group(int(t))) for t in part])
        for part in np.array_split(order, 4)
    ]
    for thread in threads:
        thread.start()
    seen = [ticket for _ in range(count // 8) for ticket in taken(buffer, 8)]
    for thread in threads:
        thread.join()
    assert seen == list(range(count))
