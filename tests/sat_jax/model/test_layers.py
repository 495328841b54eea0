import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.model.layers import frequencies, rms_norm, rope
from tests.reference.policy_twin import turn


def test_rms_norm_by_hand():
    # mean square of (3, 4) is 12.5; with eps 12.5 the divisor is 5.
    np.testing.assert_allclose(rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 10.0]), 12.5), [0.6, 8.0], rtol=1e-6)


def test_rms_norm_of_bfloat16_is_taken_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)), jnp.bfloat16)
    scale = jnp.linspace(0.5, 2, 64)
    got = rms_norm(x, scale, 1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rms_norm(x.astype(jnp.float32), scale, 1e-6).astype(jnp.bfloat16))


def test_rope_equals_the_half_rotation():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 3, 8)), jnp.float32)
    position = jnp.array([[0, 1, 2, 7, 300]])
    expected = np.array(
        [[turn(np.asarray(x)[0, t, h], int(position[0, t]), 100.0) for h in range(3)] for t in range(5)]
    )
    np.testing.assert_allclose(rope(x, position, 100.0)[0], expected, atol=2e-5)
    np.testing.assert_array_equal(rope(x, position, 100.0)[0, 0], x[0, 0])


def test_frequencies_are_rounded_as_transformers_rounds_them():
    # As transformers 5.19 computes them; 1e6^(-1/4) and 1e6^(-3/4) themselves are nearer to the next float32.
    expected = np.array([1.0, 0.03162277862429619, 0.0010000000474974513, 3.162277425872162e-05], np.float32)
    np.testing.assert_array_equal(frequencies(8, 1e6), expected)


@given(st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_rotated_products_depend_on_the_distance_alone(first, shift):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 1, 8)), jnp.float32)

    def product(a, b):
        q, k = rope(x, jnp.array([[a, b]]), 10000.0)[0, :, 0]
        return float(q @ k)

    np.testing.assert_allclose(product(first + shift, first), product(shift, 0), atol=2e-3)
