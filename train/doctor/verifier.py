"""The verifier against answers that are known: one that says 0, or 1, to everything trains nothing, or anything."""

import dataclasses
import random
import time
from collections.abc import Sequence

from train.data import Prompt
from train.doctor.finding import Finding, fail, ok, warn
from train.rewards import Attempt, RandomReward, Verifier
from train.seeds import derive_seed
from train.verify.pool import Unverified

PROBLEMS = 24
_RIGHT = 0.5  # a reward above it means "right"
_FORMS = (
    "{answer}",
    "Therefore the final answer is \\boxed{{{answer}}}.",
    "Answer: {answer}",
    "So we conclude.\nAnswer: $\\boxed{{{answer}}}$",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """What a verifier said.

    Attributes:
      gold: of every problem, the best of the forms in which its own answer was given; None = no verdict.
      corrupted: of every problem, the best of the same forms with the answer changed.
      answers: of the problems.
      seconds: of the slowest attempt.
    """

    gold: tuple[float | None, ...]
    corrupted: tuple[float | None, ...]
    answers: tuple[str, ...]
    seconds: float


def ask(verifier: Verifier, prompts: Sequence[Prompt], seed: int) -> Verdicts:
    """Asks about some problems.

    Raises:
      ValueError: the verifier failed.
    """
    chosen = random.Random(derive_seed(seed, "doctor")).sample(list(prompts), min(PROBLEMS, len(prompts)))
    slowest, gold, corrupted = 0.0, [], []
    for number, prompt in enumerate(chosen):
        for found, answer in ((gold, prompt.answer), (corrupted, corrupt(prompt.answer))):
            rewards = []
            for form in _FORMS:
                began = time.monotonic()
                reward = verifier(_attempt(number, prompt, form.format(answer=answer)))
                slowest = max(slowest, time.monotonic() - began)
                if not isinstance(reward, Unverified):
                    rewards.append(float(reward))
            found.append(max(rewards, default=None))
    return Verdicts(
        gold=tuple(gold),
        corrupted=tuple(corrupted),
        answers=tuple(prompt.answer for prompt in chosen),
        seconds=slowest,
    )


def corrupt(answer: str) -> str:
    """Another answer of the same kind: its last digit is changed, or one is added."""
    for index in range(len(answer) - 1, -1, -1):
        if answer[index] in "0123456789":
            return f"{answer[:index]}{(int(answer[index]) + 1) % 10}{answer[index + 1 :]}"
    return f"{answer}7"


def check_verdicts(verifier: Verifier, verdicts: Verdicts, seconds: float) -> list[Finding]:
    """`verifier: gold`, `verifier: corrupted` and `verifier: time`.

    Args:
      verifier: the run's.
      verdicts: what it said.
      seconds: that an attempt may take.
    """
    if isinstance(verifier, RandomReward):
        return [warn("verifier: gold", "reward = random: a control, nothing may improve", "set reward for a real run")]
    count = len(verdicts.gold)
    silent = sum(reward is None for reward in (*verdicts.gold, *verdicts.corrupted))
    wrong = [
        a for a, reward in zip(verdicts.answers, verdicts.gold, strict=True) if reward is not None and reward <= _RIGHT
    ]
    fooled = [
        a
        for a, reward in zip(verdicts.answers, verdicts.corrupted, strict=True)
        if reward is not None and reward > _RIGHT
    ]
    findings = []
    if wrong:
        said = f"{len(wrong)} of {count} problems score at most {_RIGHT} with their own answer, such as {wrong[0]!r}"
        remedy = (
            "these cannot be solved: sat-jax prepare math --check leaves them out; all of them: choose another reward"
        )
        # One such problem wastes a group now and then; a tenth of them is another data set than the verifier's.
        findings.append((fail if len(wrong) * 10 > count else warn)("verifier: gold", said, remedy))
    else:
        findings.append(ok("verifier: gold", f"{count} problems score more than {_RIGHT} with their own answer"))
    if fooled:
        findings.append(
            fail(
                "verifier: corrupted",
                f"{len(fooled)} of {count} problems score with an answer that was changed, such as {fooled[0]!r}",
                "the verifier rewards what is wrong: the policy will find out",
            )
        )
    else:
        findings.append(ok("verifier: corrupted", f"none of {count} changed answers scores"))
    if silent:
        findings.append(
            fail(
                "verifier: time",
                f"{silent} of {2 * count} attempts had no verdict within {seconds:g} s",
                "raise verifier.seconds, or use a verifier that ends",
            )
        )
    else:
        findings.append(ok("verifier: time", f"the slowest attempt took {verdicts.seconds:.3f} s of {seconds:g} s"))
    return findings


def _attempt(number: int, prompt: Prompt, text: str) -> Attempt:
    return Attempt(
        ticket=number,
        member=0,
        prompt=prompt.text,
        completion=text,
        stopped=True,
        answer=prompt.answer,
        metadata=prompt.metadata,
        transcript=text,
    )
