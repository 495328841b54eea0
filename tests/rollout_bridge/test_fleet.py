"""Many engines as one: each completion exactly once, and only from weights that were verified."""

import collections
import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_bridge import Fatal, Finish, Fleet, FleetOptions, InFlight, Retryable, serve
from rollout_bridge.checks import check_completion
from rollout_bridge.endpoint import State
from rollout_bridge.engines.fake import FakeEngine, Fault
from tests.rollout_bridge.fleets import QUICK, keys, publish, same, sampled, wanted
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually


def test_every_member_comes_exactly_once_and_is_what_one_engine_would_say(model, start, gather, requests):
    fleet = gather(*[start(FakeEngine(model)) for _ in range(3)])
    publish(fleet, model, 1)
    completions = list(fleet.sample(requests))
    assert keys(completions) == wanted(requests)
    for completion in completions:
        request = next(r for r in requests if r.request_id == completion.request_id)
        assert same(completion, sampled(model, 1, request)[completion.member])
    assert list(fleet.sample([])) == []


def test_a_group_stays_together_and_groups_go_to_the_least_loaded(model, start, gather, requests):
    engines = [FakeEngine(model, version=1, seconds_per_token=0.02) for _ in range(3)]
    fleet = gather(*map(start, engines))
    eventually(lambda: all(s.state is State.READY for s in fleet.status().values()))
    where = collections.defaultdict(set)
    for completion in fleet.sample(requests):
        where[completion.request_id].add(completion.engine_id)
    assert all(len(engine_ids) == 1 for engine_ids in where.values())
    assert collections.Counter(next(iter(e)) for e in where.values()) == {engine.engine_id: 4 for engine in engines}


FAULTS = [Fault.DUPLICATE, Fault.DROP, Fault.LOST, Fault.REFUSE]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 1)), min_size=1, max_size=12))
def test_no_mix_of_faults_loses_or_doubles_a_completion(model, make_request, faults):
    engines = [FakeEngine(model, version=1) for _ in range(2)]
    servers = [serve(engine, "127.0.0.1:0") for engine in engines]
    for fault, index in faults:
        engines[index].inject(fault)
    requests = [make_request(f"t{i}", members=(0, 1, 2), seed=i) for i in range(8)]
    with Fleet([s.address for s in servers], options=FleetOptions(client=QUICK, progress_seconds=20)) as fleet:
        fleet.wait_ready(30.0)
        completions = list(fleet.sample(requests))
    for server in servers:
        server.stop(0.0)
    assert keys(completions) == wanted(requests)
    for completion in completions:
        assert same(completion, _undisturbed(model, requests, completion))


def _undisturbed(model, requests, completion):
    request = next(r for r in requests if r.request_id == completion.request_id)
    engine = FakeEngine(model, version=1)
    return next(c for c in engine.sample(request, threading.Event()) if c.member == completion.member)


def test_duplicates_are_dropped_and_counted(model, start, gather, make_request):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.DUPLICATE, times=3)
    fleet = gather(start(engine))
    requests = [make_request(members=(0, 1, 2))]
    assert keys(fleet.sample(requests)) == wanted(requests)
    assert fleet.counts()["duplicates"] in (2, 3)  # nobody waits for what comes after the last member
    assert fleet.counts()["completions"] == 3


@pytest.mark.parametrize("fault", [Fault.NAN_LOGP, Fault.ZERO_ROUTES, Fault.UNKNOWN_TOKEN])
def test_a_broken_completion_stops_the_call_with_its_name(fault, model, start, gather, requests):
    engines = [FakeEngine(model, version=1), FakeEngine(model, version=1)]
    engines[0].inject(fault)
    engines[1].inject(fault)
    with pytest.raises(Fatal, match=r"t\d+/\d.* \(engine fake-\w+, versions 1 to 1\)"):
        list(gather(*map(start, engines)).sample(requests))


def test_a_version_that_was_never_committed_is_refused(model, start, gather, requests):
    engine = FakeEngine(model)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    assert len(list(fleet.sample(requests))) == 36
    engine.inject(Fault.WRONG_VERSION)
    with pytest.raises(
        Fatal, match=r"expected tokens and routes of verified versions \[1\], got \[1, 1001\] \(engine fake-"
    ):
        list(fleet.sample(requests))


