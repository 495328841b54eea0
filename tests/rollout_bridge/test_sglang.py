"""The engine over SGLang's HTTP, against a server that behaves and misbehaves as the real one does."""

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_bridge import BridgeError, Fatal, Finish, Fleet, FleetOptions, InFlight, NotStaged, Retryable, Serving
from rollout_bridge.cli import main
from rollout_bridge.engines.fake_model import fake_logp, fake_probe, fake_routes, fake_weights, fingerprint
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from tests.rollout_bridge.fake_sglang import MODEL
from tests.rollout_bridge.waiting import eventually


@pytest.fixture
def attach(stack, tmp_path):
    """An engine over a server."""

    def begin(server, **options):
        config = SglangConfig(url=server.url, stage_folder=tmp_path, **{"poll_seconds": 0.02, **options})
        engine = SglangEngine(config)
        stack.callback(engine.close)
        return engine

    return begin


def stage(engine, weights):
    sink = engine.stage(weights.manifest)
    for name, array in weights.tensors.items():
        sink.put(name, array)
    sink.finish()


def publish(engine, version, in_flight=InFlight.FINISH, seed=0):
    weights = fake_weights(MODEL, version, seed=seed)
    stage(engine, weights)
    return weights, engine.commit(version, fake_probe(weights, MODEL), in_flight)


def sample(engine, request, cancelled=None):
    return list(engine.sample(request, cancelled or threading.Event()))


def hold(server, number=5):
    """Has every completion wait before its token of this number until the event is set that this gives."""
    server.gates[number] = threading.Event()
    return server.gates[number]


@contextlib.contextmanager
def sampling(engine, request):
    """Samples in a thread; gives the list that fills, and waits for its end."""
    found, errors = [], []

    def run():
        try:
            found.extend(engine.sample(request, threading.Event()))
        except BridgeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: engine.status().running > 0)
    yield found, errors
    thread.join(60)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------- sampling


def test_a_completion_is_what_the_server_sampled(both, make_request):
    _, engine = both
    weights, report = publish(engine, 3)
    assert report.mean_abs == 0
    key = fingerprint(dict(weights.tensors))
    request = make_request(members=(0, 1, 2), temperature=2.0, length=5, stop=())
    completions = sample(engine, request)
    assert sorted(c.member for c in completions) == [0, 1, 2]
    for c in completions:
        whole = np.concatenate([request.prompt_tokens, c.tokens])
        np.testing.assert_allclose(c.behavior_logp, fake_logp(key, whole, 2.0)[2:], rtol=1e-6)
        np.testing.assert_array_equal(c.trace.experts_TLK, fake_routes(key, whole[:-1], MODEL))
        assert c.trace.experts_TLK.dtype == np.uint8
        assert (c.trace.first_row, set(c.trace.version_T), set(c.version)) == (0, {3}, {3})
        assert (c.finish, c.engine_id, c.logprob.temperature) == (Finish.LENGTH, engine.engine_id, 2.0)


def test_an_end_of_text_that_was_not_asked_for_is_a_partial_completion(both, make_request):
    """The server stops at its model's own end-of-text ids too; whoever asked goes on from there."""
    server, engine = both
    publish(engine, 1)
    original = server.generate

    def stop_early(body):
        answer = original(body | {"sampling_params": body["sampling_params"] | {"max_new_tokens": 2}})
        answer["meta_info"]["finish_reason"] = {"type": "stop"}
        return answer

    server.generate = stop_early
    (completion,) = sample(engine, make_request(members=(0,), length=5, stop=()))
    assert (len(completion.tokens), completion.finish) == (2, Finish.ABORT)


def test_the_pieces_of_a_fleet_fit(both, start, gather, make_request):
    _, engine = both
    fleet = gather(start(engine))
    weights = fake_weights(MODEL, 1)
    fleet.publish(weights, fake_probe(weights, MODEL), InFlight.RETRACT)
    requests = [make_request(f"t{i}", members=(0, 1), seed=i) for i in range(8)]
    assert len(list(fleet.sample(requests))) == 16


def test_a_cancelled_call_is_aborted_at_the_server(both, make_request):
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    assert sample(engine, make_request(length=400, stop=()), cancelled) == []
    gate.set()
    eventually(lambda: "/abort_request" in server.calls and server.running == 0)


# -------------------------------------------------------------------------------------------- versions in flight


