import dataclasses

import numpy as np
import pytest

from sat_jax.advantages import OverlongConfig
from train.rewards import (
    Attempt,
    RandomReward,
    build_verifier,
    exact_match,
    open_verifier,
    score,
    verifier_metrics,
)
from train.verify.pool import Unverified, VerifierConfig


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


def test_a_function_of_a_user_is_given_prompt_completion_answer_and_metadata():
    verifier = build_verifier("tests.reference.faulty_rewards:good", seed=0)
    with open_verifier(verifier):
        assert score(verifier, attempt("64")) == 1.0
        assert score(verifier, dataclasses.replace(attempt("6"), metadata={"bonus": 0.5})) == 0.5
        assert verifier_metrics(verifier)["verify/attempts"] == 2
    assert verifier_metrics(exact_match) == {}


@pytest.mark.parametrize("name", ["dapo", "dapo_boxed", "prime_math", "math_verify"])
def test_gold_answers_score_one_and_corrupted_ones_zero(name):
    verifier = build_verifier(name, seed=0)
    with open_verifier(verifier):
        for gold in ("17", "-4", "1024"):
            for text in (f"So it is.\nAnswer: {gold}", f"Answer: $\\boxed{{{gold}}}$"):
                if name != "math_verify" or "boxed" in text:
                    assert score(verifier, attempt(text, answer=gold)) == 1.0
            assert score(verifier, attempt(f"Answer: \\boxed{{{gold}1}}", answer=gold)) == 0.0


def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start():
    with (
        pytest.raises(ValueError, match="expected a function that loads, got 'no_such_module:f'"),
        open_verifier(build_verifier("no_such_module:f", seed=0)),
    ):
        pass


@pytest.mark.parametrize("name", ["exact_mach", "math", "a b:c", ":f", "m:"])
def test_an_unknown_verifier_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"reward: expected one of 'exact_match', .*got '{name}'"):
        build_verifier(name, seed=0)


def test_an_unverified_attempt_stays_one_and_is_not_punished_for_its_length():
    overlong = OverlongConfig(max_length=10, cache=4)
    long = dataclasses.replace(attempt(), length=9)
    assert score(lambda _: Unverified.TIMEOUT, long, overlong) is Unverified.TIMEOUT
    assert score(exact_match, long, overlong) == 1 - 0.75
    assert score(exact_match, dataclasses.replace(attempt(), length=6), overlong) == 1.0
    assert score(exact_match, dataclasses.replace(attempt("1"), length=10), overlong) == -1.0


def test_the_config_of_the_processes_is_checked():
    with pytest.raises(ValueError, match=r"verifier\.seconds: expected above 0"):
        VerifierConfig(seconds=0.0)
