import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.model.attention import attend, packed_attention
from tests.reference.policy_twin import softmax

ROWS, LENGTH, HEADS, KEYS, CHANNELS = 2, 9, 4, 2, 6
_packed = jax.jit(packed_attention)


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


def test_long_rows_go_by_blocks_and_give_the_same_value_and_gradients():
    length = 1100
    q, k, v = qkv(5, rows=1, length=length, heads=2, keys=1, channels=4)
    segment = jnp.asarray(np.sort(np.random.default_rng(6).integers(1, 5, (1, length)), -1), jnp.int32)
    visible = (np.arange(length)[:, None] >= np.arange(length)) & (segment[:, :, None] == segment[:, None, :])
    pull = np.random.default_rng(7).normal(size=q.shape).astype(np.float32)

    def loss(function):
        total = jax.value_and_grad(lambda q, k, v: (function(q, k, v) * pull).sum(), argnums=(0, 1, 2))
        return jax.jit(total)(*map(jnp.asarray, (q, k, v)))

    blocked = loss(lambda q, k, v: packed_attention(q, k, v, segment))
    whole = loss(lambda q, k, v: attend(q, k, v, jnp.asarray(visible)))
    for got, expected in zip(jax.tree.leaves(blocked), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4)


def test_long_rows_need_no_square_array():
    length = 16384
    q, kv = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32), jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
    loss = jax.grad(lambda q, k, v, s: packed_attention(q, k, v, s).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(loss).lower(q, kv, kv, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    memory, scores_of_one_head = compiled.memory_analysis(), 4 * length * length
    assert memory is not None
    assert memory.temp_size_in_bytes < scores_of_one_head / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_answers_in_the_type_it_was_asked_in(dtype):
    q, k, v = (jnp.asarray(a, dtype) for a in qkv(8))
    assert attend(q, k, v, jnp.ones((ROWS, LENGTH, LENGTH), bool)).dtype == dtype