def test_retracted_tokens_keep_their_version_and_every_row_is_of_the_newest(both, make_request):
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    with sampling(engine, make_request(members=(0,), length=60, stop=())) as (found, errors):
        eventually(lambda: server.reached == 5)
        new, _ = publish(engine, 2, InFlight.RETRACT)
        gate.set()
    assert not errors
    (completion,) = found
    assert np.unique(completion.version).tolist() == [1, 2]
    assert set(completion.trace.version_T.tolist()) == {2}
    whole = np.concatenate([make_request().prompt_tokens, completion.tokens])
    key = fingerprint(dict(new.tensors))
    np.testing.assert_array_equal(completion.trace.experts_TLK, fake_routes(key, whole[:-1], MODEL))


def test_abort_returns_parts_of_the_old_version(both, make_request):
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    with sampling(engine, make_request(members=(0, 1), length=400, stop=())) as (found, _):
        eventually(lambda: server.reached == 5)
        publish(engine, 2, InFlight.ABORT)
        gate.set()
    assert [(c.finish, set(c.version.tolist())) for c in found] == [(Finish.ABORT, {1})] * 2


def test_finish_waits_for_the_end_and_lets_nothing_begin(both, make_request):
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    later = []
    with sampling(engine, make_request(members=(0,), length=40, stop=())) as (found, _):
        committing = threading.Thread(target=publish, args=(engine, 2))
        committing.start()
        eventually(lambda: engine._committing)
        request = make_request("t1", members=(0,), length=2, stop=())
        beginning = threading.Thread(target=lambda: later.extend(sample(engine, request)))
        beginning.start()
        eventually(lambda: engine.status().waiting == 1)
        assert engine.status().running == 1
        gate.set()
        committing.join(30)
        beginning.join(30)
    assert set(found[0].version.tolist()) == {1}
    assert set(later[0].version.tolist()) == {2}


@pytest.mark.parametrize("passes", [True, False])
def test_tokens_of_an_unverified_version_wait_for_the_verdict(both, make_request, passes):
    """A paused server answers no probe, so the new weights sample before they are verified."""
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    asked, verdict = threading.Event(), threading.Event()
    original = server.weights_checker

    def checker(body):
        asked.set()
        verdict.wait(30)
        return original(body) if passes else 400

    server.weights_checker = checker
    with sampling(engine, make_request(members=(0,), length=30, stop=())) as (found, errors):
        eventually(lambda: server.reached == 5)
        outcome = []

        def commit():
            try:
                outcome.append(publish(engine, 2, InFlight.RETRACT))
            except BridgeError as error:
                outcome.append(error)

        committing = threading.Thread(target=commit)
        committing.start()
        assert asked.wait(30)
        gate.set()
        eventually(lambda: server.running == 0)
        time.sleep(0.05)
        assert found == []
        verdict.set()
        committing.join(30)
    assert (len(found), len(errors)) == ((1, 0) if passes else (0, 1))
    assert engine.status().serving is (Serving.SERVING if passes else Serving.NOT_SERVING)


def test_what_was_aborted_after_a_retraction_is_sampled_again(both, make_request):
    server, engine = both
    publish(engine, 1)
    before, after = hold(server), hold(server, 10)
    with sampling(engine, make_request(members=(0,), length=400, stop=())) as (found, _):
        eventually(lambda: server.reached == 5)
        publish(engine, 2, InFlight.RETRACT)
        before.set()
        eventually(lambda: server.reached == 10)
        engine.abort(("t0",))
        after.set()
    assert [(len(c.tokens), c.trace, c.finish) for c in found] == [(0, None, Finish.ABORT)]


def test_a_paused_engine_keeps_requests_waiting(both, make_request):
    _, engine = both
    publish(engine, 1)
    engine.pause(InFlight.FINISH)
    assert engine.status().serving is Serving.PAUSED
    with pytest.raises(Retryable, match="resume it"):
        publish(engine, 2)
    threading.Timer(0.1, engine.resume).start()
    assert len(sample(engine, make_request())) == 2


# --------------------------------------------------------------------------------------------------- the traps


def rewrite(tmp_path, change):
    from safetensors.numpy import load_file, save_file

    (path,) = tmp_path.glob("sat-jax-bridge-*/v*/*.safetensors")
    save_file(change(load_file(path)), path)


def test_tensors_that_are_taken_and_not_loaded_are_noticed(both, tmp_path):
    _, engine = both
    old, _ = publish(engine, 1)
    stage(engine, fake_weights(MODEL, 2))
    rewrite(tmp_path, lambda tensors: {f"bogus.{name}": array for name, array in tensors.items()})
    with pytest.raises(Fatal, match="under names that it does not load"):
        engine.commit(2, fake_probe(old, MODEL), InFlight.FINISH)  # whose probe the old weights would pass
    assert engine.status().serving is Serving.NOT_SERVING


