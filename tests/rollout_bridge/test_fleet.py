"""Many engines as one: each completion exactly once, and only from weights that were verified."""

import collections
import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_bridge import ClientOptions, Fatal, Finish, Fleet, FleetOptions, InFlight, Retryable, ServerOptions, serve
from rollout_bridge.checks import check_completion
from rollout_bridge.endpoint import State
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.errors import NotStaged
from rollout_bridge.messages import Staged
from tests.rollout_bridge.standing import Standing
from tests.rollout_bridge.waiting import eventually

QUICK = ClientOptions(attempts=2, control_seconds=5.0)


def publish(fleet, model, version, in_flight=InFlight.FINISH):
    weights = fake_weights(model, version)
    return fleet.publish(weights, fake_probe(weights, model), in_flight)


def sampled(model, version, request):
    """What an engine with these weights answers, undisturbed, by member."""
    engine, weights = FakeEngine(model), fake_weights(model, version)
    sink = engine.stage(weights.manifest)
    for name, array in weights.tensors.items():
        sink.put(name, array)
    sink.finish()
    engine.commit(version, fake_probe(weights, model), InFlight.FINISH)
    return {c.member: c for c in engine.sample(request, threading.Event())}


def same(left, right):
    return (
        left.tokens.tolist() == right.tokens.tolist()
        and left.behavior_logp.tolist() == right.behavior_logp.tolist()
        and left.version.tolist() == right.version.tolist()
        and np.array_equal(left.trace.experts_TLK, right.trace.experts_TLK)
        and left.finish is right.finish
    )


def keys(completions):
    return sorted((c.request_id, c.member) for c in completions)


def wanted(requests):
    return sorted((r.request_id, member) for r in requests for member in r.members)


@pytest.fixture
def requests(make_request):
    return [make_request(f"t{i}", members=(0, 1, 2), seed=i, prompt=(3 + i % 5, 9)) for i in range(12)]


# ------------------------------------------------------------------------------------------------ sampling


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
        with pytest.raises(Retryable, match=r"the stream ended without tokens of \[0\]"):
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


# ------------------------------------------------------------------------------------------------ loss and restart


def test_a_lost_engine_has_its_members_asked_for_elsewhere(model, start, gather, requests):
    engines = [FakeEngine(model, seconds_per_token=0.03) for _ in range(2)]
    servers = list(map(start, engines))
    fleet = gather(*servers, client=QUICK)
    publish(fleet, model, 1)
    completions = []
    for completion in fleet.sample(requests):
        completions.append(completion)
        if len(completions) == 2:
            servers[0].stop(0.0)
    assert keys(completions) == wanted(requests)
    assert all(same(c, sampled(model, 1, _of(requests, c))[c.member]) for c in completions)
    assert fleet.status()[servers[0].address].state is State.LOST
    assert fleet.counts()["lost"] == 1


def test_an_engine_that_is_lost_as_soon_as_it_serves_is_told(model, start, gather, monkeypatch):
    """The fleet's watch looks again after a commit; here it finds nobody."""
    engine, told = FakeEngine(model), []
    server = start(engine, options=ServerOptions(poll_seconds=60.0))  # nor did it hear of it
    fleet = gather(server, client=QUICK, on_event=lambda kind, _text: told.append(kind))
    client = fleet._endpoints[0].client
    original = client.commit

    def last(*arguments, **options):
        reply = original(*arguments, **options)
        server.stop(0.0)
        return reply

    monkeypatch.setattr(client, "commit", last)
    publish(fleet, model, 1)
    eventually(lambda: told)
    start(engine, server.address)
    eventually(lambda: len(told) > 1)
    assert told == ["lost", "ready"]


def _of(requests, completion):
    return next(r for r in requests if r.request_id == completion.request_id)


class Respawning:
    """Restarts an engine on its port when the fleet has lost it."""

    def __init__(self, make, start):
        self._make, self._start = make, start
        self.engine = make()
        self.server = start(self.engine)
        self.restarts = 0
        self.dead = False

    def kill(self):
        self.server.stop(0.0)
        self.engine.close()
        self.dead = True  # only now is the port free

    def on_lost(self, endpoint):
        assert endpoint == self.server.address
        if self.dead:
            self.restarts += 1
            self.dead = False
            self.engine = self._make()
            self.server = self._start(self.engine, self.server.address)


