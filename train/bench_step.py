"""What SAT on a sequence ratio costs of a whole train step: the third ratio of `sat-jax bench clip`."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sat_jax.mesh import make_mesh
from sat_jax.objective import ObjectiveConfig
from sat_jax.types import TokenBatch
from train.bench_clip import Clock, made_up, program
from train.config import RunConfig, load
from train.setup import Problem, make_problem
from train.state import TrainState, init_policy, init_state
from train.step import Step

# A kernel of a small batch is a thousandth of the step: one run of it is nearer to the clock's grain.
_RUNS = 20


def measure_step(path: Path, repetitions: int, clock: Clock) -> dict[str, Any]:
    """Times a run's optimizer step, and both kernels at its batch's shape, in turns.

    The step is `Step.update` with one full microbatch, without the scoring by the reference, so that the share is
    rather too high than too low.

    Args:
      path: the run's file.
      repetitions: how often each is timed; the first run of each, which compiles, is not.
      clock: seconds.

    Returns:
      Milliseconds (medians), and the share (sat_gspo - gspo) / step: its median and its quartiles.

    Raises:
      ValueError: the file is not a complete run, or needs other devices than there are.
    """
    config = load(path)
    problem = make_problem(config)
    step, state = _step(config, problem)
    batch = config.batch
    sequence = max(1, batch.row_length // 5)
    logp_BT, micro, prox_logp_BT = made_up(jax.random.key(0), batch.rows, batch.row_length, sequence)
    micro = _routed(micro, problem)
    kernels = {name: program(ObjectiveConfig.preset(name)) for name in ("gspo", "sat_gspo")}
    seconds: dict[str, list[float]] = {"step": [], **{name: [] for name in kernels}}
    for repetition in range(repetitions + 1):
        measurement = step.measure(state, (micro,))
        start = clock()
        state, _ = step.update(state, (micro,), measurement, (logp_BT,), (prox_logp_BT,))
        jax.block_until_ready(state.params)
        seconds["step"].append(clock() - start)
        for name, kernel in kernels.items():
            jax.block_until_ready(kernel(logp_BT, micro, prox_logp_BT))
            start = clock()
            for _ in range(_RUNS):
                jax.block_until_ready(kernel(logp_BT, micro, prox_logp_BT))
            seconds[name].append((clock() - start) / _RUNS)
        if repetition == 0:
            seconds = {name: [] for name in seconds}
    shares = [
        (sat - base) / whole
        for sat, base, whole in zip(seconds["sat_gspo"], seconds["gspo"], seconds["step"], strict=True)
    ]
    low, _, high = statistics.quantiles(shares, method="inclusive") if len(shares) > 1 else shares * 3
    return {
        "run": config.name,
        "rows": batch.rows,
        "length": batch.row_length,
        **{f"{name}_ms": round(1e3 * statistics.median(values), 4) for name, values in seconds.items()},
        "share": round(statistics.median(shares), 5),
        "share_low": round(low, 5),
        "share_high": round(high, 5),
    }


def _step(config: RunConfig, problem: Problem) -> tuple[Step, TrainState]:
    mesh = make_mesh(config.mesh)
    graph, params = init_policy(problem.policy, config.seed, mesh)
    optimizer = config.optim.transformation()
    state = init_state(params, optimizer, mesh, config.optim.moments_memory)
    return Step(graph, optimizer, config.objective.config, config.sampling.temperature, state), state


def _routed(micro: TokenBatch, problem: Problem) -> TokenBatch:
    """The batch with routes of the policy's shape, all to be replayed."""
    policy = problem.policy
    shape_LBTK = (policy.moe_layers, *micro.segment_BT.shape, policy.experts_per_token)
    experts_LBTK = jnp.broadcast_to(jnp.arange(policy.experts_per_token, dtype=jnp.uint8), shape_LBTK)
    trace = dataclasses.replace(
        micro.trace, experts_LBTK=experts_LBTK, present_BT=jnp.ones_like(micro.trace.present_BT)
    )
    return dataclasses.replace(micro, trace=trace)
