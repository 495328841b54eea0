import json
import sys

import pytest

from train.cli import main
from train.data import read_jsonl
from train.prepare.math import MathOptions, prepare_math
from train.prepare.problems import BOXED_SUFFIX, DAPO_PREFIX, DAPO_SUFFIX, read_problem, strip_instruction
from train.prepare.reasoning import parse_settings
from train.records import read_records


def dapo(question, answer, index="0"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_PREFIX}{question}{DAPO_SUFFIX}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def dolci(question, answer):
    return {"prompt": question, "ground_truth": answer, "dataset": "math", "messages": None}


def write(tmp_path, records, name="src.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(tmp_path, records, **changes):
    options = MathOptions(sources=(write(tmp_path, records),), out=tmp_path / "out.jsonl", **changes)
    return prepare_math(options), [record for record, _ in read_records(options.out)]


def test_both_formats_are_read_deduplicated_and_counted(tmp_path):
    records = [
        dapo("Solve x.", "34"),
        dapo("Solve x.", "34", "1"),  # a copy
        dapo("  SOLVE\n x. ", "34", "2"),  # a copy by its normalised text
        dolci("Some problem", ["5"]),
        dolci("Another problem", "6"),
        dolci("Two answers", "1"),
        dolci("two  answers", "2"),
        dolci("Two answers", "1"),
        {"problem": "AIME 1", "answer": 204},
        {"prompt": [{"role": "user", "content": "slime's"}], "label": "9"},
    ]
    counts, written = run(tmp_path, records, instruction="none")
    assert [(record["prompt"], record["answer"]) for record in written] == [
        ("Solve x.", "34"),
        ("Some problem", "5"),
        ("Another problem", "6"),
        ("AIME 1", "204"),
        ("slime's", "9"),
    ]
    figures = counts.figures()
    assert {kind: n for kind, n in figures.items() if n} == {"read": 10, "duplicate": 2, "conflicting": 3, "written": 5}
    assert figures["read"] == sum(figures.values()) - figures["read"]
    (said,) = counts.examples["conflicting"]
    assert "src.jsonl:6 says '1'" in said
    assert "src.jsonl:7 says '2'" in said
    assert written[0]["metadata"] == {"source": "math_dapo"}


def test_an_instruction_is_removed_as_a_whole_and_never_letter_by_letter():
    # Every letter of "Solve the" is in the prefix: lstrip would eat the question's own beginning.
    assert strip_instruction(f"{DAPO_PREFIX}Solve the least n.{DAPO_SUFFIX}") == "Solve the least n."
    assert strip_instruction("Remember the Answer") == "Remember the Answer"


@pytest.mark.parametrize(
    ("instruction", "prompt"),
    [
        ("keep", f"{DAPO_PREFIX}How many?{DAPO_SUFFIX}"),
        ("none", "How many?"),
        ("boxed", f"How many?{BOXED_SUFFIX}"),
        ("answer", f"{DAPO_PREFIX}How many?{DAPO_SUFFIX}"),
    ],
)
def test_the_wanted_instruction_is_put_around_the_question(tmp_path, instruction, prompt):
    _, written = run(tmp_path, [dapo("How many?", "3")], instruction=instruction)
    assert written[0]["prompt"] == prompt


@pytest.mark.parametrize("name", ["out.jsonl", "out.arrayrecord"])
def test_the_same_seed_gives_the_same_bytes_and_another_another_order(tmp_path, name):
    source = write(tmp_path, [dolci(f"question {i}", str(i)) for i in range(50)])
    found = []
    for seed in (1, 1, 2):
        out = tmp_path / name
        counts = prepare_math(MathOptions(sources=(source,), out=out, seed=seed, limit=20))
        assert (counts.written, counts.over_limit) == (20, 30)
        found.append(out.read_bytes())
        assert len(read_jsonl(out)) == 20  # what a run reads
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (dolci("q", None), "expected 'ground_truth' to be a string, got null"),
        (dolci("q", ["1", "2"]), "expected 'ground_truth' to be one answer, got a list of 2"),
        (dolci("q", []), "expected 'ground_truth' to be one answer, got a list of 0"),
        (dolci("q", [None]), "expected 'ground_truth' to be a string, got null"),
        (dolci("q", "  "), "expected 'ground_truth' to hold an answer, got blanks"),
        (dolci(None, "1"), "expected 'prompt' to be a string, got null"),
        (dolci("", "1"), "expected 'prompt' to be a string that is not empty"),
        ({"ground_truth": "1"}, "expected one of the keys prompt, problem, question or messages, got 'ground_truth'"),
        ({"prompt": "q"}, "expected the key 'answer', got 'prompt'"),
        ({"prompt": [], "label": "1"}, "expected one message of role user in 'prompt', got 0 of 0"),
        ({"prompt": "q", "reward_model": {"style": "rule"}}, "expected the key 'ground_truth', got 'style'"),
        ({"prompt": "q", "answer": 1.5}, "expected 'answer' to be a string, got a number"),
    ],
)
def test_a_bad_record_is_named_with_its_line_or_counted(tmp_path, record, said):
    records = [dolci("a good one", "1"), record]
    with pytest.raises(ValueError, match=rf"src\.jsonl:2: {said}.*--skip-bad"):
        run(tmp_path, records)
    counts, written = run(tmp_path, records, skip_bad=True)
    assert (counts.bad, len(written)) == (1, 1)
    assert "src.jsonl:2" in counts.examples["bad"][0]


