"""The local engine's device side: its compiled programs, and the host's copies of what goes in and comes out.

Every program is compiled before the first request and called with fixed shapes, so nothing compiles afterwards (only a
probe of another length class compiles once more). Nothing here is thread-safe: one thread owns it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from rollout_bridge.messages import Probe, SampleRequest
from sat_jax import sampler
from sat_jax.logprob import token_logp
from sat_jax.model import Policy, PolicyConfig

_TAKE = 32  # slots read back at a time
_PROBE_STEP = 256  # a probe is padded to a multiple of this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where every slot is, on the host: running_B, fed_B and known_B as in `sampler.Slots`."""

    running_B: np.ndarray
    fed_B: np.ndarray
    known_B: np.ndarray


class LocalPrograms:
    """Compiles the sampler and the probe for one policy, and holds the slots."""

    def __init__(self, policy: PolicyConfig, slots: sampler.SlotsConfig) -> None:
        """Compiles everything: seconds.

        Args:
          policy: the architecture, its `dtype` that of weights and computation.
          slots: how much is held at once.
        """
        self._policy = policy
        self._config = slots
        abstract = nnx.eval_shape(lambda: Policy(policy, nnx.Rngs(0)))
        self._graph, shapes = nnx.split(abstract, nnx.Param)
        self._weight_shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, policy.dtype, sharding=leaf.sharding), shapes
        )
        self._slots = sampler.empty_slots(slots, policy)
        number, slot_N = np.int32(0), np.zeros(min(_TAKE, slots.slots), np.int32)
        self._admit = self._compile(sampler.admit, 0, self._slots, self._admission())
        self._decode = self._compile(self._decode_from, 1, self._weight_shapes, self._slots, number, number, number)
        self._retract = self._compile(sampler.retract, 0, self._slots)
        self._halt = self._compile(sampler.halt, 0, self._slots, np.zeros(slots.slots, bool))
        self._take = self._compile(sampler.take, (), self._slots, slot_N)
        self._probes: dict[int, Any] = {}
        self._probe_program(_PROBE_STEP)

    def weights(self, policy: Policy) -> nnx.State:
        """The parameters of a policy in the engine's type, on its device."""
        return jax.tree.map(lambda leaf: leaf.astype(self._policy.dtype), nnx.state(policy, nnx.Param))

    def admit(self, new: Mapping[int, tuple[SampleRequest, int]]) -> None:
        """Puts (request, member) into slots, by slot number."""
        admission = self._admission()
        terms = admission.terms
        for slot, (request, member) in new.items():
            prompt, sampling = request.prompt_tokens, request.sampling
            admission.new_B[slot] = True
            admission.token_BS[slot, : len(prompt)] = prompt
            terms.prompt_B[slot] = len(prompt)
            terms.sampled_B[slot] = request.already_sampled
            terms.limit_B[slot] = len(prompt) - request.already_sampled + sampling.max_new_tokens
            terms.seed_low_B[slot] = sampling.seed & 0xFFFFFFFF
            terms.seed_high_B[slot] = sampling.seed >> 32
            terms.member_B[slot] = member
            terms.temperature_B[slot] = sampling.temperature
            terms.top_p_B[slot] = sampling.top_p
            terms.top_k_B[slot] = max(sampling.top_k, 0)
            terms.stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self._slots = self._admit(self._slots, admission)

    def decode(self, weights: nnx.State, version: int, steps: int, enough: int) -> Progress:
        """Runs `sampler.decode` and waits for it."""
        self._slots = self._decode(weights, self._slots, np.int32(version), np.int32(steps), np.int32(enough))
        return self.progress()

    def progress(self) -> Progress:
        """Reads back where every slot is."""
        running_B, fed_B, known_B = jax.device_get((self._slots.running_B, self._slots.fed_B, self._slots.known_B))
        return Progress(running_B=running_B, fed_B=fed_B, known_B=known_B)

    def retract(self) -> None:
        """Makes the running slots feed their known tokens again."""
        self._slots = self._retract(self._slots)

    def halt(self, slots: Iterable[int]) -> None:
        """Ends slots where they are."""
        halted_B = np.zeros(self._config.slots, bool)
        halted_B[list(slots)] = True
        self._slots = self._halt(self._slots, halted_B)

    def take(self, slots: list[int]) -> sampler.Sequences:
        """Reads slots back: `sampler.Sequences` of NumPy arrays, one row per entry of `slots`."""
        width = min(_TAKE, self._config.slots)
        padded = slots + slots[:1] * (-len(slots) % width)
        parts = [
            jax.device_get(self._take(self._slots, np.array(padded[begin : begin + width], np.int32)))
            for begin in range(0, len(padded), width)
        ]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(slots)], *parts)

    def score(self, weights: nnx.State, probe: Probe) -> np.ndarray:
        """Log-probs of the probe's tokens[1:] at temperature 1 with free routing, float32[N - 1], nats."""
        count = len(probe.tokens) - 1
        padded = -(-count // _PROBE_STEP) * _PROBE_STEP
        input_BT, target_BT, segment_BT, position_BT = np.zeros((4, 1, padded), np.int32)
        input_BT[0, :count], target_BT[0, :count] = probe.tokens[:-1], probe.tokens[1:]
        segment_BT[0, :count], position_BT[0, :count] = probe.segments[:-1], probe.positions[:-1]
        logp_BT = self._probe_program(padded)(weights, input_BT, target_BT, segment_BT, position_BT)
        return np.array(logp_BT[0, :count])

    def _probe_program(self, length: int) -> Any:
        if length not in self._probes:
            row_BT = np.zeros((1, length), np.int32)
            self._probes[length] = self._compile(self._score, (), self._weight_shapes, *(row_BT,) * 4)
        return self._probes[length]

    def _score(self, weights, input_BT, target_BT, segment_BT, position_BT):
        policy = nnx.merge(self._graph, weights)
        hidden_BTD, _ = policy(input_BT, segment_BT, position_BT)
        return token_logp(hidden_BTD, policy.head_DV, target_BT)[0]

    def _decode_from(self, weights, slots, version, steps, enough):
        return sampler.decode(nnx.merge(self._graph, weights), slots, version, steps, enough)

    def _admission(self) -> sampler.Admission:
        """Nothing new, in fresh arrays: the device may read them after the call returns."""
        count = self._config.slots
        terms = sampler.Terms(
            prompt_B=np.zeros(count, np.int32),
            sampled_B=np.zeros(count, np.int32),
            limit_B=np.zeros(count, np.int32),
            seed_low_B=np.zeros(count, np.uint32),
            seed_high_B=np.zeros(count, np.uint32),
            member_B=np.zeros(count, np.uint32),
            temperature_B=np.zeros(count, np.float32),
            top_p_B=np.zeros(count, np.float32),
            top_k_B=np.zeros(count, np.int32),
            stop_ids=np.full((count, self._config.stop_ids), -1, np.int32),
        )
        tokens = np.zeros((count, self._config.positions), np.int32)
        return sampler.Admission(new_B=np.zeros(count, bool), token_BS=tokens, terms=terms)

    def _compile(self, function: Any, donated: Any, *arguments: Any) -> Any:
        return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
