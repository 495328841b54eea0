import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.rollouts import make_group
from train.staleness import BoundedSchedule
from train.stream_buffer import StreamBuffer, StreamSettings, Ticket


def make_buffer(*, max_lag=1, groups=2, steps=100, minibatches=1, deadline=5.0, served: int | None = 0, **policies):
    schedule = BoundedSchedule(
        max_lag=max_lag, publish_every=minibatches, steps=steps, groups_per_step=groups, minibatches=minibatches
    )
    buffer = StreamBuffer(schedule, StreamSettings(**policies), deadline=deadline)
    if served is not None:
        buffer.serve(served)
    return buffer


def admitted(buffer):
    """Everything that may be sampled now."""
    found = []
    while buffer._again or buffer._capacity():
        found += buffer.next_tickets()
    return found


def numbers(groups):
    return [group.ticket for group in groups]


def test_nothing_is_admitted_before_a_version_serves():
    buffer = make_buffer(served=None)
    assert admitted(buffer) == []
    buffer.serve(0)
    assert admitted(buffer) == [Ticket(number, 0) for number in range(4)]  # (0 + 1 + 1) steps of 2


def test_a_newer_version_and_nothing_else_makes_room():
    buffer = make_buffer()
    for ticket in admitted(buffer):
        buffer.put(make_group(ticket.number))
    buffer.take(2, 0)
    assert admitted(buffer) == []
    buffer.serve(1)
    assert [ticket.number for ticket in admitted(buffer)] == [4, 5]
    buffer.serve(0)  # what serves never goes back
    assert admitted(buffer) == []


def test_no_more_is_sampled_than_the_run_trains_on():
    buffer = make_buffer(max_lag=50, steps=3)
    assert len(admitted(buffer)) == 6


def test_a_dropped_prompt_makes_room_for_another():
    buffer = make_buffer(zero_std="drop", resample_rounds=1)
    admitted(buffer)
    buffer.put(make_group(0, rewards=[1.0, 1.0]))
    assert admitted(buffer) == [Ticket(4, 0)]
    assert buffer.stats().metrics()["dropped/zero_std"] == 1.0
    buffer.put(make_group(1, rewards=[0.0, 0.0]))
    buffer.put(make_group(2, rewards=[0.0, 0.0]))  # the one round of 2 is used up
    assert buffer.stats().buffered == 1
    buffer.put(make_group(3))
    assert numbers(buffer.take(2, 0)) == [2, 3]


def test_the_oldest_groups_are_taken_first_and_a_straggler_keeps_nobody_waiting():
    buffer = make_buffer(max_lag=3)
    admitted(buffer)
    buffer.serve(1)
    for ticket, version in ((2, 1), (5, 0), (3, 0), (1, 1)):
        buffer.put(make_group(ticket, version=version))
    assert numbers(buffer.take(2, 1)) == [3, 5]
    assert numbers(buffer.take(2, 1)) == [1, 2]
    assert buffer.stats().out == 4


def test_what_is_too_old_when_it_arrives_is_sampled_again_with_another_attempt():
    buffer = make_buffer(max_lag=1)
    admitted(buffer)
    for ticket in (0, 1):
        buffer.put(make_group(ticket))
    buffer.take(2, 0)
    for version, pair in ((1, (4, 5)), (2, (6, 7))):
        buffer.serve(version)
        for ticket in admitted(buffer):
            assert ticket.number in pair
            buffer.put(make_group(ticket.number, version=version))
        if version == 1:
            assert numbers(buffer.take(2, 1)) == [4, 5]
    buffer.put(make_group(2, version=0))  # version 2 is the next to use it
    assert admitted(buffer) == [Ticket(2, 1)]
    assert buffer.stats().reissued == 1
    assert buffer.entry().reissued == ((2, 1, "too_old"),)


def test_what_has_grown_too_old_in_the_buffer_is_not_trained_on():
    buffer = make_buffer(max_lag=1)
    admitted(buffer)
    for ticket, version in ((0, 0), (1, 2), (2, 2)):
        buffer.put(make_group(ticket, version=version))
    assert numbers(buffer.take(2, 2)) == [1, 2]
    assert admitted(buffer)[0] == Ticket(0, 1)