def test_a_killed_engine_is_restarted_published_to_and_only_then_asked_again(model, start, gather, requests):
    def make():
        return FakeEngine(model, seconds_per_token=0.02)

    spawn, events = Respawning(make, start), []
    fleet = gather(
        spawn.server,
        client=QUICK,
        max_streams=4,
        on_lost=spawn.on_lost,
        on_event=lambda *event: events.append(event),
    )
    publish(fleet, model, 1)
    publish(fleet, model, 2)
    completions, first = [], spawn.engine.engine_id
    for completion in fleet.sample(requests):
        completions.append(completion)
        if len(completions) in (3, 20):
            spawn.kill()
    assert spawn.restarts == 2
    assert keys(completions) == wanted(requests)
    assert all(same(c, sampled(model, 2, _of(requests, c))[c.member]) for c in completions)
    assert {c.engine_id for c in completions} >= {first, spawn.engine.engine_id}
    kinds = [kind for kind, _ in events if kind in ("lost", "republish", "ready")]
    assert kinds == ["ready"] + ["lost", "republish", "ready"] * 2


def test_without_a_hook_the_fleet_waits_for_the_engine_to_come_back(model, start, gather, requests):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 1)
    server.stop(0.0)
    threading.Timer(0.5, lambda: start(FakeEngine(model), server.address)).start()
    assert keys(fleet.sample(requests)) == wanted(requests)
    assert fleet.counts()["republish"] == 1


def test_an_engine_that_comes_back_with_older_weights_is_brought_forward_first(model, start, gather, requests):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 5)
    server.stop(0.0)
    start(FakeEngine(model, version=4), server.address)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {5}


def test_an_engine_that_comes_back_with_the_same_version_but_unverified_by_us_is_published_to(
    model, start, gather, requests
):
    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK)
    publish(fleet, model, 5)
    server.stop(0.0)
    start(FakeEngine(model, version=5), server.address)  # says 5, but of other weights
    with pytest.raises(Fatal, match="push of version 5: expected a version above 5"):
        list(fleet.sample(requests))


