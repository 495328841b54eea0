import numpy as np
import pytest

from train.rewards import Attempt, RandomReward, build_verifier, exact_match, score


def attempt(completion="64", *, stopped=True, answer="64", ticket=3, member=0):
    return Attempt(ticket=ticket, member=member, prompt="12+34=", completion=completion, stopped=stopped, answer=answer)


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (attempt("64"), 1.0),
        (attempt("64", stopped=False), 0.0),
        (attempt("641"), 0.0),
        (attempt("6"), 0.0),
        (attempt(""), 0.0),
        (attempt(" 64"), 0.0),
    ],
)
def test_an_exact_match_is_the_whole_answer_and_then_a_stop(given, reward):
    assert build_verifier("exact_match", seed=0)(given) == reward


def test_a_random_reward_depends_on_seed_ticket_and_member_only():
    verifier = build_verifier("random", seed=5)
    assert verifier == RandomReward(5)
    first = [verifier(attempt("64", ticket=t, member=m)) for t in range(20) for m in range(8)]
    again = [verifier(attempt("wrong", ticket=t, member=m)) for t in range(20) for m in range(8)]
    other = [RandomReward(6)(attempt(ticket=t, member=m)) for t in range(20) for m in range(8)]
    assert first == again
    assert first != other


def test_a_random_reward_is_a_fair_coin_within_groups():
    rewards = np.array([[RandomReward(0)(attempt(ticket=t, member=m)) for m in range(8)] for t in range(500)])
    assert set(rewards.ravel()) == {0.0, 1.0}
    assert abs(rewards.mean() - 0.5) < 4 * 0.5 / np.sqrt(rewards.size)
    assert (rewards.std(axis=1) > 0).mean() > 0.95  # a constant group would train nothing, whatever the control shows


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", np.zeros(1)])
def test_a_reward_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=r"reward: expected a finite number, got .*completion t3/0, '64'"):
        score(lambda _: value, attempt())


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1)])
def test_any_kind_of_finite_number_is_a_reward(value):
    reward = score(lambda _: value, attempt())
    assert reward == 1.0
    assert type(reward) is float


def test_a_verifier_that_fails_is_an_error_of_the_run_and_names_the_attempt():
    def broken(given):
        raise KeyError("no such unit")

    with pytest.raises(KeyError) as caught:
        score(broken, attempt())
    assert caught.value.__notes__ == ["reward of completion t3/0: the verifier failed on '64'"]


def test_exact_match_is_the_function_itself():
    assert build_verifier("exact_match", seed=1) is exact_match