def test_routes_of_a_version_that_was_never_committed_are_refused(model, start, gather, make_request):
    class Routing(FakeEngine):
        def sample(self, request, cancelled):
            for completion in super().sample(request, cancelled):
                assert completion.trace is not None
                rows = dataclasses.replace(completion.trace, version_T=completion.trace.version_T + 1)
                yield dataclasses.replace(completion, trace=rows)

    fleet = gather(start(Routing(model)))
    publish(fleet, model, 1)
    with pytest.raises(Fatal, match=r"verified versions \[1\], got \[1, 2\]"):
        list(fleet.sample([make_request()]))


def test_a_fleet_that_publishes_nothing_takes_the_versions_that_its_engines_verified(model, start, gather, requests):
    engine = FakeEngine(model, version=7)
    server = start(engine)
    watching, publishing = gather(server), gather(server)
    assert {int(v) for c in watching.sample(requests) for v in c.version} == {7}
    publish(publishing, model, 8)
    assert {int(v) for c in watching.sample(requests) for v in c.version} == {8}
    engine.inject(Fault.WRONG_VERSION)
    with pytest.raises(Fatal, match=r"verified versions \[7, 8\], got \[8, 1008\]"):
        list(watching.sample(requests))


def test_completions_of_another_instance_are_not_taken(model, start, gather, make_request):
    class Confused(FakeEngine):
        confused = 2

        def sample(self, request, cancelled):
            for completion in super().sample(request, cancelled):
                if self.confused:
                    self.confused -= 1
                    completion = dataclasses.replace(completion, engine_id="somebody-else")
                yield completion

    engine = Confused(model, version=1)
    fleet = gather(start(engine))
    (completion,) = fleet.sample([make_request(members=(0,))])
    assert completion.engine_id == engine.engine_id
    assert fleet.counts()["reissued"] == 2


def test_no_progress_is_an_error_that_says_what_it_waited_for(model, start, gather, requests):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.HANG, times=99)
    fleet = gather(start(engine), progress_seconds=1.5)
    with pytest.raises(Retryable) as caught:
        list(fleet.sample(requests))
    text = str(caught.value)
    assert "expected a completion within 1.5 s, got none; missing: t0/0, t0/1, t0/2, t1/0 and 32 more" in text
    assert f"ready: engine {engine.engine_id} serving at version 1" in text
    assert "36 members in flight" in text
    eventually(lambda: fleet.status()[next(iter(fleet.status()))].in_flight == 0)


def test_a_fleet_without_verified_weights_says_so(model, start, gather, requests):
    fleet = gather(start(FakeEngine(model)), progress_seconds=0.3)
    with pytest.raises(Retryable, match=r"behind \(serves no verified version, and nothing was published\)"):
        list(fleet.sample(requests))


def test_a_request_that_always_fails_is_given_up_after_a_bounded_number_of_tries(model, start, gather, make_request):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.REFUSE, times=99)
    fleet = gather(start(engine), max_failures=3)
    with pytest.raises(Retryable, match=r"expected members \[0, 1\] within 3 repetitions.*told to refuse"):
        list(fleet.sample([make_request()]))
    assert engine.struck[Fault.REFUSE] == 4


def test_members_that_never_come_and_empty_aborts_are_failures_too(model, start, gather, make_request):
    class Aborting(FakeEngine):
        calls = 0

        def sample(self, request, cancelled):
            self.calls += 1
            for completion in super().sample(request, cancelled):
                none = completion.tokens[:0]
                yield dataclasses.replace(
                    completion,
                    tokens=none,
                    behavior_logp=none.astype(np.float32),
                    version=none,
                    trace=None,
                    finish=Finish.ABORT,
                )

    losing, aborting = FakeEngine(model, version=1), Aborting(model, version=1)
    losing.inject(Fault.LOST, times=99)
    for engine in (losing, aborting):
        fleet = gather(start(engine), max_failures=3)
        with pytest.raises(Retryable, match=r"the stream ended without tokens of \{'t0': \[0\]\}"):
            list(fleet.sample([make_request(members=(0,))]))
    assert losing.struck[Fault.LOST] == aborting.calls == 4


def test_a_hung_request_is_asked_for_again_after_its_deadline(model, start, gather, make_request):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.HANG)
    fleet = gather(start(engine), client=dataclasses.replace(QUICK, sample_seconds=0.3))
    assert len(list(fleet.sample([make_request()]))) == 2


def test_bad_requests_are_refused_before_anything_is_sent(model, start, gather, make_request):
    fleet = gather(start(FakeEngine(model, version=1)))
    with pytest.raises(ValueError, match="expected distinct request ids"):
        fleet.sample([make_request(), make_request()])
    with pytest.raises(ValueError, match="at least one prompt token"):
        fleet.sample([make_request(prompt=())])


