import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.mesh import MeshConfig, make_mesh, one_device_mesh
from sat_jax.model.blocked import block_rows, plan_blocks
from sat_jax.model.dispatch import ExpertWeights, stable_order
from sat_jax.model.experts import apply_experts
from tests.reference.experts_twin import every_expert

TOKENS, WIDTH, HIDDEN, EXPERTS, SLOTS = 96, 16, 24, 6, 2
_apply = jax.jit(functools.partial(apply_experts, mesh=one_device_mesh()))


def weights(seed=0, dtype=jnp.float32, *, width=WIDTH, hidden=HIDDEN, count=EXPERTS):
    draw = np.random.default_rng(seed)
    shapes = {"gate_EDF": (width, hidden), "up_EDF": (width, hidden), "down_EFD": (hidden, width)}
    return ExpertWeights(
        **{name: jnp.asarray(draw.normal(0, 0.3, (count, *shape)), dtype) for name, shape in shapes.items()}
    )


def tokens(seed, routing="even", *, count=TOKENS, width=WIDTH, number=EXPERTS, slots=SLOTS):
    """x, ids, combine weights and used of `count` tokens, routed evenly, all to the same experts, or to few."""
    draw = np.random.default_rng(seed)
    score = draw.random((count, number))
    score[:, : slots if routing == "one" else 3 if routing == "few" else 0] += 1
    ids = np.argsort(-score, -1)[:, :slots].astype(np.int32)
    x = draw.normal(size=(count, width)).astype(np.float32)
    return x, ids, draw.random((count, slots)).astype(np.float32), draw.random(count) < 0.9


def objective(function, pull):
    """Value and all gradients of a weighted sum of the output."""

    def loss(x, weight, w, ids, used):
        return (function(x, ids, weight, used, w).astype(jnp.float32) * pull).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


