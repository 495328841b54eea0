"""The policy against transformers' Qwen3MoeForCausalLM and Qwen3ForCausalLM: numbers, gradients, files."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sat_jax.model import Policy, PolicyConfig, hf
from sat_jax.model.hf_names import LAYOUTS, Layout
from sat_jax.model.layers import rope

# transformers and PyTorch warn of their own matters.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-5  # of each tensor's largest number
DRAWS = 10  # of weights and tokens for each config
INITIALIZER_RANGE = 0.02  # transformers' default for Qwen3-MoE and Qwen3
WIDTH_30B = 2048  # of Qwen3-30B-A3B
ROWS, LENGTH = 3, 24
NOT_FLAT = ("routes", "gradients")
NONE = {"experts": 0, "experts_per_token": 0, "expert_hidden": 0}


def tiny(vocab: int, width: int, heads: tuple[int, int, int], **changes) -> PolicyConfig:
    query, kv, head_dim = heads
    sizes = {"vocab_size": vocab, "width": width, "query_heads": query, "kv_heads": kv, "head_dim": head_dim}
    return PolicyConfig.tiny(**(sizes | {"remat": "none"} | changes))


CONFIGS = {
    "gqa2": tiny(64, 64, (4, 2, 16), experts=8, layers=3),
    "mqa_head_dim_not_d_over_h": tiny(97, 48, (8, 1, 10), experts=5, experts_per_token=3, norm_topk=False),
    "mha_tied": tiny(50, 36, (3, 3, 20), tie_embeddings=True, experts=6, rope_theta=1e6, norm_eps=1e-5),
    "dense_among_sparse": tiny(33, 40, (6, 2, 8), layers=4, dense_layers=(1,), dense_hidden=56),
    "every_other_dense_tied": tiny(
        101, 32, (4, 1, 8), layers=5, dense_layers=(0, 2, 4), dense_hidden=24, norm_topk=False, tie_embeddings=True
    ),
    "one_expert_of_many": tiny(71, 64, (4, 4, 16), experts=16, experts_per_token=1, norm_topk=False),
    "many_experts_a_token": tiny(17, 24, (2, 1, 6), experts=12, experts_per_token=8, expert_hidden=20, layers=2),
    "qwen3": tiny(89, 48, (6, 3, 8), dense_layers=(0, 1), dense_hidden=100, **NONE),
    "qwen3_tied": tiny(31, 32, (4, 1, 12), dense_layers=(0, 1), dense_hidden=40, tie_embeddings=True, **NONE),
}


def random_tensors(config: PolicyConfig, layout: Layout, seed: int = 0, *, wide: bool = False) -> dict[str, np.ndarray]:
    """Matrices as transformers initialises them, `wide` as it would at the width of 30B; scales of norms around one."""
    draw = np.random.default_rng(seed)

    def tensor(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return 1 + 0.25 * draw.normal(size=shape)
        return INITIALIZER_RANGE * (np.sqrt(WIDTH_30B / shape[-1]) if wide else 1) * draw.normal(size=shape)

    return {name: tensor(shape).astype(np.float32) for name, shape in hf.tensor_shapes(config, layout).items()}


def random_batch(config: PolicyConfig, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets, and weights of both signs, as advantages are."""
    draw = np.random.default_rng(seed)
    input_BT, target_BT = draw.integers(0, config.vocab_size, (2, 2 * ROWS, LENGTH))
    return input_BT, target_BT, draw.normal(size=input_BT.shape).astype(np.float32)


def make_run(config: PolicyConfig) -> Callable[..., dict[str, Any]]:
    """As `oracle.run`, two sequences packed into a row; and the gradients in transformers' layout. Compiled once."""
    packed = (ROWS, -1)
    segment_BT = jnp.repeat(jnp.array([[1, 2]]), LENGTH, axis=1).repeat(ROWS, axis=0)
    position_BT = jnp.tile(jnp.arange(LENGTH), (ROWS, 2))
    graph, _ = nnx.split(Policy(config), nnx.Param)

    def loss(params: nnx.State, input_BT: Any, target_BT: Any, weight_BT: Any) -> Any:
        policy = nnx.merge(graph, params)
        hidden_BTD, trace = policy(input_BT.reshape(packed), segment_BT, position_BT)
        logits_BTV = policy.logits(hidden_BTD).reshape(*input_BT.shape, -1)
        logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), target_BT[..., None], -1)[..., 0]
        return (logp_BT * weight_BT).sum(), (logits_BTV, logp_BT, trace.experts_LBTK)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(tensors: dict[str, np.ndarray], *batch: np.ndarray) -> dict[str, Any]:
        params = nnx.state(hf.import_tensors(config, dict(per_expert(config, tensors))), nnx.Param)
        (_, (logits_BTV, logp_BT, experts_LBTK)), gradients = compiled(params, *batch)
        return {
            "logits": logits_BTV,
            "logp": logp_BT,
            "routes": [np.asarray(routes).reshape(*batch[0].shape, -1) for routes in experts_LBTK],
            "gradients": dict(hf.export_tensors(gradients, config, layout="fused")),
        }

    return run


