"""Requests that share a call: each answered as if it had one of its own, and what fails one costs the others little."""

import collections
import dataclasses
import threading
from concurrent import futures

import numpy as np
import pytest

from rollout_bridge import Busy, Client, Fatal, Fleet, FleetOptions, InFlight, Retryable, ServerOptions, sampling
from rollout_bridge.dispatch import most_together
from rollout_bridge.endpoint import State
from rollout_bridge.engines.fake import FakeEngine, Fault
from tests.rollout_bridge.fleets import QUICK, keys, of, publish, same, wanted
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually


class AtOnce(FakeEngine):
    """Takes all requests of a call by one thread; keeps how many it was given."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.taken = []

    def sample_ready(self, requests, cancelled):
        self.taken.append(len(requests))
        yield from zip(*(self.sample(request, cancelled) for request in requests), strict=True)


@pytest.fixture
def calls(monkeypatch):
    """Ids of the requests of every call, in the order in which the calls began."""
    found, lock, sample_all = [], threading.Lock(), Client.sample_all

    def watched(self, requests, model):
        with lock:
            found.append([request.request_id for request in requests])
        return sample_all(self, requests, model)

    monkeypatch.setattr(Client, "sample_all", watched)
    return found


@pytest.mark.parametrize("kind", [FakeEngine, AtOnce])
def test_the_requests_of_a_call_are_each_answered_as_by_one_of_its_own(kind, model, start, connect, requests):
    engine = kind(model, version=1)
    with connect(start(engine)).sample_all(requests, model) as stream:
        completions = list(stream)
    assert keys(completions) == wanted(requests)
    for completion in completions:
        alone = FakeEngine(model, version=1).sample(of(requests, completion), threading.Event())
        assert same(completion, next(c for c in alone if c.member == completion.member))
    assert engine.status().running == 0


def test_what_is_finished_together_travels_together_whatever_its_request(model, start, connect, make_request):
    engine = AtOnce(model, version=1)
    requests = [make_request(f"t{i}", seed=i, stop=()) for i in range(3)]
    with connect(start(engine)).sample_all(requests, model) as stream:
        assert [next(stream).request_id, stream.pending] == ["t0", 2]
        assert len(list(stream)) == 5
    assert engine.taken == [3]


def test_a_request_that_fails_ends_its_call_and_the_others_at_the_engine(model, start, connect, make_request):
    engine = FakeEngine(model, version=1, seconds_per_token=0.02)
    engine.inject(Fault.REFUSE)
    requests = [make_request(f"t{i}", length=100, stop=()) for i in range(4)]
    with (
        connect(start(engine)).sample_all(requests, model) as stream,
        pytest.raises(Retryable, match=r"Sample of 't0' and 3 more.*told to refuse"),
    ):
        list(stream)
    eventually(lambda: engine.status().running == engine.status().waiting == 0)


def test_what_fails_one_request_of_a_call_cancels_the_others(model, make_request):
    engine, cancelled = FakeEngine(model, version=1, seconds_per_token=0.02), threading.Event()
    engine.inject(Fault.REFUSE)
    requests = [make_request(f"t{i}", length=100, stop=()) for i in range(2)]
    with futures.ThreadPoolExecutor(2) as threads, pytest.raises(Retryable, match="told to refuse"):
        list(sampling.sampled(engine, requests, cancelled, threads))
    assert cancelled.is_set()


class Stopping(futures.ThreadPoolExecutor):
    """Takes one request, and is shut down then, as by a server that stops."""

    def submit(self, *arguments, **options):
        accepted = super().submit(*arguments, **options)
        self.shutdown(wait=False)
        return accepted


def test_a_call_that_meets_a_stop_of_the_server_may_be_made_again_and_leaves_nothing_behind(model, make_request):
    engine, cancelled = FakeEngine(model, version=1, seconds_per_token=0.02), threading.Event()
    requests = [make_request(f"t{i}", length=100, stop=()) for i in range(2)]
    with Stopping(2) as threads, pytest.raises(Retryable, match=r"expected an engine that takes requests, got: cannot"):
        list(sampling.sampled(engine, requests, cancelled, threads))
    assert cancelled.is_set()
    eventually(lambda: engine.status().running == 0)


def test_a_client_that_leaves_ends_every_request_of_its_call(model, start, connect, make_request):
    engine = FakeEngine(model, version=1, seconds_per_token=0.05)
    client = connect(start(engine))
    requests = [make_request(f"t{i}", length=100, stop=()) for i in range(3)]
    with client.sample_all(requests, model):
        eventually(lambda: engine.status().running == 3)
    eventually(lambda: engine.status().running == 0)


def test_a_call_has_as_many_places_as_requests_or_none(model, start, connect, make_request):
    engine = Standing(model, version=1)
    client = connect(start(engine, options=ServerOptions(max_samples=3)))
    requests = [make_request(f"t{i}") for i in range(4)]
    with pytest.raises(Busy, match="at most 3 requests at once, got 4 beside 0; try again"):
        next(client.sample_all(requests, model))
    with client.sample_all(requests[:2], model) as stream:
        eventually(lambda: engine.standing == 2)
        with pytest.raises(Busy, match="at most 3 requests at once, got 2 beside 2; try again"):
            next(client.sample_all(requests[2:], model))
        engine.go.set()
        assert len(list(client.sample(requests[2], model))) == 2
        assert len(list(stream)) == 4
    assert len(list(client.sample_all(requests[:3], model))) == 6


def test_bad_requests_of_a_call_are_refused_before_the_engine_sees_one(serving, connect, make_request, model):
    engine, server = serving
    client, lenient = connect(server), dataclasses.replace(model, vocab_size=10_000)
    with pytest.raises(Fatal, match=r"request 't1': prompt tokens: expected ids in \[0, 32\), got 77"):
        list(client.sample_all([make_request("t0"), make_request("t1", prompt=(77,))], lenient))
    with pytest.raises(Fatal, match=r"expected others with other ids together with it, got \['t0', 't0'\]"):
        list(client.sample_all([make_request("t0"), make_request("t0")], model))
    assert engine.status().waiting == engine.status().running == 0


def test_a_completion_that_none_of_the_requests_asked_for_is_fatal(model, start, connect, make_request):
    class Wrong(AtOnce):
        def sample_ready(self, requests, cancelled):
            for ready in super().sample_ready(requests, cancelled):
                yield [dataclasses.replace(completion, request_id="t9") for completion in ready]

    with (
        connect(start(Wrong(model, version=1))).sample_all([make_request("t0"), make_request("t1")], model) as stream,
        pytest.raises(Fatal, match="t9"),
    ):
        list(stream)


@pytest.mark.parametrize(
    ("members", "max_new_tokens", "expected"), [(8, 4, 8), (8, 64, 8), (8, 128, 4), (8, 300, 1), (16, 32768, 1)]
)
def test_only_short_completions_share_a_call(members, max_new_tokens, expected):
    assert most_together(members, max_new_tokens) == expected


def test_a_fleet_lets_no_engine_wait_while_another_has_two(model, start, gather, requests, calls):
    engines = [FakeEngine(model, version=1) for _ in range(3)]
    fleet = gather(*map(start, engines))
    eventually(lambda: all(s.state is State.READY for s in fleet.status().values()))
    assert keys(fleet.sample(requests)) == wanted(requests)
    assert sorted(map(len, calls)) == [4, 4, 4]
    calls.clear()
    assert keys(fleet.sample(requests[:2])) == wanted(requests[:2])
    assert sorted(map(len, calls)) == [1, 1]


def test_no_call_is_larger_than_an_engine_may_be_asked_at_once(model, start, gather, requests, calls):
    fleet = gather(start(FakeEngine(model, version=1)), max_streams=3)
    assert keys(fleet.sample(requests)) == wanted(requests)
    assert sorted(map(len, calls)) == [3, 3, 3, 3]


def test_an_engine_that_takes_fewer_at_once_than_a_call_has_is_asked_for_each_alone(
    model, start, gather, requests, calls
):
    fleet = gather(start(FakeEngine(model, version=1), options=ServerOptions(max_samples=2)))
    assert keys(fleet.sample(requests[:6])) == wanted(requests[:6])
    assert len(calls[0]) == 6
    assert all(len(call) == 1 for call in calls[1:])


def test_long_and_short_requests_do_not_mix(model, start, gather, make_request, calls):
    short = [make_request(f"s{i}", length=4) for i in range(4)]
    long = make_request("long", members=tuple(range(60)), length=100)
    fleet = gather(start(FakeEngine(model, version=1)))
    assert keys(fleet.sample([*short[:2], long, *short[2:]])) == wanted([*short, long])
    assert collections.Counter(map(len, calls)) == {2: 2, 1: 1}


def test_after_a_failure_each_request_is_asked_for_alone_and_only_what_it_lacks(
    model, start, gather, make_request, calls
):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.DROP)
    requests = [make_request(f"t{i}", members=(0, 1, 2), seed=i) for i in range(6)]
    fleet = gather(start(engine))
    completions = list(fleet.sample(requests))
    assert keys(completions) == wanted(requests)
    assert len(calls[0]) == 6
    again = calls[1:]
    assert all(len(call) == 1 for call in again)
    assert len(again) == len({name for (name,) in again})
    assert fleet.counts()["reissued"] > 0


def test_a_request_that_always_fails_takes_no_other_down(model, start, make_request):
    alone, others = threading.Event(), threading.Event()

    class Poisoned(FakeEngine):
        def sample(self, request, cancelled):
            if request.request_id == "t2":
                if alone.is_set():
                    assert others.wait(30)
                alone.set()
                raise Retryable("sample: not this one")
            yield from super().sample(request, cancelled)

    requests = [make_request(f"t{i}", seed=i) for i in range(6)]
    options = FleetOptions(client=QUICK, progress_seconds=20, max_failures=3)
    with Fleet([start(Poisoned(model, version=1)).address], options=options) as fleet:
        fleet.wait_ready(30.0)
        found = []
        with pytest.raises(Retryable, match=r"sample of 't2': expected members \[0, 1\] within 3 repetitions"):
            for completion in fleet.sample(requests):
                found.append(completion)
                if len(found) == 10:
                    others.set()
    assert keys(found) == wanted([request for request in requests if request.request_id != "t2"])


def test_a_commit_that_aborts_meets_every_request_of_a_call(model, start, gather, make_request):
    engine = Standing(model)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    requests = [make_request(f"t{i}", members=(0,), length=8, stop=(), seed=i) for i in range(4)]
    found = []
    thread = threading.Thread(target=lambda: found.extend(fleet.sample(requests)))
    thread.start()
    eventually(lambda: engine.standing == 4)
    publish(fleet, model, 2, InFlight.ABORT)
    thread.join(60)
    assert keys(found) == wanted(requests)
    for completion in found:
        assert set(np.unique(completion.version)) == {1, 2}