def test_whoever_stops_iterating_ends_what_runs(model, start, gather, requests):
    engine = FakeEngine(model, version=1, seconds_per_token=0.02)
    fleet = gather(start(engine))
    completions = fleet.sample(requests)
    next(completions)
    completions.close()
    eventually(lambda: engine.status().running == 0)
    assert len(list(fleet.sample(requests))) == 36


def test_closing_the_fleet_ends_a_call_that_waits(model, start, gather, requests):
    engine = FakeEngine(model, version=1)
    engine.inject(Fault.HANG, times=99)
    fleet = gather(start(engine))
    threading.Timer(0.3, fleet.close).start()
    with pytest.raises(Fatal, match="the fleet was closed"):
        list(fleet.sample(requests))
    with pytest.raises(Fatal, match="the fleet was closed"):
        list(fleet.sample(requests))


def test_a_paused_engine_gets_no_new_requests(model, start, gather, connect, requests):
    engines = [FakeEngine(model, version=1), FakeEngine(model, version=1)]
    servers = list(map(start, engines))
    fleet = gather(*servers)
    connect(servers[0]).pause(InFlight.FINISH)
    eventually(lambda: fleet.status()[servers[0].address].state is State.HELD)
    assert {c.engine_id for c in fleet.sample(requests)} == {engines[1].engine_id}
    connect(servers[0]).resume()
    eventually(lambda: fleet.status()[servers[0].address].state is State.READY)


# ------------------------------------------------------------------------------------------------ partial completions


def test_an_aborted_completion_is_continued_and_equals_the_undivided_one(model, start, gather, connect, make_request):
    engine = Standing(model, seconds_per_token=0.01)
    server = start(engine)
    fleet = gather(server)
    publish(fleet, model, 1)
    requests = [make_request(f"t{i}", members=(0, 1), length=40, stop=(), seed=i) for i in range(3)]
    whole = {r.request_id: sampled(model, 1, r) for r in requests}
    stop = threading.Event()

    def disturb():
        client = connect(server)
        eventually(lambda: engine.standing == 3)
        client.abort(None)
        while not stop.wait(0.12):
            client.abort(None)

    thread = threading.Thread(target=disturb)
    thread.start()
    completions = list(fleet.sample(requests))
    stop.set()
    thread.join()
    assert fleet.counts()["continued"] >= 6
    assert keys(completions) == wanted(requests)
    for completion in completions:
        assert same(completion, whole[completion.request_id][completion.member])
        assert completion.trace.version_T.tolist() == [1] * 42


def test_a_commit_that_aborts_gives_tokens_of_both_versions(model, start, gather, make_request):
    engine = Standing(model)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    request = make_request(members=(0, 1, 2), length=40, stop=())
    completions, thread = [], None
    thread = threading.Thread(target=lambda: completions.extend(fleet.sample([request])))
    thread.start()
    eventually(lambda: engine.standing == 1)
    publish(fleet, model, 2, InFlight.ABORT)
    thread.join(30)
    old = sampled(model, 1, request)
    assert keys(completions) == wanted([request])
    for completion in completions:
        check_completion(completion, request, model)
        assert set(completion.version.tolist()) == {1, 2}
        first = int((completion.version == 1).sum())
        assert completion.tokens[:first].tolist() == old[completion.member].tokens[:first].tolist()
        rows = 3 + first - 1  # of tokens that were fed under version 1
        assert completion.trace.version_T.tolist() == [1] * rows + [2] * (42 - rows)


def test_a_completion_that_overtakes_the_answer_of_its_commit_waits_for_it(model, start, gather, make_request):
    class SlowToSay(Standing):
        def commit(self, version, probe, in_flight):
            report = super().commit(version, probe, in_flight)
            if version == 2:
                self.go.set()
                eventually(lambda: self.status().running == 0)
                time.sleep(0.3)  # the completions are with the fleet by now
            return report

    engine = SlowToSay(model)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    request = make_request(members=(0, 1), length=15, stop=())
    completions = fleet.sample([request])
    versions, failed = [], []

    def collect():
        try:
            versions.extend(int(c.version[-1]) for c in completions)
        except Fatal as error:
            failed.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    eventually(lambda: engine.standing == 1)
    publish(fleet, model, 2, InFlight.RETRACT)
    thread.join(30)
    assert (versions, failed) == ([2, 2], [])
