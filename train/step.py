"""The jitted functions of a run: measure, update, reference. The only file that calls `jax.jit` on a step.

A batch is a tuple of microbatches of a few shapes, so that its size never changes a program. `update` is a host loop of
`grad_step` (the accumulator is donated) and one `apply`. With one microbatch `measure` is fused into `grad_step`, which
then takes the threshold of its own batch: one forward pass fewer, the same number. With several, the log-probs that it
measured are those of the gradient's pass, which then multiplies the vocabulary once less.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sat_jax import objective as objectives
from sat_jax.everywhere import by_rows, everywhere, own_slope, row_specs, total, value_everywhere
from sat_jax.mesh import MeshConfig, make_mesh, spec
from sat_jax.metrics import Mean, Metrics, Sum, merge
from sat_jax.model import Policy
from sat_jax.model.attention import attention_pairs
from sat_jax.objective import ObjectiveConfig, policy_loss
from sat_jax.types import Measured, PolicyOutput, TokenBatch, TokenScores
from train.export import whole
from train.moments import HOST, grouped, in_memory, memory_of, streamed
from train.state import TrainState, shardings

Batch = tuple[TokenBatch, ...]
Gradients = tuple[nnx.State, Metrics]  # and what was measured on the way
# Positions up to which a batch is small: 3 MB to gather, and milliseconds of a CPU.
_SMALL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the whole optimizer batch says before its first gradient.

    Attributes:
      measured: per microbatch, the detached mismatch and the batch's threshold; None where `update` takes its own.
      scores: per microbatch, what was said of its tokens on the way, which `update` need not find out again; or None.
      denominator: the global denominator of the loss, scalar float32; None where the one microbatch's own is global.
    """

    measured: tuple[Measured | None, ...]
    scores: tuple[TokenScores | None, ...]
    denominator: jax.Array | None


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What an update did.

    Attributes:
      finite: loss and gradient norm were finite; if not, the state is the old one and its version unchanged.
      metrics: host floats.
    """

    finite: bool
    metrics: dict[str, float]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Given:
    """What a microbatch's gradient takes as given; None where the objective does without."""

    measured: Measured | None = None
    scores: TokenScores | None = None
    denominator: jax.Array | None = None
    ref_logp_BT: jax.Array | None = None
    prox_logp_BT: jax.Array | None = None


