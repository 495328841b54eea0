"""The bridge reads a model's config.json by itself; what it makes of it is what the trainer's policy makes of it."""

import pytest

from rollout_bridge.engines.hf_model import model_info
from sat_jax.model import PolicyConfig
from sat_jax.model.hf import tensor_shapes

POLICIES = {
    "tiny": PolicyConfig.tiny(),
    "30b": PolicyConfig.qwen3_30b_a3b(),
    "tied": PolicyConfig.tiny(tie_embeddings=True, norm_topk=False, norm_eps=1e-5, rope_theta=5e5),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_digest_sizes_and_tensors_are_the_policys(policy):
    info = model_info(policy.to_hf(), dtype="bfloat16", max_tokens=100)
    assert info.model_digest == policy.digest()
    assert (info.vocab_size, info.moe_layers) == (policy.vocab_size, policy.layers)
    assert (info.num_experts, info.top_k) == (policy.experts, policy.experts_per_token)
    assert {spec.name: spec.shape for spec in info.tensors} == dict(tensor_shapes(policy))
    assert {spec.dtype for spec in info.tensors} == {"bfloat16"}


def test_the_newer_spelling_of_a_config_means_the_same():
    policy = PolicyConfig.tiny()
    config = policy.to_hf()
    for key in ("num_experts", "rope_theta"):
        del config[key]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": policy.rope_theta}
    assert model_info(config, dtype="float32", max_tokens=1).model_digest == policy.digest()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("rope_scaling", {"type": "yarn"}),
        ("hidden_size", None),
    ],
)
def test_both_refuse_what_the_policy_cannot_compute(key, value):
    config = PolicyConfig.tiny().to_hf() | {key: value}
    with pytest.raises(ValueError, match=key):
        model_info(config, dtype="float32", max_tokens=1)
    with pytest.raises(ValueError, match=key):
        PolicyConfig.from_hf(config)


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "qwen3"), ("mlp_only_layers", [0]), ("decoder_sparse_step", 2)]
)
def test_dense_layers_are_for_the_local_engine_only(key, value):
    config = PolicyConfig.tiny().to_hf() | {key: value}
    with pytest.raises(ValueError, match=f"expected {key}.*only Qwen3-MoE with experts in every layer"):
        model_info(config, dtype="float32", max_tokens=1)
    assert PolicyConfig.from_hf(config).dense_layers
