"""Supervised warm start: a policy that answers in the right form, about half of the time rightly.

Reinforcement learning needs some success to begin with. The answers are noised on purpose, so that the sampled
accuracy starts low while the greedy one is high: part of what the run then gains is that noise, removed. The run's
summary says so.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sat_jax.mesh import check_divides, constrain
from sat_jax.model import Policy, PolicyConfig
from sat_jax.routing import free_trace
from sat_jax.types import RoutingTrace, TokenBatch
from train.state import init_state, shardings

_STEPS_PER_CALL = 50


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """The supervised phase before version 0.

    Attributes:
      steps: optimizer steps; 0 = none, the run starts from random weights.
      batch_size: examples a step.
      peak_lr: learning rate, after a warm-up of a tenth of the steps, then decaying to a tenth along a cosine.
      noise: share in [0, 1] of answer tokens (never the stop) that are replaced by another answer token.
      path: file of worked solutions, `sat-jax prepare math --supervised`; empty = the answers of the training prompts.
    """

    steps: int
    batch_size: int = 256
    peak_lr: float = 1e-3
    noise: float = 0.0
    path: str = ""

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
          ValueError: a value is out of range.
        """
        for name, value, good, what in (
            ("steps", self.steps, self.steps >= 0, ">= 0"),
            ("batch_size", self.batch_size, self.batch_size >= 1, ">= 1"),
            ("peak_lr", self.peak_lr, self.peak_lr > 0, "> 0"),
            ("noise", self.noise, 0 <= self.noise <= 1, "in [0, 1]"),
        ):
            if not good:
                raise ValueError(f"warm_start.{name}: expected {what}, got {value}")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Encoded prompt, answer and stop token of every training example, padded to one length.

    Attributes:
      token_PT: int32; 0 where padded.
      prompt_P: int32, tokens of the prompt.
      whole_P: int32, tokens of prompt, answer and stop.
    """

    token_PT: np.ndarray
    prompt_P: np.ndarray
    whole_P: np.ndarray

    @classmethod
    def pack(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Examples":
        """From (prompt tokens, answer tokens with the stop) pairs."""
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        token_PT = np.zeros((len(pairs), longest), np.int32)
        for row, (prompt, answer) in enumerate(pairs):
            token_PT[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        prompt_P = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        return cls(token_PT, prompt_P, prompt_P + np.array([len(answer) for _, answer in pairs], np.int32))

    def answer_tokens(self) -> np.ndarray:
        """The distinct tokens that occur in answers, stop excluded: what noise is drawn from."""
        at_T = np.arange(self.token_PT.shape[1])
        inside_PT = (at_T >= self.prompt_P[:, None]) & (at_T < self.whole_P[:, None] - 1)
        return np.unique(self.token_PT[inside_PT])


class WarmStart:
    """Runs the supervised phase; a function of (parameters, examples, config, seed)."""

    def __init__(self, graph: nnx.GraphDef, examples: Examples, config: WarmStartConfig, seed: int) -> None:
        """Takes what it trains on.

        Args:
          graph: static part of the policy.
          examples: the training split.
          config: the phase.
          seed: of the order of examples and of the noise.

        Raises:
          ValueError: noise is wanted where answers have only one distinct token.
        """
        self._graph = graph
        self._examples = examples
        self._config = config
        self._key = jax.random.key(seed)
        self._choices = examples.answer_tokens()
        if config.noise > 0 and len(self._choices) < 2:
            raise ValueError(
                f"warm_start.noise: expected answers of at least two distinct tokens to noise, got "
                f"{len(self._choices)}; set warm_start.noise=0"
            )
        decay = optax.warmup_cosine_decay_schedule(
            0.0, config.peak_lr, max(config.steps // 10, 1), max(config.steps, 2), config.peak_lr / 10
        )
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(decay, b2=0.98))

    def run(self, params: nnx.State, progress: Callable[[int, float, float], None]) -> nnx.State:
        """Trains.

        Args:
          params: initial parameters; donated.
          progress: called now and then with (step, mean loss in nats a token, share of answer tokens that are given
            better than even odds).

        Returns:
          The trained parameters.
        """
        mesh = nnx.merge(self._graph, params).mesh
        check_divides(mesh, "batch", **{"warm_start.batch_size": self._config.batch_size})
        state = init_state(params, self._optimizer, mesh)
        kept = (shardings(state.params, mesh), shardings(state.opt_state, mesh))
        steps = jax.jit(self._steps, donate_argnums=(0, 1), out_shardings=(*kept, None))
        carry = (state.params, state.opt_state)
        for first in range(0, self._config.steps, _STEPS_PER_CALL):
            count = min(_STEPS_PER_CALL, self._config.steps - first)
            *carry, (loss, likely) = steps(*carry, jnp.int32(first), jnp.int32(count))
            progress(first + count, float(loss), float(likely))
        return carry[0]

    def _steps(
        self, params: nnx.State, opt_state: optax.OptState, first: jax.Array, count: jax.Array
    ) -> tuple[nnx.State, optax.OptState, tuple[jax.Array, jax.Array]]:
        def body(index: jax.Array, carry: tuple) -> tuple:
            params, opt_state, loss_sum, likely_sum = carry
            batch = self._batch(jax.random.fold_in(self._key, first + index), nnx.merge(self._graph, params))
            (loss, likely), gradients = jax.value_and_grad(self._loss, has_aux=True)(params, batch)
            updates, opt_state = self._optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss_sum + loss, likely_sum + likely

        zero = jnp.float32(0)
        params, opt_state, loss, likely = jax.lax.fori_loop(0, count, body, (params, opt_state, zero, zero))
        return params, opt_state, (loss / count, likely / count)

    def _batch(self, key: jax.Array, policy: Policy) -> TokenBatch:
        """A batch of noised examples, one a row."""
        pick_key, noise_key, token_key = jax.random.split(key, 3)
        row_B = jax.random.randint(pick_key, (self._config.batch_size,), 0, len(self._examples.token_PT))
        token_BT = constrain(jnp.asarray(self._examples.token_PT)[row_B], policy.mesh, "batch", "unsharded")
        prompt_B = jnp.asarray(self._examples.prompt_P)[row_B]
        whole_B = jnp.asarray(self._examples.whole_P)[row_B]
        at_T = jnp.arange(token_BT.shape[1])
        answer_BT = (at_T >= prompt_B[:, None]) & (at_T < whole_B[:, None] - 1)
        noised_BT = answer_BT & (jax.random.uniform(noise_key, token_BT.shape) < self._config.noise)
        token_BT = jnp.where(noised_BT, self._another(token_key, token_BT), token_BT)
        segment_BT = (at_T[:-1] < whole_B[:, None] - 1).astype(jnp.int32)
        mask_BT = (at_T[1:] >= prompt_B[:, None]) & (at_T[1:] < whole_B[:, None])
        input_BT = token_BT[:, :-1]
        zero_BT = jnp.zeros(input_BT.shape, jnp.float32)
        return TokenBatch(
            input_BT=input_BT,
            target_BT=token_BT[:, 1:],
            segment_BT=segment_BT,
            position_BT=jnp.broadcast_to(at_T[:-1], input_BT.shape).astype(jnp.int32),
            loss_mask_BT=mask_BT,
            behavior_logp_BT=zero_BT,
            advantage_BT=zero_BT,
            lag_BT=jnp.zeros(input_BT.shape, jnp.int32),
            trace=_free_trace(policy.config, *input_BT.shape),
        )

    def _another(self, key: jax.Array, token_BT: jax.Array) -> jax.Array:
        """A different answer token for each, uniformly."""
        if len(self._choices) < 2:
            return token_BT
        choices = jnp.asarray(self._choices)
        # The original's own place is skipped, so that the noise is never the truth.
        own_BT = jnp.searchsorted(choices, token_BT)
        shift_BT = jax.random.randint(key, token_BT.shape, 1, len(self._choices))
        return choices[(own_BT + shift_BT) % len(self._choices)]

    def _loss(self, params: nnx.State, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
        output = nnx.merge(self._graph, params).score(batch)
        count = jnp.maximum(jnp.sum(batch.loss_mask_BT), 1)
        loss = -jnp.sum(jnp.where(batch.loss_mask_BT, output.logp_BT, 0)) / count
        likely = jnp.sum(batch.loss_mask_BT & (output.logp_BT > np.log(0.5)))
        return loss, likely / count


def _free_trace(config: PolicyConfig, rows: int, positions: int) -> RoutingTrace:
    return free_trace(config.moe_layers, rows, positions, config.experts_per_token, config.experts)