def test_a_partial_update_fails_the_probe(both, tmp_path):
    _, engine = both
    publish(engine, 1)
    weights = fake_weights(MODEL, 2)
    stage(engine, weights)
    rewrite(tmp_path, lambda tensors: {"lm_head.weight": tensors["lm_head.weight"]})
    with pytest.raises(Fatal, match="probe of weights 2"):
        engine.commit(2, fake_probe(weights, MODEL), InFlight.FINISH)
    assert engine.status().serving is Serving.NOT_SERVING


def test_the_same_weights_again_are_no_error(both):
    _, engine = both
    tensors = fake_weights(MODEL, 1)
    publish(engine, 1)
    again = dataclasses.replace(tensors, version=2)
    stage(engine, again)
    engine.commit(2, fake_probe(again, MODEL), InFlight.FINISH)
    assert engine.status().version == 2


def test_a_400_that_changed_the_weights_is_doubt_and_sampling_goes_on_only_after_another_push(both, make_request):
    server, engine = both
    publish(engine, 1)
    server.say_400 = True
    with pytest.raises(BridgeError):
        publish(engine, 2)
    assert engine.status().serving is Serving.NOT_SERVING
    assert not server.paused  # continued, whatever happened
    with pytest.raises(Retryable, match="publish first"):
        sample(engine, make_request())
    publish(engine, 1)  # an older version is fine: nothing is live
    assert len(sample(engine, make_request())) == 2


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ("/pause_generation", 1),
        ("/flush_cache", 1),
        ("/update_weight_version", -1),
        ("/update_weights_from_disk", -1),
        ("/weights_checker", -1),
    ],
)
def test_a_server_that_fails_in_a_commit_serves_the_old_version_or_none(both, path, served):
    server, engine = both
    publish(engine, 1)
    stage(engine, fake_weights(MODEL, 2))
    server.hang_up = path
    with pytest.raises(Retryable):
        engine.commit(2, fake_probe(fake_weights(MODEL, 2), MODEL), InFlight.RETRACT)
    assert engine.status().version == served
    assert not server.paused
    assert publish(engine, 2)[1].mean_abs == 0


def test_a_server_that_could_not_be_made_to_go_on_is_out_of_service(both):
    """It may stay paused, and a paused one serves nothing, whatever its weights are."""
    server, engine = both
    publish(engine, 1)
    stage(engine, fake_weights(MODEL, 2))
    server.flush_cache = lambda _body: 503  # before anything of the weights could change
    server.hang_up = "/continue_generation"
    with pytest.raises(Retryable):
        engine.commit(2, fake_probe(fake_weights(MODEL, 2), MODEL), InFlight.RETRACT)
    assert server.paused
    assert engine.status().serving is Serving.NOT_SERVING
    del server.flush_cache
    assert publish(engine, 2)[1].mean_abs == 0
    assert (engine.status().version, server.paused) == (2, False)


def test_a_restarted_server_samples_nothing_until_it_is_pushed_to(both, make_request):
    server, engine = both
    publish(engine, 1)
    before = engine.engine_id
    server.restart()
    with pytest.raises(Retryable):
        for _ in range(1000):  # until the watch or the first answer notices
            assert all(set(c.version.tolist()) == {1} for c in sample(engine, make_request()))
    eventually(lambda: engine.engine_id != before)
    assert engine.status().version == -1
    publish(engine, 1)
    assert {c.engine_id for c in sample(engine, make_request())} == {engine.engine_id}


def test_base_weights_are_refused_before_the_watch_has_noticed(sglang, attach, make_request):
    server = sglang()
    engine = attach(server, poll_seconds=60.0)
    engine.connect(30.0)
    publish(engine, 1)
    server.restart()
    with pytest.raises(Retryable, match=r"some of \['base'\]"):
        sample(engine, make_request())


def test_an_update_by_somebody_else_is_another_instance(both):
    server, engine = both
    publish(engine, 1)
    before = engine.engine_id
    time.sleep(0.1)
    assert (engine.engine_id, engine.status().version) == (before, 1)  # ours is known
    server.path = "/somewhere/else"  # the name of the weights stays as it was
    eventually(lambda: engine.engine_id != before or engine.status().version == -1)


