"""A stand-in for an engine elsewhere: completions that nobody sampled, so that making them costs next to nothing."""

import functools
import itertools
import threading
from collections.abc import Iterator

import numpy as np

from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_routes
from rollout_bridge.errors import Retryable
from rollout_bridge.messages import Completion, Finish, LogprobDefinition, ModelInfo, SampleRequest, Trace

_LOGP = -1.0  # nats, of every token


class StandInEngine(FakeEngine):
    """A fake engine whose completions are all alike: one token again and again up to the limit, the routes of a pool.

    The fake engine computes every number from the weights; here two requests cost less processor time than the gRPC
    call that brings them. A request is over when it arrives, so no push finds one running.
    """

    def __init__(self, model: ModelInfo) -> None:
        """Makes an instance that serves nothing until a commit."""
        super().__init__(model)
        self._routes_TLK = fake_routes(0, np.arange(model.max_tokens, dtype=np.int32), model)
        self._logp_T = np.full(model.max_tokens, _LOGP, np.float32)
        self._token_T = functools.cache(self._repeated)

    def sample(self, request: SampleRequest, cancelled: threading.Event) -> Iterator[Completion]:
        """Yields a completion per member, of the version that serves now."""
        version = self.status().version
        if version < 0:
            raise Retryable(f"sample: expected a serving engine, got {self.status()}")
        count = request.sampling.max_new_tokens - request.already_sampled
        rows = len(request.prompt_tokens) + count - 1
        version_T = np.full(rows, version, np.int32)
        trace = None
        if request.want_trace and self.model().moe_layers:
            trace = Trace(experts_TLK=self._routes_TLK[:rows], first_row=0, version_T=version_T)
        for member in request.members:
            yield Completion(
                request_id=request.request_id,
                member=member,
                tokens=self._token_T(request.sampling.stop_ids)[:count],
                behavior_logp=self._logp_T[:count],
                version=version_T[:count],
                trace=trace,
                finish=Finish.LENGTH,
                engine_id=self.engine_id,
                logprob=LogprobDefinition(temperature=request.sampling.temperature or 1.0),
            )

    def _repeated(self, stop_ids: tuple[int, ...]) -> np.ndarray:
        """The first token that ends nothing, as often as a sequence may be long."""
        token = next(token for token in itertools.count() if token not in stop_ids)
        return np.full(self.model().max_tokens, token, np.int32)
