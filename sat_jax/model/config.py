"""The policy's architecture: presets, and from and to a Hugging Face `config.json`."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Fields that change how the policy computes or how far it reaches, not which tensors it has or what they mean.
_NOT_ARCHITECTURE = ("max_positions", "dtype", "remat")
# Sizes that are 0 where no layer is of their kind.
_MAY_BE_ABSENT = ("experts", "experts_per_token", "expert_hidden", "dense_hidden")
_SPARSE, _DENSE = "qwen3_moe", "qwen3"

# What of a layer is kept for the backward pass: everything; nothing but its input; besides that attention's output (the
# dearest part to compute again in long rows); that and all four projections. Values are names of what is kept.
REMAT: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {"none": None, "full": (), "attention": ("attention",), "projections": ("attention", "projections")}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """A Qwen3-MoE or a dense Qwen3 decoder. Parameters are kept by whoever builds the policy, float32 when trained.

    Attributes:
      vocab_size: V, tokens.
      width: D, of the residual stream.
      layers: decoder layers, with experts or without.
      query_heads: H.
      kv_heads: G; divides H.
      head_dim: C; even (rope turns half of it against the other half).
      experts: E; 0 where no layer has experts, and so the next two.
      experts_per_token: K, at most E.
      expert_hidden: F.
      dense_layers: numbers of the layers with one feed-forward in place of experts, ascending, from 0.
      dense_hidden: F of these; 0 where there are none.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      norm_topk: whether the weights of a token's K experts are renormalised to sum to 1.
      tie_embeddings: whether the head is the transposed embedding.
      max_positions: longest sequence, tokens.
      dtype: compute type, "float32" or "bfloat16"; router, softmax and accumulation are float32 in either.
      remat: what the backward pass recomputes: a name in `REMAT`.

    Raises:
      ValueError: a value out of its range.
    """

    vocab_size: int
    width: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_hidden: int
    dense_layers: tuple[int, ...] = ()
    dense_hidden: int = 0
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    norm_topk: bool = True
    tie_embeddings: bool = False
    max_positions: int = 32768
    dtype: str = "float32"
    remat: str = "full"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # JSON and TOML know lists only
        self._check_feed_forward()
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.type is int and field.name not in _MAY_BE_ABSENT and not _is_count(size):
                raise ValueError(f"policy.{field.name}: expected an integer of at least 1, got {size!r}")
            if field.type is float and not size > 0:
                raise ValueError(f"policy.{field.name}: expected a number above 0, got {size!r}")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"policy.kv_heads: expected a divisor of query_heads = {self.query_heads}, got {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"policy.head_dim: expected an even number, got {self.head_dim}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"policy.dtype: expected float32 or bfloat16, got {self.dtype!r}")
        if self.remat not in REMAT:
            raise ValueError(f"policy.remat: expected one of {', '.join(REMAT)}, got {self.remat!r}")

    def _check_feed_forward(self) -> None:
        dense = self.dense_layers
        if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in dense):
            raise ValueError(f"policy.dense_layers: expected layer numbers, got {list(dense)}")
        if list(dense) != sorted(set(dense) & set(range(self.layers if _is_count(self.layers) else 0))):
            raise ValueError(
                f"policy.dense_layers: expected distinct layers below {self.layers}, ascending, got {list(dense)}"
            )
        sparse = len(dense) < self.layers
        for name, present in (
            ("experts", sparse),
            ("experts_per_token", sparse),
            ("expert_hidden", sparse),
            ("dense_hidden", bool(dense)),
        ):
            size = getattr(self, name)
            if present and not _is_count(size):
                raise ValueError(f"policy.{name}: expected an integer of at least 1, got {size!r}")
            if not present and size != 0:
                why = "every layer has experts" if name == "dense_hidden" else "no layer has experts"
                raise ValueError(f"policy.{name}: expected 0, because {why}, got {size!r}")
        if self.experts > 2**16:
            raise ValueError(f"policy.experts: expected at most 65536, got {self.experts}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"policy.experts_per_token: expected at most experts = {self.experts}, got {self.experts_per_token}"
            )

    @property
    def moe_layers(self) -> int:
        """L of a routing trace: how many layers have experts."""
        return self.layers - len(self.dense_layers)

    @property
    def runs(self) -> tuple[tuple[bool, int, int], ...]:
        """Stretches of layers of one kind, in forward order: (has experts, first layer, layer after the last)."""
        kinds = [layer not in self.dense_layers for layer in range(self.layers)]
        edges = [0, *(n for n in range(1, self.layers) if kinds[n] != kinds[n - 1]), self.layers]
        return tuple((kinds[first], first, end) for first, end in itertools.pairwise(edges))

    @classmethod
    def tiny(cls, **overrides: Any) -> "PolicyConfig":
        """The quickstart's policy: two layers of four experts, about 0.1 M parameters."""
        sizes: dict[str, Any] = {
            "vocab_size": 16,
            "width": 64,
            "layers": 2,
            "query_heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "experts": 4,
            "experts_per_token": 2,
            "expert_hidden": 64,
            "rope_theta": 10000.0,
            "max_positions": 4096,
        }
        return cls(**(sizes | overrides))

    @classmethod
    def qwen3_30b_a3b(cls, **overrides: Any) -> "PolicyConfig":
        """Qwen3-30B-A3B-Base: 30.5 B parameters, 3.3 B of them active (source: its `config.json`)."""
        sizes: dict[str, Any] = {
            "vocab_size": 151936,
            "width": 2048,
            "layers": 48,
            "query_heads": 32,
            "kv_heads": 4,
            "head_dim": 128,
            "experts": 128,
            "experts_per_token": 8,
            "expert_hidden": 768,
            "rope_theta": 1e6,
            "max_positions": 32768,
            "dtype": "bfloat16",
        }
        return cls(**(sizes | overrides))

    @classmethod
    def from_hf(cls, source: "str | os.PathLike[str] | Mapping[str, Any]", **overrides: Any) -> "PolicyConfig":
        """Reads a `config.json` of Qwen3-MoE or of dense Qwen3.

        Args:
          source: the parsed file, its path, or its folder.
          **overrides: fields to replace, e.g. `dtype` or `remat`.

        Raises:
          ValueError: another architecture, a feature that this policy does not have, or a key that is missing.
        """
        if isinstance(source, Mapping):
            return cls(**(_fields_from_hf(source, "config") | overrides))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"config of the policy: expected a readable JSON file, got {error} ({path})") from error
        if not isinstance(parsed, dict):
            raise ValueError(f"config of the policy: expected a JSON object, got {type(parsed).__name__} ({path})")
        return cls(**(_fields_from_hf(parsed, str(path)) | overrides))

    def to_hf(self) -> dict[str, Any]:
        """This architecture as a Hugging Face `config.json`, both spellings of the number of experts included.

        Qwen3 where no layer has experts, else Qwen3-MoE.
        """
        shared = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            # Readers need the key also where every layer has experts.
            "intermediate_size": self.dense_hidden or self.expert_hidden,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "rope_scaling": None,
            "torch_dtype": self.dtype,
        }
        if not self.moe_layers:
            return {"architectures": ["Qwen3ForCausalLM"], "model_type": _DENSE} | shared
        routed = {
            "num_experts": self.experts,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_hidden,
            "norm_topk_prob": self.norm_topk,
            "mlp_only_layers": list(self.dense_layers),
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": 0.0,
        }
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": _SPARSE} | shared | routed

    def digest(self) -> str:
        """A hash of the architecture: equal where the same tensors mean the same function.

        Compute type, rematerialisation and the longest sequence are no part of it, so that a bfloat16 sampler and a
        float32 trainer of one model agree.
        """
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in _NOT_ARCHITECTURE}
        if not self.dense_layers:  # then nothing distinguishes it from what had a digest before these fields were there
            del fields["dense_layers"], fields["dense_hidden"]
        text = json.dumps({"model_type": "qwen3_moe"} | fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def num_parameters(self) -> int:
        """Parameters of the whole policy."""
        attention = self.width * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads) + 2 * self.head_dim
        routed = self.width * self.experts + 3 * self.experts * self.width * self.expert_hidden
        dense = 3 * self.width * self.dense_hidden
        embeddings = self.vocab_size * self.width * (1 if self.tie_embeddings else 2)
        layers = self.layers * (attention + 2 * self.width) + self.moe_layers * routed + len(self.dense_layers) * dense
        return layers + embeddings + self.width


