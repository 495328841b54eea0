import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.metrics import EffectiveShare, Max, Mean, Min, Sum, merge, values

PARTS = st.lists(
    st.lists(st.floats(-100, 100, width=32), min_size=0, max_size=5),
    min_size=1,
    max_size=4,
)


def kinds(samples):
    array = np.asarray(samples, np.float32)
    count = jnp.float32(array.size)
    return {
        "mean": Mean(jnp.float32(array.sum()), count),
        "max": Max(jnp.float32(array.max(initial=-np.inf))),
        "min": Min(jnp.float32(array.min(initial=np.inf))),
        "sum": Sum(jnp.float32(array.sum())),
        "share": EffectiveShare(jnp.float32(array.sum()), jnp.float32((array**2).sum()), count),
    }


def test_means_of_unequal_parts_merge_to_the_mean_of_all():
    merged = Mean(jnp.float32(4), jnp.float32(1)).merge(Mean(jnp.float32(4), jnp.float32(2)))
    assert float(merged.value()) == pytest.approx(8 / 3)


def test_the_mean_and_share_of_nothing_are_0():
    empty = kinds([])
    assert float(empty["mean"].value()) == 0
    assert float(empty["share"].value()) == 0


def test_effective_share_by_hand():
    # (3 + 1)^2 / (2 (9 + 1)) = 0.8
    assert float(kinds([3, 1])["share"].value()) == pytest.approx(0.8)
    assert float(kinds([2, 2, 2])["share"].value()) == pytest.approx(1)


def test_unequal_names_are_refused():
    with pytest.raises(ValueError, match=r"metrics: expected equal names, got \['b'\]"):
        merge({"a": Sum(jnp.float32(1))}, {"a": Sum(jnp.float32(1)), "b": Sum(jnp.float32(1))})


def test_metrics_pass_through_jit():
    merged = jax.jit(merge)(kinds([1.0, 2.0]), kinds([6.0]))
    assert values(merged) == pytest.approx({"mean": 3, "max": 6, "min": 1, "sum": 9, "share": 81 / (3 * 41)})


@settings(max_examples=40, deadline=None)
@given(PARTS)
def test_merging_parts_gives_the_metrics_of_the_whole(parts):
    merged = values(functools.reduce(merge, map(kinds, parts)))
    assert merged == pytest.approx(values(kinds([sample for part in parts for sample in part])), rel=1e-4, abs=1e-3)
