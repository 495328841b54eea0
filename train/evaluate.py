"""Held-out accuracy, sampled by the fleet at the version that it serves."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from rollout_bridge.messages import Completion, SampleRequest, Sampling


class Samples(Protocol):
    """What evaluation needs of a fleet."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterable[Completion]:
        """Every wanted completion, once."""
        ...


class Scores(Protocol):
    """What evaluation needs of a verifier: 1 for a right completion of prompt number `index`, else 0."""

    def __call__(self, index: int, completion: Completion) -> float:
        """The score."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out figures of one version.

    Attributes:
      version: that served; every token is of it.
      prompts: how many.
      sampled: share of right answers, one sample a prompt at the training temperature.
      greedy: share of right answers, decoded greedily.
      entropy: mean of -log mu over the sampled tokens, nats: an unbiased estimate of the policy's entropy a token.
    """

    version: int
    prompts: int
    sampled: float
    greedy: float
    entropy: float

    def metrics(self) -> dict[str, float]:
        """As metrics."""
        return {
            "eval/sampled_accuracy": self.sampled,
            "eval/greedy_accuracy": self.greedy,
            "eval/entropy": self.entropy,
            "eval/prompts": float(self.prompts),
        }


def evaluate(
    fleet: Samples, prompts: Sequence[np.ndarray], score: Scores, sampling: Sampling, progress: Callable[[], None]
) -> Evaluation:
    """Samples every held-out prompt once as in training and once greedily.

    Args:
      fleet: at the version to be judged, which stays for the whole evaluation.
      prompts: token ids, int32[N] each.
      score: the verifier.
      sampling: as in training; its seed is the evaluation's own.
      progress: called as completions arrive, for whoever waits for the fleet meanwhile.

    Raises:
      ValueError: the completions are of more than one version.
    """
    sampled = _run(fleet, prompts, sampling, "sampled", progress)
    greedy = _run(fleet, prompts, dataclasses.replace(sampling, temperature=0.0), "greedy", progress)
    versions = {int(v) for completion in [*sampled.values(), *greedy.values()] for v in completion.version}
    if len(versions) != 1:
        raise ValueError(f"evaluation: expected completions of one version, got {sorted(versions)}")
    logp = np.concatenate([completion.behavior_logp for completion in sampled.values()])
    return Evaluation(
        version=versions.pop(),
        prompts=len(prompts),
        sampled=float(np.mean([score(index, completion) for index, completion in sampled.items()])),
        greedy=float(np.mean([score(index, completion) for index, completion in greedy.items()])),
        entropy=float(-logp.mean(dtype=np.float64)),
    )


def _run(
    fleet: Samples, prompts: Sequence[np.ndarray], sampling: Sampling, kind: str, progress: Callable[[], None]
) -> dict[int, Completion]:
    requests = [
        SampleRequest(
            request_id=f"eval-{kind}-{index}",
            prompt_tokens=tokens,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + index),
            members=(0,),
            want_trace=False,
        )
        for index, tokens in enumerate(prompts)
    ]
    by_id = {}
    for completion in fleet.sample(requests):
        by_id[completion.request_id] = completion
        progress()
    return {index: by_id[request.request_id] for index, request in enumerate(requests)}