def test_the_age_of_a_group_is_its_oldest_tokens_unless_old_tokens_are_masked():
    mixed = make_group(0, version=3)
    first = dataclasses.replace(mixed.completions[0], version=np.array([0, 3], np.int32))
    mixed = dataclasses.replace(mixed, completions=(first, *mixed.completions[1:]))
    for policy, kept in (("reissue", 0), ("mask", 1)):
        buffer = make_buffer(max_lag=2, groups=1, too_old=policy, served=1)
        admitted(buffer)
        buffer.put(make_group(1, version=1))
        buffer.put(make_group(2, version=3))
        buffer.take(1, 3)
        buffer.put(mixed)
        assert sum(group.ticket == 0 for group in buffer.snapshot().groups) == kept


def test_the_second_minibatch_of_a_batch_counts_its_own_lag():
    buffer = make_buffer(max_lag=1, groups=1, minibatches=2)
    admitted(buffer)
    buffer.serve(2)
    for ticket, version in ((0, 0), (1, 0)):
        buffer.put(make_group(ticket, version=version))
    for ticket in admitted(buffer)[:1]:
        buffer.put(make_group(ticket.number, version=1))
    # At version 1, the first may be of version 0 and the second, trained on at version 2, may not.
    assert numbers(buffer.take(2, 1)) == [0, 2]
    assert buffer.stats().reissued == 1


def test_a_token_of_the_future_is_an_error():
    buffer = make_buffer()
    admitted(buffer)
    buffer.put(make_group(0, version=1))
    buffer.put(make_group(1))
    with pytest.raises(ValueError, match=r"group t0: expected tokens of at most version 0, got one of 1"):
        buffer.take(2, 0)
    assert buffer.stats().trained == 0


def test_a_prompt_is_given_up_after_its_last_attempt():
    buffer = make_buffer(attempts=2)
    admitted(buffer)
    assert buffer.late(1)
    assert admitted(buffer) == [Ticket(1, 1)]
    assert not buffer.late(1)
    stats = buffer.stats()
    assert (stats.dropped, stats.reasons, stats.reissued) == (1, {"late": 1}, 1)
    with pytest.raises(ValueError, match=r"late t1: .* trained or dropped already"):
        buffer.late(1)


def test_take_says_what_it_waits_for():
    buffer = make_buffer(deadline=0.1)
    admitted(buffer)
    buffer.put(make_group(0))
    with pytest.raises(TimeoutError) as caught:
        buffer.take(2, 0)
    assert str(caught.value) == (
        "2 groups of step 0: expected them within 0.1 s of the last completion, got 1; 3 prompts are out, version 0 "
        "serves, 0 more may be admitted; engines: not asked; look there, or raise rollout.deadline"
    )


