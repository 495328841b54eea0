import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax.model import Policy, PolicyConfig, hf
from sat_jax.routing import free_trace
from sat_jax.types import RoutingTrace, TokenBatch
from tests.reference.policy_twin import PolicyTwin

CONFIG = PolicyConfig.tiny(vocab_size=20, width=32, head_dim=8, experts=6, experts_per_token=2, expert_hidden=24)
ROWS, LENGTH = 4, 16
# Lengths of the sequences of each row; the rest is padding.
PACKED = ((5, 7, 2), (16,), (1, 1, 9), (3,))


class Program:
    """Scores a batch, with or without the gradient, as one jitted program each: a trace is always passed."""

    def __init__(self, config, **changes):
        self.config = dataclasses.replace(config, **changes)
        self.policy = Policy(self.config)
        self.graph, self.params = nnx.split(self.policy, nnx.Param)
        self.grad = jax.value_and_grad(self._loss, has_aux=True)
        self.run = jax.jit(self.grad)
        self.forward = jax.jit(lambda batch, temperature=1.0: self._loss(self.params, batch, temperature)[1])
        self.logits = jax.jit(self._logits)
        self.traced = 0

    def _loss(self, params, batch, temperature):
        self.traced += 1
        output = nnx.merge(self.graph, params).score(batch, temperature)
        return jnp.where(batch.loss_mask_BT, output.logp_BT, 0).sum(), output

    def _logits(self, batch):
        policy = nnx.merge(self.graph, self.params)
        hidden, trace = policy(batch.input_BT, batch.segment_BT, batch.position_BT, batch.trace)
        return policy.logits(hidden), hidden, trace

    def __call__(self, batch, temperature=1.0):
        (_, output), gradient = self.run(self.params, batch, jnp.float32(temperature))
        return output, nnx.to_pure_dict(gradient)


@pytest.fixture(scope="module")
def program():
    return Program(CONFIG)


def packed(seed, lengths=PACKED, *, filler=0):
    """Rows of random sequences with a free trace; `filler` is the token of the padding."""
    draw = np.random.default_rng(seed)
    token = np.full((len(lengths), LENGTH), filler)
    target, segment, position = token.copy(), np.zeros_like(token), np.zeros_like(token)
    for row, sizes in enumerate(lengths):
        for number, (start, size) in enumerate(zip(np.cumsum((0, *sizes[:-1])), sizes, strict=True), start=1):
            at = slice(start, start + size)
            token[row, at] = draw.integers(0, CONFIG.vocab_size, size)
            target[row, at] = draw.integers(0, CONFIG.vocab_size, size)
            segment[row, at], position[row, at] = number, np.arange(size)
    return make_batch(token, target, segment, position)


def make_batch(token, target, segment, position):
    def ints(a):
        return jnp.asarray(a, jnp.int32)

    zero = jnp.zeros(token.shape, jnp.float32)
    return TokenBatch(
        input_BT=ints(token),
        target_BT=ints(target),
        segment_BT=ints(segment),
        position_BT=ints(position),
        loss_mask_BT=jnp.asarray(segment) > 0,
        behavior_logp_BT=zero,
        advantage_BT=zero,
        lag_BT=ints(0 * token),
        trace=free_trace(CONFIG.layers, len(token), LENGTH, CONFIG.experts_per_token, CONFIG.experts),
    )


def with_trace(batch, experts_LBTK, present_BT):
    trace = RoutingTrace(experts_LBTK=jnp.asarray(experts_LBTK, jnp.uint8), present_BT=jnp.asarray(present_BT))
    return dataclasses.replace(batch, trace=trace)


def foreign(seed):
    shape = (CONFIG.layers, ROWS, LENGTH, CONFIG.experts)
    return np.argsort(np.random.default_rng(seed).random(shape), -1)[..., : CONFIG.experts_per_token]


def sequences(batch):
    for row, sizes in enumerate(PACKED):
        for start, size in zip(np.cumsum((0, *sizes[:-1])), sizes, strict=True):
            yield row, slice(start, start + size)


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


DENSE = {"experts": 0, "experts_per_token": 0, "expert_hidden": 0, "dense_layers": (0, 1), "dense_hidden": 40}
MIXED = {"layers": 5, "dense_layers": (0, 3), "dense_hidden": 40}
OTHER = {"tie_embeddings": True, "norm_topk": False, "rope_theta": 50.0}


