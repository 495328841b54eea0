"""A fake engine whose requests stand, so that what a test does to them certainly meets them."""

import threading

from rollout_bridge.engines.fake import FakeEngine


class Standing(FakeEngine):
    """A request that is no continuation stands once its members have a token each, until aborted or until `go` is set.

    `standing` is how many have come to stand so far.
    """

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.go = threading.Event()
        self.standing = 0

    def _step(self, run, member, live):
        finish = super()._step(run, member, live)
        if member == run.request.members[-1] and len(run.tokens[member]) == 1 and not run.request.already_sampled:
            with self._changed:
                self.standing += 1
                self._wait(lambda: self.go.is_set() or run.aborted, threading.Event())
        return finish
