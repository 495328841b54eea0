import json
import threading

import pytest

from train.preemption import Preempted, Preemption
from train.share import Share
from train.team import Alone, Members, ProcessLost, TeamConfig, shared


class FakeStore:
    """A store in memory; whoever asks for what is not there is told at once that it did not come in time."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values, key
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def key_value_delete(self, key):
        del self.values[key]


def pair(**deadlines) -> tuple[Members, Members, FakeStore, list]:
    """Two processes over one store, and what ended them."""
    store, ended = FakeStore(), []
    config = TeamConfig(**({"grace": 0.0, "deadline": 0.0} | deadlines))
    one, two = (
        Members(Share(process=process, processes=2), store, config, lambda code, said: ended.append((code, said)))
        for process in range(2)
    )
    one._names = two._names = ("host-a", "host-b")
    return one, two, store, ended


def speak(store, process, number, what, value):
    store.key_value_set(f"sat-jax/rounds/{number}/{process}", json.dumps([what, value]))


def test_a_round_gives_everybodys_value_in_the_order_of_processes():
    one, two, store, _ = pair()
    speak(store, 1, 0, "lengths", [3, 4])
    assert one.exchange("lengths", [1, 2]) == [[1, 2], [3, 4]]
    del store.values["sat-jax/rounds/0/1"]
    assert two.exchange("lengths", [3, 4]) == [[1, 2], [3, 4]]


def test_values_of_past_rounds_do_not_pile_up():
    one, _, store, _ = pair()
    for number in range(20):
        speak(store, 1, number, "x", number)
        one.exchange("x", number)
    assert len([key for key in store.values if key.endswith("/0")]) == 2


def test_processes_that_are_at_different_places_say_so():
    one, _, store, _ = pair()
    speak(store, 1, 0, "a push", None)
    with pytest.raises(ValueError, match=r"process 1 \(host-b\): expected to meet it at 'asked', got it at 'a push'"):
        one.exchange("asked", None)


def test_a_round_that_one_process_does_not_reach_has_a_name_and_an_end():
    one, *_ = pair()
    with pytest.raises(TimeoutError, match=r"the groups of step 3: expected process 1 \(host-b\) within 0 s"):
        one.exchange("the groups of step 3", None)


def test_a_preemption_of_one_is_one_of_all():
    one, two, store, _ = pair()

    def leave():
        raise Preempted

    speak(store, 1, 0, "groups", True)
    with pytest.raises(Preempted):
        one.together("groups", leave)
    del store.values["sat-jax/rounds/0/1"]
    with pytest.raises(Preempted):
        two.together("groups", lambda: "mine")
    speak(store, 1, 1, "next", False)
    with pytest.raises(Preempted):
        one.together("next", lambda: "mine")


def test_what_all_waited_for_is_handed_over_once_all_have_their_own():
    one, _, store, _ = pair()
    speak(store, 1, 0, "groups", True)
    assert one.together("groups", lambda: "mine") == "mine"


def test_a_failure_elsewhere_ends_every_wait_by_its_name():
    one, two, _, ended = pair()
    woken = []
    one.on_lost(woken.append)
    two._say_end("failed", "TimeoutError: groups 1..3")
    one._judge(dict(one._read("ends")), {}, {})
    assert str(woken[0]) == "process 1 (host-b) failed: TimeoutError: groups 1..3"
    with pytest.raises(ProcessLost, match=r"groups 1\.\.3"):
        one.exchange("next", None)
    # The loop's thread sat in a collective for the whole grace.
    assert ended == [(1, f"error: {woken[0]}")]
    assert woken[0].__notes__ == ["start the same command again in every process to resume"]
    later = []
    one.on_lost(later.append)
    assert later == woken


def test_a_process_that_is_silent_for_too_long_is_gone():
    one, _, _, _ = pair(silent=5.0)
    seen = {}
    one._judge({}, {1: "7"}, seen)
    beat, since = seen[1]
    one._judge({}, {1: "7"}, seen)
    assert one._lost is None  # not yet
    seen[1] = (beat, since - 6)
    one._judge({}, {1: "8"}, seen)
    assert one._lost is None  # it lives
    seen[1] = ("8", seen[1][1] - 6)
    one._judge({}, {1: "8"}, seen)
    assert str(one._lost) == "process 1 (host-b) is gone: no sign of life for 5 s"


def test_a_process_that_was_asked_to_stop_takes_the_others_with_it():
    one, two, _, ended = pair()
    two._say_end("preempted", "")
    one._judge(dict(one._read("ends")), {}, {})
    with pytest.raises(Preempted):
        one.exchange("next", None)
    assert ended[0][0] == 75


def test_a_failed_computation_is_blamed_on_the_process_that_is_gone():
    one, two, _, _ = pair(look=0.0)
    two._say_end("failed", "killed")
    one._judge(dict(one._read("ends")), {}, {})
    assert one._cause(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")) is one._lost
    assert one._cause(ValueError("batch.rows: expected 4")) is None


def test_a_failed_computation_without_a_lost_process_is_this_ones_own():
    one, *_ = pair(silent=0.0, look=0.0)
    assert one._cause(ValueError("UNKNOWN: Gloo all-reduce failed")) is None


def test_an_error_of_this_process_is_told_to_the_others():
    one, two, _, _ = pair(look=10.0)
    with pytest.raises(ValueError, match="bad reward"), one.watching(Preemption()):
        raise ValueError("bad reward")
    two._judge(dict(two._read("ends")), {}, {})
    assert str(two._lost) == "process 0 (host-a) failed: ValueError: bad reward"


def test_events_of_other_processes_reach_process_0_once():
    one, two, _, _ = pair()
    heard, known = [], set()
    one.on_event(lambda kind, text: heard.append((kind, text)))
    two.on_event(lambda kind, text: pytest.fail("only process 0 records"))
    two.tell("lost", "engine 3")
    two.tell("ready", "engine 3")
    for _ in range(2):
        one._hear(known)
        two._hear(set())
    assert heard == [("lost", "process 1 (host-b): engine 3"), ("ready", "process 1 (host-b): engine 3")]


def test_everybody_gets_what_process_0_says():
    _, two, store, _ = pair()
    speak(store, 0, 0, "name", "the run")
    assert shared(two, "name", "another") == "the run"


def test_one_process_exchanges_with_nobody():
    alone, value = Alone(), object()
    assert alone.exchange("anything", value) == [value]
    assert alone.together("anything", lambda: value) is value
    assert shared(alone, "anything", value) is value
    assert threading.active_count() == len(threading.enumerate())


def test_a_preemption_elsewhere_ends_a_wait_here():
    preemption, cancelled = Preemption(), []
    with preemption.waiting(cancelled.append):
        preemption.ask()
    assert preemption.asked
    assert isinstance(cancelled[0], Preempted)
