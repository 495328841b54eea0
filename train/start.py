"""Where a run begins: at its newest checkpoint, or at version 0 after the warm start."""

import dataclasses
import shutil
from pathlib import Path

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from sat_jax.model import hf
from train.buffer import BufferSnapshot
from train.checkpoint import Checkpoints, Cut, Identity
from train.config import RunConfig
from train.data import read_supervised
from train.reference import Reference
from train.report import Report
from train.seeds import derive_seed
from train.setup import Problem
from train.side_report import SideReport
from train.state import init_policy, init_state
from train.warm_start import Examples, WarmStart

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A cut to go on from, and what belongs to it."""

    graph: nnx.GraphDef
    optimizer: optax.GradientTransformation
    cut: Cut
    reference: Reference | None


def start_or_restore(
    config: RunConfig,
    problem: Problem,
    folder: Path,
    mesh: Mesh,
    checkpoints: Checkpoints,
    report: Report | SideReport,
) -> Start:
    """Restores the newest cut; where there is none, warms up and saves the cut of version 0.

    Raises:
      ValueError: the checkpoint is of another model, tokenizer, data set or reference.
      OSError: the cut of version 0 could not be written.
    """
    restored = restore(config, problem, folder, mesh, checkpoints)
    if restored is not None:
        report.resume(restored.cut.state.version)
        return restored
    report.resume(0)
    graph, params = _first_weights(config, problem, mesh)
    if config.warm_start.steps:
        examples = Examples.pack(supervised_pairs(config, problem))
        warm = WarmStart(graph, examples, config.warm_start, derive_seed(config.seed, "warm_start"))
        params = warm.run(params, report.warm_start)
    reference = None
    if config.objective.config.needs_reference:
        # What an attempt that was killed before its first checkpoint left there is not a reference of this run.
        if jax.process_index() == 0:
            shutil.rmtree(folder / REFERENCE, ignore_errors=True)
        reference = Reference.freeze(graph, params, problem.policy, folder / REFERENCE)
    optimizer = config.optim.transformation()
    cut = Cut(
        identity=identity(problem, reference),
        state=init_state(params, optimizer, mesh, config.optim.moments_memory),
        buffer=BufferSnapshot(),
        counters={},
    )
    checkpoints.save(cut)
    return Start(graph=graph, optimizer=optimizer, cut=cut, reference=reference)


def restore(
    config: RunConfig,
    problem: Problem,
    folder: Path,
    mesh: Mesh,
    checkpoints: Checkpoints,
    version: int | None = None,
) -> Start | None:
    """The newest cut of the folder (or that of `version`), or None where there is none.

    Raises:
      ValueError: it is of another model, tokenizer, data set or reference, or damaged.
    """
    if checkpoints.latest() is None:
        return None
    checkpoints.check(identity(problem, None), but=("reference",))
    graph, params = _init(config, problem, mesh)
    optimizer = config.optim.transformation()
    reference = None
    if config.objective.config.needs_reference:
        reference = Reference.load(folder / REFERENCE, problem.policy, mesh)
    state = init_state(params, optimizer, mesh, config.optim.moments_memory)
    cut = checkpoints.restore(state, identity(problem, reference), version)
    assert cut is not None, "there is a latest one"
    return Start(graph=graph, optimizer=optimizer, cut=cut, reference=reference)


def supervised_pairs(config: RunConfig, problem: Problem) -> list[tuple[list[int], list[int]]]:
    """What the warm start trains on: (prompt, answer with its stop token), as token ids.

    Raises:
      ValueError: the file of worked solutions cannot be used.
    """
    if not config.warm_start.path:
        return [(prompt.tokens.tolist(), prompt.answer_tokens.tolist()) for prompt in problem.data.train]
    return read_supervised(Path(config.warm_start.path), problem.encoding)


def identity(problem: Problem, reference: Reference | None) -> Identity:
    """What a checkpoint of this run must agree about."""
    return Identity(
        policy=problem.policy.digest(),
        tokenizer=problem.tokenizer.digest(),
        data=problem.data.digest(),
        reference="" if reference is None else reference.digest,
    )


def _first_weights(config: RunConfig, problem: Problem, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Those of the checkpoint to start from, or random ones."""
    if not config.policy.path:
        return _init(config, problem, mesh)
    graph, params = nnx.split(hf.load(config.policy.path, config=problem.policy, mesh=mesh), nnx.Param)
    return graph, params


def _init(config: RunConfig, problem: Problem, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    return init_policy(problem.policy, derive_seed(config.seed, "init"), mesh)