def flat(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Everything that is compared but routes, by name; a copy, as PyTorch sums into the same gradients again."""
    return {name: np.array(value) for name, value in (found | found["gradients"]).items() if name not in NOT_FLAT}


def distances(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """By name, the largest difference as a part of the largest number expected."""
    assert got.keys() == expected.keys()
    assert all(np.abs(tensor).max() > 0 for tensor in expected.values())
    return {
        name: float(np.abs(np.asarray(got[name], np.float64) - tensor).max() / np.abs(tensor).max())
        for name, tensor in expected.items()
    }


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str) -> None:
    far = {name: f"{distance:.2e}" for name, distance in distances(got, expected).items() if distance > TOLERANCE}
    assert not far, f"{what}, parts of the largest number: {far}"


def assert_same_routes(got: dict[str, Any], expected: dict[str, Any], config: PolicyConfig) -> None:
    assert len(got["routes"]) == len(expected["routes"]) == config.moe_layers
    for ours, theirs in zip(got["routes"], expected["routes"], strict=True):
        np.testing.assert_array_equal(np.sort(ours, -1), np.sort(theirs, -1))
        assert len(np.unique(ours)) >= config.experts - config.experts // 8  # of many, two may stay empty in a draw


def same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        np.testing.assert_array_equal(np.asarray(right[name], np.float32), np.asarray(tensor, np.float32), err_msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_numbers_routes_and_gradients_are_transformers(oracle, config):
    """By the same bound in float32 and in float64 (where transformers' norms, softmax and rope stay in float32)."""
    ours = make_run(config)
    used: list[set[int]] = [set() for _ in range(config.moe_layers)]
    for seed, wide in [(seed, False) for seed in range(DRAWS)] + [(0, True)]:
        tensors, batch = random_tensors(config, "fused", seed, wide=wide), random_batch(config, DRAWS + seed)
        model = oracle.make_model(config.to_hf(), tensors)
        expected, got = oracle.run(model, *batch), ours(tensors, *batch)
        assert_same_routes(got, expected, config)
        for experts, routes in zip(used, got["routes"], strict=True):
            experts.update(routes.flat)
        assert_close(flat(got), flat(expected), f"draw {seed}, {wide=}, float32")
        exact = oracle.run(model.double(), *batch[:2], batch[2].astype(np.float64))
        assert_close(flat(got), flat(exact), f"draw {seed}, {wide=}, float64")
    assert used == [set(range(config.experts))] * config.moe_layers  # none was left untried


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (1e6, 128), (1e7, 128)])
def test_rope_is_transformers_at_far_positions(oracle, theta, head_dim):
    """At position 32,768 the last bit of a frequency turns a channel by up to 2e-3."""
    config = tiny(8, 8, (1, 1, head_dim), rope_theta=theta)
    table = oracle.make_model(config.to_hf(), random_tensors(config, "fused")).model.rotary_emb
    position_BT = np.concatenate([np.arange(0, 32768, 97), [2047, 32767]])[None]
    cos_BTC, sin_BTC = (found.numpy() for found in table(oracle.torch.zeros(1), oracle.torch.from_numpy(position_BT)))
    unit_BTHC = jnp.zeros((*position_BT.shape, 1, head_dim)).at[..., : head_dim // 2].set(1)
    got_BTC = rope(unit_BTHC, jnp.asarray(position_BT), theta)[:, :, 0]
    half = head_dim // 2
    expected_BTC = np.concatenate([cos_BTC[..., :half], sin_BTC[..., half:]], axis=-1)
    np.testing.assert_allclose(got_BTC, expected_BTC, rtol=0, atol=TOLERANCE)


def swap_halves(tensor: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(tensor, 2, axis=1)[::-1], axis=1)


MISTAKES = {
    "rope's base, by a tenth of a percent": ({"rope_theta": 10010.0}, {}),
    "eps of norms": ({"rms_norm_eps": 2e-6}, {}),
    "weights of experts not renormalised": ({"norm_topk_prob": False}, {}),
    "one expert too few": ({"num_experts_per_tok": 1}, {}),
    "gate for up": ({}, {"gate_up_proj": swap_halves}),
    "no scale after the queries' norm": ({}, {"q_norm.weight": np.ones_like}),
    "no scale after the keys' norm": ({}, {"k_norm.weight": np.ones_like}),
    "a scale of a norm, by a thousandth": ({}, {"post_attention_layernorm.weight": lambda tensor: 1.001 * tensor}),
    "heads of keys exchanged": ({}, {"k_proj.weight": lambda tensor: np.roll(tensor, len(tensor) // 2, axis=0)}),
}


@pytest.mark.parametrize(("keys", "tensors"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_far_beyond_the_tolerance(oracle, keys, tensors):
    """Weights as initialised are small, but hide nothing: asked of transformers itself, so of no compiled program."""
    config = CONFIGS["gqa2"]
    right, batch = random_tensors(config, "fused"), random_batch(config, DRAWS)
    wrong = dict(right)
    for name, end in ((name, end) for name in right for end in tensors if name.endswith(end)):
        wrong[name] = np.asarray(tensors[end](right[name]), np.float32)
    expected = flat(oracle.run(oracle.make_model(config.to_hf(), right), *batch))
    found = flat(oracle.run(oracle.make_model(config.to_hf() | keys, wrong), *batch))
    assert max(distances(found, expected).values()) > 10 * TOLERANCE


def per_expert(config: PolicyConfig, fused: dict[str, np.ndarray]):
    """Written out by hand, so that the layouts are not compared through the code under test."""
    for name in hf.tensor_shapes(config):
        if ".experts." not in name:
            yield name, fused[name]
            continue
        block, rest = name.split(".experts.")
        expert, kind, _ = rest.split(".")
        gate_up, hidden = fused[f"{block}.experts.gate_up_proj"][int(expert)], config.expert_hidden
        down = fused[f"{block}.experts.down_proj"][int(expert)]
        yield name, {"gate_proj": gate_up[:hidden], "up_proj": gate_up[hidden:], "down_proj": down}[kind]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mqa_head_dim_not_d_over_h", "every_other_dense_tied", "qwen3"])
def test_transformers_reads_what_we_write(oracle, name, layout, dtype, tmp_path):
    config = CONFIGS[name]
    policy = hf.import_tensors(config, dict(per_expert(config, random_tensors(config, "fused"))))
    hf.save(policy, tmp_path / "model", dtype, layout)
    model, parameters = oracle.load(tmp_path / "model", dtype)
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if config.moe_layers else "Qwen3ForCausalLM")
    assert model.config.dtype == getattr(oracle.torch, dtype)
    same_bits(dict(hf.export_tensors(policy, config, dtype, "fused")), parameters)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mha_tied", "dense_among_sparse", "qwen3_tied"])
def test_we_read_what_transformers_writes(oracle, name, layout, tmp_path):
    config = CONFIGS[name]
    model = oracle.make_model(config.to_hf(), random_tensors(config, "fused"))
    oracle.randomise(model, seed=2)
    oracle.save(model, tmp_path / "model", fused=layout == "fused")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "rope_parameters" in written  # the form of transformers 5
    loaded = PolicyConfig.from_hf(tmp_path / "model")
    assert dataclasses.replace(loaded, remat="none") == config
    policy = hf.load(tmp_path / "model")
    parameters = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    same_bits(parameters, dict(hf.export_tensors(policy, config, layout="fused")))
    stored = hf.tensor_shapes(config, layout)
    assert set(stored) == set(dict(hf.read_tensors(tmp_path / "model", config, layout=layout)))


def test_bfloat16_weights_of_transformers_keep_their_bits(oracle, tmp_path):
    config = CONFIGS["gqa2"]
    model = oracle.make_model(config.to_hf(), random_tensors(config, "fused")).to(oracle.torch.bfloat16)
    oracle.save(model, tmp_path / "model", fused=False)
    policy = hf.load(tmp_path / "model", param_dtype="bfloat16")
    assert policy.config.dtype == "bfloat16"
    parameters = {name: tensor.detach().float().numpy() for name, tensor in model.named_parameters()}
    same_bits(parameters, dict(hf.export_tensors(policy, config, layout="fused")))


def test_defaults_of_transformers_configs_are_read_as_they_are_meant(oracle):
    for kind, changes in (("qwen3_moe", {"num_experts": 8}), ("qwen3", {})):
        theirs = oracle.transformers.AutoConfig.for_model(kind, num_hidden_layers=3, hidden_size=512, **changes)
        ours = PolicyConfig.from_hf(theirs.to_dict())
        attention = (
            oracle.transformers.AutoModelForCausalLM.from_config(
                oracle.transformers.AutoConfig.for_model(
                    kind, num_hidden_layers=1, hidden_size=512, intermediate_size=8, vocab_size=8, **changes
                )
            )
            .model.layers[0]
            .self_attn
        )
        assert ours.head_dim == attention.head_dim
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
        assert ours.norm_topk == getattr(theirs, "norm_topk_prob", True)
