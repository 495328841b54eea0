import os
import signal
import threading
import time

import pytest

from train.buffer import Buffer
from train.preemption import Preempted, Preemption


@pytest.fixture
def preemption():
    before = signal.getsignal(signal.SIGTERM)
    made = Preemption()
    made.install()
    yield made
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_outside_the_loop_it_ends_the_run_at_once(preemption):
    with pytest.raises(Preempted) as caught:
        send()
    assert caught.value.code == 75


def test_in_the_middle_of_a_step_it_only_leaves_a_mark(preemption):
    with preemption.held():
        preemption.leave_if_asked()
        send()
        done = 1  # the step goes on to its end
        with pytest.raises(Preempted):
            preemption.leave_if_asked()
    assert done == 1


def test_a_wait_ends_at_its_own_next_look_and_the_books_still_add_up(preemption):
    buffer = Buffer(max_lag=1, deadline=30.0)
    buffer.draw(range(2))
    threading.Timer(0.1, send).start()
    began = time.monotonic()
    with preemption.held(), preemption.waiting(buffer.fail), pytest.raises(Preempted):
        buffer.take(2, 0)
    assert time.monotonic() - began < 5
    assert buffer.stats().out == 2


def test_what_was_asked_before_a_wait_ends_it_before_it_begins(preemption):
    with preemption.held():
        send()
        with pytest.raises(Preempted), preemption.waiting(lambda error: None):
            pytest.fail("the wait began")
