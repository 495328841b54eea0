"""Weights over a process group: what a push leaves behind, and what becomes of one that breaks off."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from rollout_bridge import BridgeError, Fatal, InFlight, Retryable, Serving
from rollout_bridge.cli import main
from rollout_bridge.engines.fake_model import fake_weights
from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
from rollout_bridge.engines.sglang_group import GroupConfig, Sender
from rollout_bridge.engines.sglang_http import Refused
from rollout_bridge.engines.torch_sender import run
from tests.rollout_bridge.fake_sglang import MODEL
from tests.rollout_bridge.test_sglang import hold, publish, sample, sampling, stage
from tests.rollout_bridge.waiting import eventually

GROUP = GroupConfig(
    sender=(sys.executable, "-P", str(Path(__file__).with_name("fake_sender.py"))), bucket_bytes=600, join_seconds=60.0
)
BUCKETS = 12  # of the fake model's


@pytest.fixture
def attach(stack, tmp_path):
    def begin(server, group=GROUP):
        engine = SglangEngine(SglangConfig(url=server.url, stage_folder=tmp_path, poll_seconds=0.02, group=group))
        stack.callback(engine.close)
        return engine

    return begin


def in_bucket(monkeypatch, number, do):
    """Does something before the bucket of this number (from 1) is broadcast, once."""
    original, sent = Sender.order, []

    def order(self, order):
        if order["do"] == "send":
            sent.append(order)
            if len(sent) == number:
                do(self)
        original(self, order)

    monkeypatch.setattr(Sender, "order", order)


def kill(sender):
    os.kill(sender.pid, signal.SIGKILL)


def test_a_push_over_the_group_serves_the_same_weights_as_one_by_disk(both, attach, make_request):
    server, engine = both
    _, report = publish(engine, 1)
    assert (report.mean_abs, server.buckets) == (0, BUCKETS)
    assert "/update_weights_from_disk" not in server.calls
    assert len(sample(engine, make_request())) == 2
    engine.close()
    by_disk = attach(server, None)
    by_disk.connect(30.0)
    assert publish(by_disk, 2)[1].checksum != report.checksum
    assert publish(by_disk, 1)[1].checksum == report.checksum


def test_calls_come_in_the_order_that_the_server_asks_for(both):
    server, engine = both
    publish(engine, 1)
    control = [path for path in server.calls if path not in ("/model_info", "/server_info", "/generate")]
    assert control == [
        "/init_weights_update_group",
        "/pause_generation",
        "/flush_cache",
        "/update_weight_version",
        "/begin_weight_update",
        *["/update_weights_from_distributed"] * BUCKETS,
        "/end_weight_update",
        "/continue_generation",
        "/weights_checker",
    ]


def test_one_group_serves_every_push_and_the_server_stays_the_same_instance(both):
    server, engine = both
    before = engine.engine_id
    for version in (1, 2, 3):
        publish(engine, version)
    assert server.calls.count("/init_weights_update_group") == 1
    looks = server.calls.count("/model_info")
    eventually(lambda: server.calls.count("/model_info") > looks + 3)
    assert (engine.engine_id, engine.status().version) == (before, 3)


@pytest.mark.parametrize("bucket", [1, 5, BUCKETS])
def test_a_sender_killed_in_an_update_leaves_nothing_serving_and_the_next_push_is_whole(both, monkeypatch, bucket):
    server, engine = both
    publish(engine, 1)
    in_bucket(monkeypatch, bucket, kill)
    with pytest.raises(Retryable):  # by another sender it can succeed
        publish(engine, 2)
    assert engine.status().serving is Serving.NOT_SERVING
    assert (server.paused, server.session) == (False, None)
    assert publish(engine, 3)[1].mean_abs == 0
    assert server.calls.count("/init_weights_update_group") == 2
    assert len(server.groups) == 1  # the broken one was taken down


def test_a_refusal_that_is_the_servers_own_is_not_tried_again(both, monkeypatch):
    server, engine = both
    publish(engine, 1)
    original, sender = server.update_weights_from_distributed, engine._transport.sender
    with monkeypatch.context() as patched:
        patched.setattr(server, "update_weights_from_distributed", lambda body: original(body) and 400)
        with pytest.raises(Refused):
            publish(engine, 2)
    assert engine.status().serving is Serving.NOT_SERVING
    assert not sender.alive()  # what it has sent and what was taken may differ by now
    assert publish(engine, 3)[1].mean_abs == 0


def test_tokens_of_torn_weights_reach_nobody(both, monkeypatch, make_request):
    """A load that broke off goes on sampling under mixed weights: not under a name that is trusted."""
    server, engine = both
    publish(engine, 1)
    gate = hold(server)
    with sampling(engine, make_request(members=(0,), length=60, stop=())) as (found, errors):
        eventually(lambda: server.reached == 5)
        in_bucket(monkeypatch, 5, kill)
        with pytest.raises(BridgeError):
            publish(engine, 2, InFlight.RETRACT)
        gate.set()
    assert found == []
    assert len(errors) == 1
    assert r".torn" in str(errors[0])


def test_a_server_that_restarts_in_an_update_gets_a_new_group(both, monkeypatch):
    server, engine = both
    publish(engine, 1)
    before = engine.engine_id
    in_bucket(monkeypatch, 3, lambda _sender: server.restart())
    with pytest.raises(BridgeError):
        publish(engine, 2)
    assert engine.status().version == -1
    eventually(lambda: engine.engine_id != before)
    assert publish(engine, 2)[1].mean_abs == 0
    assert engine.status().version == 2


def test_a_sender_that_died_between_pushes_is_replaced_before_the_server_is_held_up(both):
    _, engine = both
    publish(engine, 1)
    first = engine._transport.sender
    kill(first)
    eventually(lambda: not first.alive())
    assert publish(engine, 2)[1].mean_abs == 0
    assert engine._transport.sender is not first


def test_a_session_that_a_killed_bridge_left_open_is_closed_first(both):
    server, engine = both
    server.session = {}
    assert publish(engine, 1)[1].mean_abs == 0


def test_no_group_means_that_the_old_version_serves_on(both, monkeypatch):
    server, engine = both
    publish(engine, 1)
    kill(engine._transport.sender)
    eventually(lambda: not engine._transport.sender.alive())
    monkeypatch.setattr(server, "init_weights_update_group", lambda _body: 400)
    with pytest.raises(BridgeError):
        stage(engine, fake_weights(MODEL, 2))
    assert engine.status().version == 1


def test_the_end_of_the_bridge_is_the_end_of_the_sender(both):
    _, engine = both
    publish(engine, 1)
    sender = engine._transport.sender
    engine.close()
    assert not sender.alive()


def test_a_sender_ends_with_its_orders():
    """A bridge that is killed closes nothing by itself: its end of the pipe is all that goes."""
    sender = Sender(GROUP.sender)
    sender.order({"do": "listen"})
    assert sender.answer(30.0)["port"] > 0
    sender.order({"do": "join"})  # nobody comes, and nothing interrupts it
    assert sender._process.stdin is not None
    sender._process.stdin.close()
    assert sender._process.wait(30.0) == 0
    sender.kill()
    with pytest.raises(Retryable, match="it ended with"):
        sender.order({"do": "listen"})
    for _ in range(2):  # whoever asks, and asks again
        with pytest.raises(Retryable, match="it ended with 0"):
            sender.answer(30.0)


def test_without_pytorch_the_way_out_is_named(sglang, attach):
    server = sglang()
    engine = attach(server, GroupConfig(sender=(sys.executable, "-c", "raise SystemExit(3)")))
    engine.connect(30.0)
    with pytest.raises(Retryable, match=r"ended with 3.*--sender-python"):
        stage(engine, fake_weights(MODEL, 1))
    engine.close()
    engine = attach(server, GroupConfig(sender=("/no/such/python",)))
    engine.connect(30.0)
    with pytest.raises(Fatal, match=r"/no/such/python.*--sender-python"):
        stage(engine, fake_weights(MODEL, 1))


def test_a_sender_that_ended_before_its_first_order_is_told_alike():
    sender = Sender((sys.executable, "-c", "raise SystemExit(3)"))
    eventually(lambda: not sender.alive())
    with pytest.raises(Retryable, match=r"expected it to take 'listen', it ended with 3; .*--sender-python"):
        sender.order({"do": "listen"})
    sender.kill()


def test_pipeline_stages_are_refused(sglang, attach):
    engine = attach(sglang(pp_size=2))
    engine.connect(30.0)
    with pytest.raises(Fatal, match=r"expected pp_size = 1 .* got 2; use --transport disk"):
        stage(engine, fake_weights(MODEL, 1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "mpi"}, "expected gloo or nccl, got 'mpi'"),
        ({"backend": "nccl"}, "expected cuda:N with the backend nccl"),
        ({"bucket_bytes": 0}, "expected at least 1, got 0"),
    ],
)
def test_a_group_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        GroupConfig(**fields)


def test_the_command_line_makes_the_group(capsys, tmp_path):
    serve = ["serve", "--engine", "sglang", "--listen", "127.0.0.1:0", "--stage-folder", str(tmp_path)]
    assert main([*serve, "--url", "http://127.0.0.1:9", "--transport", "distributed", "--group-backend", "nccl"]) == 2
    assert "expected cuda:N with the backend nccl" in capsys.readouterr().err


def test_an_interpreter_without_pytorch_is_refused_at_the_start(capsys, tmp_path):
    serve = ["serve", "--engine", "sglang", "--listen", "127.0.0.1:0", "--stage-folder", str(tmp_path)]
    serve += ["--url", "http://127.0.0.1:9", "--transport", "distributed", "--sender-python"]
    bare = tmp_path / "python"  # the tests' own may have one
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    assert main([*serve, str(bare)]) == 2
    assert re.search(r"with PyTorch, got .*: ModuleNotFoundError: No module named 'torch'", capsys.readouterr().err)
    assert main([*serve, "/no/such/python"]) == 2
    assert re.search(r"with PyTorch, got /no/such/python: .*--sender-python", capsys.readouterr().err)


def test_the_sender_answers_every_order_in_turn():
    class Group:
        def __init__(self):
            self.done = []

        def listen(self):
            return 7

        def join(self):
            self.done.append("join")

        def send(self, path, begin, end):
            self.done.append((path, begin, end))

    group, answers = Group(), io.StringIO()
    orders = [{"do": "listen"}, {"do": "join"}, {"do": "send", "path": "/a", "begin": 2, "end": 5}]
    run(group, map(json.dumps, orders), answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"port": 7},
        {"joined": True},
        {"sent": True},
    ]
    assert group.done == ["join", (Path("/a"), 2, 5)]
