"""`sat-jax doctor CONFIG`: looks at the data, the machine and the live fleet, and says what would go wrong."""

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from rollout_bridge.client import Client
from rollout_bridge.errors import BridgeError
from sat_jax.mesh import make_mesh
from train.chat import StopTokens, stop_tokens
from train.config import RunConfig
from train.data import read_examples
from train.doctor import data, live
from train.doctor.finding import Finding, fail, healthy, ok, show, to_json, warn
from train.doctor.fleet import check_ends, check_logprobs, check_repeat, check_routes, check_tokens, check_weights
from train.doctor.machine import Machine, check_batch, check_clock, check_disk, check_memory
from train.doctor.verifier import ask, check_verdicts
from train.engines import Engines, attach_fleet
from train.publish import Published
from train.rewards import open_verifier
from train.seeds import derive_seed
from train.setup import Problem, make_problem, make_publisher
from train.start import restore
from train.state import TrainState, init_policy, init_state
from train.store import cut_folder, open_checkpoints

_COMPILE_SECONDS = 180.0


def doctor(config: RunConfig, folder: Path, *, as_json: bool) -> bool:
    """Examines a run and prints what was found.

    Args:
      config: of the run.
      folder: of the run; only read. A fleet that the config starts itself logs to a temporary folder.
      as_json: print one JSON object in place of a table.

    Returns:
      Whether the run may begin.
    """
    began = time.monotonic()
    findings = list(examine(config, folder))
    seconds = time.monotonic() - began
    if as_json:
        sys.stdout.write(to_json(findings, seconds) + "\n")
    else:
        show(findings, seconds, Console())
    return healthy(findings)


def examine(config: RunConfig, folder: Path) -> Iterator[Finding]:
    """Every finding, in the order in which a run would meet it; what a failure makes impossible is left out."""
    try:
        problem = make_problem(config)
    except ValueError as error:
        yield fail("data: lines", str(error), "a run would end with the same words")
        return
    yield from examine_data(config, problem)
    yield from examine_verifier(config, problem)
    yield from examine_machine(config, problem, folder)
    longest = max(len(prompt.tokens) for prompt in problem.data.train)
    yield from check_batch(config, len(problem.data), longest)
    try:
        yield from _examine_fleet(config, problem, folder)
    except (ValueError, BridgeError, TimeoutError) as error:
        yield fail("fleet: calls", str(error), "a run would end with the same words")


def examine_data(config: RunConfig, problem: Problem) -> Iterator[Finding]:
    """The data file, the tokenizer and the prompts' form."""
    examples = read_examples(config.data)
    yield from data.check_examples(examples, problem.encoding)
    yield from data.check_copies(examples)
    if problem.evaluation:
        yield data.check_overlap(problem.data.train, problem.evaluation)
    yield data.check_round_trip(problem.tokenizer, examples)
    beside = Path(config.tokenizer.path).parent if config.tokenizer.kind == "file" else None
    has_template = beside is not None and _has_template(beside)
    yield from data.check_prompt_form(problem.encoding, problem.data.train, has_template)
    named = StopTokens(by_file={}) if beside is None else stop_tokens(beside, problem.tokenizer)
    yield data.check_stops(problem.collect.stop_ids, named, problem.tokenizer)


def examine_machine(config: RunConfig, problem: Problem, folder: Path) -> Iterator[Finding]:
    """Disk, clock and memory."""
    parameters = problem.policy.num_parameters()
    try:
        machine = measure(folder, config)
    except OSError as error:
        yield fail("machine: disk", f"{folder} cannot be written: {error}", "repair its permissions, or --runs DIR")
        return
    yield check_disk(machine, parameters, config.checkpoint.keep)
    yield check_clock(machine)
    yield check_memory(machine, config, parameters)


def examine_verifier(config: RunConfig, problem: Problem) -> Iterator[Finding]:
    """The verifier, on gold and changed answers."""
    try:
        with open_verifier(problem.verifier):
            verdicts = ask(problem.verifier, problem.data.train, config.seed)
    except Exception as error:  # whatever a user's function raises is what is to be found here
        yield fail("verifier: gold", f"{type(error).__name__}: {error}", "a run would end with the same words")
        return
    yield from check_verdicts(problem.verifier, verdicts, config.verifier.seconds)


