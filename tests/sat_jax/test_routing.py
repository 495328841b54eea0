import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.routing import agreement, check_trace, free_trace, id_dtype


@pytest.mark.parametrize(
    ("experts", "expected"), [(0, "uint8"), (1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")]
)
def test_ids_take_the_smallest_type_that_holds_them(experts, expected):
    assert id_dtype(experts) == np.dtype(expected)
    assert np.iinfo(id_dtype(experts)).max >= experts - 1


@pytest.mark.parametrize("experts", [-1, 65537])
def test_a_number_of_experts_that_no_id_type_holds_is_refused(experts):
    with pytest.raises(ValueError, match=rf"experts: expected 0 to 65536, got {experts}"):
        id_dtype(experts)


def test_a_free_trace_replays_nothing():
    trace = free_trace(layers=3, rows=2, positions=5, slots=4, experts=300)
    assert trace.experts_LBTK.shape == (3, 2, 5, 4)
    assert trace.experts_LBTK.dtype == jnp.uint16
    assert not trace.present_BT.any()


def test_agreement_counts_shared_experts_whatever_their_slots():
    used = jnp.array([[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 8, 9], [6, 7, 8, 9]])
    live = jnp.array([[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3]])
    np.testing.assert_array_equal(agreement(used, live), [1.0, 1.0, 0.5, 0.0])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_distinct_ids_below_the_number_of_experts_are_accepted(seed):
    draw = np.random.default_rng(seed)
    check_trace(np.argsort(draw.random((3, 7, 8)), -1)[..., :3].astype(np.uint8), 8, "anywhere")


def test_an_id_outside_is_refused_with_its_place():
    trace = np.tile(np.array([0, 1], np.uint8), (2, 3, 1))
    trace[1, 2] = [7, 4]
    with pytest.raises(
        ValueError, match=r"expected 2 distinct expert ids below 4, got \[7, 4\] in layer 1, position 2 \(g7"
    ):
        check_trace(trace, 4, "g7/3")


def test_a_negative_id_is_refused():
    with pytest.raises(ValueError, match=r"got \[-1, 1\] in layer 0, position 0"):
        check_trace(np.array([[[-1, 1]]], np.int32), 4, "here")


def test_routes_that_were_never_captured_are_refused():
    with pytest.raises(ValueError, match=r"got \[0, 0\] in layer 0, position 0 \(here; 6 of 6 rows are wrong\)"):
        check_trace(np.zeros((2, 3, 2), np.uint8), 4, "here")


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match=r"expected integer expert ids, got float32 \(here\)"):
        check_trace(np.zeros((2, 3, 2), np.float32), 4, "here")
