import numpy as np
import pytest

from rollout_bridge.messages import Sampling
from tests.reference.rollouts import make_completion
from train.evaluate import EvalOptions, Judgement, evaluate
from train.verify.latex import final_answer

SAMPLING = Sampling(temperature=0.7, max_new_tokens=4, stop_ids=(1,), seed=100)


def wrong(index, completion):
    return Judgement(right=False, answer=None)


PROMPTS = [np.array([2, 3], np.int32), np.array([4], np.int32), np.array([5, 6, 7], np.int32)]


class Scripted:
    """Answers out of order; remembers the requests."""

    def __init__(self, versions=(5, 5, 5, 5, 5, 5)):
        self.requests = []
        self.versions = iter(versions)

    def sample(self, requests):
        self.requests += requests
        for index, request in reversed(list(enumerate(requests))):
            completion = make_completion(
                index,
                prompt_length=len(request.prompt_tokens),
                count=2 + index,
                version=next(self.versions),
                request_id=request.request_id,
                trace=None,
            )
            yield completion


def test_accuracies_and_entropy_are_those_worked_by_hand():
    fleet, seen = Scripted(), []
    progress = []

    def score(index, completion):
        seen.append((index, completion.request_id))
        right = index == 0 or (completion.request_id.startswith("eval-greedy") and index == 2)
        return Judgement(right=right, answer=None)

    result = evaluate(fleet, PROMPTS, score, SAMPLING, lambda: progress.append(1))
    assert (result.version, result.prompts) == (5, 3)
    assert result.sampled == pytest.approx(1 / 3)
    assert result.greedy == pytest.approx(2 / 3)
    logp = np.concatenate([make_completion(i, count=2 + i).behavior_logp for i in range(3)])
    assert result.entropy == pytest.approx(float(-logp.astype(np.float64).mean()))
    assert len(progress) == 6
    assert all(request_id.endswith(str(index)) for index, request_id in seen)


def test_it_samples_as_in_training_and_greedily_and_wants_no_trace():
    fleet = Scripted()
    evaluate(fleet, PROMPTS, wrong, SAMPLING, lambda: None)
    sampled, greedy = fleet.requests[:3], fleet.requests[3:]
    assert {request.sampling.temperature for request in sampled} == {0.7}
    assert {request.sampling.temperature for request in greedy} == {0.0}
    assert [request.sampling.seed for request in sampled] == [100, 101, 102]
    assert not any(request.want_trace for request in fleet.requests)
    assert len({request.request_id for request in fleet.requests}) == 6


def test_two_versions_in_one_evaluation_are_an_error():
    with pytest.raises(ValueError, match=r"expected completions of one version, got \[5, 6\]"):
        evaluate(Scripted((5, 5, 5, 5, 5, 6)), PROMPTS, wrong, SAMPLING, lambda: None)


class Recorded:
    """Answers with recorded texts, by problem and member; greedy is member 0's."""

    def sample(self, requests):
        for request in requests:
            for member in request.members:
                yield make_completion(
                    0, member, prompt_length=len(request.prompt_tokens), request_id=request.request_id, trace=None
                )


# What four samples of three problems said, and whether it was right.
SAID = [["7", "7", "8", "7"], ["1", "2", "2", None], ["5", "6", "5", "6"]]
RIGHT = [[True, True, False, True], [True, False, False, False], [True, False, True, False]]


def recorded(index, completion):
    member = completion.member
    return Judgement(right=RIGHT[index][member], answer=SAID[index][member], verified=SAID[index][member] is not None)


def test_the_figures_of_recorded_completions_are_those_worked_by_hand():
    result = evaluate(Recorded(), PROMPTS, recorded, SAMPLING, lambda: None, EvalOptions(samples=4, scorers=3))
    assert (result.prompts, result.samples, result.unverified) == (3, 4, 1)
    assert result.sampled == pytest.approx((3 / 4 + 1 / 4 + 2 / 4) / 3)
    # pass@2: 1 - C(1,2)/C(4,2) = 1; 1 - C(3,2)/C(4,2) = 1/2; 1 - C(2,2)/C(4,2) = 5/6.
    assert result.passes(2).mean == pytest.approx((1 + 1 / 2 + 5 / 6) / 3)
    assert result.passes(1).mean == pytest.approx(result.sampled)
    assert result.passes(4).mean == 1.0
    # Votes: 7 (right); 2 (wrong); 5 and 6 tie, of which one is right.
    assert result.majority.mean == pytest.approx((1 + 0 + 1 / 2) / 3)
    assert result.greedy == 1.0
    metrics = result.metrics()
    assert metrics["eval/pass_at_k"] == 1.0
    assert metrics["eval/majority_at_k"] == pytest.approx(0.5)
    assert metrics["eval/sampled_low"] <= metrics["eval/sampled_accuracy"] <= metrics["eval/sampled_high"]
    assert [problem["right"] for problem in result.to_json()["problems"]] == [tuple(row) for row in RIGHT]


def test_no_problem_is_an_error():
    with pytest.raises(ValueError, match="evaluation: expected at least one problem, got none"):
        evaluate(Scripted(), [], wrong, SAMPLING, lambda: None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{ 2 }", "2"),
        ("Answer: $7$.", "7"),
        ("47", "47"),
        ("", None),
        ("x" * 100, None),
    ],
)
def test_what_a_completion_answers_is_found_for_the_vote(text, answer):
    assert final_answer(text) == answer
