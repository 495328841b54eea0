import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model.attention import attend, attention_pairs, packed_attention
from sat_jax.model.chunked_attention import chunked_attention, first_key_block
from sat_jax.model.splash import splash_attention
from tests.reference.policy_twin import softmax

ROWS, LENGTH, HEADS, KEYS, CHANNELS = 2, 9, 4, 2, 6
ONE = one_device_mesh()
_packed = jax.jit(functools.partial(packed_attention, mesh=ONE))


def qkv(seed, rows=ROWS, length=LENGTH, heads=HEADS, keys=KEYS, channels=CHANNELS):
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=(rows, length, n, channels)).astype(np.float32) for n in (heads, keys, keys))


def attention_twin(q, k, v, segment):
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        seen = [s for s in range(t + 1) if segment[b, s] == segment[b, t]]
        out[b, t, h] = softmax(k[b, seen, g] @ q[b, t, h] / np.sqrt(q.shape[-1])) @ v[b, seen, g]
    return out


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_packed_attention_is_causal_within_each_segment(seed):
    q, k, v = qkv(seed)
    segment = np.sort(np.random.default_rng(seed).integers(1, 4, (ROWS, LENGTH)), -1).astype(np.int32)
    segment[:, -2:] = 0
    np.testing.assert_allclose(_packed(q, k, v, segment), attention_twin(q, k, v, segment), atol=2e-6)


def test_nothing_bleeds_between_segments():
    q, k, v = qkv(3)
    segment = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]] * ROWS, np.int32)
    plain = _packed(q, k, v, segment)
    for touched in (slice(0, 3), slice(7, 9)):
        other_k, other_v = k.copy(), v.copy()
        other_k[:, touched], other_v[:, touched] = 1e4, -1e4
        np.testing.assert_array_equal(_packed(q, other_k, other_v, segment)[:, 3:7], plain[:, 3:7])


def test_later_positions_are_not_seen():
    q, k, v = qkv(4)
    segment = np.ones((ROWS, LENGTH), np.int32)
    other_k, other_v = k.copy(), v.copy()
    other_k[:, 5:], other_v[:, 5:] = 7.0, 7.0
    np.testing.assert_array_equal(_packed(q, other_k, other_v, segment)[:, :5], _packed(q, k, v, segment)[:, :5])


def whole_rows(q, k, v, segment):
    """Value and gradients of the obvious form; padding, which means nothing, is left out of the loss by its weight."""
    place = jnp.arange(q.shape[1])
    visible = (place[:, None] >= place) & (segment[:, :, None] == segment[:, None, :])
    return attend(q, k, v, visible)


def loss_of(function):
    """A compiled weighted sum of the output with its gradients; padding, which means nothing, weighs nothing."""

    def loss(q, k, v, segment):
        pull = jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape) * (segment != 0)[:, :, None, None]
        return (function(q, k, v, segment) * pull).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


_pairs = jax.jit(functools.partial(attention_pairs, mesh=ONE))
_whole_loss = loss_of(whole_rows)
_chunked = jax.jit(chunked_attention, static_argnames="block")
_chunked_loss = loss_of(functools.partial(chunked_attention, block=8))


