import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sat_jax.shapes import check_shapes


def test_sizes_of_all_letters_are_returned():
    assert check_shapes(logp_BT=np.zeros((2, 3)), experts_LBTK=np.zeros((5, 2, 3, 4))) == {
        "L": 5,
        "B": 2,
        "T": 3,
        "K": 4,
    }


def test_a_rank_that_contradicts_its_suffix_is_named():
    with pytest.raises(ValueError, match=r"logp_BT: expected 2 axes \(BT\), got shape \(3,\)"):
        check_shapes(logp_BT=np.zeros(3))


def test_two_arrays_that_disagree_are_both_named():
    with pytest.raises(ValueError, match=r"mask_BT: expected axis T of size 3 \(from logp_BT\), got 4"):
        check_shapes(logp_BT=np.zeros((2, 3)), mask_BT=np.zeros((2, 4)))


def test_a_letter_twice_in_one_name_must_agree():
    with pytest.raises(ValueError, match="expected axis T of size 2"):
        check_shapes(score_TT=np.zeros((2, 3)))


def test_a_name_without_suffix_is_a_scalar():
    assert check_shapes(threshold=jnp.float32(1)) == {}
    with pytest.raises(ValueError, match=r"threshold: expected 0 axes \(scalar\), got shape \(2,\)"):
        check_shapes(threshold=np.zeros(2))


def test_none_is_skipped():
    assert check_shapes(prox_logp_BT=None, logp_BT=np.zeros((2, 3))) == {"B": 2, "T": 3}


def test_shapes_are_checked_while_tracing():
    with pytest.raises(ValueError, match="mask_BT"):
        jax.eval_shape(
            lambda a, b: check_shapes(logp_BT=a, mask_BT=b) and a,
            jax.ShapeDtypeStruct((2, 3), jnp.float32),
            jax.ShapeDtypeStruct((3, 3), jnp.bool_),
        )
