import dataclasses
import json

import jax
import pytest
from flax import nnx

from sat_jax.model import Policy, PolicyConfig

DENSE = {"experts": 0, "experts_per_token": 0, "expert_hidden": 0, "dense_layers": (0, 1), "dense_hidden": 48}
MIXED = {"layers": 5, "dense_layers": (0, 3, 4), "dense_hidden": 48}


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, DENSE, MIXED], ids=str)
def test_the_number_of_parameters_is_that_of_the_policy(changes):
    config = PolicyConfig.tiny(**changes)
    policy = nnx.eval_shape(lambda: Policy(config, nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(policy, nnx.Param)))
    assert config.num_parameters() == sum(leaf.size for leaf in leaves)


def test_qwen3_30b_a3b_has_the_published_size():
    assert PolicyConfig.qwen3_30b_a3b().num_parameters() == 30_532_122_624


@pytest.mark.parametrize(
    "config",
    [PolicyConfig.tiny(), PolicyConfig.qwen3_30b_a3b(), PolicyConfig.tiny(**DENSE), PolicyConfig.tiny(**MIXED)],
    ids=["tiny", "30b", "dense", "mixed"],
)
def test_a_config_survives_the_hugging_face_form(config, tmp_path):
    assert PolicyConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert PolicyConfig.from_hf(tmp_path) == config
    assert PolicyConfig.from_hf(str(tmp_path / "config.json"), remat="none") == dataclasses.replace(
        config, remat="none"
    )


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_either_spelling_of_the_number_of_experts_is_read(spelling):
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[spelling]
    hf = PolicyConfig.tiny().to_hf()
    del hf[other]
    assert PolicyConfig.from_hf(hf).experts == 4


def test_the_rope_base_of_transformers_5_is_read():
    hf = PolicyConfig.tiny().to_hf()
    del hf["rope_theta"]
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    assert PolicyConfig.from_hf(hf).rope_theta == 123.0


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "llama", "expected model_type qwen3_moe or qwen3, got 'llama'"),
        ("layer_types", ["full_attention", "sliding_attention"], r"full_attention = \[\], got \['sliding_attention'\]"),
        ("attention_bias", True, "attention_bias = False, got True"),
        ("hidden_act", "gelu", "hidden_act = 'silu', got 'gelu'"),
        ("use_sliding_window", True, "use_sliding_window = False, got True"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling = None, got"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}, "rope_type = 'default', got 'yarn'"),
        ("rope_parameters", {"type": "linear", "rope_theta": 1.0}, "rope_type = 'default', got 'linear'"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 1.0, got 0.5"),
    ],
)
def test_what_would_be_computed_differently_is_refused(key, value, named):
    with pytest.raises(ValueError, match=named):
        PolicyConfig.from_hf(PolicyConfig.tiny().to_hf() | {key: value})


@pytest.mark.parametrize(
    ("only", "step", "dense"),
    [([], 1, ()), ([2], 1, (2,)), ([], 2, (0, 2, 4)), ([1, 5], 3, (0, 1, 3, 4, 5)), ([0, 1, 2, 3, 4, 5], 1, range(6))],
)
def test_dense_layers_follow_transformers_rule(only, step, dense):
    # Sparse are the layers whose number, from 1, is a multiple of the step, but for those that are listed.
    hf = PolicyConfig.tiny(layers=6).to_hf() | {"intermediate_size": 40}
    config = PolicyConfig.from_hf(hf | {"mlp_only_layers": only, "decoder_sparse_step": step})
    assert config.dense_layers == tuple(dense)
    assert config.moe_layers == 6 - len(dense)
    assert (config.dense_hidden, config.experts) == (40 if dense else 0, 4 if config.moe_layers else 0)


def test_a_dense_config_needs_no_word_of_experts():
    dense = PolicyConfig.tiny(**DENSE)
    hf = dense.to_hf()
    assert hf["architectures"] == ["Qwen3ForCausalLM"]
    assert not [key for key in hf if "expert" in key or "moe" in key]
    del hf["head_dim"]
    assert PolicyConfig.from_hf(hf).head_dim == 128  # transformers' default for Qwen3; for Qwen3-MoE the quotient
    no_experts = PolicyConfig.tiny().to_hf() | {"num_experts": 0, "num_local_experts": 0, "intermediate_size": 48}
    assert PolicyConfig.from_hf(no_experts) == dense
    del no_experts["head_dim"]
    assert PolicyConfig.from_hf(no_experts).head_dim == 16