def packed_segments(seed, rows, length, most):
    """Rows of 1 to `most` sequences with a tail of padding."""
    draw = np.random.default_rng(seed)
    segment = np.sort(draw.integers(1, 1 + draw.integers(1, most + 1, (rows, 1)), (rows, length)), -1)
    segment[np.arange(length) >= length - draw.integers(0, length // 3, (rows, 1))] = 0
    return jnp.asarray(segment, jnp.int32)


def close(ours, theirs, rtol=1e-4, atol=2e-5):
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol * max(1, float(np.abs(expected).max())))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_chunks_give_the_value_and_gradients_of_whole_rows(seed):
    length = 45  # not a multiple of the block
    q, k, v = map(jnp.asarray, qkv(seed, length=length))
    segment = packed_segments(seed, ROWS, length, 5)
    close(_chunked_loss(q, k, v, segment), _whole_loss(q, k, v, segment))


def test_padding_attends_to_nothing_and_is_zero():
    q, k, v = map(jnp.asarray, qkv(1, length=32))
    segment = jnp.asarray([[1] * 10 + [0] * 22, [0] * 32], jnp.int32)
    np.testing.assert_array_equal(_chunked(q, k, v, segment, 8)[segment == 0], 0)
    for grad in _chunked_loss(q, k, v, segment)[1]:
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(np.asarray(grad)[np.asarray(segment) == 0], 0)


def test_blocks_of_other_segments_are_not_visited():
    # Blocks of 4: sequence 1 fills the first and half of the second, 2 reaches into the fourth, the last is padding.
    segment = jnp.asarray([[1] * 6 + [2] * 8 + [3, 3] + [0] * 4], jnp.int32)
    np.testing.assert_array_equal(first_key_block(segment, 4), [[0, 0, 1, 1, 5]])
    descending = jnp.asarray([[2] * 4 + [1] * 4 + [2] * 4], jnp.int32)  # out of order: served, not skipped
    np.testing.assert_array_equal(first_key_block(descending, 4), [[0, 1, 0]])
    q, k, v = map(jnp.asarray, qkv(2, rows=1, length=20))
    plain = _chunked(q, k, v, segment, 4)
    poisoned = _chunked(q, k.at[:, 0].set(jnp.nan), v.at[:, 0].set(jnp.nan), segment, 4)
    np.testing.assert_array_equal(poisoned[:, 8:], plain[:, 8:])
    assert np.isnan(poisoned[:, :6]).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_longer_than_1024_go_by_chunks_on_any_mesh(dtype):
    length = 1100
    q, k, v = (jnp.asarray(a, dtype) for a in qkv(5, rows=2, length=length, heads=4, channels=8))
    segment = packed_segments(6, 2, length, 4)
    expected = np.asarray(jax.jit(whole_rows)(q, k, v, segment), np.float32)
    for mesh in (ONE, make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])):
        got = jax.jit(functools.partial(packed_attention, mesh=mesh))(q, k, v, segment)
        assert got.dtype == dtype
        real = np.asarray(segment) != 0
        tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.asarray(got, np.float32)[real], expected[real], atol=tolerance)


def test_memory_is_linear_in_the_length_of_a_row():
    def temporaries(length):
        q, kv = (jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32) for n in (4, 2))
        loss = jax.grad(lambda q, k, v, s: packed_attention(q, k, v, s, ONE).sum(), argnums=(0, 1, 2))
        compiled = jax.jit(loss).lower(q, kv, kv, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long = temporaries(4096), temporaries(32768)
    assert long < 8.5 * short
    assert long < 32768**2 / 4  # a 16th of the scores of one head


def test_splash_equals_whole_rows_with_blocks_of_other_segments_pruned():
    length = 300  # three blocks of 128, the last partly beyond the row
    q, k, v = map(jnp.asarray, qkv(8, length=length, channels=32))
    segment = jnp.asarray([[1] * 130 + [2] * 100 + [3] * 40 + [0] * 30, [1] * 100 + [0] * 200], jnp.int32)
    splash = functools.partial(splash_attention, block=128, interpret=True)
    close(loss_of(splash)(q, k, v, segment), _whole_loss(q, k, v, segment))


def test_pruned_splash_never_reads_blocks_of_other_segments():
    # Keys and values of sequence 1 fill block 0 alone; queries of sequence 2 must not meet them: NaN would spread.
    q, k, v = map(jnp.asarray, qkv(9, rows=1, length=384, channels=32))
    segment = jnp.asarray([[1] * 128 + [2] * 256], jnp.int32)
    poisoned = splash_attention(
        q, k.at[:, :128].set(jnp.nan), v.at[:, :128].set(jnp.nan), segment, block=128, interpret=True
    )
    assert np.isfinite(poisoned[:, 128:]).all()
    assert np.isnan(poisoned[:, :128]).any()


def test_pairs_are_counted_as_the_kernels_run_them():
    # One sequence of 1100 and one of 436 in a row of 1536: blocks 0, 0-1, 0-2 of 512.
    segment = jnp.asarray([[1] * 1100 + [2] * 400 + [0] * 36], jnp.int32)
    useful, executed = _pairs(segment)
    assert (useful, executed) == (1100 * 1101 / 2 + 400 * 401 / 2, 6 * 512**2)
    eight = jnp.repeat(jnp.arange(1, 9, dtype=jnp.int32), 4096)[None]
    useful, executed = _pairs(eight)
    assert executed / useful < 1.13  # 8 x (1 + ... + 8) blocks; without skipping it would be 8.1 times the useful pairs
    assert _pairs(jnp.zeros((1, 2048), jnp.int32)) == (0, 0)
    assert _pairs(jnp.asarray([[1, 1, 2, 0]])) == (4, 16)  # a short row is attended whole


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_answers_in_the_type_it_was_asked_in(dtype):
    q, k, v = (jnp.asarray(a, dtype) for a in qkv(8))
    assert attend(q, k, v, jnp.ones((ROWS, LENGTH, LENGTH), bool)).dtype == dtype
