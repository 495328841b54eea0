"""A model made of hashes: the fake engine's log-probs, tokens and routes, all functions of the weights' bytes.

Whoever holds the same weights computes the same numbers, so a test can play the trainer.
"""

import numpy as np
import xxhash

from rollout_bridge.checks import id_dtype
from rollout_bridge.messages import ModelInfo, Probe, Sampling, TensorSpec
from rollout_bridge.weights import DTYPES, Weights

_WIDTH = 8
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def fake_model(
    *, vocab_size: int = 32, layers: int = 2, experts: int = 4, top_k: int = 2, max_tokens: int = 128
) -> ModelInfo:
    """A small mixture-of-experts model with per-expert tensors of both types."""
    shapes = {"model.embed_tokens.weight": (vocab_size, _WIDTH), "model.norm.weight": (_WIDTH,)}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.mlp.gate.weight"] = (experts, _WIDTH)
        for expert in range(experts):
            shapes[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] = (2 * _WIDTH, _WIDTH)
    tensors = tuple(
        TensorSpec(name=name, dtype="float32" if "norm" in name else "bfloat16", shape=shape)
        for name, shape in shapes.items()
    )
    return ModelInfo(
        model_digest=f"fake-{vocab_size}-{layers}-{experts}-{top_k}",
        vocab_size=vocab_size,
        moe_layers=layers,
        num_experts=experts,
        top_k=top_k,
        max_tokens=max_tokens,
        tensors=tensors,
        dtype="float32",
    )


def fake_weights(model: ModelInfo, version: int, *, seed: int = 0) -> Weights:
    """Random weights of a version: a function of (seed, version)."""
    rng = np.random.default_rng([seed, version])
    tensors = {spec.name: rng.normal(size=spec.shape).astype(DTYPES[spec.dtype]) for spec in model.tensors}
    return Weights(version=version, model_digest=model.model_digest, tensors=tensors)


def fake_probe(weights: Weights, model: ModelInfo, *, tolerance: float = 1e-3) -> Probe:
    """A probe that engines with these weights reproduce exactly."""
    tokens = (_mix(np.arange(256, dtype=np.uint64)) % np.uint64(model.vocab_size)).astype(np.int32)
    logp = fake_logp(fingerprint(dict(weights.tensors)), tokens, temperature=1.0)
    return Probe(tokens=tokens, lengths=(8,) * 32, logp=logp, tolerance=tolerance, expert_coverage=1.0)


def fingerprint(tensors: dict[str, np.ndarray]) -> int:
    """What the numbers depend on: every byte of every tensor, under its name."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


def fake_logp(weights: int, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of tokens[1:], each given the one before, float32 in (-4, 0) for temperatures of at least 1."""
    key = _key(weights, tokens[:-1]) ^ _mix(tokens[1:].astype(np.uint64))
    return (-(0.01 + 3.9 * _unit(_mix(key))) / (temperature or 1.0)).astype(np.float32)


def fake_token(weights: int, previous: int, place: tuple[int, int], sampling: Sampling, vocab_size: int) -> int:
    """Token number `place[1]` of member `place[0]` after `previous`; without chance when greedy."""
    key = _mix_one(weights ^ _mix_one(previous + 1))
    if sampling.temperature > 0:
        for part in (sampling.seed, *place):
            key = _mix_one(key ^ part)
    return key % vocab_size


def fake_routes(weights: int, tokens: np.ndarray, model: ModelInfo) -> np.ndarray:
    """Routes of fed tokens: K distinct experts a row and layer, [T, L, K]."""
    layer_L = np.arange(model.moe_layers, dtype=np.uint64)
    expert_E = np.arange(model.num_experts, dtype=np.uint64)
    key_TL = _mix(_key(weights, tokens)[:, None] ^ (layer_L + np.uint64(1)))
    score_TLE = _mix(key_TL[:, :, None] ^ (expert_E + np.uint64(77)))
    order_TLE = np.argsort(score_TLE, axis=-1, kind="stable")
    return order_TLE[:, :, : model.top_k].astype(id_dtype(model.num_experts))


def _key(weights: int, tokens: np.ndarray) -> np.ndarray:
    return _mix(np.uint64(weights) ^ _mix(tokens.astype(np.uint64) + np.uint64(1)))


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FACTORS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return value ^ (value >> np.uint64(31))


def _mix_one(value: int) -> int:
    """`_mix` of one number, without NumPy: a token follows from the one before, so they come one at a time."""
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _WORD
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _WORD
    return value ^ (value >> 31)


def _unit(value: np.ndarray) -> np.ndarray:
    return (value >> np.uint64(11)).astype(np.float64) / float(1 << 53)