def test_numbers_as_floats_and_lists_of_one_are_answers():
    assert read_problem({"problem": "q", "answer": 204.0}, "f:1").answer == "204"
    assert read_problem(dolci("q", [" 7 "]), "f:1").answer == "7"


def test_questions_of_an_evaluation_are_left_out(tmp_path):
    held = write(tmp_path, [{"problem": "Secret  question", "answer": 1}], "aime.jsonl")
    counts, written = run(
        tmp_path, [dapo("secret question", "1"), dolci("another", "2")], exclude=(held,), instruction="none"
    )
    assert (counts.excluded, [record["prompt"] for record in written]) == (1, ["another"])


def test_answers_that_no_verifier_accepts_are_left_out(tmp_path):
    records = [dolci("q1", "7"), dolci("q2", "\\text{}"), dolci("q3", "\\frac{1}{2}")]
    counts, written = run(tmp_path, records, check="math_verify")
    assert (counts.unverified, [record["answer"] for record in written]) == (1, ["7", "\\frac{1}{2}"])
    assert "src.jsonl:2" in counts.examples["unverified"][0]


def test_prompts_longer_than_allowed_are_left_out_after_the_chat_template(tmp_path):
    import tokenizers

    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<a>": 1, "</a>": 2}, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<a> {{ messages[0].content }} </a>"}))
    records = [dolci("one two three", "1"), dolci("one two three four", "2")]
    counts, written = run(tmp_path, records, tokenizer=folder, chat=True, max_prompt_tokens=5)
    assert (counts.too_long, [record["prompt"] for record in written]) == (1, ["<a> one two three </a>"])
    counts, _ = run(tmp_path, records, tokenizer=folder / "tokenizer.json", max_prompt_tokens=3)
    assert counts.too_long == 1


def test_supervised_records_need_and_keep_a_worked_solution(tmp_path):
    records = [
        {"problem": "q1", "answer": 1, "solution": "It is 1."},
        {"problem": "q2", "answer": 2},
        {"messages": [{"role": "user", "content": "q3"}, {"role": "assistant", "content": "3!"}], "answer": 3},
    ]
    counts, written = run(tmp_path, records, supervised=True)
    assert (counts.no_response, [record["response"] for record in written]) == (1, ["It is 1.", "3!"])


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"expected at least one problem to be left, got none: .*'conflicting': 2"):
        run(tmp_path, [dolci("q", "1"), dolci("q", "2")])


def test_the_command_writes_and_counts(tmp_path, capsys):
    source, out = write(tmp_path, [dapo("q", "1"), dapo("q", "1")]), tmp_path / "out.jsonl"
    assert main(["prepare", "math", str(source), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["read"], said["duplicate"], said["written"]) == (2, 1, 1)
    assert main(["prepare", "math", str(source), "--out", str(source)]) == 1
    assert main(["prepare", "math", str(source), "--out", str(out), "--chat"]) == 1
    assert main(["prepare", "math", str(source), "--out", str(out)]) == 0
    assert "written" in capsys.readouterr().out


def test_settings_of_a_task_are_a_json_object():
    assert parse_settings('{"min_terms": 2}') == {"min_terms": 2}
    for text in ("[1]", "{", "3"):
        with pytest.raises(ValueError, match="--with: expected a JSON object"):
            parse_settings(text)


def test_a_function_of_a_user_is_found_in_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text("def accept(answer, **_):\n    return answer != '2'\n")
    source, out = write(tmp_path, [dolci("q1", "1"), dolci("q2", "2")]), tmp_path / "out.jsonl"
    monkeypatch.chdir(tmp_path)
    # As a console script has it: its own folder comes first, and not the present one.
    monkeypatch.setattr(sys, "path", ["/nowhere/bin", *(entry for entry in sys.path if entry)])
    assert main(["prepare", "math", str(source), "--out", str(out), "--check", "my_own_reward:accept"]) == 0
    assert [record["answer"] for record, _ in read_records(out)] == ["1"]