@pytest.mark.parametrize("changes", [{}, OTHER, DENSE, MIXED], ids=["moe", "other", "dense", "mixed"])
def test_the_policy_equals_its_numpy_twin_token_by_token(program, changes):
    batch = packed(0)
    if changes:
        program = Program(CONFIG, **changes)
        c = program.config
        free = free_trace(c.moe_layers, ROWS, LENGTH, c.experts_per_token, c.experts)
        batch = dataclasses.replace(batch, trace=free)
        output = program.forward(batch)
    else:
        output, _ = program(batch)
    twin = PolicyTwin(program.config, dict(hf.export_tensors(program.policy, program.config)))
    for row, at in sequences(batch):
        logits, routes = twin.run(np.asarray(batch.input_BT)[row, at])
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        target = np.asarray(batch.target_BT)[row, at]
        assert len(output.trace.experts_LBTK) == len(routes) == program.config.moe_layers
        np.testing.assert_array_equal(
            output.trace.experts_LBTK[:, row, at],
            routes.reshape(len(routes), len(target), program.config.experts_per_token),
        )
        np.testing.assert_allclose(output.logp_BT[row, at], logp[np.arange(len(target)), target], atol=2e-5)
        np.testing.assert_allclose(output.entropy_BT[row, at], -(np.exp(logp) * logp).sum(-1), atol=2e-5)


def test_replayed_foreign_routes_equal_the_twins(program):
    twin = PolicyTwin(CONFIG, dict(hf.export_tensors(program.policy, CONFIG)))
    batch, routes = packed(1), foreign(1)
    output, _ = program(with_trace(batch, routes, np.ones((ROWS, LENGTH), bool)))
    for row, at in sequences(batch):
        expected, _ = twin.run(np.asarray(batch.input_BT)[row, at], routes[:, row, at])
        logp = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
        target = np.asarray(batch.target_BT)[row, at]
        np.testing.assert_allclose(output.logp_BT[row, at], logp[np.arange(len(target)), target], atol=2e-5)
        np.testing.assert_array_equal(output.trace.experts_LBTK[:, row, at], routes[:, row, at])


def test_the_score_is_that_of_the_logits_at_the_given_temperature(program):
    batch = packed(2)
    logits, hidden, _ = program.logits(batch)
    assert (hidden.dtype, logits.dtype) == (jnp.float32, jnp.float32)
    for temperature in (0.7, 1.0):
        logp = jax.nn.log_softmax(logits / temperature)
        expected = jnp.take_along_axis(logp, batch.target_BT[..., None], -1)[..., 0]
        got = program(batch, temperature)[0].logp_BT
        np.testing.assert_allclose(got[batch.loss_mask_BT], expected[batch.loss_mask_BT], atol=1e-5)


def test_calling_and_scoring_use_the_same_routes(program):
    batch = with_trace(packed(2), foreign(2), np.ones((ROWS, LENGTH), bool))
    assert_same_bits(program.logits(batch)[2], program(batch)[0].trace)


def test_no_trace_is_a_trace_with_nothing_present(program):
    batch = packed(3)
    hidden, trace = program.policy(batch.input_BT, batch.segment_BT, batch.position_BT)
    _, expected, routes = program.logits(batch)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    assert_same_bits(trace, routes)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_replaying_its_own_routes_changes_no_bit(program, seed):
    batch = packed(seed)
    free = program(batch)
    own = free[0].trace
    replayed = program(with_trace(batch, own.experts_LBTK, own.present_BT))
    assert_same_bits(free, replayed)
    np.testing.assert_array_equal(free[0].agreement_BT, 1.0)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_foreign_routes_are_used_and_the_router_still_learns(program, seed):
    batch, routes = packed(seed), foreign(seed)
    output, gradient = program(with_trace(batch, routes, np.ones((ROWS, LENGTH), bool)))
    real = np.asarray(batch.segment_BT) > 0
    np.testing.assert_array_equal(output.trace.experts_LBTK[:, real], routes[:, real])
    assert (np.abs(gradient["layers"]["router_DE"]).max((1, 2)) > 1e-4).all()
    assert (output.agreement_BT[real] < 1).any()

    # The agreement is the share of used choices that the same stream, routed freely, would have made: check layer 0,
    # whose input does not depend on the routes.
    live = program(batch)[0].trace.experts_LBTK[0]
    first = (routes[0][:, :, :, None] == np.asarray(live)[:, :, None, :]).any(-1).mean(-1)
    highest = (first * 1 + (CONFIG.layers - 1)) / CONFIG.layers
    assert (np.asarray(output.agreement_BT)[real] <= highest[real] + 1e-6).all()
    assert (np.asarray(output.agreement_BT)[real] >= first[real] / CONFIG.layers - 1e-6).all()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_rows_without_a_route_fall_back_to_the_live_router(program, seed):
    # Whole sequences without routes must come out as if nothing were replayed, whatever their rows hold.
    batch, garbage = packed(seed), foreign(seed)
    absent = np.asarray(batch.segment_BT) % 2 == 1
    free, _ = program(batch)
    mixed, _ = program(with_trace(batch, garbage, ~absent))
    np.testing.assert_array_equal(mixed.logp_BT[absent], free.logp_BT[absent])
    np.testing.assert_array_equal(mixed.trace.experts_LBTK[:, absent], free.trace.experts_LBTK[:, absent])
    np.testing.assert_array_equal(mixed.agreement_BT[absent], 1.0)


