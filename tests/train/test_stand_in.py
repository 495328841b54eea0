"""The engine of `bench async`: what the bridge checks of any engine, and next to no work."""

import threading

import numpy as np
import pytest

from rollout_bridge import Client, Fleet, InFlight, serve
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.errors import Retryable
from rollout_bridge.messages import Finish, SampleRequest, Sampling
from train.paced_engine import PacedEngine
from train.stand_in import StandInEngine

MODEL = fake_model(experts=8, top_k=3)


def request(number=0, **changes):
    fields = {"max_new_tokens": 4, "stop_ids": (0, 1), "seed": number, "temperature": 0.7}
    return SampleRequest(
        request_id=f"t{number}",
        prompt_tokens=np.array([3, 5], np.int32),
        sampling=Sampling(**fields),
        members=(0, 1),
        **changes,
    )


def test_it_serves_nothing_before_a_version_was_committed():
    with pytest.raises(Retryable, match="expected a serving engine"):
        next(StandInEngine(MODEL).sample(request(), threading.Event()))


def test_its_completions_pass_the_bridges_checks_and_are_of_the_version_that_serves():
    engine = PacedEngine(StandInEngine(MODEL), 0.0)
    with serve(engine, "127.0.0.1:0") as server, Fleet([server.address]) as fleet:
        fleet.wait_ready(30.0)
        for version in (1, 2):
            weights = fake_weights(MODEL, version)
            fleet.publish(weights, fake_probe(weights, MODEL), InFlight.FINISH)
            completions = list(fleet.sample([request(number) for number in range(5)]))
            assert sorted((c.request_id, c.member) for c in completions) == [
                (f"t{number}", member) for number in range(5) for member in (0, 1)
            ]
            for completion in completions:
                assert completion.tokens.tolist() == [2] * 4
                assert completion.finish is Finish.LENGTH
                assert set(completion.version) == {version}
                assert completion.trace is not None
                assert completion.trace.experts_TLK.shape == (5, MODEL.moe_layers, 3)
        with Client(server.address) as client:
            (plain,) = (c for c in client.sample(request(want_trace=False), MODEL) if c.member == 0)
            assert plain.trace is None