PULL = np.random.default_rng(9).normal(size=(TOKENS, WIDTH)).astype(np.float32)
_ours = objective(functools.partial(apply_experts, mesh=one_device_mesh()), PULL)
_twin = objective(every_expert, PULL)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["even", "few", "one"]))
@settings(max_examples=12, deadline=None)
def test_value_and_every_gradient_equal_running_every_expert(seed, routing):
    # "few" leaves half of the experts empty, "one" puts every token on the same two.
    x, ids, weight, used = tokens(seed, routing)
    ours, twin = _ours(x, weight, weights(), ids, used), _twin(x, weight, weights(), ids, used)
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(twin), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(
        _apply(x, ids, weight, used, weights()), every_expert(x, ids, weight, used, weights()), rtol=1e-5, atol=1e-5
    )


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    x, ids, weight, used = tokens(1, "one")
    _, (_, _, gradient) = _ours(x, weight, weights(), ids, used)
    for leaf in jax.tree.leaves(gradient):
        assert (np.abs(leaf[:SLOTS]).max((1, 2)) > 0).all()
        np.testing.assert_array_equal(leaf[SLOTS:], 0)


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65])
def test_any_number_of_tokens_fits_whole_blocks(count):
    x, ids, weight, used = tokens(2, count=count)
    np.testing.assert_allclose(
        _apply(x, ids, weight, used, weights()), every_expert(x, ids, weight, used, weights()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tokens_bits_depend_neither_on_its_place_nor_on_its_companions(dtype):
    x, ids, weight, _ = tokens(3)
    x, everyone = jnp.asarray(x, dtype), np.ones(TOKENS, bool)
    alone = np.asarray(_apply(x, ids, weight, everyone, weights()), np.float32)
    for seed in range(5):
        draw = np.random.default_rng(seed)
        order, kept = draw.permutation(TOKENS), draw.random(TOKENS) < 0.5
        moved = _apply(x[order], ids[order], weight[order], everyone, weights())
        np.testing.assert_array_equal(np.asarray(moved, np.float32), alone[order])

        others_x = jnp.where(kept[:, None], x, 3 * x + 1)
        others_ids = np.where(kept[:, None], ids, (ids + 1) % EXPERTS)
        for used in (everyone, kept):
            among = np.asarray(_apply(others_x, others_ids, weight, used, weights()), np.float32)
            np.testing.assert_array_equal(among[kept], alone[kept])


def test_the_order_of_a_tokens_slots_changes_no_bit():
    x, ids, weight, used = tokens(4, slots=SLOTS)
    swapped = _apply(x, ids[:, ::-1], weight[:, ::-1], used, weights())
    np.testing.assert_array_equal(swapped, _apply(x, ids, weight, used, weights()))


def test_equal_inputs_give_equal_gradients_bit_for_bit():
    x, ids, weight, used = tokens(5)
    first, second = _ours(x, weight, weights(), ids, used), _ours(x, weight, weights(), ids, used)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unused_tokens_give_zero_whatever_they_hold_and_take_no_block():
    rows = block_rows(TOKENS * SLOTS, EXPERTS)
    for count in (0, 37, 38, 39):
        x, ids, weight, _ = tokens(6)
        used = np.arange(TOKENS) < count
        x[~used] = np.nan
        np.testing.assert_array_equal(_apply(x, ids, weight, used, weights())[~used], 0)
        _, gradients = _ours(x, weight, weights(), ids, used)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        needed = sum(-(-int((ids[used] == expert).sum()) // rows) for expert in range(EXPERTS))
        assert int(plan_blocks(jnp.where(used[:, None], ids, -1), EXPERTS, rows).blocks) == needed


def test_ids_outside_contribute_nothing():
    x, ids, weight, used = tokens(7)
    ids[::3, 0], ids[1::3, 0] = EXPERTS, -5
    np.testing.assert_allclose(
        _apply(x, ids, weight, used, weights()), every_expert(x, ids, weight, used, weights()), rtol=1e-5, atol=1e-5
    )


def test_bfloat16_tokens_keep_float32_sums_in_the_weights_gradients():
    # 4096 equal contributions of 1/16: bfloat16 sums of them stall far below 256.
    count = 4096
    one = ExpertWeights(gate_EDF=jnp.ones((1, 1, 1)), up_EDF=jnp.ones((1, 1, 1)), down_EFD=jnp.ones((1, 1, 1)))
    x = jnp.ones((count, 1), jnp.bfloat16)

    def loss(w):
        ids, weight, used = jnp.zeros((count, 1), jnp.int32), jnp.full((count, 1), 1 / 16), jnp.ones(count, bool)
        return apply_experts(x, ids, weight, used, w, one_device_mesh()).astype(jnp.float32).sum()

    hidden = float(jnp.bfloat16(jax.nn.silu(1.0) / 16))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(one).down_EFD.item(), count * hidden, rtol=1e-6)


def test_blocks_are_between_16_and_256_rows():
    assert block_rows(2, 128) == 16
    assert block_rows(512, 4) == 64
    assert block_rows(6144, 4) == 256
    assert block_rows(10**7, 4) == 256


def test_both_ways_to_sort_give_the_stable_order():
    key = jnp.asarray(np.random.default_rng(8).integers(0, 9, 257), jnp.int32)
    expected = np.argsort(key, kind="stable")
    np.testing.assert_array_equal(stable_order(key, 9), expected)
    np.testing.assert_array_equal(stable_order(key, 2**32), expected)


@pytest.mark.parametrize("routing", ["even", "one"])
@pytest.mark.parametrize(
    "axes",
    # Beyond two shards of `expert`, the slots of a token, tokens are exchanged instead of gathered.
    [{"data": 2, "expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 4, "tensor": 2}],
    ids=str,
)
def test_sharded_experts_equal_unsharded_under_any_skew(axes, routing):
    x, ids, weight, used = tokens(10, routing, number=8)
    w = weights(count=8)
    sharded = objective(functools.partial(apply_experts, mesh=make_mesh(MeshConfig(**axes))), PULL)
    ours, twin = sharded(x, weight, w, ids, used), _twin(x, weight, w, ids, used)
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(twin), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


def test_tokens_are_exchanged_only_beyond_as_many_shards_as_slots():
    x, ids, weight, used = tokens(12, number=8)
    for shards, exchanged in ((2, False), (4, True)):
        mesh = make_mesh(MeshConfig(data=8 // shards, expert=shards))
        program = str(
            jax.make_jaxpr(functools.partial(apply_experts, mesh=mesh))(x, ids, weight, used, weights(count=8))
        )
        assert ("all_to_all" in program) == exchanged
        assert ("reduce_scatter" in program) != exchanged


def test_shapes_that_disagree_are_refused():
    x, ids, weight, used = map(jnp.asarray, tokens(11))
    with pytest.raises(ValueError, match=r"weight_NK: expected axis K of size 2 \(from ids_NK\), got 1"):
        apply_experts(x, ids, weight[:, :1], used, weights(), one_device_mesh())