def test_free_and_replayed_are_one_program(program):
    batch = packed(3)
    program(batch)
    before = program.traced
    program(with_trace(batch, foreign(3), np.ones((ROWS, LENGTH), bool)))
    assert before == program.traced > 0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None)
def test_packed_equals_unpacked(program, seed):
    batch = packed(seed)
    together, _ = program(batch)
    single = [(row, at) for row, at in sequences(batch)]
    for group in range(0, len(single), ROWS):
        rows = single[group : group + ROWS]
        fields = {name: np.zeros((ROWS, LENGTH), int) for name in ("input_BT", "target_BT", "position_BT")}
        segment = np.zeros((ROWS, LENGTH), int)
        for into, (row, at) in enumerate(rows):
            size = at.stop - at.start
            segment[into, :size] = 1
            for name, field in fields.items():
                field[into, :size] = np.asarray(getattr(batch, name))[row, at]
        alone, _ = program(make_batch(fields["input_BT"], fields["target_BT"], segment, fields["position_BT"]))
        for into, (row, at) in enumerate(rows):
            size = at.stop - at.start
            np.testing.assert_allclose(alone.logp_BT[into, :size], together.logp_BT[row, at], atol=1e-5)
            np.testing.assert_array_equal(
                alone.trace.experts_LBTK[:, into, :size], together.trace.experts_LBTK[:, row, at]
            )


def test_padding_changes_no_bit_of_a_real_token_or_a_gradient(program):
    batch = packed(4)
    real = np.asarray(batch.segment_BT) > 0
    plain_output, plain_gradient = program(batch)
    garbage = with_trace(packed(4, filler=CONFIG.vocab_size - 1), foreign(4), ~real)
    output, gradient = program(dataclasses.replace(garbage, target_BT=batch.target_BT))
    np.testing.assert_array_equal(output.logp_BT[real], plain_output.logp_BT[real])
    np.testing.assert_array_equal(output.trace.present_BT, real)
    np.testing.assert_array_equal(output.agreement_BT[~real], 1.0)
    assert_same_bits(gradient, plain_gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_its_companions(dtype):
    run = Program(CONFIG, dtype=dtype).forward
    lengths = ((LENGTH,),) * 16
    batch, other = packed(5, lengths), packed(6, lengths)
    plain = np.asarray(run(batch).logp_BT)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(lengths))
        moved = jax.tree.map(lambda a: a[order] if a.ndim == 2 else a[:, order], batch)
        np.testing.assert_array_equal(run(moved).logp_BT, plain[order])
        kept = order < 8
        mixed = jax.tree.map(lambda a, b: jnp.where(kept[:, None], a, b) if a.ndim == 2 else a, batch, other)
        np.testing.assert_array_equal(np.asarray(run(mixed).logp_BT)[kept], plain[kept])


