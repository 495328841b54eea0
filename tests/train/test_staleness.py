import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.staleness import BoundedSchedule, Schedule, ScheduleConfig


def scaled(batches_of_lag, batches, groups_per_step, minibatches):
    return Schedule(
        lag=batches_of_lag * minibatches,
        steps=batches * minibatches,
        groups_per_step=groups_per_step,
        minibatches=minibatches,
    )


schedules = st.builds(
    scaled,
    batches_of_lag=st.integers(0, 9),
    batches=st.integers(1, 40),
    groups_per_step=st.integers(1, 5),
    minibatches=st.sampled_from([1, 1, 2, 3]),
)
laws = settings(max_examples=150, deadline=None)


def test_the_schedule_of_lag_4_worked_by_hand():
    plan = Schedule(lag=4, steps=14, groups_per_step=2)
    assert [plan.sampled_by(step) for step in range(14)] == [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [version for version in range(15) if plan.publishes(version)] == [0, 4, 8]
    assert plan.tickets_of_version(0) == range(0, 16)
    assert plan.tickets_of_version(4) == range(16, 24)
    assert plan.tickets_of_version(8) == range(24, 28)  # the tail: two steps of two groups
    assert plan.tickets_of_version(5) == range(0)
    assert plan.tickets_before_publish(4) == range(0, 16)
    assert plan.tickets_before_publish(8) == range(0, 24)
    assert plan.tickets_before_publish(0) == range(0)
    assert [version for version in range(15) if plan.is_edge(version)] == [0, 4, 8, 12, 14]
    assert (plan.max_lag, plan.window_steps) == (7, 4)


def test_lag_0_is_synchronous():
    plan = Schedule(lag=0, steps=3, groups_per_step=2)
    assert [plan.sampled_by(step) for step in range(3)] == [0, 1, 2]
    assert [plan.tickets_of_version(version) for version in range(4)] == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 6),
    ]
    assert [plan.publishes(version) for version in range(4)] == [True, True, True, False]
    assert all(plan.is_edge(version) for version in range(4))
    assert plan.max_lag == 0


def test_a_batch_of_two_minibatches_is_sampled_by_the_version_that_it_finds():
    plan = Schedule(lag=0, steps=4, groups_per_step=2, minibatches=2)
    assert [plan.sampled_by(step) for step in range(4)] == [0, 0, 2, 2]
    assert [plan.tickets_of_version(version) for version in (0, 1, 2)] == [range(0, 4), range(0), range(4, 8)]
    assert [plan.is_edge(version) for version in range(5)] == [True, False, True, False, True]
    assert plan.max_lag == 1


@pytest.mark.parametrize(("lag", "steps", "name"), [(3, 4, "lag"), (2, 5, "steps")])
def test_a_batch_is_never_cut_by_a_publication_or_the_end(lag, steps, name):
    with pytest.raises(
        ValueError,
        match=rf"{name}: expected a multiple of batch.minibatches = 2, .* got {lag if name == 'lag' else steps}",
    ):
        Schedule(lag=lag, steps=steps, groups_per_step=1, minibatches=2)


@laws
@given(plan=schedules)
def test_the_lag_of_every_step_is_n_to_2n_less_1_from_the_second_window_on(plan):
    for step in range(plan.steps):
        lag = step - plan.sampled_by(step)
        assert 0 <= lag <= plan.max_lag
        if plan.lag and step >= plan.lag:
            assert plan.lag <= lag <= 2 * plan.lag - 1
        if plan.lag and step < plan.lag:
            assert lag == step


@laws
@given(plan=schedules)
def test_every_ticket_is_sampled_once_by_the_version_of_its_step(plan):
    sampled = {}
    for version in range(plan.steps + 1):
        for ticket in plan.tickets_of_version(version):
            assert ticket not in sampled
            sampled[ticket] = version
    assert sorted(sampled) == list(range(plan.steps * plan.groups_per_step))
    for step in range(plan.steps):
        for ticket in plan.tickets_of_step(step):
            assert sampled[ticket] == plan.sampled_by(step)


@laws
@given(plan=schedules)
def test_published_versions_sample_their_tickets_in_order_and_are_edges(plan):
    published = [version for version in range(plan.steps + 1) if plan.publishes(version)]
    next_ticket = 0
    for version in published:
        assert plan.is_edge(version)
        assert plan.tickets_before_publish(version) == range(0, next_ticket)
        assert plan.tickets_of_version(version).start == next_ticket
        next_ticket = plan.tickets_of_version(version).stop
    assert published[0] == 0