def test_a_server_that_is_away_for_a_moment_is_still_the_same(both):
    server, engine = both
    publish(engine, 1)
    before = engine.engine_id
    for _ in range(3):
        server.hang_up = "/model_info"
        time.sleep(0.05)
    eventually(lambda: engine.status().version == 1)
    assert engine.engine_id == before


# ------------------------------------------------------------------------------------------------- staging


def test_what_is_staged_is_removed_when_it_is_live_dropped_or_replaced(both, tmp_path):
    _, engine = both
    files = lambda: list(tmp_path.glob("sat-jax-bridge-*/v*/*.safetensors"))  # noqa: E731
    publish(engine, 1)
    assert files() == []
    stage(engine, fake_weights(MODEL, 2))
    stage(engine, fake_weights(MODEL, 3))
    assert len(files()) == 1
    engine.discard()
    assert files() == []
    with pytest.raises(NotStaged):
        engine.commit(3, fake_probe(fake_weights(MODEL, 3), MODEL), InFlight.FINISH)
    sink = engine.stage(fake_weights(MODEL, 4).manifest)
    sink.discard()
    assert files() == []
    assert engine.status().version == 1


def test_weights_that_are_no_numbers_never_reach_the_server(both, start, gather, tmp_path):
    """The probe would refuse them, but only after the server has sampled from them, which ends the real one."""
    server, engine = both
    publish(engine, 1)
    fleet = gather(start(engine))
    tensors = dict(fake_weights(MODEL, 2).tensors)
    tensors["lm_head.weight"] = np.where(np.arange(8) == 3, -np.inf, tensors["lm_head.weight"]).astype(np.float32)
    calls = [path for path in server.calls if "update" in path]
    with pytest.raises(Fatal, match=r"expected finite numbers, got NaN or infinity in lm_head\.weight"):
        fleet.stage(dataclasses.replace(fake_weights(MODEL, 2), tensors=tensors))
    assert [path for path in server.calls if "update" in path] == calls
    assert list(tmp_path.glob("sat-jax-bridge-*/v2*")) == []
    assert engine.status().version == 1


def test_no_room_is_said_before_anything_is_written(both, monkeypatch):
    _, engine = both
    manifest = fake_weights(MODEL, 1).manifest
    room = dict.fromkeys(("f_frsize", "f_bavail", "f_blocks"), 1)
    for blocks, kind in ((1, Fatal), (1 << 40, Retryable)):
        full = type("Room", (), room | {"f_blocks": blocks})
        monkeypatch.setattr("rollout_bridge.engines.sglang_files.os.statvfs", lambda _path, full=full: full)
        with pytest.raises(kind, match=r"expected room for .*--stage-folder"):
            engine.stage(manifest)


