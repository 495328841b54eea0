"""What a Hugging Face `config.json` of a Qwen3-MoE means for the bridge: sizes, tensor names, and the model's digest.

The trainer has the same knowledge beside its policy (`sat_jax.model`), which may not be imported here; a contract test
holds the two together.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_bridge.messages import ModelInfo, TensorSpec

# What must be so for the trainer's policy to be the same function; a missing key means the same as its value here.
_EXPECTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder.

    Raises:
      ValueError: there is none that can be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model config: expected a readable {path}, got {error}; name the folder of the served model's config.json "
            "(--model)"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"model config: expected a JSON object, got {type(config).__name__} ({path})")
    return config


def model_info(config: Mapping[str, Any], *, dtype: str, max_tokens: int) -> ModelInfo:
    """What a server of this model holds.

    Args:
      config: parsed `config.json`.
      dtype: in which the server holds and computes, "float32" or "bfloat16".
      max_tokens: longest prompt + completion that it takes.

    Raises:
      ValueError: another architecture, a feature that the trainer's policy does not have, or a missing key.
    """
    fields = architecture(config)
    shapes = _shapes(fields)
    return ModelInfo(
        model_digest=digest(fields),
        vocab_size=fields["vocab_size"],
        moe_layers=fields["layers"],
        num_experts=fields["experts"],
        top_k=fields["experts_per_token"],
        max_tokens=max_tokens,
        tensors=tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()),
        dtype=dtype,
    )


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture by the trainer's names of its fields.

    Raises:
      ValueError: another architecture, a feature that the trainer's policy does not have, or a missing key.
    """
    _check_supported(config)

    def read(*keys: str, default: Any = None) -> Any:
        found = next((config[key] for key in keys if config.get(key) is not None), default)
        if found is None:
            raise ValueError(f"model config: expected the key {' or '.join(keys)}, got none")
        return found

    width, heads = read("hidden_size"), read("num_attention_heads")
    rope = config.get("rope_parameters") or {}  # where transformers 5 keeps the base
    return {
        "vocab_size": read("vocab_size"),
        "width": width,
        "layers": read("num_hidden_layers"),
        "query_heads": heads,
        "kv_heads": read("num_key_value_heads"),
        "head_dim": read("head_dim", default=width // heads),
        "experts": read("num_experts", "num_local_experts"),
        "experts_per_token": read("num_experts_per_tok"),
        "expert_hidden": read("moe_intermediate_size"),
        "rope_theta": float(rope["rope_theta"] if "rope_theta" in rope else read("rope_theta", default=10000.0)),
        "norm_eps": float(read("rms_norm_eps", default=1e-6)),
        "norm_topk": bool(read("norm_topk_prob", default=False)),
        "tie_embeddings": bool(read("tie_word_embeddings", default=False)),
    }


def digest(fields: Mapping[str, Any]) -> str:
    """The hash by which trainer and server know that they mean the same model (`sat_jax.model.PolicyConfig.digest`)."""
    return hashlib.sha256(json.dumps({"model_type": "qwen3_moe", **fields}, sort_keys=True).encode()).hexdigest()


def _check_supported(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    found = {key: config.get(key) or value for key, value in _EXPECTED.items()}
    found["model_type"] = config.get("model_type")
    found["rope type"] = rope.get("rope_type") or "default"
    found["rope_scaling"] = None if rope else config.get("rope_scaling")
    wanted = {**_EXPECTED, "model_type": "qwen3_moe", "rope type": "default", "rope_scaling": None}
    for key, value in wanted.items():
        if found[key] != value:
            raise ValueError(
                f"model config: expected {key} = {value!r}, got {found[key]!r}; only Qwen3-MoE with experts in every "
                "layer and plain rope is supported"
            )


def _shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor with its shape; a linear map is [out, in]."""
    width, heads, kv_heads, head = (fields[key] for key in ("width", "query_heads", "kv_heads", "head_dim"))
    hidden, experts, vocabulary = fields["expert_hidden"], fields["experts"], fields["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(fields["layers"]):
        begin = f"model.layers.{layer}."
        shapes |= {
            f"{begin}input_layernorm.weight": (width,),
            f"{begin}self_attn.q_proj.weight": (heads * head, width),
            f"{begin}self_attn.k_proj.weight": (kv_heads * head, width),
            f"{begin}self_attn.v_proj.weight": (kv_heads * head, width),
            f"{begin}self_attn.o_proj.weight": (width, heads * head),
            f"{begin}self_attn.q_norm.weight": (head,),
            f"{begin}self_attn.k_norm.weight": (head,),
            f"{begin}post_attention_layernorm.weight": (width,),
            f"{begin}mlp.gate.weight": (experts, width),
        }
        for expert in range(experts):
            shapes |= {
                f"{begin}mlp.experts.{expert}.gate_proj.weight": (hidden, width),
                f"{begin}mlp.experts.{expert}.up_proj.weight": (hidden, width),
                f"{begin}mlp.experts.{expert}.down_proj.weight": (width, hidden),
            }
    shapes["model.norm.weight"] = (width,)
    if not fields["tie_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, width)
    return shapes