def test_a_hook_that_gives_up_is_the_error_of_the_call(model, start, gather, requests):
    def give_up(endpoint):
        raise RuntimeError("restarted 3 times in a minute; last words: out of memory")

    server = start(FakeEngine(model))
    fleet = gather(server, client=QUICK, on_lost=give_up)
    publish(fleet, model, 1)
    server.stop(0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(fleet.sample(requests))
    with pytest.raises(Fatal, match="out of memory"):
        fleet.stage(fake_weights(model, 2))


# ------------------------------------------------------------------------------------------------ publishing


def test_publishing_reaches_every_engine_and_reports_each(model, start, gather):
    servers = [start(FakeEngine(model)) for _ in range(3)]
    fleet = gather(*servers)
    weights = fake_weights(model, 1)
    staged = fleet.stage(weights)
    assert {address: report.staged for address, report in staged.items()} == {
        server.address: Staged.RECEIVED for server in servers
    }
    off = dataclasses.replace(fake_probe(weights, model), tolerance=0.5)
    off = dataclasses.replace(off, logp=off.logp - np.float32(0.25))
    report = fleet.commit(1, off, InFlight.FINISH)
    assert report.engines.keys() == {server.address for server in servers}
    assert (report.version, report.mean_abs, report.max_abs) == (1, pytest.approx(0.25), pytest.approx(0.25))
    eventually(lambda: {s.engine.version for s in fleet.status().values()} == {1})


def test_a_push_goes_beside_sampling(model, start, gather, requests):
    engine = FakeEngine(model, seconds_per_token=0.01)
    fleet = gather(start(engine))
    publish(fleet, model, 1)
    versions, done = set(), threading.Event()

    def collect():
        for _ in range(6):
            versions.update(int(v) for c in fleet.sample(requests) for v in c.version)
        done.set()

    thread = threading.Thread(target=collect)
    thread.start()
    for version in range(2, 20):
        if done.is_set():
            break
        publish(fleet, model, version, list(InFlight)[version % 3])
    thread.join(30)
    assert done.is_set()
    assert len(versions) > 3


def test_a_push_that_one_engine_refuses_is_dropped_by_all(model, start, gather):
    class Full(FakeEngine):
        def stage(self, manifest):
            raise Fatal("no space left for a push")

    engines = [FakeEngine(model), Full(model), FakeEngine(model)]
    servers = list(map(start, engines))
    with pytest.raises(Fatal) as caught:
        gather(*servers).stage(fake_weights(model, 1))
    text = str(caught.value)
    assert f"these failed: {servers[1].address}: StageWeights of version 1 at {servers[1].address}" in text
    assert "no space left for a push" in text
    assert [engine.status().staged_version for engine in engines] == [None] * 3


def test_a_commit_that_fails_everywhere_leaves_the_old_version_serving(model, start, gather, requests):
    engines = [FakeEngine(model), FakeEngine(model)]
    fleet = gather(*map(start, engines))
    publish(fleet, model, 1)
    for engine in engines:
        engine.inject(Fault.FAIL_COMMIT)
    with pytest.raises(Fatal, match=r"expected all engines, got none done and these failed: .*expected the probe"):
        publish(fleet, model, 2)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {1}
    publish(fleet, model, 3)
    assert {int(v) for c in fleet.sample(requests) for v in c.version} == {3}


def test_a_commit_that_fails_somewhere_names_who_serves_and_who_does_not(model, start, gather):
    engines = [FakeEngine(model), FakeEngine(model)]
    servers = list(map(start, engines))
    fleet = gather(*servers)
    publish(fleet, model, 1)
    engines[1].inject(Fault.FAIL_COMMIT, times=9)
    with pytest.raises(Fatal) as caught:
        publish(fleet, model, 2)
    assert f"got {servers[0].address} done and these failed: {servers[1].address}: " in str(caught.value)
    eventually(
        lambda: fleet.status()[servers[1].address].state is State.FAILED
    )  # it was pushed again, and failed again
    assert fleet.status()[servers[0].address].state is State.READY


def test_an_engine_that_is_away_is_awaited_by_a_push(model, start, gather):
    spawn = Respawning(lambda: FakeEngine(model), start)
    fleet = gather(spawn.server, client=QUICK, on_lost=spawn.on_lost)
    publish(fleet, model, 1)
    spawn.kill()
    assert publish(fleet, model, 2).version == 2
    assert spawn.restarts == 1
    assert spawn.engine.status().version == 2


def test_an_engine_that_restarts_between_stage_and_commit_is_staged_again(model, start, gather, requests):
    for target in (False, True):
        spawn = Respawning(lambda: FakeEngine(model), start)
        fleet = gather(spawn.server, client=QUICK, on_lost=spawn.on_lost)
        if target:
            publish(fleet, model, 1)
        weights = fake_weights(model, 2)
        fleet.stage(weights)
        spawn.kill()
        assert fleet.commit(2, fake_probe(weights, model), InFlight.FINISH).mean_abs == 0.0
        assert {int(v) for c in fleet.sample(requests) for v in c.version} == {2}


class Forgetful(FakeEngine):
    """Becomes another instance before each of its first commits, with what is staged lost, and the desk not told."""

    def __init__(self, model, times):
        super().__init__(model)
        self.times = times

    def commit(self, version, probe, in_flight):
        if self.times:
            self.times -= 1
            raise NotStaged("another instance by now")
        return super().commit(version, probe, in_flight)


@pytest.mark.parametrize("restored", [False, True])
def test_an_engine_that_restarts_again_and_again_is_staged_as_often(model, start, gather, restored):
    """Also where the fleet restores it by itself: a second time in a row is no reason to give it up."""
    engine = Forgetful(model, 0 if restored else 4)
    fleet = gather(start(engine), client=QUICK, heartbeat_seconds=0.05)
    publish(fleet, model, 1)
    if restored:
        engine.times = 4
        with engine._changed:
            engine._live = None  # it serves nothing any more
        eventually(lambda: engine.status().version == 1, 30.0)
    assert engine.times == 0
    assert fleet.status().popitem()[1].state is not State.FAILED


def test_an_engine_that_stays_away_is_named_when_time_is_up(model, start, gather):
    servers = [start(FakeEngine(model)), start(FakeEngine(model))]
    fleet = gather(*servers, client=QUICK, publish_seconds=0.5)
    servers[1].stop(0.0)
    with pytest.raises(Retryable) as caught:
        fleet.stage(fake_weights(model, 1))
    assert f"stage of version 1 at {servers[1].address}: expected an end within 0.5 s" in str(caught.value)
    assert f"got {servers[0].address} done" in str(caught.value)


def test_what_cannot_be_published_is_refused_at_once(model, start, gather):
    fleet = gather(start(FakeEngine(model)))
    weights = fake_weights(model, 1)
    probe = fake_probe(weights, model)
    with pytest.raises(ValueError, match="expected it staged, got nothing; stage it first"):
        fleet.commit(1, probe, InFlight.FINISH)
    other = dataclasses.replace(weights, tensors=dict(list(weights.tensors.items())[1:]))
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        fleet.stage(other)
    fleet.stage(weights)
    with pytest.raises(ValueError, match="commit of version 2: expected it staged, got version 1"):
        fleet.commit(2, probe, InFlight.FINISH)
    with pytest.raises(ValueError, match="at least 256 tokens"):
        fleet.commit(1, dataclasses.replace(probe, tokens=probe.tokens[:9]), InFlight.FINISH)


# ------------------------------------------------------------------------------------------------ membership


def test_engines_of_different_models_are_refused(model, start, stack):
    servers = [start(FakeEngine(model)), start(FakeEngine(fake_model(experts=8)))]
    fleet = stack.enter_context(Fleet([server.address for server in servers]))
    with pytest.raises(Fatal, match=r"expected the model of .* \(fake-32-2-\d-2, .*serve one model in a fleet"):
        fleet.wait_ready(30.0)


def test_an_engine_that_never_answers_is_named(model, start, stack):
    server = start(FakeEngine(model))
    options = FleetOptions(client=ClientOptions(attempts=1))
    fleet = stack.enter_context(Fleet([server.address, "127.0.0.1:1"], options=options))
    eventually(lambda: "UNAVAILABLE" in fleet.status()["127.0.0.1:1"].reason)
    with pytest.raises(Retryable, match=r"every engine to answer within 0.5 s.*127\.0\.0\.1:1 lost \(.*UNAVAILABLE"):
        fleet.wait_ready(0.5)


def test_a_fleet_needs_distinct_endpoints_and_an_answer():
    for endpoints in ((), ("127.0.0.1:1", "127.0.0.1:1")):
        with pytest.raises(ValueError, match="one or more distinct endpoints"):
            Fleet(endpoints)
    with Fleet(["127.0.0.1:1"]) as fleet, pytest.raises(Retryable, match="expected an engine that has answered"):
        fleet.model()


def test_a_closed_fleet_leaves_no_thread(model, start):
    before = set(threading.enumerate())
    server = start(FakeEngine(model, version=1))
    with Fleet([server.address]) as fleet:
        fleet.wait_ready(30.0)
    eventually(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("fleet")])


def test_replicas_that_serve_different_weights_are_named(model, start, gather):
    class Summing(FakeEngine):
        checksum = "aa"

        def commit(self, version, probe, in_flight):
            return dataclasses.replace(super().commit(version, probe, in_flight), checksum=self.checksum)

    one, other = Summing(model), Summing(model)
    fleet = gather(start(one), start(other))
    weights = fake_weights(model, 1)
    assert fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH).version == 1
    other.checksum = "bb"
    weights = fake_weights(model, 2)
    with pytest.raises(Fatal, match="expected the same checksum of the served weights everywhere"):
        fleet.publish(weights, fake_probe(weights, model), InFlight.FINISH)
