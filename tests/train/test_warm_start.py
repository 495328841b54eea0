import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sat_jax.mesh import one_device_mesh
from sat_jax.model import PolicyConfig
from train.state import init_policy
from train.warm_start import Examples, WarmStart, WarmStartConfig

STOP = 1
POLICY = PolicyConfig(
    vocab_size=8,
    width=8,
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=8,
    experts=2,
    experts_per_token=1,
    expert_hidden=8,
    remat="none",
)
# Prompts are tokens 6 and 7, answers 2 to 5: what is noised is told apart from what is not.
PAIRS = [([6, 7], [2, 3, STOP]), ([7], [4, STOP]), ([6, 6, 7], [5, STOP]), ([7, 6], [3, 3, STOP])]


def make(noise, steps=60):
    graph, params = init_policy(POLICY, 0, one_device_mesh())
    config = WarmStartConfig(steps=steps, batch_size=64, peak_lr=1e-2, noise=noise)
    return WarmStart(graph, Examples.pack(PAIRS), config, seed=3), graph, params


def drawn(noise):
    warm, graph, params = make(noise)
    return warm._batch(jax.random.key(0), nnx.merge(graph, params))


def originals(batch):
    """The example that each row was made from, known by its prompt."""
    rows = []
    for tokens_T in np.asarray(batch.input_BT):
        (match,) = [p + a for p, a in PAIRS if tokens_T[: len(p)].tolist() == p and tokens_T[len(p)] not in (6, 7)]
        rows.append(match)
    return rows


def test_examples_are_padded_and_their_answers_known():
    examples = Examples.pack(PAIRS)
    assert examples.token_PT.tolist()[1] == [7, 4, STOP, 0, 0]
    assert examples.prompt_P.tolist() == [2, 1, 3, 2]
    assert examples.whole_P.tolist() == [5, 3, 5, 5]
    assert examples.answer_tokens().tolist() == [2, 3, 4, 5]


def test_without_noise_the_batch_is_the_examples_and_only_answers_are_trained():
    batch = drawn(0.0)
    for row, tokens in enumerate(originals(batch)):
        prompt = next(p for p, a in PAIRS if p + a == tokens)
        length = len(tokens) - 1
        assert np.asarray(batch.input_BT)[row, :length].tolist() == tokens[:-1]
        assert np.asarray(batch.target_BT)[row, :length].tolist() == tokens[1:]
        assert np.asarray(batch.segment_BT)[row].tolist() == [1] * length + [0] * (4 - length)
        trained = np.flatnonzero(np.asarray(batch.loss_mask_BT)[row])
        assert trained.tolist() == list(range(len(prompt) - 1, length))


def test_full_noise_replaces_every_answer_token_by_another_answer_token_and_never_the_stop():
    batch = drawn(1.0)
    target_BT, mask_BT = np.asarray(batch.target_BT), np.asarray(batch.loss_mask_BT)
    rows = originals(batch)
    for row, tokens in enumerate(rows):
        prompt = next(p for p, a in PAIRS if p + a == tokens)
        sampled = target_BT[row][mask_BT[row]]
        assert sampled[-1] == STOP
        truth = tokens[len(prompt) : -1]
        assert set(sampled[:-1].tolist()) <= {2, 3, 4, 5}
        assert all(got != true for got, true in zip(sampled[:-1], truth, strict=True))


def test_the_noised_share_is_the_configured_one():
    batch = drawn(0.3)
    target_BT, mask_BT = np.asarray(batch.target_BT), np.asarray(batch.loss_mask_BT)
    wrong = total = 0
    for row, tokens in enumerate(originals(batch)):
        prompt = next(p for p, a in PAIRS if p + a == tokens)
        sampled = target_BT[row][mask_BT[row]][:-1]
        wrong += int((sampled != tokens[len(prompt) : -1]).sum())
        total += len(sampled)
    assert 0.15 < wrong / total < 0.45


def test_it_learns_and_is_a_function_of_its_seed():
    losses = []
    results = []
    for _ in range(2):
        warm, _, params = make(0.0)
        losses.clear()
        results.append(warm.run(params, lambda step, loss, likely: losses.append((step, loss, likely))))
    assert [step for step, _, _ in losses] == [50, 60]
    assert losses[-1][1] < 0.7 * np.log(8)
    assert losses[-1][2] > losses[0][2] >= 0
    for left, right in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(results[0]))


def test_noise_needs_something_else_to_say():
    graph, _ = init_policy(POLICY, 0, one_device_mesh())
    config = WarmStartConfig(steps=1, noise=0.5)
    with pytest.raises(ValueError, match="expected answers of at least two distinct tokens to noise, got 1"):
        WarmStart(graph, Examples.pack([([6], [2, STOP])]), config, 0)


@pytest.mark.parametrize(("field", "value"), [("steps", -1), ("batch_size", 0), ("peak_lr", 0.0), ("noise", 1.5)])
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"warm_start.{field}: expected .*, got {value}"):
        WarmStartConfig(**{"steps": 1, field: value})
