import types

import pytest

from tests.reference.rollouts import make_group
from train.flow import BatchWise, Bounded
from train.share import Share
from train.staleness import BoundedSchedule, Schedule
from train.stream_buffer import StreamBuffer, StreamSettings


def bounded(max_lag=2):
    schedule = BoundedSchedule(max_lag=max_lag, publish_every=1, steps=9, groups_per_step=1)
    buffer = StreamBuffer(schedule, StreamSettings(), deadline=1.0)
    return Bounded(schedule, buffer, None), buffer  # pyright: ignore[reportArgumentType]


def test_a_push_may_wait_while_groups_are_there_and_what_serves_is_young():
    flow, buffer = bounded()
    assert flow.hurries(0)  # nothing serves yet
    flow.served(0)
    assert flow.hurries(1)  # no group for the next batch
    buffer.next_tickets()
    buffer.put(make_group(0))
    assert not flow.hurries(1)
    assert flow.hurries(2)  # what serves is max_lag behind
    flow.served(1)
    assert not flow.hurries(2)
    flow.settle(2)  # waits for nothing


def test_batch_wise_the_schedule_says_what_is_asked_for_and_when():
    asked, waited = [], []
    flow = BatchWise(
        Schedule(lag=2, steps=8, groups_per_step=3),
        types.SimpleNamespace(wait=waited.append),  # pyright: ignore[reportArgumentType]
        types.SimpleNamespace(request=lambda tickets, version: asked.append((tickets, version))),  # pyright: ignore
        Share(),
    )
    flow.served(2)
    flow.settle(2)
    assert asked == [(range(12, 18), 2)]
    assert waited == [range(12)]
    assert flow.hurries(2)


@pytest.mark.parametrize(("max_lag", "hurries"), [(0, True), (1, True), (2, False)])
def test_with_the_tightest_bounds_every_push_hurries_that_must(max_lag, hurries):
    flow, buffer = bounded(max_lag)
    flow.served(0)
    buffer.next_tickets()
    buffer.put(make_group(0))
    assert flow.hurries(1) is hurries
