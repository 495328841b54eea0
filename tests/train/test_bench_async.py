import json
from pathlib import Path

import pytest

from train.bench_async import Options, Result, report

RESULT = Result(trainer=(0.3, 0.4), synchronous=(0.6, 0.8), bounded=(0.3, 0.5), max_lag=1)


def test_the_gain_is_that_of_each_round_and_the_median_is_said():
    assert RESULT.gains == pytest.approx((2.0, 1.6))
    assert report(RESULT, as_json=False).splitlines()[2:] == [
        "| 1 | 0.300 | 0.600 | 0.300 | 2.00 |",
        "| 2 | 0.400 | 0.800 | 0.500 | 1.60 |",
        "",
        "median 1.80 times the throughput, lag at most 1",
    ]
    assert json.loads(report(RESULT, as_json=True))["gain"] == pytest.approx(1.8)


@pytest.mark.parametrize("changes", [{"steps": 8}, {"rounds": 0}])
def test_too_little_to_measure_is_refused(changes):
    with pytest.raises(ValueError, match="bench: expected more than 8 steps and a round"):
        Options(config=Path("x.toml"), **changes)
