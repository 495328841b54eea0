import numpy as np
import pytest

from rollout_bridge.messages import Sampling
from tests.reference.rollouts import make_completion
from train.evaluate import evaluate

SAMPLING = Sampling(temperature=0.7, max_new_tokens=4, stop_ids=(1,), seed=100)
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
        return 1.0 if (index == 0 or (completion.request_id.startswith("eval-greedy") and index == 2)) else 0.0

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
    evaluate(fleet, PROMPTS, lambda index, completion: 0.0, SAMPLING, lambda: None)
    sampled, greedy = fleet.requests[:3], fleet.requests[3:]
    assert {request.sampling.temperature for request in sampled} == {0.7}
    assert {request.sampling.temperature for request in greedy} == {0.0}
    assert [request.sampling.seed for request in sampled] == [100, 101, 102]
    assert not any(request.want_trace for request in fleet.requests)
    assert len({request.request_id for request in fleet.requests}) == 6


def test_two_versions_in_one_evaluation_are_an_error():
    with pytest.raises(ValueError, match=r"expected completions of one version, got \[5, 6\]"):
        evaluate(Scripted((5, 5, 5, 5, 5, 6)), PROMPTS, lambda index, completion: 0.0, SAMPLING, lambda: None)
