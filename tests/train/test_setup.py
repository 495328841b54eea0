import json
from pathlib import Path

import pytest
import tokenizers

from train.config import load
from train.rewards import exact_match
from train.rollout import CodeRollouts
from train.setup import make_problem, make_samples
from train.start import supervised_pairs

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as a checkpoint has it: words, a chat template, and three files that do not agree about the end."""
    words = ["<unk>", "<u>", "<a>", "<end>", "<eos>", *map(str, range(20)), "+", "="]
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["<u>", "<a>", "<end>", "<eos>"])
    built.save(str(tmp_path / "tokenizer.json"))
    files = {
        "config.json": {"eos_token_id": 4},
        "generation_config.json": {"eos_token_id": [3, 4]},
        "tokenizer_config.json": {"eos_token": "<end>", "chat_template": "<u> {{ messages[0].content }} <a>"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    lines = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(10, 19)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "aime.jsonl").write_text('{"problem": "1 + 1 =", "answer": 2}\n{"problem": "2 + 1 =", "answer": 3}\n')
    (tmp_path / "solved.jsonl").write_text('{"prompt": "1 + 1 =", "response": "1 + 1 = 2"}\n')
    return tmp_path


def configured(checkpoint, *overrides):
    return load(
        QUICKSTART,
        [
            "tokenizer.kind=file",
            f"tokenizer.path={checkpoint / 'tokenizer.json'}",
            f"data.path={checkpoint / 'data.jsonl'}",
            "data.holdout=0",
            "eval.prompts=0",
            'prompt.stop=["<eos>"]',
            "prompt.chat=true",
            "batch.row_length=20",
            *overrides,
        ],
    )


def test_prompts_are_in_the_checkpoints_chat_template_and_all_of_its_ends_stop(checkpoint):
    problem = make_problem(configured(checkpoint, "prompt.checkpoint_stop=true"))
    assert problem.tokenizer.decode(problem.data.train[0].tokens) == "<u> 10 + 1 = <a>"
    assert problem.collect.stop_ids == (4, 3)
    assert make_problem(configured(checkpoint)).collect.stop_ids == (4,)
    assert problem.evaluation == ()


def test_problems_of_a_file_are_judged_on_in_the_same_form(checkpoint):
    problem = make_problem(configured(checkpoint, f"eval.path={checkpoint / 'aime.jsonl'}", "eval.prompts=1"))
    (judged,) = problem.evaluation
    assert (problem.tokenizer.decode(judged.tokens), judged.answer) == ("<u> 1 + 1 = <a>", "2")


def test_worked_solutions_are_what_the_warm_start_trains_on(checkpoint):
    config = configured(checkpoint, f"warm_start.path={checkpoint / 'solved.jsonl'}")
    ((prompt, response),) = supervised_pairs(config, problem := make_problem(config))
    assert problem.tokenizer.decode(prompt) == "<u> 1 + 1 = <a>"
    assert problem.tokenizer.decode(response) == "1 + 1 = 2 <eos>"
    assert len(supervised_pairs(configured(checkpoint), problem)) == 9


def test_a_chat_template_needs_a_checkpoint():
    for key in ("prompt.chat", "prompt.checkpoint_stop"):
        with pytest.raises(ValueError, match=r"prompt\.chat, prompt\.checkpoint_stop: expected false without"):
            load(QUICKSTART, [f"{key}=true"])


def test_a_rollout_function_stands_before_the_fleet_where_the_config_names_one(checkpoint):
    config = configured(checkpoint)
    problem, fleet = make_problem(config), object()
    assert make_samples(config, problem, fleet) is fleet  # type: ignore[arg-type]
    coded = configured(checkpoint, "rollout.function=train.tasks.calculator:rollout")
    assert isinstance(make_samples(coded, problem, fleet), CodeRollouts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rollout\.function: expected"):
        make_samples(configured(checkpoint, "rollout.function=nope:f"), problem, fleet)  # type: ignore[arg-type]
    assert problem.verifier is exact_match


def test_the_ramp_of_long_completions_fits_them():
    with pytest.raises(
        ValueError, match=r"verifier\.overlong_cache: expected at most sampling\.max_new_tokens = 4, got 5"
    ):
        load(QUICKSTART, ["verifier.overlong_cache=5"])
    overlong = make_problem(
        load(QUICKSTART, ["verifier.overlong_cache=3", "verifier.overlong_factor=0.5"])
    ).collect.overlong
    assert overlong is not None
    assert (overlong.max_length, overlong.cache, overlong.factor) == (4, 3, 0.5)
