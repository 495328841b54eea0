import threading
import time

import pytest

from rollout_bridge.errors import Retryable
from train.watchdog import STACKS, Watchdog


def make(folder, seconds=0.2):
    said, ended = [], threading.Event()
    watchdog = Watchdog(folder, seconds, lambda kind, text: said.append((kind, text)), lambda _why: ended.set())
    return watchdog, said, ended


def stuck_here(ended):
    assert ended.wait(20)


def test_a_part_that_does_not_move_is_named_its_stacks_written_and_then_the_process_ended(tmp_path):
    watchdog, said, ended = make(tmp_path)
    with watchdog, watchdog.doing("update at version 3"):
        stuck_here(ended)
    assert [kind for kind, _ in said] == ["stuck", "stuck"]
    assert said[0][1].startswith("update at version 3: expected an end within 0.2 s (watchdog.seconds), got none")
    assert "within 0.4 s" in said[1][1]
    stacks = (tmp_path / STACKS).read_text()
    assert stacks.count("stuck_here") == 1
    assert "watchdog" in stacks


def test_parts_that_move_are_left_alone(tmp_path):
    watchdog, said, ended = make(tmp_path, 1.5)
    with watchdog:
        for _ in range(4):
            with watchdog.doing("collect"):
                time.sleep(0.4)
        time.sleep(1.6)  # between parts nothing is watched
    assert (said, ended.is_set()) == ([], False)
    assert not (tmp_path / STACKS).exists()


def test_an_outer_part_begins_anew_after_an_inner_one(tmp_path):
    watchdog, said, _ = make(tmp_path, 1.0)
    with watchdog, watchdog.doing("step"):
        for _ in range(4):
            time.sleep(0.2)
            with watchdog.doing("checkpoint"):
                time.sleep(0.2)
    assert said == []


@pytest.mark.parametrize("error", [TimeoutError("groups 0..3: late"), Retryable("no engine")])
def test_a_run_that_ends_because_something_did_not_come_leaves_its_stacks(tmp_path, error):
    watchdog, _, _ = make(tmp_path)
    with pytest.raises(type(error)) as caught, watchdog:
        raise error
    assert str(error) in (tmp_path / STACKS).read_text()
    assert "what every thread was doing is in" in caught.value.__notes__[0]


def test_other_errors_leave_none(tmp_path):
    watchdog, _, _ = make(tmp_path)
    with pytest.raises(ValueError), watchdog:
        raise ValueError("a wrong config")
    assert not (tmp_path / STACKS).exists()