@laws
@given(plan=schedules)
def test_a_step_never_needs_tickets_that_only_a_later_version_samples(plan):
    for step in range(plan.steps):
        assert plan.sampled_by(step) <= step
        live = [version for version in range(step + 1) if plan.publishes(version)]
        assert plan.tickets_of_step(step).stop <= plan.tickets_of_version(max(live)).stop


@laws
@given(plan=schedules, every=st.integers(1, 25))
def test_what_is_due_every_so_often_is_done_once_per_period_at_the_first_edge_in_it(plan, every):
    due = [version for version in range(1, plan.steps + 1) if plan.due(version, every)]
    edges = [version for version in range(1, plan.steps + 1) if plan.is_edge(version)]
    expected = []
    passed = 0  # multiples of `every` that have been served
    for edge in edges:
        if edge // every > passed:
            expected.append(edge)
            passed = edge // every
    assert due == expected


def test_nothing_is_due_when_every_is_0_or_before_the_first_step():
    plan = Schedule(lag=0, steps=5, groups_per_step=1)
    assert not any(plan.due(version, 0) for version in range(6))
    assert not plan.due(0, 1)


def test_a_negative_lag_is_refused():
    with pytest.raises(ValueError, match=r"schedule\.lag: expected at least 0, got -1"):
        ScheduleConfig(mode="batch_wise", lag=-1)
    with pytest.raises(ValueError, match=r"schedule\.lag: expected at least 0, got -1"):
        Schedule(lag=-1, steps=1, groups_per_step=1)


bounded = st.builds(
    lambda max_lag, every, minibatches, groups, batches: BoundedSchedule(
        max_lag=max_lag + every * minibatches - 1,
        publish_every=every * minibatches,
        steps=batches * minibatches,
        groups_per_step=groups,
        minibatches=minibatches,
    ),
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 20),
)


def test_the_bounded_schedule_by_hand():
    plan = BoundedSchedule(max_lag=2, publish_every=2, steps=9, groups_per_step=4)
    assert plan.capacity(served=0, accepted=0, running=0) == 12
    assert plan.capacity(served=0, accepted=5, running=3) == 4
    assert plan.capacity(served=4, accepted=20, running=8) == 0
    assert plan.capacity(served=8, accepted=30, running=0) == 6  # the run ends with step 9
    assert plan.capacity(served=0, accepted=20, running=0) == 0
    assert [version for version in range(10) if plan.publishes(version)] == [0, 2, 4, 6, 8]
    assert [version for version in range(10) if plan.due(version, 4)] == [4, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lag": 1, "publish_every": 3}, r"schedule\.max_lag: expected at least .* = 2, got 1"),
        ({"minibatches": 2, "publish_every": 3, "max_lag": 9}, "publish_every: expected a positive multiple of .* = 2"),
        ({"minibatches": 2, "publish_every": 2, "steps": 5}, "steps: expected a positive multiple"),
    ],
)
def test_a_bounded_schedule_that_would_stand_still_is_refused(changes, message):
    fields = {"max_lag": 4, "publish_every": 1, "steps": 6, "groups_per_step": 2}
    with pytest.raises(ValueError, match=message):
        BoundedSchedule(**(fields | changes))


@laws
@given(plan=bounded, served=st.integers(0, 30), position=st.integers(0, 400))
def test_an_admitted_prompt_is_young_enough_when_its_turn_comes(plan, served, position):
    if plan.capacity(served, position, 0) > 0:
        step = position // plan.groups_per_step
        assert step - served <= plan.max_lag
        assert step < plan.steps


@laws
@given(plan=bounded, batch=st.integers(0, 19))
def test_the_next_batch_can_always_be_sampled_however_long_ago_the_last_publication_was(plan, batch):
    version = batch * plan.minibatches
    if version >= plan.steps:
        return
    served = version // plan.publish_every * plan.publish_every  # the newest that is published
    trained = version * plan.groups_per_step
    assert plan.capacity(served, trained, 0) >= plan.batch_groups


@laws
@given(plan=bounded, every=st.integers(1, 9))
def test_what_is_due_in_bounded_mode_is_due_once_a_period_at_the_end_of_a_batch(plan, every):
    due = [version for version in range(plan.steps + 1) if plan.due(version, every)]
    assert all(plan.is_edge(version) for version in due)
    periods = [version // every for version in due]
    assert len(periods) == len(set(periods))
    edges = [version for version in range(1, plan.steps + 1) if plan.is_edge(version)]
    assert set(periods) == {edge // every for edge in edges} - {0}