def test_runs_are_stretches_of_layers_of_one_kind():
    assert PolicyConfig.tiny(layers=3).runs == ((True, 0, 3),)
    assert PolicyConfig.tiny(**DENSE).runs == ((False, 0, 2),)
    assert PolicyConfig.tiny(**MIXED).runs == ((False, 0, 1), (True, 1, 3), (False, 3, 5))
    assert PolicyConfig.tiny(layers=1).runs == ((True, 0, 1),)


def test_a_missing_key_is_named():
    hf = PolicyConfig.tiny().to_hf()
    del hf["moe_intermediate_size"]
    with pytest.raises(ValueError, match=r"expected the key moe_intermediate_size, got none \(config\)"):
        PolicyConfig.from_hf(hf)


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected a readable JSON file, got .*nowhere"):
        PolicyConfig.from_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected a readable JSON file, got .*config\.json"):
        PolicyConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected a JSON object, got list"):
        PolicyConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"width": 0}, "policy.width: expected an integer of at least 1, got 0"),
        ({"layers": 1.5}, "policy.layers: expected an integer of at least 1, got 1.5"),
        ({"norm_eps": 0.0}, "policy.norm_eps: expected a number above 0, got 0.0"),
        ({"rope_theta": float("nan")}, "policy.rope_theta: expected a number above 0, got nan"),
        ({"kv_heads": 3}, "policy.kv_heads: expected a divisor of query_heads = 4, got 3"),
        ({"head_dim": 15}, "policy.head_dim: expected an even number, got 15"),
        ({"experts_per_token": 5}, "policy.experts_per_token: expected at most experts = 4, got 5"),
        ({"experts": 65537}, "policy.experts: expected at most 65536, got 65537"),
        ({"dtype": "float16"}, "policy.dtype: expected float32 or bfloat16, got 'float16'"),
        ({"dense_layers": (2,)}, r"policy.dense_layers: expected distinct layers below 2, ascending, got \[2\]"),
        ({"dense_layers": (1, 0)}, r"policy.dense_layers: expected distinct layers below 2, ascending, got \[1, 0\]"),
        ({"dense_layers": ("0",)}, r"policy.dense_layers: expected layer numbers, got \['0'\]"),
        ({"dense_layers": (0,)}, "policy.dense_hidden: expected an integer of at least 1, got 0"),
        ({"dense_hidden": 8}, "policy.dense_hidden: expected 0, because every layer has experts, got 8"),
        ({"dense_layers": (0, 1), "dense_hidden": 8}, "policy.experts: expected 0, because no layer has experts"),
        ({"experts": 0}, "policy.experts: expected an integer of at least 1, got 0"),
        ({"remat": "half"}, "policy.remat: expected one of none, full, attention, projections, got 'half'"),
    ],
)
def test_a_value_out_of_range_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        PolicyConfig.tiny(**change)


def test_the_digest_is_of_the_architecture_alone():
    for field in dataclasses.fields(PolicyConfig):
        change = {
            **{"dtype": "bfloat16", "remat": "none", "max_positions": 8, "norm_topk": False, "tie_embeddings": True},
            **{"rope_theta": 7.0, "norm_eps": 1e-5, "query_heads": 8, "kv_heads": 1, "head_dim": 8, "experts": 5},
            **{"experts_per_token": 1, "expert_hidden": 8, "vocab_size": 8, "width": 8, "layers": 1},
            **{"dense_layers": (1,), "dense_hidden": 16},
        }[field.name]
        if field.name.startswith("dense"):  # one of the two alone is no config
            digest = PolicyConfig.tiny(dense_layers=(0,), dense_hidden=8).digest()
            change = {"dense_layers": (0,), "dense_hidden": 8} | {field.name: change}
        else:
            digest, change = PolicyConfig.tiny().digest(), {field.name: change}
        same = PolicyConfig.tiny(**change).digest() == digest
        assert same == (field.name in ("dtype", "remat", "max_positions")), field.name
