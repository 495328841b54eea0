"""Samples from the live fleet and scores what came by the trainer's own programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rollout_bridge import Completion, Fleet
from rollout_bridge.messages import SampleRequest
from rollout_bridge.stitch import continuation
from sat_jax.model import Policy
from train.assemble import assemble, place
from train.config import RunConfig
from train.data import Prompt
from train.doctor.fleet import Scored
from train.groups import Group
from train.seeds import derive_seed
from train.setup import Problem, assembly
from train.state import TrainState
from train.step import Step

GROUPS = 4  # prompts that are sampled at each temperature
_SHARPER = 4.0  # logits of random weights, times this, are about as spread as a trained policy's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """The trainer's side of a comparison.

    Attributes:
      config, problem, mesh, graph: of the run.
      state: whose parameters the fleet serves.
      steps: the compiled functions, by temperature.
    """

    config: RunConfig
    problem: Problem
    mesh: Mesh
    graph: nnx.GraphDef
    state: TrainState
    steps: Mapping[float, Step]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], temperature: float) -> Scored:
        """Scores completions of one temperature, there and at another one."""
        groups = _groups(prompts, completions)
        config = dataclasses.replace(assembly(self.config, self.problem), temperature=temperature)
        made = assemble(groups, self.state.version, config)
        batch = place(made.microbatches, self.mesh)
        mismatch, agreement = [], []
        other = []
        for micro, output, elsewhere in zip(
            batch,
            self.steps[temperature].score(self.state.params, batch),
            self.steps[_another(temperature)].score(self.state.params, batch),
            strict=True,
        ):
            active_BT = np.asarray(micro.loss_mask_BT)
            behavior = np.asarray(micro.behavior_logp_BT)[active_BT]
            mismatch.append(np.asarray(output.logp_BT)[active_BT] - behavior)
            other.append(np.asarray(elsewhere.logp_BT)[active_BT] - behavior)
            agreement.append(np.asarray(output.agreement_BT)[np.asarray(micro.trace.present_BT)])
        return Scored(
            temperature=temperature,
            mismatch=np.concatenate(mismatch),
            other=np.concatenate(other),
            agreement=np.concatenate(agreement),
            missing=made.stats.missing,
        )


def make_trainer(config: RunConfig, problem: Problem, mesh: Mesh, graph: nnx.GraphDef, state: TrainState) -> Trainer:
    """The trainer's side, at the run's own temperature and at one that differs from it."""
    optimizer, objective = config.optim.transformation(), config.objective.config
    own = config.sampling.temperature
    chain = {own, _another(own), _another(_another(own))}
    steps = {temperature: Step(graph, optimizer, objective, temperature, state) for temperature in chain}
    return Trainer(config=config, problem=problem, mesh=mesh, graph=graph, state=state, steps=steps)


def temperatures(config: RunConfig) -> tuple[float, float]:
    """The two that are compared: the run's own, and one that differs from it."""
    return config.sampling.temperature, _another(config.sampling.temperature)


def sample(
    fleet: Fleet, problem: Problem, prompts: Sequence[Prompt], temperature: float, name: str
) -> list[Completion]:
    """Samples a whole group of every prompt, in order of prompt and member; twice alike for the same arguments."""
    settings = problem.collect
    requests = [
        SampleRequest(
            request_id=f"doctor-{name}-{index}",
            prompt_tokens=prompt.tokens,
            sampling=dataclasses.replace(
                settings.sampling(0), temperature=temperature, seed=derive_seed(settings.seed, "doctor", index)
            ),
            members=tuple(range(settings.group_size)),
            want_trace=settings.want_trace,
        )
        for index, prompt in enumerate(prompts)
    ]
    number = {request.request_id: index for index, request in enumerate(requests)}
    return sorted(fleet.sample(requests), key=lambda completion: (number[completion.request_id], completion.member))


def resample(
    fleet: Fleet, problem: Problem, prompts: Sequence[Prompt], whole: Sequence[Completion]
) -> tuple[list[Completion], list[Completion], list[int]]:
    """Asks for the second half of completions of two tokens or more, as continuations of their first halves.

    Args:
      fleet: that gave them.
      problem: of the run.
      prompts: of the groups.
      whole: of `sample` at the run's temperature, as `name` "whole".

    Returns:
      The undivided completions that were asked for again, what came, and how many tokens were given.
    """
    settings = problem.collect
    chosen = [completion for completion in whole if len(completion.tokens) >= 2][: 2 * settings.group_size]
    requests, cuts = [], []
    for position, completion in enumerate(chosen):
        index = int(completion.request_id.rpartition("-")[2])
        cut = len(completion.tokens) // 2
        undivided = SampleRequest(
            request_id=f"doctor-half-{position}",
            prompt_tokens=prompts[index].tokens,
            sampling=dataclasses.replace(settings.sampling(0), seed=derive_seed(settings.seed, "doctor", index)),
            members=(completion.member,),
            want_trace=settings.want_trace,
        )
        given = dataclasses.replace(completion, tokens=completion.tokens[:cut])
        requests.append(continuation(undivided, completion.member, [given]))
        cuts.append(cut)
    found = {completion.request_id: completion for completion in fleet.sample(requests)} if requests else {}
    return chosen, [found[request.request_id] for request in requests], cuts


def sharpen(graph: nnx.GraphDef, params: nnx.State) -> nnx.State:
    """Random weights whose predictions differ from each other as a trained policy's do.

    Flat predictions are the same at every temperature and under every route: nothing could be told from them.
    """
    policy: Any = nnx.merge(graph, params)
    assert isinstance(policy, Policy), "the graph is of one"
    policy.final_norm_D[...] = policy.final_norm_D[...] * _SHARPER
    return nnx.state(policy, nnx.Param)


def _groups(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
    size = len(completions) // len(prompts)
    return [
        Group(
            ticket=index,
            prompt_tokens=prompt.tokens,
            answer=prompt.answer,
            completions=tuple(completions[index * size : (index + 1) * size]),
            reward_M=np.zeros(size, np.float32),
        )
        for index, prompt in enumerate(prompts)
    ]


def _another(temperature: float) -> float:
    return 0.7 if abs(temperature - 1.0) < 0.15 else 1.0
