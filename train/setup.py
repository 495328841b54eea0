"""From a config to the parts of a run that need neither a device state nor a fleet."""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rollout_bridge import Completion, Fleet, InFlight
from sat_jax.advantages import OverlongConfig
from sat_jax.model import PolicyConfig
from train.assemble import AssembleConfig
from train.chat import ChatTemplate, stop_tokens
from train.collect import CollectSettings, to_attempt
from train.config import RunConfig
from train.data import Encoding, Prompt, PromptData, read_examples, split
from train.evaluate import EvalOptions, Evaluation, Judgement, evaluate
from train.prepare.problems import read_problems
from train.publish import PROBE_TOKENS, ProbeScorer, Publisher
from train.rewards import RandomReward, Verifier, build_verifier, exact_match, score
from train.rollout import CodeRollouts, load_rollout
from train.run_folder import RunHeader
from train.seeds import derive_seed
from train.share import Share
from train.tokenizer import Tokenizer, build_tokenizer, stop_ids
from train.verify.latex import final_answer
from train.verify.pool import Unverified


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is learnt: prompts, their encoding, the verifier, the policy's architecture, how it is sampled.

    `evaluation` are the problems that it is judged on: of a file, or held-out prompts.
    """

    tokenizer: Tokenizer
    encoding: Encoding
    data: PromptData
    evaluation: tuple[Prompt, ...]
    verifier: Verifier
    policy: PolicyConfig
    collect: CollectSettings


def make_problem(config: RunConfig) -> Problem:
    """Reads the data and checks every line of it, so that a bad one is an error before the run.

    Raises:
      ValueError: the data, the tokenizer or the prompt cannot be used; see their modules.
    """
    examples = read_examples(config.data)
    train, held_out = split(config.data, examples, config.seed)
    chat = ChatTemplate.from_folder(Path(config.tokenizer.path).parent) if config.prompt.chat else None
    judged = read_problems(Path(config.eval.path)) if config.eval.path and config.eval.prompts else []
    texts = (text for e in (*examples, *judged) for text in (config.prompt.render(e.prompt), e.answer))
    tokenizer = build_tokenizer(config.tokenizer, texts)
    encoding = Encoding(
        tokenizer=tokenizer,
        prompt=config.prompt,
        max_new_tokens=config.sampling.max_new_tokens,
        row_length=config.batch.row_length,
        chat=chat,
    )
    data = PromptData(train, held_out, encoding, config.seed)
    evaluation = tuple(encoding.encode(example) for example in judged) if judged else data.held_out
    policy = config.policy.build(vocab_size=tokenizer.vocab_size, max_positions=config.batch.row_length)
    collect = CollectSettings(
        seed=config.seed,
        group_size=config.batch.group_size,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_ids=_stops(config, tokenizer),
        want_trace=config.objective.replay and policy.moe_layers > 0,
        scorers=config.verifier.workers,
        overlong=_overlong(config),
    )
    return Problem(
        tokenizer=tokenizer,
        encoding=encoding,
        data=data,
        evaluation=evaluation[: config.eval.prompts],
        verifier=build_verifier(config.reward, config.seed, config.verifier),
        policy=policy,
        collect=collect,
    )


def make_samples(config: RunConfig, problem: Problem, fleet: Fleet) -> Fleet | CodeRollouts:
    """The fleet itself, or one whose completions are made by the run's rollout function.

    Raises:
      ValueError: that function cannot be imported.
    """
    if not config.rollout.function:
        return fleet

    def find(request_id: str) -> Prompt:
        # The ids of the collectors ("t12", or "t12-1" when asked for anew) and of the evaluation ("eval-greedy-3").
        if request_id.startswith("t"):
            return problem.data[int(request_id[1:].partition("-")[0])]
        return problem.evaluation[int(request_id.rpartition("-")[2])]

    function = load_rollout(config.rollout.function)
    return CodeRollouts(function, fleet, problem.tokenizer, find, config.rollout.trajectories)


def _stops(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a completion: those of the config, then those that only the checkpoint's files name."""
    try:
        stops = stop_ids(tokenizer, config.prompt.stop)
    except ValueError as error:
        raise ValueError(f"prompt.stop: {error}") from error
    if not config.prompt.checkpoint_stop:
        return stops
    named = stop_tokens(Path(config.tokenizer.path).parent, tokenizer).ids
    return (*stops, *(token for token in named if token not in stops))


def _overlong(config: RunConfig) -> OverlongConfig | None:
    if not config.verifier.overlong_cache:
        return None
    return OverlongConfig(
        max_length=config.sampling.max_new_tokens,
        cache=config.verifier.overlong_cache,
        factor=config.verifier.overlong_factor,
    )