def test_a_sampler_waits_for_room_and_ends_when_the_buffer_is_closed():
    buffer = make_buffer()
    admitted(buffer)
    found = []
    threads = [threading.Thread(target=lambda: found.append(buffer.next_tickets())) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert found == []
    buffer.serve(1)
    end = time.monotonic() + 30
    while len(found) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert {ticket.number for tickets in found for ticket in tickets} == {4, 5}
    buffer.close()
    for thread in threads:
        thread.join(30)
    assert found[2] == []


def test_a_sampler_takes_new_prompts_together_and_one_that_was_sampled_before_alone():
    buffer = make_buffer(groups=3, together=4)
    assert [ticket.number for ticket in buffer.next_tickets()] == [0, 1, 2, 3]
    buffer.late(2)
    buffer.late(0)
    assert [(ticket.number, ticket.attempt) for ticket in buffer.next_tickets()] == [(2, 1)]
    assert [(ticket.number, ticket.attempt) for ticket in buffer.next_tickets()] == [(0, 1)]
    assert [ticket.number for ticket in buffer.next_tickets()] == [4, 5]
    restored = make_buffer(groups=3, together=4)
    restored.restore(buffer.snapshot())
    assert [ticket.number for ticket in restored.next_tickets()] == [0]
    assert [ticket.number for ticket in restored.next_tickets()] == [1]
    assert [ticket.number for ticket in restored.next_tickets()] == [2]
    assert [ticket.number for ticket in restored.next_tickets()] == [3, 4, 5]


def test_each_sampler_that_finds_more_than_it_takes_wakes_another():
    buffer = make_buffer(groups=4, together=2, served=None)
    found = []
    threads = [threading.Thread(target=lambda: found.append(buffer.next_tickets())) for _ in range(4)]
    for thread in threads:
        thread.start()
    buffer.serve(0)
    for thread in threads:
        thread.join(30)
    assert sorted(ticket.number for tickets in found for ticket in tickets) == list(range(8))


def test_a_restored_buffer_gives_out_again_what_was_out():
    buffer = make_buffer()
    admitted(buffer)
    buffer.put(make_group(1))
    buffer.late(2)
    snapshot = buffer.snapshot()
    again = make_buffer(served=None)
    again.restore(snapshot)
    assert admitted(again) == [Ticket(0, 0), Ticket(2, 1), Ticket(3, 0)]
    again.serve(0)
    assert admitted(again) == []
    again.put(make_group(0))
    assert numbers(again.take(2, 0)) == [0, 1]


moves = st.lists(
    st.tuples(st.sampled_from(["sample", "put", "put", "late", "step", "publish", "restart"]), st.integers(0, 7)),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(moves=moves, max_lag=st.integers(0, 3), policy=st.sampled_from(["reissue", "mask"]))
def test_no_token_is_ever_older_than_allowed_and_no_prompt_is_trained_on_twice(moves, max_lag, policy):
    def fresh():
        return make_buffer(max_lag=max_lag, deadline=0.0, served=None, too_old=policy, zero_std="drop", attempts=3)

    buffer = fresh()
    buffer.serve(0)
    version = served = 0
    running: dict[int, int] = {}  # ticket -> version that samples it
    trained: list[int] = []
    for move, which in moves:
        if move == "sample" and (buffer._again or buffer._capacity()):
            running.update({ticket.number: served for ticket in buffer.next_tickets()})
        elif move == "put" and running:
            ticket = sorted(running)[which % len(running)]
            rewards = [1.0, 1.0] if which == 7 else None
            buffer.put(make_group(ticket, version=running.pop(ticket), rewards=rewards))
        elif move == "late" and running:
            ticket = sorted(running)[which % len(running)]
            del running[ticket]
            buffer.late(ticket)
        elif move == "publish":
            served = version
            buffer.serve(served)
        elif move == "step" and buffer.ready(2):
            try:
                groups = buffer.take(2, version)
            except TimeoutError:  # what was there was too old
                continue
            newest = policy == "mask"
            assert all(version - (g.newest_version if newest else g.oldest_version) <= max_lag for g in groups)
            trained += numbers(groups)
            version += 1
        elif move == "restart":
            snapshot, buffer, running = buffer.snapshot(), fresh(), {}
            buffer.restore(snapshot)
            served = version
            buffer.serve(served)
        stats = buffer.stats()  # checks the ledger
        assert stats.trained == len(trained) == len(set(trained))
        # What is admitted fits into the steps that the version that serves may still feed.
        assert stats.buffered + stats.out + stats.trained <= (served + max_lag + 1) * 2


@pytest.mark.parametrize("together", [1, 3, 8])
def test_many_samplers_and_a_trainer_lose_nothing(together):
    buffer = make_buffer(max_lag=2, groups=4, steps=30, deadline=20, together=together)
    chance = np.random.default_rng(0)
    waits = chance.uniform(0, 0.002, 1000)

    def sampler():
        while tickets := buffer.next_tickets():
            version = buffer.served
            assert version is not None
            for ticket in tickets:
                time.sleep(waits[ticket.number])
                if ticket.number % 7 == 3 and ticket.attempt == 0:
                    buffer.late(ticket.number)
                else:
                    buffer.put(make_group(ticket.number, version=version))

    threads = [threading.Thread(target=sampler) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen = []
    for version in range(30):
        seen += numbers(buffer.take(4, version))
        buffer.stats()
        buffer.serve(version + 1)
    buffer.close()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == list(range(120))
