import json
import sys

import pytest

from sat_jax.model import hf
from train import bench_policy
from train.bench_policy import TASKS, Options, measure, report

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SMALL = Options(oracle=sys.executable, rows=4, length=8, prompt=2, new=3, repetitions=2)


def test_both_sides_compute_the_same_and_every_task_is_timed():
    result = json.loads(report(measure(SMALL), as_json=True))
    assert tuple(result["tasks"]) == TASKS
    assert result["oracle"]["threads"] == 1
    assert result["clock"] == "process_time"
    for row in result["tasks"].values():
        assert row["ours_ms"] > 0
        assert row["theirs_ms"] > 0
        assert row["quartiles"][0] <= row["quartiles"][1]


def test_other_weights_are_noticed_before_anything_is_timed(monkeypatch):
    def other(policy, path):
        tensors = {name: 2 * tensor for name, tensor in hf.export_tensors(policy, policy.config)}
        hf.save(hf.import_tensors(policy.config, tensors), path)

    monkeypatch.setattr(bench_policy, "hf", type("Other", (), {"save": staticmethod(other)}))
    with pytest.raises(ValueError, match=r"bench policy, train: expected transformers' -?[\d.]+ within 0.0001, got"):
        measure(SMALL)