@pytest.mark.parametrize("puts", [1, 2])
def test_a_disk_that_fills_up_leaves_the_old_version_serving(both, monkeypatch, tmp_path, puts):
    """A tensor is written while the next one comes: with that one, or with the end, it is told."""
    _, engine = both
    publish(engine, 1)
    weights = fake_weights(MODEL, 2)
    sink = engine.stage(weights.manifest)

    def full(_file, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollout_bridge.engines.sglang_files._write", full)
    with pytest.raises(Retryable, match="No space left on device"):
        for name, array in list(weights.tensors.items())[:puts]:
            sink.put(name, array)
        sink.finish()
    sink.discard()
    assert list(tmp_path.glob("sat-jax-bridge-*/v2*")) == []
    assert engine.status().version == 1


def test_a_killed_bridges_weights_are_removed_and_its_server_is_not_trusted(both, attach, tmp_path, sglang):
    server, engine = both
    publish(engine, 1)
    stage(engine, fake_weights(MODEL, 2))
    (left,) = tmp_path.glob("sat-jax-bridge-*/v2-*/*.safetensors")
    kept = left.read_bytes()
    engine.close()
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(kept)  # a killed one would not have removed it
    server.pause_generation({"mode": "retract"})  # and would have left the server paused
    again = attach(server)
    again.connect(30.0)  # finds the config that its predecessor left
    assert not left.exists()
    assert again.status().serving is Serving.NOT_SERVING
    publish(again, 1)
    assert (again.status().version, server.paused) == (1, False)


def test_two_bridges_do_not_share_a_server(both, attach):
    server, _ = both
    with pytest.raises(ValueError, match="run one bridge for each SGLang server"):
        attach(server)


# ------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"dp_size": 2}, "a bridge beside it, for each replica"),
        ({"quantization": "fp8"}, "without quantization"),
        ({"dtype": "float16"}, "start SGLang with --dtype bfloat16"),
        ({"max_req_input_len": None}, "expected /server_info to tell max_req_input_len"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_with_what_to_change(sglang, attach, info, said):
    engine = attach(sglang(**info))
    with pytest.raises(Fatal, match=said):
        engine.connect(30.0)
    assert engine.status().serving is Serving.NOT_SERVING


def test_a_server_that_comes_back_with_the_flag_is_taken(sglang, attach):
    server = sglang(enable_return_routed_experts=False)
    engine = attach(server)
    with pytest.raises(Fatal):
        engine.connect(30.0)
    server.info["enable_return_routed_experts"] = True
    eventually(lambda: engine.engine_id != "sglang-unreached")
    assert publish(engine, 1)[1].mean_abs == 0


def test_a_server_without_our_key_says_which_to_give(sglang, attach):
    engine = attach(sglang(key="right"), admin_key="wrong")
    with pytest.raises(Fatal, match="--admin-key-file"):
        engine.connect(30.0)


def test_the_right_key_opens_and_is_not_shown(sglang, attach):
    engine = attach(sglang(key="right"), admin_key="right")
    assert engine.connect(30.0).vocab_size == 32
    assert "right" not in repr(SglangConfig(url="http://x:1", admin_key="right", api_key="right"))


def test_an_untested_version_is_a_warning(sglang, attach, caplog):
    attach(sglang(version="0.6.0")).connect(5.0)
    assert "0.5.23 is what was tested" in caplog.text


def test_no_server_at_all_is_an_address_and_a_question(attach):
    class Nowhere:
        url = "http://127.0.0.1:9"

    with pytest.raises(Retryable, match=r"http://127\.0\.0\.1:9"):
        attach(Nowhere).connect(0.2)


def test_the_command_line_wants_a_url_and_says_what_is_wrong(capsys, sglang, tmp_path):
    serve = ["serve", "--engine", "sglang", "--listen", "127.0.0.1:0", "--stage-folder", str(tmp_path)]
    assert main(serve) == 2
    assert "--url: expected http://HOST:PORT" in capsys.readouterr().err
    assert main([*serve, "--url", sglang(enable_return_routed_experts=False).url]) == 2
    assert "--enable-return-routed-experts" in capsys.readouterr().err


def test_a_fleet_pushes_to_a_restarted_server_before_it_samples(both, start, stack, make_request):
    server, engine = both
    bridge = start(engine)
    fleet = stack.enter_context(Fleet([bridge.address], options=FleetOptions(heartbeat_seconds=0.05)))
    fleet.wait_ready(30.0)
    weights = fake_weights(MODEL, 4)
    fleet.publish(weights, fake_probe(weights, MODEL), InFlight.RETRACT)
    server.seconds_per_token = 0.002
    requests = [make_request(f"t{i}", members=(0, 1), seed=i, length=20, stop=()) for i in range(16)]
    seen = []
    for completion in fleet.sample(requests):
        seen.append((completion.request_id, completion.member))
        assert set(completion.version.tolist()) == {4}
        if len(seen) == 4:
            server.restart()
    assert sorted(seen) == sorted((f"t{i}", member) for i in range(16) for member in (0, 1))
    eventually(lambda: fleet.counts().get("republish") == 1)


def test_the_staging_folder_is_for_nobody_else(both, tmp_path):
    (root,) = tmp_path.glob("sat-jax-bridge-*")
    assert Path(root).stat().st_mode & 0o077 == 0


def test_a_server_that_stays_away_is_told_once_and_asked_ever_more_rarely(both, start, stack):
    server, engine = both
    tried = []
    options = FleetOptions(heartbeat_seconds=0.05, on_lost=lambda _endpoint: tried.append(time.monotonic()))
    fleet = stack.enter_context(Fleet([start(engine).address], options=options))
    fleet.wait_ready(30.0)
    weights = fake_weights(MODEL, 4)
    fleet.publish(weights, fake_probe(weights, MODEL), InFlight.RETRACT)
    original = server.model_info
    server.model_info = lambda _body: 503
    eventually(lambda: engine.status().version == -1)
    eventually(lambda: len(tried) == 6)
    assert all(pause >= 0.05 * 2**number for number, pause in enumerate(np.diff(tried)))
    assert fleet.counts().get("republish", 0) == 0
    assert fleet.counts()["lost"] == 1
    server.model_info = original
    eventually(lambda: engine.status().version == 4)
    assert fleet.counts()["lost"] == 1
