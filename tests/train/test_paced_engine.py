import threading
import time

import numpy as np

from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model
from rollout_bridge.messages import SampleRequest, Sampling
from train.paced_engine import PacedEngine


def test_requests_take_their_turns_however_many_are_asked_at_once():
    engine = PacedEngine(FakeEngine(fake_model(), version=0), 0.1)
    done = []

    def ask(number):
        request = SampleRequest(
            request_id=str(number),
            prompt_tokens=np.array([3], np.int32),
            sampling=Sampling(max_new_tokens=2, stop_ids=(), seed=0),
            members=(0, 1),
        )
        assert len(list(engine.sample(request, threading.Event()))) == 2
        done.append(time.monotonic())

    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = [end - began for end in sorted(done)]
    assert all(end >= 0.1 * turn for turn, end in enumerate(took, start=1))
    assert engine.status().version == 0


def test_the_requests_of_a_call_are_over_together_and_take_as_long_as_one_by_one():
    engine = PacedEngine(FakeEngine(fake_model(), version=0), 0.05)
    requests = [
        SampleRequest(
            request_id=str(number),
            prompt_tokens=np.array([3], np.int32),
            sampling=Sampling(max_new_tokens=2, stop_ids=(), seed=0),
            members=(0, 1),
        )
        for number in range(4)
    ]
    began = time.monotonic()
    (ready,) = engine.sample_ready(requests, threading.Event())
    assert time.monotonic() - began >= 4 * 0.05
    assert [(c.request_id, c.member) for c in ready] == [(str(n), m) for n in range(4) for m in (0, 1)]
