"""The trainer's side of the tests: real policies, one for each seed, and what they compute."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rollout_bridge import Completion, Probe, SampleRequest, Sampling, Weights
from sat_jax.logprob import token_logp
from sat_jax.mesh import one_device_mesh
from sat_jax.model.hf import export_tensors
from train.config import load
from train.publish import ProbeScorer
from train.setup import make_problem, probe_sequences
from train.state import init_policy

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_sglang.toml"
SHORT, LONG = 32, 640  # fed tokens of a scored sequence
TOLERANCE = 1e-3  # nats, of the probe; honest float32 is below 1e-6


class Trainer:
    """Policies by seed; a version is any number together with a seed."""

    def __init__(self) -> None:
        config = load(CONFIG, ["rollout.dtype=float32"])
        self.problem = make_problem(config)
        # Some of the tests' sequences are longer than the run's; how far a policy reaches is no part of what it is.
        self._policy = dataclasses.replace(self.problem.policy, max_positions=LONG)
        self._mesh = one_device_mesh()
        self._seed = config.seed
        self._score = None

    @functools.cache  # noqa: B019
    def params(self, seed: int):
        return init_policy(self._policy, seed, self._mesh)

    def weights(self, version: int, seed: int) -> Weights:
        _, params = self.params(seed)
        tensors = dict(export_tensors(params, self.problem.policy, np.float32))
        return Weights(version=version, model_digest=self.problem.policy.digest(), tensors=tensors)

    @functools.cache  # noqa: B019
    def probe(self, seed: int) -> Probe:
        graph, params = self.params(seed)
        sequences = probe_sequences(self.problem.data, self._seed)
        return ProbeScorer(graph, self.problem.policy, sequences, TOLERANCE)(params)

    def request(self, number: int = 0, *, members: int = 8, length: int = 12, temperature: float = 0.7, **rest):
        prompt = rest.pop("prompt", self.problem.data[number].tokens)
        sampling = Sampling(
            max_new_tokens=length, stop_ids=rest.pop("stop", (1,)), seed=number, temperature=temperature
        )
        return SampleRequest(
            request_id=rest.pop("request_id", f"t{number}"),
            prompt_tokens=np.asarray(prompt, np.int32),
            sampling=sampling,
            members=tuple(range(members)),
            **rest,
        )

    def score(self, request: SampleRequest, completion: Completion, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of the completion's tokens and routes of every fed token, as this policy computes them."""
        graph, params = self.params(seed)
        if self._score is None:
            self._score = jax.jit(functools.partial(_score, graph))
        whole = np.concatenate([request.prompt_tokens, completion.tokens])
        count = len(whole) - 1
        room = SHORT if count <= SHORT else LONG  # two shapes, two programs
        token_BT = np.zeros((1, room + 1), np.int32)
        token_BT[0, : count + 1] = whole
        segment_BT = (np.arange(room) < count).astype(np.int32)[None]
        logp_BT, experts_LBTK = self._score(params, token_BT, segment_BT, request.sampling.temperature or 1.0)
        routes_TLK = np.asarray(experts_LBTK)[:, 0, :count].transpose(1, 0, 2)
        return np.asarray(logp_BT)[0, len(request.prompt_tokens) - 1 : count], routes_TLK


def _score(graph, params, token_BT, segment_BT, temperature):
    policy = nnx.merge(graph, params)
    position_BT = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)[None]
    hidden_BTD, trace = policy(token_BT[:, :-1], segment_BT, position_BT)
    logp_BT, _ = token_logp(hidden_BTD, policy.head_DV, token_BT[:, 1:], temperature=temperature)
    return logp_BT, trace.experts_LBTK
