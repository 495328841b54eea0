"""Each check of the doctor, well and with its fault planted."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.reference.rollouts import make_completion
from train.chat import StopTokens
from train.config import load
from train.data import Encoding, PromptConfig
from train.doctor.data import (
    check_copies,
    check_examples,
    check_overlap,
    check_prompt_form,
    check_round_trip,
    check_stops,
)
from train.doctor.finding import Status, fail, healthy, ok, show, to_json, warn
from train.doctor.fleet import (
    Scored,
    check_ends,
    check_logprobs,
    check_repeat,
    check_routes,
    check_tokens,
    check_weights,
)
from train.doctor.machine import Machine, check_batch, check_clock, check_disk, check_memory
from train.doctor.verifier import ask, check_verdicts, corrupt
from train.publish import Published
from train.rewards import RandomReward, build_verifier, open_verifier
from train.tasks import Example
from train.tokenizer import CharTokenizer
from train.verify.pool import VerifierConfig

TOKENIZER = CharTokenizer("0123456789+=<>s")
PLAIN = PromptConfig(template="{prompt}", stop=("<eos>",))
ENCODING = Encoding(tokenizer=TOKENIZER, prompt=PLAIN, max_new_tokens=4, row_length=16)
GOOD = [Example(prompt=f"{i}+1=", answer=str(i + 1), where=f"f:{i}") for i in range(30)]
PROMPTS = [ENCODING.encode(example) for example in GOOD]
HEALTHY = Machine(disk_free=10**12, memory=16 * 2**30, devices=1, clock=1.8e9, disk_clock=1.8e9)
QUICKSTART = load(Path(__file__).parents[3] / "configs" / "quickstart.toml")


def statuses(findings):
    return [finding.status.value for finding in findings]


def quickstart(*overrides):
    return load(Path(__file__).parents[3] / "configs" / "quickstart.toml", overrides)


def test_good_data_is_well():
    found = [*check_examples(GOOD, ENCODING), *check_copies(GOOD), check_round_trip(TOKENIZER, GOOD)]
    found += [check_overlap(PROMPTS[5:], PROMPTS[:5]), *check_prompt_form(ENCODING, PROMPTS, has_template=False)]
    assert set(statuses(found)) == {"ok"}


def test_a_line_that_does_not_fit_is_found():
    (found,) = check_examples([*GOOD, Example(prompt="1" * 20, answer="1", where="f:99")], ENCODING)
    assert found.status is Status.FAIL
    assert "1 of 31 cannot be used: f:99: expected a prompt of 1 to 12 tokens" in found.found


def test_a_question_with_two_answers_is_found():
    torn = Example(prompt=" 3+1= ", answer="5", where="f:77")
    answers, copies = check_copies([*GOOD, torn])
    assert (answers.status, copies.status) == (Status.FAIL, Status.OK)
    assert "'4' (f:3) and '5' (f:77)" in answers.found


def test_many_copies_are_found():
    assert statuses(check_copies(GOOD * 2)) == ["ok", "warn"]


def test_an_evaluation_problem_that_is_trained_on_is_found():
    spelt = dataclasses.replace(PROMPTS[3], text=" 3+1=")
    trained = [dataclasses.replace(prompt, text=f"{prompt.text} ") for prompt in PROMPTS]
    found = check_overlap(trained, [spelt])
    assert (found.status, found.found.startswith("1 of 1")) == (Status.FAIL, True)


def test_a_tokenizer_that_cannot_say_an_answer_is_found():
    class Lossy(CharTokenizer):
        def decode(self, tokens):
            return super().decode(tokens).replace("3", " ")

    found = check_round_trip(Lossy("0123456789+="), GOOD)
    assert found.status is Status.FAIL
    assert "the answer '3' (f:2) comes back as ' '" in found.found


def test_a_prompt_that_begins_twice_is_found():
    twice = np.array([TOKENIZER.token_id("<eos>")] * 2 + [3], np.int32)
    prompts = [dataclasses.replace(prompt, tokens=twice) for prompt in PROMPTS]
    (found,) = check_prompt_form(ENCODING, prompts, has_template=False)
    assert (found.status, "begins with '<eos>' twice" in found.found) == (Status.FAIL, True)
    # A digit twice is a number.
    digits = [dataclasses.replace(prompt, tokens=np.array([5, 5, 3], np.int32)) for prompt in PROMPTS]
    assert statuses(check_prompt_form(ENCODING, digits, has_template=False)) == ["ok"]


def test_a_chat_template_that_is_not_used_is_found():
    assert statuses(check_prompt_form(ENCODING, PROMPTS, has_template=True)) == ["warn"]


def test_a_stop_token_that_is_missing_is_found():
    named = StopTokens(by_file={"config.json": (1,), "generation_config.json": (1, 4)})
    assert check_stops((1, 4), StopTokens(by_file={"config.json": (1, 4)}), TOKENIZER).status is Status.OK
    assert check_stops((1,), StopTokens(by_file={}), TOKENIZER).status is Status.OK
    found = check_stops((1,), named, TOKENIZER)
    assert found.status is Status.FAIL
    assert "not at 4 ('2'), which config.json, generation_config.json name: they may never end" in found.found
    both = check_stops((1, 4), named, TOKENIZER)
    assert (both.status, "config.json names 1" in both.found) == (Status.WARN, True)


def judged(verifier, seconds=10.0):
    return check_verdicts(verifier, ask(verifier, PROMPTS, seed=0), seconds)


@pytest.mark.parametrize("name", ["exact_match", "dapo", "prime_math", "math_verify"])
def test_a_good_verifier_is_well(name):
    with open_verifier(build_verifier(name, seed=0)) as verifier:
        assert statuses(judged(verifier)) == ["ok", "ok", "ok"]


def test_a_verifier_that_says_zero_to_everything_is_found():
    gold, corrupted, _ = judged(lambda attempt: 0.0)
    assert (gold.status, corrupted.status) == (Status.FAIL, Status.OK)
    assert gold.found.startswith("24 of 24 problems score at most 0.5 with their own answer")


def test_a_verifier_that_rewards_everything_is_found():
    assert statuses(judged(lambda attempt: 1.0)) == ["ok", "fail", "ok"]


def test_a_few_answers_that_no_verifier_accepts_are_a_warning():
    prompts = [*PROMPTS[:20], dataclasses.replace(PROMPTS[20], answer="never")]
    verifier = build_verifier("exact_match", seed=0)
    verdicts = ask(lambda a: 0.0 if a.answer == "never" else verifier(a), prompts, seed=0)
    assert statuses(check_verdicts(verifier, verdicts, 10.0)) == ["warn", "ok", "ok"]


def test_a_verifier_that_hangs_is_found():
    config = VerifierConfig(seconds=0.2, workers=1)
    with open_verifier(build_verifier("tests.reference.faulty_rewards:hangs_in_c", 0, config)) as verifier:
        verdicts = ask(verifier, PROMPTS[:1], seed=0)
    *_, found = check_verdicts(verifier, verdicts, 0.2)
    assert (found.status, found.found) == (Status.FAIL, "2 of 2 attempts had no verdict within 0.2 s")


def test_the_random_control_is_said():
    assert statuses(judged(RandomReward(0))) == ["warn"]


@pytest.mark.parametrize(("answer", "other"), [("17", "18"), ("x9y", "x0y"), ("yes", "yes7"), ("", "7")])
def test_an_answer_is_corrupted_into_another(answer, other):
    assert corrupt(answer) == other


def test_a_healthy_machine_is_well():
    found = [check_disk(HEALTHY, 10**6, 2), check_clock(HEALTHY), check_memory(HEALTHY, QUICKSTART, 10**6)]
    assert statuses(found) == ["ok"] * 3


def test_a_disk_too_small_for_the_checkpoints_is_found():
    # Two kept and one being written, of 12 bytes a parameter: 36 MB.
    assert check_disk(dataclasses.replace(HEALTHY, disk_free=35_999_999), 10**6, 2).status is Status.FAIL
    assert check_disk(dataclasses.replace(HEALTHY, disk_free=36_000_000), 10**6, 2).status is Status.WARN


@pytest.mark.parametrize(
    "changes", [{"disk_clock": 1.8e9 + 60}, {"disk_clock": 1.8e9 - 60}, {"clock": 0, "disk_clock": 0}]
)
def test_a_clock_that_is_off_is_found(changes):
    assert check_clock(dataclasses.replace(HEALTHY, **changes)).status is Status.FAIL


def test_a_model_too_large_for_a_device_is_found():
    assert check_memory(HEALTHY, QUICKSTART, 2 * 10**9).status is Status.FAIL
    assert check_memory(HEALTHY, QUICKSTART, 8 * 10**8).status is Status.WARN


def test_the_arithmetic_of_the_quickstart_is_well():
    found = check_batch(QUICKSTART, prompts=9488, longest_prompt=6)
    assert statuses(found) == ["ok", "ok"]
    assert "32 groups x 8 = 256 sequences a step" in found[0].found
    assert "at most 1 microbatches of 52 x 45" in found[0].found


def test_a_batch_that_is_mostly_padding_is_found():
    found, *_ = check_batch(quickstart("batch.rows=520"), prompts=9488, longest_prompt=6)
    assert (found.status, "batch.rows=52 holds a whole step" in found.remedy) == (Status.WARN, True)


def test_a_step_that_holds_a_prompt_twice_is_found():
    *_, found = check_batch(QUICKSTART, prompts=31, longest_prompt=6)
    assert (found.check, found.status) == ("batch: epochs", Status.FAIL)
    *_, found = check_batch(QUICKSTART, prompts=100, longest_prompt=6)
    assert found.status is Status.WARN


def test_too_few_sequences_for_the_quantile_are_found():
    config = quickstart("objective.preset=sat_gspo", "batch.groups_per_step=4", "batch.group_size=2")
    _, found, _ = check_batch(config, prompts=9488, longest_prompt=6)
    assert (found.check, found.status) == ("batch: threshold", Status.FAIL)
    _, found, _ = check_batch(quickstart("objective.preset=sat_gspo"), prompts=9488, longest_prompt=6)
    assert found.status is Status.OK


def published(**changes):
    fields = {
        "version": 3,
        "probe_mean_abs": 0.01,
        "probe_max_abs": 0.2,
        "expert_coverage": 1.0,
        "bytes": 10**9,
        "seconds_export": 1.0,
        "seconds_stage": 2.0,
        "seconds_commit": 1.0,
        "seconds_write": 0.1,
        "seconds_held": 0.5,
        "seconds_load": 0.25,
        "seconds_verify": 0.25,
    }
    return Published(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["ok", "ok"]),
        ({"probe_mean_abs": 0.2}, ["fail", "ok"]),
        ({"probe_mean_abs": float("nan")}, ["fail", "ok"]),
        ({"probe_mean_abs": 0.06}, ["warn", "ok"]),
        ({"expert_coverage": 0.3}, ["warn", "ok"]),
        ({"seconds_stage": 100.0}, ["ok", "warn"]),  # 10 MB/s
        ({"seconds_stage": 100.0, "bytes": 10**6}, ["ok", "ok"]),  # too little to tell
    ],
)
def test_weights_and_the_network_are_judged(changes, expected):
    assert statuses(check_weights(published(**changes), tolerance=0.1)) == expected


def scored(mismatch=0.005, other=0.3, *, agreement=0.99, missing=0):
    return Scored(
        temperature=1.0,
        mismatch=np.array([mismatch, -mismatch], np.float32),
        other=np.array([other, other], np.float32),
        agreement=np.full(8, agreement, np.float32),
        missing=missing,
    )


@pytest.mark.parametrize(
    ("made", "expected", "said"),
    [
        (scored(), "ok", "another temperature would give 0.3"),
        (scored(0.3, 0.005), "fail", "another temperature fits better"),
        (scored(0.3, 0.5), "fail", "at most 0.1 is normal"),
        (scored(0.02, 0.02), "warn", "another temperature would fit as well"),
    ],
)
def test_log_probs_at_a_wrong_temperature_or_of_other_weights_are_found(made, expected, said):
    (found,) = check_logprobs([made], level=0.1)
    assert (found.check, found.status.value) == ("fleet: log-probs at 1", expected)
    assert said in found.found


@pytest.mark.parametrize(
    ("made", "replay", "exact", "expected"),
    [
        (scored(), True, False, "ok"),
        (scored(missing=1), True, False, "fail"),
        (scored(agreement=0.5), True, False, "fail"),
        (scored(), True, True, "fail"),  # in float32, 1 % of other routes is no rounding
        (scored(agreement=1.0), True, True, "ok"),
        (scored(agreement=0.0, missing=9), False, False, "ok"),
    ],
)
def test_routes_that_are_missing_or_others_are_found(made, replay, exact, expected):
    assert check_routes([made], replay, exact).status.value == expected


def test_an_engine_that_answers_otherwise_the_second_time_is_found():
    first = [make_completion(0, 0, count=3), make_completion(0, 1, count=3)]
    assert check_repeat(first, first).status is Status.OK
    assert check_repeat(first, [first[0], make_completion(0, 1, count=3, seed=5)]).status is Status.WARN
    rerouted = dataclasses.replace(first[1], trace=make_completion(0, 1, count=3, seed=6).trace)
    found = check_repeat(first, [first[0], rerouted])
    assert (found.status, "took other routes" in found.found) == (Status.WARN, True)


def test_an_engine_that_does_not_continue_from_the_tokens_it_is_given_is_found():
    whole = [make_completion(0, 0, count=4)]
    rest = [dataclasses.replace(whole[0], tokens=whole[0].tokens[2:])]
    assert check_tokens(whole, rest, [2]).status is Status.OK
    # Re-tokenised, an earlier token comes again.
    found = check_tokens(whole, [dataclasses.replace(whole[0], tokens=whole[0].tokens[1:])], [2])
    assert (found.status, "after its first 2 tokens" in found.found) == (Status.FAIL, True)


def test_completions_that_never_end_are_found():
    cut, ended = make_completion(stop=False), make_completion(stop=True)
    assert check_ends([cut, ended], trained=True).status is Status.OK
    assert check_ends([cut, cut], trained=True).status is Status.FAIL
    assert check_ends([cut, cut], trained=False).status is Status.WARN


def test_what_was_found_is_shown_with_what_to_do():
    found = [ok("a: b", "fine [x]"), warn("c: d", "odd", "look"), fail("e: f", "broken", "repair it")]
    assert healthy(found[:2])
    assert not healthy(found)
    written = io.StringIO()
    show(found, 3.0, Console(file=written, width=100))
    text = written.getvalue()
    assert "fine [x]" in text
    assert "-> repair it" in text
    assert "not ready to run: 1 ok, 1 to look at, 1 failed (3 s)" in text
    said = json.loads(to_json(found, 3.04))
    assert (said["healthy"], said["seconds"], said["findings"][2]["status"]) == (False, 3.0, "fail")
