"""Parameters -> fleet, versioned. Exports the weights, streams them, and commits them against a probe.

`start` returns at once; a thread copies the parameters to the host and talks to the fleet. It launches no computation:
the probe is scored by `start` itself, and of several processes the parameters are exchanged there (`train.export`).
`wait` returns when the parameters are no longer read, so that the next update may donate them, and re-raises what went
wrong in the thread.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from rollout_bridge import Fleet
from rollout_bridge.fleet import Weights
from rollout_bridge.messages import InFlight, Probe
from sat_jax.logprob import token_logp
from sat_jax.mesh import LOGICAL
from sat_jax.model import PolicyConfig
from train.export import Export, is_local, whole
from train.state import TrainState

PROBE_TOKENS = 256
_DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Published:
    """What the last push cost and how well it was reproduced. Seconds, bytes, nats; of several engines the worst.

    `seconds_write` is a part of `seconds_stage`; `seconds_held`, in which engines began nothing new, a part of
    `seconds_commit`, and `seconds_load` (nothing sampled) and `seconds_verify` are parts of that. Engines that do not
    tell them have 0.
    """

    version: int
    probe_mean_abs: float
    probe_max_abs: float
    expert_coverage: float
    bytes: int
    seconds_export: float
    seconds_stage: float
    seconds_write: float
    seconds_commit: float
    seconds_held: float
    seconds_load: float
    seconds_verify: float

    def metrics(self) -> dict[str, float]:
        """As metrics of the step that published."""
        return {
            "publish/version": float(self.version),
            "publish/probe_mean_abs": self.probe_mean_abs,
            "publish/probe_max_abs": self.probe_max_abs,
            "publish/expert_coverage": self.expert_coverage,
            "publish/bytes": float(self.bytes),
            "publish/seconds_export": self.seconds_export,
            "publish/seconds_stage": self.seconds_stage,
            "publish/seconds_write": self.seconds_write,
            "publish/seconds_commit": self.seconds_commit,
            "publish/seconds_held": self.seconds_held,
            "publish/seconds_load": self.seconds_load,
            "publish/seconds_verify": self.seconds_verify,
        }


class ProbeScorer:
    """Scores the fixed probe by the trainer: its log-probs at temperature 1 with free routing."""

    def __init__(
        self, graph: nnx.GraphDef, config: PolicyConfig, sequences: Sequence[np.ndarray], tolerance: float
    ) -> None:
        """Takes the probe.

        Args:
          graph: static part of the policy.
          config: its architecture.
          sequences: int32[n] each, such as the policy is trained on; the same at every version of a run.
          tolerance: largest accepted `ProbeReport.mean_abs`, nats.

        Raises:
          ValueError: fewer than 256 tokens in all.
        """
        tokens = np.concatenate(sequences).astype(np.int32)
        if len(tokens) < PROBE_TOKENS:
            raise ValueError(f"probe: expected at least {PROBE_TOKENS} tokens, got {len(tokens)}")
        self._graph = graph
        self._config = config
        self._probe = Probe(
            tokens=tokens,
            lengths=tuple(map(len, sequences)),
            logp=np.zeros(len(tokens) - 1, np.float32),
            tolerance=tolerance,
            expert_coverage=0.0,
        )
        self._score_jit = jax.jit(self._score)

    def __call__(self, params: nnx.State) -> Probe:
        """The probe with the log-probs that an engine must reproduce under `params`."""
        return self.launch(params)()

    def launch(self, params: nnx.State) -> Callable[[], Probe]:
        """Begins to score the probe; what is returned waits for it, and any thread may call that."""
        mesh = nnx.merge(self._graph, params).mesh
        probe = self._probe
        rows = math.prod(mesh.shape[axis] for axis in LOGICAL["batch"])  # one for each shard, all alike
        inputs = (np.tile(array, (rows, 1)) for array in (probe.tokens, probe.segments, probe.positions))
        scored = self._score_jit(params, *inputs)
        if not is_local(scored):
            scored = whole(scored)  # here and now: a collective
        return lambda: self._scored(*whole(scored))

    def _scored(self, logp_BT: np.ndarray, experts_LBTK: np.ndarray) -> Probe:
        seen = sum(len(np.unique(experts_BTK)) for experts_BTK in experts_LBTK)
        return dataclasses.replace(
            self._probe,
            logp=np.array(logp_BT[0], np.float32),
            expert_coverage=seen / max(self._config.moe_layers * self._config.experts, 1),
        )

    def _score(
        self, params: nnx.State, token_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        policy = nnx.merge(self._graph, params)
        hidden_BTD, trace = policy(token_BT[:, :-1], segment_BT[:, :-1], position_BT[:, :-1])
        logp_BT, _ = token_logp(hidden_BTD, policy.head_DV, token_BT[:, 1:])
        return logp_BT, trace.experts_LBTK


class Publisher:
    """Pushes versions to the fleet, one at a time, in order."""

    def __init__(
        self,
        fleet: Fleet,
        config: PolicyConfig,
        probe: ProbeScorer,
        dtype: str,
        on_failed: Callable[[BaseException], None],
        in_flight: InFlight = InFlight.FINISH,
    ) -> None:
        """Takes its fleet.

        Args:
          fleet: where to.
          config: the architecture, whose digest the engines compare with theirs.
          probe: scores the probe.
          dtype: of the tensors on the wire, "float32" or "bfloat16".
          on_failed: called with the error, in the publishing thread, so that nobody waits for what will not come.
          in_flight: what a commit does to running requests.
        """
        self._fleet = fleet
        self._config = config
        self._probe = probe
        self._export = Export(config, _DTYPES[dtype])
        self._on_failed = on_failed
        self._in_flight = in_flight
        self._thread: threading.Thread | None = None
        self._exported = threading.Event()
        self._error: BaseException | None = None
        self._last: Published | None = None

    @property
    def busy(self) -> bool:
        """Whether a push is under way: `start` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, state: TrainState, on_committed: Callable[[int], None]) -> None:
        """Begins to publish this version; an earlier push is finished first.

        Args:
          state: whose parameters are pushed.
          on_committed: called with the version, in the publishing thread, once every engine serves it.
        """
        self.finish()
        probe = self._probe.launch(state.params)
        tensors = self._export.tensors(state.params)
        self._exported.clear()
        if not is_local(state.params):
            tensors = iter(list(tensors))  # here and now: a collective
        arguments = (tensors, state.version, probe, on_committed)
        self._thread = threading.Thread(target=self._push, args=arguments, name="publish", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing reads the parameters of `start` any more. Re-raises the push's failure."""
        if self._thread is not None:
            self._exported.wait()
        self._raise()

    def finish(self) -> None:
        """Returns when the push is committed and what follows it has been started. Re-raises its failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def published(self) -> Published | None:
        """The last push, once (None if there was none since the last call)."""
        last, self._last = self._last, None
        return last

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _push(
        self,
        exported: Iterator[tuple[str, np.ndarray]],
        version: int,
        probe: Callable[[], Probe],
        on_committed: Callable[[int], None],
    ) -> None:
        try:
            began = time.monotonic()
            tensors = dict(exported)
            self._exported.set()
            weights = Weights(version=version, model_digest=self._config.digest(), tensors=tensors)
            copied = time.monotonic()
            received = self._fleet.stage(weights)
            staged = time.monotonic()
            wanted = probe()  # was scored meanwhile
            report = self._fleet.commit(version, wanted, self._in_flight)
            self._last = Published(
                version=version,
                probe_mean_abs=report.mean_abs,
                probe_max_abs=report.max_abs,
                expert_coverage=wanted.expert_coverage,
                bytes=sum(array.nbytes for array in tensors.values()),
                seconds_export=copied - began,
                seconds_stage=staged - copied,
                seconds_write=max(engine.seconds_write for engine in received.values()),
                seconds_commit=time.monotonic() - staged,
                seconds_held=max(engine.seconds_held for engine in report.engines.values()),
                seconds_load=max(engine.seconds_load for engine in report.engines.values()),
                seconds_verify=max(engine.seconds_verify for engine in report.engines.values()),
            )
            on_committed(version)
        except BaseException as error:  # re-raised by wait or finish, in the thread that can stop the run
            self._error = error
            self._on_failed(error)
        finally:
            self._exported.set()
