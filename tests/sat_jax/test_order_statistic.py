import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.order_statistic import ABSENT_BITS, LARGEST_BITS, count, every, folded_sum, kth_smallest_bits

SELECT = jax.jit(kth_smallest_bits)
# Around every width at which slicing changes: nothing to fold, one slice, padding, two full folds, odd sizes.
SHAPES = [(1,), (31,), (3, 33), (2, 256), (2, 257), (5, 1), (2, 3, 40), (1, 4099)]


def hard_samples(seed, size):
    """Where interpolation goes wrong: ties, two scales, long gaps, clusters one unit wide, the ends of the range."""
    rng = np.random.default_rng(seed)
    smooth = np.abs(rng.standard_t(2, size)).astype(np.float32)
    return {
        "smooth": smooth,
        "zeros": np.where(rng.random(size) < 0.95, np.float32(0), smooth),
        "constant": np.full(size, 0.3, np.float32),
        "few values": rng.choice(smooth[: max(1, size // 9)], size),
        "two scales": np.where(rng.random(size) < 0.9, smooth * np.float32(1e-30), smooth * np.float32(1e30)),
        "all scales": np.exp(rng.uniform(-80, 80, size)).astype(np.float32),
        "denormal": (smooth * np.float32(1e-41)).astype(np.float32),
        "infinite": np.where(rng.random(size) < 0.3, np.float32(np.inf), smooth),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_sorted_element_and_exact_reductions(shape):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**31 - 2, shape).astype(np.int32)
    present = rng.random(shape) < 0.8
    present.ravel()[0] = True
    masked = jnp.asarray(np.where(present, bits, ABSENT_BITS))
    ordered = np.sort(bits[present])
    for rank in {1, (ordered.size + 1) // 2, ordered.size}:
        assert int(SELECT(masked, jnp.int32(rank), jnp.int32(ordered.size))) == ordered[rank - 1]
    assert int(count(jnp.asarray(present))) == ordered.size
    assert int(folded_sum(jnp.asarray(bits % 1000))) == (bits % 1000).sum()
    assert bool(every(jnp.asarray(present))) == present.all()
    assert bool(every(jnp.ones(shape, bool)))


@pytest.mark.parametrize("kind", hard_samples(0, 8))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]))
def test_hard_samples_give_the_sorted_element(kind, seed, share):
    sample = hard_samples(seed, 300)[kind]
    bits = sample.view(np.int32)
    rank = max(1, int(np.ceil(share * bits.size)))
    found = SELECT(jnp.asarray(bits.reshape(3, 100)), jnp.int32(rank), jnp.int32(bits.size))
    assert int(found) == np.sort(bits)[rank - 1]


def test_the_largest_bits_count_and_the_absent_do_not():
    bits = jnp.array([[ABSENT_BITS, LARGEST_BITS, 5, ABSENT_BITS]], jnp.int32)
    assert int(SELECT(bits, jnp.int32(1), jnp.int32(2))) == 5
    assert int(SELECT(bits, jnp.int32(2), jnp.int32(2))) == LARGEST_BITS


def test_one_false_element_anywhere_is_found():
    for position in range(0, 515, 37):
        mask = np.ones((1, 515), bool)
        mask[0, position] = False
        assert not bool(every(jnp.asarray(mask)))
        assert int(count(jnp.asarray(mask))) == 514


@pytest.mark.parametrize(("kind", "share", "most"), [("smooth", 0.9, 10), ("smooth", 0.999, 32), ("constant", 0.9, 32)])
def test_few_passes_are_needed_and_the_middle_pivot_bounds_them(kind, share, most):
    seen = []
    bits = jnp.asarray(hard_samples(1, 2**16)[kind].view(np.int32).reshape(16, -1))

    def spied(bits, rank, present):
        with jax.disable_jit():
            return kth_smallest_bits(bits, rank, present)

    original = jax.lax.while_loop
    with pytest.MonkeyPatch.context() as patch:

        def counting(condition, body, start):
            def counted(state):
                seen.append(1)
                return body(state)

            return original(condition, counted, start)

        patch.setattr(jax.lax, "while_loop", counting)
        rank = int(np.ceil(share * 2**16))
        found = spied(bits, jnp.int32(rank), jnp.int32(2**16))
    assert int(found) == np.sort(np.asarray(bits).ravel())[rank - 1]
    assert 0 < len(seen) <= most