def _fields_from_hf(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_architecture(hf, where)

    def read(*keys: str, default: Any = None) -> Any:
        found = next((hf[key] for key in keys if hf.get(key) is not None), default)
        if found is None:
            raise ValueError(f"config of the policy: expected the key {' or '.join(keys)}, got none ({where})")
        return found

    width, heads, layers = read("hidden_size"), read("num_attention_heads"), read("num_hidden_layers")
    # Since transformers 5 the base is in `rope_parameters`; before it stood beside `rope_scaling`.
    rope = hf.get("rope_parameters") or {}
    dense = _dense_layers(hf, layers)
    sparse = len(dense) < layers
    return {
        "vocab_size": read("vocab_size"),
        "width": width,
        "layers": layers,
        "query_heads": heads,
        "kv_heads": read("num_key_value_heads"),
        # Where the key is missing, transformers takes 128 for Qwen3 and the quotient for Qwen3-MoE.
        "head_dim": read("head_dim", default=128 if hf["model_type"] == _DENSE else width // heads),
        "experts": read("num_experts", "num_local_experts") if sparse else 0,
        "experts_per_token": read("num_experts_per_tok") if sparse else 0,
        "expert_hidden": read("moe_intermediate_size") if sparse else 0,
        "dense_layers": dense,
        "dense_hidden": read("intermediate_size") if dense else 0,
        "rope_theta": float(rope["rope_theta"] if "rope_theta" in rope else read("rope_theta", default=10000.0)),
        "norm_eps": float(read("rms_norm_eps", default=1e-6)),
        "norm_topk": bool(read("norm_topk_prob", default=False)) if sparse else True,
        "tie_embeddings": bool(read("tie_word_embeddings", default=False)),
        "max_positions": read("max_position_embeddings", default=32768),
        "dtype": _dtype_from_hf(hf),
    }


def _dense_layers(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers have no experts, by transformers' rule (`Qwen3MoeDecoderLayer`)."""
    if hf.get("model_type") == _DENSE:
        return tuple(range(layers))
    step = hf.get("decoder_sparse_step") or 1
    only = set(hf.get("mlp_only_layers") or ())
    # Without experts every layer is dense; without the key the reader of the number of experts complains.
    none = 0 in (hf.get("num_experts"), hf.get("num_local_experts"))
    return tuple(layer for layer in range(layers) if none or layer in only or (layer + 1) % step)


def _dtype_from_hf(hf: Mapping[str, Any]) -> str:
    named = hf.get("dtype") or hf.get("torch_dtype")
    return "bfloat16" if named in ("bfloat16", "float16") else "float32"


def _check_architecture(hf: Mapping[str, Any], where: str) -> None:
    """Refuses what this policy would compute differently, rather than computing it wrongly."""
    if hf.get("model_type") not in (_SPARSE, _DENSE):
        raise ValueError(
            f"config of the policy: expected model_type {_SPARSE} or {_DENSE}, got {hf.get('model_type')!r} ({where}); "
            "other architectures are not supported"
        )
    rope = hf.get("rope_parameters") or {}
    kinds = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    expected: dict[str, tuple[Any, Any]] = {
        "hidden_act": (hf.get("hidden_act") or "silu", "silu"),
        "attention_bias": (bool(hf.get("attention_bias")), False),
        "use_sliding_window": (bool(hf.get("use_sliding_window")), False),
        "layer_types other than full_attention": (kinds, []),
        "rope_scaling": (hf.get("rope_scaling"), None),
        "rope_parameters.rope_type": (rope.get("rope_type") or rope.get("type") or "default", "default"),
        "rope_parameters.partial_rotary_factor": (float(rope.get("partial_rotary_factor") or 1), 1.0),
    }
    for key, (got, want) in expected.items():
        if got != want:
            raise ValueError(
                f"config of the policy: expected {key} = {want!r}, got {got!r} ({where}); "
                "only Qwen3 and Qwen3-MoE with full attention and plain rope are supported"
            )


def _is_count(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1