class Step:
    """Holds the compiled functions of one run: one policy structure, one objective, one mesh."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        objective: ObjectiveConfig,
        temperature: float,
        state: TrainState,
    ) -> None:
        """Builds the functions; nothing is compiled until the first call.

        Args:
          graph: static part of the policy.
          optimizer: as it made `state.opt_state`. Where that is in the host's memory, it is called for some
            parameters at a time and given the gradient's global `norm`.
          objective: the loss.
          temperature: of the sampling; logits are divided by it.
          state: for its shardings, and the memory of its moments.
        """
        self._graph = graph
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._objective = objective
        self._temperature = temperature
        policy: Policy = nnx.merge(graph, state.params)
        self._mesh = mesh = policy.mesh
        self._alone = _alone(policy) if mesh.shape["data"] == mesh.size > 1 else None
        memory = memory_of(state.opt_state)
        moments = in_memory(state.opt_state, shardings(state.opt_state, mesh), memory)
        kept = (shardings(state.params, mesh), moments)
        self._groups = grouped(state.params) if memory == HOST else None
        self._score_jit = jax.jit(self._score)
        self._mismatch_jit = jax.jit(self._mismatch)
        self._threshold_jit = jax.jit(self._threshold)
        self._values_jit = jax.jit(lambda metrics: {name: metric.value() for name, metric in metrics.items()})
        self._denominator_jit = jax.jit(self._denominator)
        self._grad_jit = jax.jit(self._grad, donate_argnums=1, out_shardings=(kept[0], None))
        # The gradient is not donated: nothing that comes out could take its buffer.
        self._apply_jit = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=(*kept, None))

    def score(self, params: nnx.State, batch: Sequence[TokenBatch]) -> tuple[PolicyOutput, ...]:
        """Scores every microbatch at the sampling temperature, forward only."""
        return tuple(self._score_jit(params, micro) for micro in batch)

    def measure(self, state: TrainState, batch: Batch) -> Measurement:
        """Looks at the whole optimizer batch: the threshold and the denominator are statistics of all of it."""
        nothing = (None,) * len(batch)
        if len(batch) == 1:
            return Measurement(measured=nothing, scores=nothing, denominator=None)
        denominator = jnp.sum(jnp.stack([self._denominator_jit(micro) for micro in batch]))
        if not self._objective.needs_measure:
            return Measurement(measured=nothing, scores=nothing, denominator=denominator)
        mismatches, scores = zip(*(self._mismatch_jit(state.params, micro) for micro in batch), strict=True)
        threshold = self._threshold_jit(mismatches, batch)
        measured = tuple(Measured(mismatch_BT=mismatch_BT, threshold=threshold) for mismatch_BT in mismatches)
        return Measurement(measured=measured, scores=scores, denominator=denominator)

    def update(
        self,
        state: TrainState,
        batch: Batch,
        measurement: Measurement,
        ref_logps: Sequence[jax.Array] | None = None,
        prox_logps: Sequence[jax.Array] | None = None,
    ) -> tuple[TrainState, StepReport]:
        """One optimizer step. `state`'s buffers are donated: nobody may read them afterwards.

        Args:
          state: the state to advance.
          batch: the optimizer batch.
          measurement: of this batch by this state.
          ref_logps: log-probs under the frozen reference per microbatch, nats; needed when kl_coef > 0.
          prox_logps: log-probs before the batch's first step per microbatch, nats; needed by a proximal anchor.

        Returns:
          The new state (the old values and version, should anything not be finite) and what happened.
        """
        gradients, metrics = self.gradients(state.params, batch, measurement, ref_logps, prox_logps)
        params, opt_state, (norm, finite) = self._apply_jit(
            state.params, state.opt_state, gradients, metrics["loss"].value()
        )
        seen, norm, finite = jax.device_get((self._values_jit(metrics), norm, finite))
        ok = bool(finite)
        seen = {name: float(value) for name, value in seen.items()}
        seen |= {"grad_norm": float(norm), "microbatches": float(len(batch))}
        return TrainState(state.version + ok, params, opt_state), StepReport(finite=ok, metrics=seen)

    def gradients(
        self,
        params: nnx.State,
        batch: Batch,
        measurement: Measurement,
        ref_logps: Sequence[jax.Array] | None = None,
        prox_logps: Sequence[jax.Array] | None = None,
    ) -> tuple[nnx.State, Metrics]:
        """The gradient of the whole batch's loss, and what it measured; the first half of `update`, which see.

        Args:
          params: of the policy; they are kept.
          batch, measurement, ref_logps, prox_logps: as `update` takes them.
        """
        gradients, metrics = None, None
        for index, micro in enumerate(batch):
            given = _Given(
                measured=measurement.measured[index],
                scores=measurement.scores[index],
                denominator=measurement.denominator,
                ref_logp_BT=None if ref_logps is None else ref_logps[index],
                prox_logp_BT=None if prox_logps is None else prox_logps[index],
            )
            gradients, seen = self._grad_jit(params, gradients, micro, given)
            metrics = seen if metrics is None else merge(metrics, seen)
        assert gradients is not None, "a batch has at least one microbatch"
        assert metrics is not None, "a batch has at least one microbatch"
        return gradients, metrics

    def trace(self, state: TrainState, micro: TokenBatch, microbatches: int = 1) -> dict[str, jax.stages.Traced]:
        """Every program of an optimizer step, traced: a jaxpr to count in, and what `lower` lowers.

        Args:
          state: the state; shapes with shardings will do (`train.abstract`), and so will a mesh of mere topology.
          micro: one microbatch, likewise.
          microbatches: how many the batch has.

        Returns:
          By name, in the order of a step: gradient (of the first or only microbatch), metrics and apply; with several
          also denominator, accumulate (gradients of the others), and mismatch and threshold where the objective
          measures the batch first; score where a frozen reference or a proximal anchor is scored.
        """
        objective, several = self._objective, microbatches > 1
        measures = several and objective.needs_measure
        logp: Any = jax.ShapeDtypeStruct(micro.target_BT.shape, jnp.float32, sharding=micro.target_BT.sharding)
        scalar: Any = jax.ShapeDtypeStruct((), jnp.float32)
        given = _Given(
            measured=Measured(mismatch_BT=logp, threshold=scalar) if measures else None,
            scores=TokenScores(logp_BT=logp, entropy_BT=logp, normaliser_BT=logp) if measures else None,
            denominator=scalar if several else None,
            ref_logp_BT=logp if objective.needs_reference else None,
            prox_logp_BT=logp if objective.needs_proximal else None,
        )
        programs: dict[str, jax.stages.Traced] = {}
        if several:
            programs["denominator"] = self._denominator_jit.trace(micro)
        if measures:
            programs["mismatch"] = self._mismatch_jit.trace(state.params, micro)
            programs["threshold"] = self._threshold_jit.trace((logp,) * microbatches, (micro,) * microbatches)
        if objective.needs_reference or objective.needs_proximal:
            programs["score"] = self._score_jit.trace(state.params, micro)
        programs["gradient"] = self._grad_jit.trace(state.params, None, micro, given)
        if several:
            programs["accumulate"] = self._grad_jit.trace(state.params, state.params, micro, given)
        programs["apply"] = self._apply_jit.trace(state.params, state.opt_state, state.params, scalar)
        programs["metrics"] = self._values_jit.trace(programs["gradient"].out_info[1])
        return programs

    def lower(self, state: TrainState, micro: TokenBatch, microbatches: int = 1) -> dict[str, jax.stages.Lowered]:
        """The programs of `trace`, lowered but not compiled."""
        return {name: program.lower() for name, program in self.trace(state, micro, microbatches).items()}

    def _score(
        self,
        params: nnx.State,
        micro: TokenBatch,
        known: TokenScores | None = None,
        graph: nnx.GraphDef | None = None,
    ) -> PolicyOutput:
        with jax.named_scope("score"):
            return nnx.merge(graph or self._graph, params).score(micro, self._temperature, known)

    def _mismatch(self, params: nnx.State, micro: TokenBatch) -> tuple[jax.Array, TokenScores]:
        def of(arrays: tuple[jax.Array, TokenBatch]) -> jax.Array:
            return objectives.mismatch(*arrays, self._objective)

        scores = self._score(params, micro).scores
        arrays = (scores.logp_BT, _judged(micro))
        return by_rows(of, self._mesh, arrays) if self._small((micro,)) else of(arrays), scores

    def _threshold(self, mismatches: tuple[jax.Array, ...], batch: Batch) -> jax.Array:
        def of(arrays: tuple[tuple[jax.Array, ...], ...]) -> jax.Array:
            mismatch, mask, advantage = (_stack(parts) for parts in zip(*arrays, strict=True))
            return objectives.batch_threshold(mismatch, mask, advantage, self._objective)

        looked_at = zip(mismatches, batch, strict=True)
        arrays = tuple((mismatch_BT, micro.loss_mask_BT, micro.advantage_BT) for mismatch_BT, micro in looked_at)
        return everywhere(of, self._mesh, arrays) if self._small(batch) else of(arrays)

    def _denominator(self, micro: TokenBatch) -> jax.Array:
        def of(micro: TokenBatch) -> jax.Array:
            return objectives.denominator(micro, self._objective)

        return everywhere(of, self._mesh, _judged(micro)) if self._small((micro,)) else of(micro)

    def _grad(self, params: nnx.State, accumulated: nnx.State | None, micro: TokenBatch, given: _Given) -> Gradients:
        def loss(params: nnx.State) -> tuple[jax.Array, Metrics]:
            output = self._score(params, micro, given.scores)
            said = jax.lax.stop_gradient((output.entropy_BT, output.agreement_BT))
            rest = (*said, _judged(micro), dataclasses.replace(given, scores=None))
            with jax.named_scope("objective"):
                if self._small((micro,)):
                    return value_everywhere(self._judge, self._mesh, output.logp_BT, rest)
                return self._judge(output.logp_BT, rest)

        with jax.named_scope("gradient"):
            if self._alone is not None and self._small((micro,)):
                gradients, metrics = self._grad_of_copies(self._alone, params, micro, given)
            else:
                (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        if accumulated is not None:
            gradients = jax.tree.map(jnp.add, accumulated, gradients)
        return gradients, metrics

    def _grad_of_copies(self, alone: nnx.GraphDef, params: nnx.State, micro: TokenBatch, given: _Given) -> Gradients:
        """As `_grad`, where every device holds the whole policy: it scores its own rows as a single one would."""

        def own(params: nnx.State, micro: TokenBatch, given: _Given) -> Gradients:
            def scored(params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
                output = self._score(params, micro, given.scores, alone)
                return output.logp_BT, (output.entropy_BT, output.agreement_BT)

            logp_BT, pull, said = jax.vjp(scored, params, has_aux=True)
            rest = (*said, _judged(micro), dataclasses.replace(given, scores=None))
            with jax.named_scope("objective"):
                (_, metrics), slope_BT = own_slope(self._judge, logp_BT, rest)
            return total(pull(slope_BT)[0]), metrics

        rows, others = row_specs((micro, given))
        routes = dataclasses.replace(rows.trace, experts_LBTK=spec("unsharded", "batch"))
        cut = (spec(), dataclasses.replace(rows, trace=routes), others)
        sharded = jax.shard_map(own, mesh=self._mesh, in_specs=cut, out_specs=spec(), check_vma=False)
        return sharded(params, micro, given)

    def _small(self, batch: Sequence[TokenBatch]) -> bool:
        """Whether waiting for other devices costs more than doing on each of them what is done of all tokens."""
        return self._mesh.size > 1 and sum(micro.segment_BT.size for micro in batch) <= _SMALL

    def _judge(
        self, logp_BT: jax.Array, rest: tuple[jax.Array, jax.Array, TokenBatch, _Given]
    ) -> tuple[jax.Array, Metrics]:
        """The loss, and all that is said of a microbatch: pure over these arrays."""
        entropy_BT, agreement_BT, micro, given = rest
        report = policy_loss(
            logp_BT,
            micro,
            self._objective,
            measured=given.measured,
            prox_logp_BT=given.prox_logp_BT,
            ref_logp_BT=given.ref_logp_BT,
            denominator=given.denominator,
        )
        metrics = report.metrics | _policy_metrics(entropy_BT, agreement_BT, micro) | {"loss": Sum(report.loss)}
        return report.loss, metrics | {"attention/useful": Mean(*attention_pairs(micro.segment_BT, self._mesh))}

    def _apply(self, params: nnx.State, opt_state: Any, gradients: nnx.State, loss: jax.Array) -> tuple[Any, Any, Any]:
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradients)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)

            def advance(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
                updates, advanced = self._optimizer.update(gradients, opt_state, params, norm=norm)
                new, old = (optax.apply_updates(params, updates), advanced), (params, opt_state)
                # The old buffers are donated, so the choice between old and new has to be made in here.
                return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

            advance_all = advance if self._groups is None else functools.partial(streamed, advance, self._groups)
            stepped, advanced = advance_all(params, opt_state, gradients)
            return stepped, advanced, (norm, finite)


def _alone(policy: Policy) -> nnx.GraphDef:
    """The static part of this policy on one of its devices, as every copy of it is."""
    mesh = make_mesh(MeshConfig(), [policy.mesh.devices.flat[0]])
    return nnx.graphdef(nnx.eval_shape(lambda: Policy(policy.config, nnx.Rngs(0), mesh)))


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of positions on a new axis, shorter rows filled up with zeros.

    Not concatenated: every row stays on the device that holds it.
    """
    length = max(array.shape[1] for array in arrays)
    return jnp.stack([jnp.pad(array, ((0, 0), (0, length - array.shape[1]))) for array in arrays])


