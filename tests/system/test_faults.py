"""The seeded part of the fault suite; `tools/soak.py` runs all of it. Each test is minutes long."""

import pytest

from tests.system.chaos import batch_wise, bounded

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, shared by every start of a trainer or engine."""
    return tmp_path_factory.mktemp("cache")


def test_a_batch_wise_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path, cache):
    record = batch_wise(tmp_path, cache, seed=1, steps=16, kills=4)
    assert (record.kills, record.starts) == (4, 5)


def test_a_bounded_run_under_kills_and_faults_loses_nothing_and_trains_on_nothing_twice(tmp_path, cache):
    record = bounded(tmp_path, cache, seed=1, steps=60, kills=4, faults=40)
    assert (record.kills, sum(record.faults.values())) == (4, 40)
    assert record.facts["trained"] == 240
