"""The policy against transformers' Qwen3MoeForCausalLM and Qwen3ForCausalLM: numbers, gradients, files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sat_jax.model import PolicyConfig, hf
from sat_jax.model.hf_names import LAYOUTS, Layout

# transformers and PyTorch warn of their own matters.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-5  # of each tensor's largest number
ROWS, LENGTH = 3, 24
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


def random_tensors(config: PolicyConfig, layout: Layout) -> dict[str, np.ndarray]:
    """Wide enough that routes differ from token to token and logits are of order ten."""
    draw = np.random.default_rng(0)
    shapes = hf.tensor_shapes(config, layout)
    scales = {name: 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 1 for name, shape in shapes.items()}
    return {
        name: ((len(shape) == 1) + scales[name] * 0.5 ** (len(shape) == 1) * draw.normal(size=shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def run(policy, input_BT: np.ndarray, target_BT: np.ndarray, weight_BT: np.ndarray) -> dict:
    """As `oracle.run`, two sequences packed into a row; and the gradients in transformers' layout."""
    graph, params = nnx.split(policy, nnx.Param)
    packed = (len(input_BT) // 2, -1)
    segment_BT = np.repeat([[1, 2]], LENGTH, axis=1).repeat(packed[0], axis=0)
    position_BT = np.tile(np.arange(LENGTH), (packed[0], 2))

    def loss(params):
        policy = nnx.merge(graph, params)
        hidden_BTD, trace = policy(input_BT.reshape(packed), segment_BT, position_BT)
        logits_BTV = policy.logits(hidden_BTD).reshape(*input_BT.shape, -1)
        logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), target_BT[..., None], -1)[..., 0]
        return (logp_BT * weight_BT).sum(), (logits_BTV, logp_BT, trace.experts_LBTK)

    (_, (logits_BTV, logp_BT, experts_LBTK)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return {
        "logits": logits_BTV,
        "logp": logp_BT,
        "routes": [np.asarray(routes).reshape(*input_BT.shape, -1) for routes in experts_LBTK],
        "gradients": dict(hf.export_tensors(gradients, policy.config, layout="fused")),
    }


def assert_close(got, expected, name: str, tolerance: float = TOLERANCE) -> None:
    worst = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
    assert worst <= tolerance, f"{name}: {worst:.2e} of the largest number"


def same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        np.testing.assert_array_equal(np.asarray(right[name], np.float32), np.asarray(tensor, np.float32), err_msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_numbers_routes_and_gradients_are_transformers(oracle, config):
    fused = random_tensors(config, "fused")
    model = oracle.make_model(config.to_hf(), fused)
    policy = hf.import_tensors(config, dict(per_expert(config, fused)))
    draw = np.random.default_rng(1)
    input_BT, target_BT = draw.integers(0, config.vocab_size, (2, 2 * ROWS, LENGTH))
    weight_BT = draw.normal(size=input_BT.shape).astype(np.float32)
    expected = oracle.run(model, input_BT, target_BT, weight_BT)
    exact = oracle.run(model.double(), input_BT, target_BT, weight_BT.astype(np.float64))
    got = run(policy, input_BT, target_BT, weight_BT)

    assert len(got["routes"]) == len(expected["routes"]) == config.moe_layers
    for ours, theirs in zip(got["routes"], expected["routes"], strict=True):
        np.testing.assert_array_equal(np.sort(ours, -1), np.sort(theirs, -1))
        assert len(np.unique(ours)) >= config.experts - 1  # with one expert a token, one of many stays empty
    assert got["gradients"].keys() == expected["gradients"].keys()
    flat = lambda found: {"logits": found["logits"], "logp": found["logp"], **found["gradients"]}  # noqa: E731
    got, expected, exact = flat(got), flat(expected), flat(exact)
    for name, truth in exact.items():
        assert np.abs(truth).max() > 0, name
        # In float32 transformers is itself up to 9e-6 from what it gives in float64, more or less on another CPU. Asked
        # of us is 1e-5 from the truth, and from its float32, too, but where its own error is more than half of that.
        assert_close(got[name], truth, name)
        own = np.abs(expected[name] - truth).max() / np.abs(truth).max()
        assert own <= 2e-5, name
        limit = TOLERANCE if own <= TOLERANCE / 2 else TOLERANCE + own
        assert_close(got[name], expected[name], f"{name}, in float32", limit)


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