def measure(folder: Path, config: RunConfig) -> Machine:
    """Looks at the disk, the clocks and the memory; writes nothing that stays."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
        file.write(b"now")
        file.flush()
        clock, disk_clock = time.time(), os.stat(file.name).st_mtime
    device = jax.devices()[0]
    limits = device.memory_stats() or {}
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        disk_free=shutil.disk_usage(place).free,
        memory=int(limits.get("bytes_limit", host)),
        devices=config.mesh.batch_shards * config.mesh.tensor,
        clock=clock,
        disk_clock=disk_clock,
    )


def _examine_fleet(config: RunConfig, problem: Problem, folder: Path) -> Iterator[Finding]:
    mesh = make_mesh(config.mesh)
    state, graph, trained = _weights(config, problem, folder, mesh)
    with (
        tempfile.TemporaryDirectory() as log,
        attach_fleet(config, problem, Path(log), lambda _kind, _text: None, errand="doctor", run=folder) as engines,
    ):
        addresses = ", ".join(engines.fleet.status())
        yield ok("fleet: model", f"{addresses}: the trainer's architecture, in {config.rollout.dtype}")
        if config.rollout.engine == "remote" and not trained and config.warm_start.steps:
            # A fleet takes a version once: what is published here, the run's own version 0 could not replace.
            yield warn(
                "fleet: weights",
                "nothing was published: the run's first version is what the warm start makes",
                "run doctor again once the run has its first checkpoint",
            )
            return
        if config.rollout.engine == "local" and not trained:
            state = TrainState(state.version, live.sharpen(graph, state.params), state.opt_state)
        trainer = live.make_trainer(config, problem, mesh, graph, state)
        if config.rollout.engine == "local":
            _await_compilation(engines)
        yield from check_weights(_publish(trainer, engines), config.rollout.probe_tolerance)
        yield from _examine_samples(trainer, engines, trained)


def _examine_samples(trainer: live.Trainer, engines: Engines, trained: bool) -> Iterator[Finding]:
    config, problem = trainer.config, trainer.problem
    prompts = problem.data.train[: live.GROUPS]
    own, other = live.temperatures(config)
    sampled = {own: live.sample(engines.fleet, problem, prompts, own, "whole")}
    sampled[other] = live.sample(engines.fleet, problem, prompts, other, "other")
    scored = [trainer.score(prompts, completions, temperature) for temperature, completions in sampled.items()]
    yield from check_logprobs(scored, config.alarms.mismatch_abs_mean)
    exact = config.policy.dtype == config.rollout.dtype == "float32"
    yield check_routes(scored, config.objective.replay, exact)
    yield check_repeat(sampled[own], live.sample(engines.fleet, problem, prompts, own, "whole"))
    yield check_tokens(*live.resample(engines.fleet, problem, prompts, sampled[own]))
    yield check_ends(sampled[own], trained)


def _weights(config: RunConfig, problem: Problem, folder: Path, mesh: Mesh) -> tuple[TrainState, nnx.GraphDef, bool]:
    """The newest checkpoint's, or the run's initial ones; and whether they are trained."""
    if cut_folder(folder, config).exists():
        with open_checkpoints(folder, config, read_only=True) as checkpoints:
            start = restore(config, problem, folder, mesh, checkpoints)
        if start is not None:
            return start.cut.state, start.graph, True
    graph, params = init_policy(problem.policy, derive_seed(config.seed, "init"), mesh)
    state = init_state(params, config.optim.transformation(), mesh, config.optim.moments_memory)
    return state, graph, False


def _await_compilation(engines: Engines) -> None:
    """Returns once a new local engine obeys, so that its compilation is not taken for a slow network."""
    for address in engines.fleet.status():
        options = dataclasses.replace(engines.fleet.options.client, control_seconds=_COMPILE_SECONDS)
        with contextlib.closing(Client(address, options=options)) as client:
            client.discard()


def _publish(trainer: live.Trainer, engines: Engines) -> Published:
    publisher = make_publisher(trainer.config, trainer.problem, trainer.graph, engines.fleet)
    publisher.start(trainer.state, on_committed=lambda _version: None)
    publisher.finish()
    published = publisher.published()
    assert published is not None, "finish raises what went wrong"
    return published


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    config = folder / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")
