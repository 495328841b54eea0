"""What needs no transformers; tests/parity/test_bench_policy.py has the rest."""

import os
import sys

import pytest

from train.bench_policy import Options, measure, report
from train.cli import main


@pytest.mark.parametrize(
    ("python", "named"),
    [(sys.executable, r"ModuleNotFoundError: No module named 'torch'"), ("nowhere", r"No such file .*'nowhere'")],
)
def test_a_python_without_transformers_is_refused_before_anything_is_compiled(python, named):
    with pytest.raises(ValueError, match=rf"--oracle: expected a Python with PyTorch and transformers, got: .*{named}"):
        measure(Options(oracle=python))


def test_settings_out_of_range_are_one_line(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which the verb changes, for a process of its own
    assert main(["bench", "policy", "--repetitions", "0"]) == 1
    assert capsys.readouterr().err == "sat-jax: error: --repetitions: expected 1 or more, got 0\n"


def test_the_table_shows_every_task_and_the_head():
    row = {"ours_ms": 12.34, "theirs_ms": 10.0, "ratio": 1.234, "quartiles": [1.1, 1.3]}
    lines = report({"tasks": {"train": row, "score": row}, "head": {"memory": {"ratio": 0.05}}}, as_json=False)
    assert lines.splitlines()[1].split() == ["train", "12.3", "10.0", "1.23", "1.10", "1.30"]
    assert lines.splitlines()[3] == 'head, memory: {"ratio": 0.05}'
