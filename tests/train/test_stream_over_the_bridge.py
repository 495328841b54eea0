"""Bounded collection behind a real server and client: weights that change under running requests, engines that fail."""

import threading
import time

import numpy as np
import pytest

from rollout_bridge import Fleet, FleetOptions, serve
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.engines.fake_model import fake_model, fake_probe, fake_weights
from rollout_bridge.messages import InFlight
from train.collect import CollectSettings
from train.data import Encoding, PromptConfig, PromptData
from train.rewards import RandomReward
from train.staleness import BoundedSchedule
from train.stream import StreamCollector, Task
from train.stream_buffer import StreamBuffer, StreamSettings
from train.tasks import Example
from train.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("0123456789=")
MODEL = fake_model(vocab_size=TOKENIZER.vocab_size)
SETTINGS = CollectSettings(
    seed=1, group_size=3, temperature=1.0, max_new_tokens=12, stop_ids=(1,), want_trace=True, shown=1
)
STEPS = 6


@pytest.fixture(scope="module")
def data():
    examples = [Example(prompt=f"{i}=", answer="1", where=f"f:{i}") for i in range(100, 200)]
    prompt = PromptConfig(template="{prompt}", stop=("<eos>",))
    return PromptData(examples, [], Encoding(tokenizer=TOKENIZER, prompt=prompt, max_new_tokens=12, row_length=30), 0)


class Met(FakeEngine):
    """Every version has a request that stands after its first token until the next push meets it."""

    def __init__(self, in_flight):
        super().__init__(MODEL, seconds_per_token=0.01)
        self.standing: dict[int, int] = {}  # its ticket, by version
        self._in_flight = in_flight

    def _step(self, run, member, live):
        finish = super()._step(run, member, live)
        begins = len(run.tokens[member]) == 1 and run.request.already_sampled == 0
        with self._changed:
            if finish is None and begins and live.version not in self.standing:
                self.standing[live.version] = int(run.request.request_id.removeprefix("t").partition("-")[0])
                if live.version < STEPS - 1:
                    self._wait(lambda: self._is_met(run, live.version), threading.Event())
        return finish

    def _is_met(self, run, version):
        if self._in_flight is InFlight.FINISH:
            return self._held_back > 0  # the push waits for it
        return run.aborted if self._in_flight is InFlight.ABORT else self.status().version > version


def until(holds):
    end = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def buffered(buffer):
    """Tickets of the groups that are there."""
    return {group.ticket for group in buffer.snapshot().groups}


def streamed(data, in_flight, engine, faults=(), request_deadline=20.0):
    """Groups of every step, with a push after each, and what happened."""
    for fault in faults:
        engine.inject(fault, 2)
    server = serve(engine, "127.0.0.1:0")
    schedule = BoundedSchedule(max_lag=1, publish_every=1, steps=STEPS, groups_per_step=3)
    buffer = StreamBuffer(schedule, StreamSettings(), deadline=60.0)
    task = Task(
        data=data,
        tokenizer=TOKENIZER,
        verifier=RandomReward(0),
        settings=SETTINGS,
        request_deadline=request_deadline,
        samplers=6,
    )
    options = FleetOptions(progress_seconds=request_deadline)
    taken = []
    try:
        with Fleet([f"127.0.0.1:{server.port}"], options=options) as fleet:
            fleet.wait_ready(30)
            with StreamCollector(fleet, task, buffer):
                for version in range(STEPS):
                    meets = isinstance(engine, Met) and version > 0
                    if meets:
                        until(lambda version=version: version - 1 in engine.standing)
                    weights = fake_weights(MODEL, version)
                    fleet.publish(weights, fake_probe(weights, MODEL), in_flight)
                    buffer.serve(version)
                    if meets:  # it is to be trained on before it is too old
                        until(lambda version=version: engine.standing[version - 1] in buffered(buffer))
                    taken.append(buffer.take(3, version))
            counts = fleet.counts()
        assert all(engine.struck[fault] == 2 for fault in faults)
        return taken, buffer.stats(), counts
    finally:
        server.stop(1.0)


@pytest.mark.parametrize("in_flight", list(InFlight))
def test_no_token_is_too_old_whatever_a_push_does_to_running_requests(data, in_flight):
    taken, stats, counts = streamed(data, in_flight, Met(in_flight))
    mixed = 0
    for version, groups in enumerate(taken):
        for group in groups:
            assert version - 1 <= group.oldest_version <= group.newest_version <= version
            for completion in group.completions:
                assert (np.diff(completion.version) >= 0).all()
                mixed += completion.version[0] != completion.version[-1]
                assert completion.trace is not None
    tickets = [group.ticket for groups in taken for group in groups]
    assert len(tickets) == len(set(tickets)) == stats.trained == STEPS * 3
    assert (counts.get("continued", 0) > 0) == (in_flight is InFlight.ABORT)
    assert (mixed == 0) == (in_flight is InFlight.FINISH)


def test_an_engine_that_repeats_drops_loses_and_hangs_costs_no_prompt(data):
    faults = (Fault.DUPLICATE, Fault.DROP, Fault.LOST, Fault.REFUSE, Fault.HANG)
    engine = FakeEngine(MODEL, seconds_per_token=0.01)
    taken, stats, _ = streamed(data, InFlight.RETRACT, engine, faults, request_deadline=2.0)
    tickets = [group.ticket for groups in taken for group in groups]
    assert len(tickets) == len(set(tickets)) == STEPS * 3
    assert (stats.trained, stats.dropped) == (STEPS * 3, 0)
    assert stats.reissued >= 1  # what hung was cut short