def test_layers_are_recomputed_or_not_with_the_same_gradients(program):
    batch = with_trace(packed(7), foreign(7), np.ones((ROWS, LENGTH), bool))
    kept = Program(CONFIG, remat="none")
    traced = [str(jax.make_jaxpr(p.grad)(p.params, batch, 1.0)) for p in (program, kept)]
    assert ["remat" in text or "checkpoint" in text for text in traced] == [True, False]
    for one, other in zip(jax.tree.leaves(program(batch)), jax.tree.leaves(kept(batch)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_stays_near_float32(program):
    half = Program(CONFIG, dtype="bfloat16")
    batch = packed(8)
    exact = program(batch)[0]
    batch = with_trace(batch, exact.trace.experts_LBTK, exact.trace.present_BT)
    logits, hidden, _ = jax.eval_shape(half.logits, batch)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    (_, output), gradient = jax.eval_shape(half.grad, half.params, batch, 1.0)
    assert (output.logp_BT.dtype, output.entropy_BT.dtype) == (jnp.float32, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    difference = np.abs(np.asarray(half.forward(batch).logp_BT - exact.logp_BT)[np.asarray(batch.loss_mask_BT)])
    assert 0 < difference.mean() < 0.02


def test_a_policy_may_be_an_argument_or_a_constant_of_a_jitted_function(program):
    batch, policy = packed(8), program.policy
    for traced in (
        jax.eval_shape(lambda policy, batch: policy.score(batch), policy, batch),
        jax.eval_shape(lambda batch: policy.score(batch), batch),
        nnx.eval_shape(lambda policy, batch: policy.score(batch), policy, batch),
        jax.eval_shape(jax.grad(lambda policy, batch: policy.score(batch).logp_BT.sum()), policy, batch),
    ):
        assert jax.tree.leaves(traced)


def test_default_parameters_are_the_same_every_time(program):
    assert_same_bits(nnx.state(Policy(CONFIG), nnx.Param), program.params)
    other = Policy(CONFIG, nnx.Rngs(1))
    assert not np.array_equal(other.embedding_VD[...], program.policy.embedding_VD[...])


def test_a_token_outside_the_vocabulary_shows(program):
    batch = packed(9)
    outside = dataclasses.replace(batch, input_BT=batch.input_BT.at[1, 3].set(CONFIG.vocab_size))
    assert np.isnan(program(outside)[0].logp_BT[1, 3])


def changed(batch, name, value):
    """The batch with one number of a real position replaced."""
    if name == "experts_LBTK":
        ids = foreign(12)
        ids[1, 1, 3, 0] = value
        return with_trace(batch, ids, np.ones((ROWS, LENGTH), bool))
    return dataclasses.replace(batch, **{name: getattr(batch, name).at[1, 3].set(value)})


@pytest.mark.parametrize(
    ("name", "bound"),
    [("input_BT", CONFIG.vocab_size), ("position_BT", CONFIG.max_positions), ("experts_LBTK", CONFIG.experts)],
)
def test_a_number_out_of_its_range_is_an_error_or_not_a_number(program, name, bound):
    batch = packed(12)
    bad = changed(batch, name, bound)
    where = rf"{name}: expected numbers from 0 to {bound - 1} \(the policy's\), got {bound} in row 1 at 3"
    with pytest.raises(ValueError, match=where):
        program.policy(bad.input_BT, bad.segment_BT, bad.position_BT, bad.trace)
    # Inside jit nobody can raise: the row must not pass for a sound one.
    logp_BT = program(bad)[0].logp_BT
    assert np.isnan(logp_BT[1, 3])
    assert np.isfinite(logp_BT[0]).all()
    sound = program(changed(batch, name, bound - 1))[0].logp_BT
    assert np.isfinite(sound[np.asarray(batch.loss_mask_BT)]).all()
    padding = changed(dataclasses.replace(bad, segment_BT=bad.segment_BT.at[1].set(0)), name, bound)
    assert np.isfinite(program(padding)[0].logp_BT[0]).all()


def test_a_trace_of_another_model_is_refused(program):
    batch = packed(10)
    ids = np.zeros((CONFIG.layers, ROWS, LENGTH, CONFIG.experts_per_token))
    present = np.zeros((ROWS, LENGTH), bool)
    with pytest.raises(ValueError, match=r"trace.experts_LBTK: expected L = 2 \(the policy's\), got 3"):
        program(with_trace(batch, np.concatenate([ids, ids[:1]]), present))
    with pytest.raises(ValueError, match=r"trace.experts_LBTK: expected K = 2 \(the policy's\), got 1"):
        program(with_trace(batch, ids[..., :1], present))
    with pytest.raises(ValueError, match=r"experts_LBTK: expected axis T of size 16"):
        program(with_trace(batch, ids[:, :, 1:], present))
