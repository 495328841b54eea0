import dataclasses
import threading
import time

import numpy as np
import pytest

from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import Finish
from tests.train.test_collect import DATA, SETTINGS, TOKENIZER, FakeFleet
from train.rewards import exact_match
from train.seeds import derive_seed
from train.staleness import BoundedSchedule
from train.stream import StreamCollector, Task
from train.stream_buffer import StreamBuffer, StreamSettings


class GivesUp(FakeFleet):
    """Ends its call at the second member of prompt 1, which comes when it is asked for again."""

    def sample(self, requests):
        for completion in super().sample(requests):
            if completion.request_id == "t1" and completion.member == 1:
                raise Retryable("no completion for 4 s")
            yield completion


@pytest.fixture
def stream():
    """Makes collectors over a fleet, serving version 0; closes them afterwards."""
    made = []

    def start(
        fleet, *, samplers=3, request_deadline=5.0, attempts=8, max_lag=1, together=1, verifier=exact_match, **settings
    ):
        schedule = BoundedSchedule(max_lag=max_lag, publish_every=1, steps=20, groups_per_step=2)
        buffer = StreamBuffer(schedule, StreamSettings(attempts=attempts, together=together), deadline=5.0)
        task = Task(
            data=DATA,
            tokenizer=TOKENIZER,
            verifier=verifier,
            settings=dataclasses.replace(SETTINGS, **settings),
            request_deadline=request_deadline,
            samplers=samplers,
        )
        collector = StreamCollector(fleet, task, buffer)
        made.append(collector)
        buffer.serve(0)
        return collector, buffer

    yield start
    for collector in made:
        collector.close()


