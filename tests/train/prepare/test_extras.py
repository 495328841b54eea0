"""What needs the extras `math` and `parquet`: make test-extras."""

import pytest

from train.data import read_jsonl
from train.prepare.math import MathOptions, prepare_math
from train.prepare.reasoning import prepare_reasoning
from train.rewards import Attempt, build_verifier, open_verifier, score

pytestmark = pytest.mark.extras


def test_parquet_of_both_data_sets_is_read_as_json_lines_are(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    dapo = [
        {"prompt": [{"content": f"q{i}", "role": "user"}], "reward_model": {"ground_truth": str(i), "style": "r"}}
        for i in range(3)
    ]
    dolci = [{"prompt": f"d{i}", "ground_truth": [str(i)], "dataset": "math"} for i in range(3)]
    paths = []
    for name, rows in (("dapo", dapo), ("dolci", dolci)):
        paths.append(tmp_path / f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), paths[-1])
    counts = prepare_math(MathOptions(sources=tuple(paths), out=tmp_path / "out.jsonl"))
    assert (counts.read, counts.written) == (6, 6)
    assert [(e.prompt, e.answer) for e in read_jsonl(tmp_path / "out.jsonl")][2:4] == [("q2", "2"), ("d0", "0")]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"bad\.parquet: expected Parquet, got, after 0 rows"):
        prepare_math(MathOptions(sources=(tmp_path / "bad.parquet",), out=tmp_path / "out.jsonl"))


def test_procedural_tasks_are_written_twice_alike_and_score_their_own_answers(tmp_path):
    out, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (out, again):
        assert prepare_reasoning("chain_sum", 20, 3, {"min_terms": 2, "max_terms": 2}, path) > 10
    assert out.read_bytes() == again.read_bytes()
    with open_verifier(build_verifier("reasoning_gym", seed=0)) as verifier:
        for example in read_jsonl(out):
            for text, least, most in (
                (f"Answer: {example.answer}", 1, 1),
                (f"<answer>{example.answer}1</answer>", 0, 0.99),
            ):
                attempt = Attempt(
                    ticket=0,
                    member=0,
                    prompt=example.prompt,
                    completion=text,
                    stopped=True,
                    answer=example.answer,
                    metadata=example.metadata,
                )
                reward = score(verifier, attempt)
                assert isinstance(reward, float)
                assert least <= reward <= most


def test_a_task_or_setting_that_does_not_exist_is_named(tmp_path):
    for task, settings in (("no_such_task", {}), ("chain_sum", {"no_such_setting": 1})):
        with pytest.raises(ValueError, match=f"expected a task and its settings, got '{task}'"):
            prepare_reasoning(task, 2, 0, settings, tmp_path / "a.jsonl")
