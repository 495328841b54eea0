"""Accuracy on problems that are not trained on, sampled by the fleet at the version that it serves."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rollout_bridge.messages import Completion, SampleRequest, Sampling
from train.estimates import Interval, interval, majority, pass_at_k


class Samples(Protocol):
    """What evaluation needs of a fleet."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterable[Completion]:
        """Every wanted completion, once."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a completion of a problem is.

    Attributes:
      right: whether the verifier accepts it.
      answer: what it answers, for the vote; None = nothing.
      verified: whether the verifier gave a verdict at all; without one it counts as not right.
    """

    right: bool
    answer: str | None
    verified: bool = True


class Scores(Protocol):
    """What evaluation needs of a verifier: judges a completion of prompt number `index`, from several threads."""

    def __call__(self, index: int, completion: Completion) -> Judgement:
        """The judgement."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """How much is sampled.

    Attributes:
      samples: k, completions a problem at the training temperature; one more is greedy.
      scorers: completions judged side by side.
      seed: of the intervals' resamples.
    """

    samples: int = 1
    scorers: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProblemResult:
    """What came of one problem.

    Attributes:
      index: its number.
      right: by sample.
      answers: by sample, for the vote.
      greedy: whether the greedy completion is right.
      tokens: mean length of its samples.
    """

    index: int
    right: tuple[bool, ...]
    answers: tuple[str | None, ...]
    greedy: bool
    tokens: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of one version.

    Attributes:
      version: that served; every token is of it.
      table: by problem, in order.
      entropy: mean of -log mu over the sampled tokens, nats: an unbiased estimate of the policy's entropy a token.
      unverified: completions without a verdict, which count as not right.
      seconds: that sampling and judging took.
      seed: of the intervals.
    """

    version: int
    table: tuple[ProblemResult, ...]
    entropy: float
    unverified: int
    seconds: float
    seed: int

    @property
    def prompts(self) -> int:
        """How many problems."""
        return len(self.table)

    @property
    def samples(self) -> int:
        """k, completions a problem."""
        return len(self.table[0].right)

    @property
    def accuracy_P(self) -> np.ndarray:
        """float64: share of right completions, by problem."""
        return np.array([np.mean(problem.right) for problem in self.table])

    @property
    def sampled(self) -> float:
        """avg@k: share of right completions."""
        return float(self.accuracy_P.mean())

    @property
    def greedy(self) -> float:
        """Share of right greedy completions."""
        return float(np.mean([problem.greedy for problem in self.table]))

    @property
    def average(self) -> Interval:
        """avg@k with its 95 % interval over problems."""
        return interval(self.accuracy_P, self.seed)

    def passes(self, k: int) -> Interval:
        """pass@k, without bias, with its 95 % interval; k in 1..samples."""
        right = [sum(problem.right) for problem in self.table]
        return interval(pass_at_k(right, self.samples, k), self.seed)

    @property
    def majority(self) -> Interval:
        """majority@k with its 95 % interval."""
        return interval(np.array([majority(p.answers, p.right) for p in self.table]), self.seed)

    def metrics(self) -> dict[str, float]:
        """As metrics."""
        average = self.average
        found = {
            "eval/sampled_accuracy": average.mean,
            "eval/sampled_low": average.low,
            "eval/sampled_high": average.high,
            "eval/greedy_accuracy": self.greedy,
            "eval/entropy": self.entropy,
            "eval/prompts": float(self.prompts),
            "eval/unverified": float(self.unverified),
            "eval/seconds": self.seconds,
        }
        if self.samples > 1:
            found["eval/pass_at_k"] = self.passes(self.samples).mean
            found["eval/majority_at_k"] = self.majority.mean
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file that another evaluation is compared with."""
        return {
            "version": self.version,
            **self.metrics(),
            "samples": self.samples,
            "problems": [dataclasses.asdict(problem) for problem in self.table],
        }


def evaluate(
    fleet: Samples,
    prompts: Sequence[np.ndarray],
    score: Scores,
    sampling: Sampling,
    progress: Callable[[], None],
    options: EvalOptions | None = None,
) -> Evaluation:
    """Samples every problem as in training, and once greedily.

    Args:
      fleet: at the version to be judged, which stays for the whole evaluation.
      prompts: token ids, int32[N] each.
      score: the verifier.
      sampling: as in training; its seed is the evaluation's own.
      progress: called as completions arrive, for whoever waits for the fleet meanwhile.
      options: how much; one sample a problem by default.

    Raises:
      ValueError: there is no prompt, or the completions are of more than one version.
    """
    options = options or EvalOptions()
    if not prompts:
        raise ValueError("evaluation: expected at least one problem, got none")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.scorers, thread_name_prefix="judge") as judges:

        def run(kind: str, how: Sampling, members: int) -> _Judged:
            return _run(
                fleet, _requests(prompts, how, kind, members), lambda i, c: judges.submit(score, i, c), progress
            )

        sampled = run("sampled", sampling, options.samples)
        greedy = run("greedy", dataclasses.replace(sampling, temperature=0.0), 1)
    completions = [completion for completion, _ in [*sampled.values(), *greedy.values()]]
    versions = {int(version) for completion in completions for version in completion.version}
    if len(versions) != 1:
        raise ValueError(f"evaluation: expected completions of one version, got {sorted(versions)}")
    table = [_result(index, sampled, greedy, options.samples) for index in range(len(prompts))]
    judgements = [verdict.result() for _, verdict in [*sampled.values(), *greedy.values()]]
    logp = np.concatenate([completion.behavior_logp for completion, _ in sampled.values()])
    return Evaluation(
        version=versions.pop(),
        table=tuple(table),
        entropy=float(-logp.mean(dtype=np.float64)),
        unverified=sum(not judgement.verified for judgement in judgements),
        seconds=time.monotonic() - began,
        seed=options.seed,
    )


# By (problem, member).
_Judged = dict[tuple[int, int], tuple[Completion, "concurrent.futures.Future[Judgement]"]]


def _result(index: int, sampled: _Judged, greedy: _Judged, samples: int) -> ProblemResult:
    verdicts = [sampled[index, member][1].result() for member in range(samples)]
    return ProblemResult(
        index=index,
        right=tuple(verdict.right for verdict in verdicts),
        answers=tuple(verdict.answer for verdict in verdicts),
        greedy=greedy[index, 0][1].result().right,
        tokens=float(np.mean([len(sampled[index, member][0].tokens) for member in range(samples)])),
    )


def _requests(prompts: Sequence[np.ndarray], sampling: Sampling, kind: str, members: int) -> list[SampleRequest]:
    return [
        SampleRequest(
            request_id=f"eval-{kind}-{index}",
            prompt_tokens=tokens,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + index),
            members=tuple(range(members)),
            want_trace=False,
        )
        for index, tokens in enumerate(prompts)
    ]


def _run(
    fleet: Samples,
    requests: Sequence[SampleRequest],
    judge: Callable[[int, Completion], "concurrent.futures.Future[Judgement]"],
    progress: Callable[[], None],
) -> _Judged:
    index = {request.request_id: number for number, request in enumerate(requests)}
    found: _Judged = {}
    for completion in fleet.sample(requests):
        number = index[completion.request_id]
        found[number, completion.member] = (completion, judge(number, completion))
        progress()
    return found