def until(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_prompts_stream_in_as_scored_groups_while_there_is_room(stream):
    fleet = FakeFleet()
    collector, buffer = stream(fleet)
    until(lambda: buffer.stats().buffered == 4)
    assert len(fleet.requests) == 4
    groups = buffer.take(2, 0)
    for group in groups:
        assert group.prompt_tokens.tolist() == DATA[group.ticket].tokens.tolist()
        assert group.reward_M.tolist() == [1.0, 0.0]
        assert [completion.member for completion in group.completions] == [0, 1]
    buffer.serve(1)
    until(lambda: len(fleet.requests) == 6)
    assert len(collector.samples()) == 3
    # Which sampler reaches the fleet first is the scheduler's choice.
    asked = sorted((r.request_id, r.members, r.sampling.seed) for r in fleet.requests)
    assert asked == [(f"t{i}", (0, 1), derive_seed(7, "sample", i)) for i in range(6)]


def test_members_that_are_there_are_kept_when_the_fleet_gives_a_request_up(stream):
    fleet = GivesUp()
    _, buffer = stream(fleet)
    until(lambda: buffer.stats().buffered == 4)
    asked = [(r.request_id, r.members) for r in fleet.requests if r.request_id.startswith("t1")]
    assert asked == [("t1", (0, 1)), ("t1-1", (1,))]
    (again,) = [r for r in fleet.requests if r.request_id == "t1-1"]
    assert again.sampling.seed == derive_seed(7, "sample", 1, 1)
    assert buffer.stats().reissued == 1
    (group,) = [group for group in buffer.take(4, 0) if group.ticket == 1]
    assert [completion.request_id for completion in group.completions] == ["t1", "t1-1"]
    assert group.reward_M.tolist() == [1.0, 0.0]


def test_a_request_beyond_its_deadline_is_cut_short_and_its_stream_closed(stream):
    closed = threading.Event()

    class Slow(FakeFleet):
        def sample(self, requests):
            try:
                for completion in super().sample(requests):
                    yield completion
                    if requests[0].request_id == "t0":
                        time.sleep(0.02)
            finally:
                if requests[0].request_id == "t0":
                    closed.set()

    fleet = Slow()
    _, buffer = stream(fleet, request_deadline=0.01, group_size=4)
    until(lambda: buffer.stats().buffered == 4)
    assert closed.is_set()
    assert buffer.stats().reissued >= 1
    assert {group.ticket for group in buffer.take(4, 0)} == {0, 1, 2, 3}
    members = [r.members for r in fleet.requests if r.request_id.startswith("t0")]
    assert members[0] == (0, 1, 2, 3)
    assert members[1][0] > 0


def test_prompts_that_may_be_sampled_together_are_asked_for_by_one_call(stream):
    fleet = FakeFleet(shuffle=True)
    _, buffer = stream(fleet, together=4, samplers=1)
    until(lambda: buffer.stats().buffered == 4)
    assert fleet.calls == 1
    for group in buffer.take(4, 0):
        assert group.prompt_tokens.tolist() == DATA[group.ticket].tokens.tolist()
        assert group.reward_M.tolist() == [1.0, 0.0]


def test_what_one_prompt_lacks_costs_those_of_its_call_nothing_that_they_have(stream):
    fleet = GivesUp()
    _, buffer = stream(fleet, together=4, samplers=1)
    until(lambda: buffer.stats().buffered == 4)
    asked = [(r.request_id, r.members) for r in fleet.requests]
    assert asked[:4] == [(f"t{i}", (0, 1)) for i in range(4)]
    assert asked[4:] == [("t1-1", (1,)), ("t2-1", (0, 1)), ("t3-1", (0, 1))]
    assert fleet.calls == 4  # what failed once is asked for by itself
    assert buffer.stats().reissued == 3


def test_a_verifier_that_takes_its_time_holds_up_no_other_prompt_of_the_call(stream):
    gate = threading.Event()

    class Slow:
        def __call__(self, attempt):
            if attempt.ticket == 0:
                assert gate.wait(30)
            return exact_match(attempt)

    fleet = FakeFleet()
    _, buffer = stream(fleet, together=4, samplers=1, verifier=Slow(), scorers=8)
    until(lambda: buffer.stats().buffered == 3)
    assert {group.ticket for group in buffer.take(2, 0)} <= {1, 2, 3}
    gate.set()
    until(lambda: buffer.stats().buffered == 2)


def test_one_scorer_is_enough_for_the_rewards_of_many_groups(stream):
    received = threading.Event()

    class Whole(FakeFleet):
        def sample(self, requests):
            yield from super().sample(requests)
            received.set()

    class Late:
        def __call__(self, attempt):
            assert received.wait(30)
            return exact_match(attempt)

    _, buffer = stream(Whole(), together=4, samplers=1, verifier=Late(), scorers=1)
    until(lambda: buffer.stats().buffered == 4)


def test_a_verifier_that_breaks_late_stops_the_run(stream):
    gate = threading.Event()

    class Broken:
        def __call__(self, attempt):
            assert gate.wait(30)
            raise ArithmeticError("no verdict")

    _, buffer = stream(FakeFleet(), together=4, samplers=1, verifier=Broken(), scorers=8)
    gate.set()
    with pytest.raises(ArithmeticError, match="no verdict"):
        buffer.take(2, 0)


def test_a_prompt_that_never_comes_is_dropped_with_its_reason_and_replaced(stream):
    class Deaf(FakeFleet):
        def sample(self, requests):
            if requests[0].request_id.split("-")[0] == "t1":
                raise Retryable("no completion")
            yield from super().sample(requests)

    _, buffer = stream(Deaf(), attempts=3)
    until(lambda: buffer.stats().buffered == 4)
    stats = buffer.stats()
    assert (stats.reasons, stats.reissued, stats.drawn) == ({"late": 1}, 2, 5)


@pytest.mark.parametrize("error", [Fatal("the probe"), KeyError("defect")])
def test_what_no_repetition_cures_is_raised_where_it_is_waited_for(stream, error):
    class Broken:
        def sample(self, requests):
            raise error
            yield

    _, buffer = stream(Broken())
    with pytest.raises(type(error)):
        buffer.take(2, 0)


def test_a_completion_that_is_not_whole_stops_the_run(stream):
    spoil = FakeFleet(change=lambda c: dataclasses.replace(c, finish=Finish.ABORT))
    _, buffer = stream(spoil)
    with pytest.raises(ValueError, match=r"completion t\d/0 .*expected a whole completion, got .* ended by abort"):
        buffer.take(2, 0)


def test_tokens_keep_the_versions_that_they_were_sampled_by(stream):
    def mixed(completion):
        versions = np.zeros(len(completion.tokens), np.int32)
        versions[-1] = 1
        return dataclasses.replace(completion, version=versions)

    _, buffer = stream(FakeFleet(change=mixed))
    groups = buffer.take(2, 1)
    assert {(group.oldest_version, group.newest_version) for group in groups} == {(0, 1)}


def test_a_fleet_that_blocks_is_named_when_closing():
    release = threading.Event()

    class Stuck:
        def sample(self, requests):
            release.wait(10)
            yield from ()

    buffer = StreamBuffer(
        BoundedSchedule(max_lag=0, publish_every=1, steps=1, groups_per_step=1), StreamSettings(), deadline=5.0
    )
    task = Task(
        data=DATA, tokenizer=TOKENIZER, verifier=exact_match, settings=SETTINGS, request_deadline=5.0, samplers=1
    )
    collector = StreamCollector(Stuck(), task, buffer)
    buffer.serve(0)
    until(lambda: buffer.stats().out == 1)
    with pytest.raises(TimeoutError, match=r"end within 0\.1 s, got 1 that the fleet still blocks \(sampler-0\)"):
        collector.close(0.1)
    release.set()
    collector.close(5.0)