def _judged(micro: TokenBatch) -> TokenBatch:
    """What the objective and the metrics look at."""
    nothing: Any = None
    trace = dataclasses.replace(micro.trace, experts_LBTK=nothing)
    return dataclasses.replace(micro, input_BT=nothing, target_BT=nothing, position_BT=nothing, trace=trace)


def _policy_metrics(entropy_BT: jax.Array, agreement_BT: jax.Array, micro: TokenBatch) -> Metrics:
    """Entropy over active tokens; agreement and absence of replayed routes over real positions."""
    active_BT = micro.loss_mask_BT
    real_BT = micro.segment_BT > 0
    replayed_BT = micro.trace.present_BT & real_BT
    count = jnp.sum(real_BT).astype(jnp.float32)
    return {
        "entropy": _mean(entropy_BT, active_BT),
        "routing/agreement": _mean(agreement_BT, replayed_BT),
        "routing/missing": Mean(count - jnp.sum(replayed_BT), count),
    }


def _mean(value_BT: jax.Array, mask_BT: jax.Array) -> Mean:
    return Mean(jnp.sum(jnp.where(mask_BT, value_BT, 0)), jnp.sum(mask_BT).astype(jnp.float32))


def host_batch(batch: Batch) -> dict[str, np.ndarray]:
    """A batch as plain arrays by name, microbatches numbered, for saving beside a run that stopped.

    Of several processes a collective: every one is given the whole batch.
    """
    return {
        f"micro{index}{jax.tree_util.keystr(path)}": whole(leaf)
        for index, micro in enumerate(batch)
        for path, leaf in jax.tree_util.tree_leaves_with_path(micro)
    }
