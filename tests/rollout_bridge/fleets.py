"""What the tests of a fleet share: pushes of made-up weights, and what an engine with them says undisturbed."""

import threading

import numpy as np

from rollout_bridge import ClientOptions, InFlight
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_probe, fake_weights

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


def of(requests, completion):
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