def assembly(config: RunConfig, problem: Problem, share: Share | None = None) -> AssembleConfig:
    """What a batch of this run must look like; of several processes, the rows of one of them."""
    rows = (share or Share()).part(config.batch.rows, "batch.rows")
    return AssembleConfig(
        batch=dataclasses.replace(config.batch, rows=rows),
        advantage=config.objective.advantage,
        vocab_size=problem.policy.vocab_size,
        moe_layers=problem.policy.moe_layers,
        experts=problem.policy.experts,
        experts_per_token=problem.policy.experts_per_token,
        temperature=config.sampling.temperature,
        replay=problem.collect.want_trace,
    )


def make_publisher(
    config: RunConfig,
    problem: Problem,
    graph: nnx.GraphDef,
    fleet: Fleet,
    on_failed: Callable[[BaseException], None] = lambda _error: None,
) -> Publisher:
    """The publisher with this run's probe.

    Args:
      config, problem, graph, fleet: of the run.
      on_failed: told of a failed push, in the publishing thread, beside whoever waits for the push.
    """
    probe = ProbeScorer(
        graph, problem.policy, probe_sequences(problem.data, config.seed), config.rollout.probe_tolerance
    )
    # Batch-wise, nothing is in flight when a version goes out.
    in_flight = InFlight(config.schedule.in_flight) if config.schedule.mode == "bounded" else InFlight.FINISH
    return Publisher(fleet, problem.policy, probe, config.rollout.dtype, on_failed, in_flight)


def probe_sequences(data: PromptData, seed: int) -> list[np.ndarray]:
    """The run's probe: problems with their answers, at least 256 tokens in all.

    Real text makes every expert work; which problems is a function of the seed, so the probe is the same at every
    version and after every restart.
    """
    order = np.random.default_rng(derive_seed(seed, "probe")).permutation(len(data.train))
    sequences: list[np.ndarray] = []
    while sum(map(len, sequences)) < PROBE_TOKENS:
        prompt = data.train[order[len(sequences) % len(order)]]
        sequences.append(np.concatenate([prompt.tokens, prompt.answer_tokens]))
    return sequences


def header(config: RunConfig, problem: Problem, mesh: Mesh, folder: Path) -> RunHeader:
    """What the report says was run."""
    policy = problem.policy
    device = mesh.devices.flat[0]
    return RunHeader(
        name=config.name,
        steps=config.steps,
        objective=config.objective.preset,
        radii=config.objective.config.radii,
        eps_low=config.objective.config.eps_low,
        eps_high=config.objective.config.eps_high,
        mode=config.schedule.mode,
        lag=config.schedule.lag,
        max_lag=config.plan.max_lag,
        replay=problem.collect.want_trace,
        reward=config.reward,
        seed=config.seed,
        model=f"{_architecture(policy)}, {policy.dtype}; sampled in {config.rollout.dtype}",
        parameters=policy.num_parameters(),
        device=f"{mesh.size} x {device.device_kind}",
        warm_start_steps=config.warm_start.steps,
        warm_start_noise=config.warm_start.noise if config.warm_start.steps else 0.0,
        levels=config.alarms.levels(),
        resume_command=f"{Path(sys.argv[0]).name} train {shlex.quote(str(folder / 'config.toml'))}",
    )


def _architecture(policy: PolicyConfig) -> str:
    sizes = f"{policy.layers} layers of width {policy.width}"
    if not policy.moe_layers:
        return f"dense Qwen3, {sizes}"
    dense = f", {len(policy.dense_layers)} of them dense" if policy.dense_layers else ""
    return f"Qwen3-MoE, {sizes}{dense}, {policy.experts} experts (top {policy.experts_per_token})"


def evaluate_held_out(
    config: RunConfig, problem: Problem, fleet: Fleet, progress: Callable[[], None] = lambda: None
) -> Evaluation:
    """Accuracy at the version that the fleet serves, by the run's own verifier (exact match for the random control).

    A completion is right where the verifier gives more than 1/2, before any punishment of its length.
    """
    verifier = exact_match if isinstance(problem.verifier, RandomReward) else problem.verifier

    def judge(index: int, completion: Completion) -> Judgement:
        attempt = to_attempt(index, problem.evaluation[index], completion, problem.tokenizer)
        reward = score(verifier, attempt)
        verified = not isinstance(reward, Unverified)
        right = not isinstance(reward, Unverified) and reward > 0.5
        return Judgement(right=right, answer=final_answer(attempt.completion), verified=verified)

    sampling = dataclasses.replace(problem.collect.sampling(0), seed=derive_seed(config.seed, "evaluate") % 2**30)
    options = EvalOptions(
        samples=config.eval.samples, scorers=config.verifier.workers, seed=derive_seed(config.seed, "bootstrap")
    )
    prompts = [prompt.tokens for prompt in problem.evaluation]
    return evaluate(make_samples(config, problem, fleet), prompts, judge, sampling, progress, options)
