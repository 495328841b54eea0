"""Qwen3-MoE and dense Qwen3 in NumPy and float64, one sequence, head and token at a time, from Hugging Face tensors."""

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def turn(x, position, theta):
    """`x` [C] of one head at one position; as HF: x * cos + rotate_half(x) * sin."""
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) / half)
    cos, sin = np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)
    return x * cos + np.concatenate([-x[half:], x[:half]]) * sin


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def best(score, k):
    """Highest first, lowest id among equals."""
    return sorted(range(len(score)), key=lambda e: (-score[e], e))[:k]


class PolicyTwin:
    def __init__(self, config, tensors):
        self.config = config
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def weight(self, layer, name):
        return self.tensors[f"model.layers.{layer}.{name}.weight"]

    def attention(self, layer, x):
        c = self.config
        normed = norm(x, self.weight(layer, "input_layernorm"), c.norm_eps)
        q = (normed @ self.weight(layer, "self_attn.q_proj").T).reshape(-1, c.query_heads, c.head_dim)
        k = (normed @ self.weight(layer, "self_attn.k_proj").T).reshape(-1, c.kv_heads, c.head_dim)
        v = (normed @ self.weight(layer, "self_attn.v_proj").T).reshape(-1, c.kv_heads, c.head_dim)
        q = norm(q, self.weight(layer, "self_attn.q_norm"), c.norm_eps)
        k = norm(k, self.weight(layer, "self_attn.k_norm"), c.norm_eps)
        out = np.zeros_like(q)
        for t in range(len(x)):
            for h in range(c.query_heads):
                g = h // (c.query_heads // c.kv_heads)
                query = turn(q[t, h], t, c.rope_theta)
                score = np.array([query @ turn(k[s, g], s, c.rope_theta) for s in range(t + 1)])
                out[t, h] = softmax(score / np.sqrt(c.head_dim)) @ v[: t + 1, g]
        return x + out.reshape(len(x), -1) @ self.weight(layer, "self_attn.o_proj").T

    def feed(self, token, layer, name):
        gate, up, down = (self.weight(layer, f"{name}.{n}_proj") for n in ("gate", "up", "down"))
        return down @ (silu(gate @ token) * (up @ token))

    def dense(self, layer, x):
        normed = norm(x, self.weight(layer, "post_attention_layernorm"), self.config.norm_eps)
        return x + np.array([self.feed(token, layer, "mlp") for token in normed])

    def experts(self, layer, x, replayed):
        c = self.config
        normed = norm(x, self.weight(layer, "post_attention_layernorm"), c.norm_eps)
        out, used = x.copy(), []
        for t, token in enumerate(normed):
            probability = softmax(self.weight(layer, "mlp.gate") @ token)
            ids = best(probability, c.experts_per_token) if replayed is None else replayed[t]
            weight = probability[ids]
            if c.norm_topk:
                weight = weight / weight.sum()
            for e, w in zip(ids, weight, strict=True):
                out[t] += w * self.feed(token, layer, f"mlp.experts.{e}")
            used.append(list(ids))
        return out, np.array(used)

    def run(self, tokens, routes=None):
        """Logits [T, V] and routes [L, T, K] of one sequence, L the layers with experts; `routes` to replay."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        used = []
        for layer in range(self.config.layers):
            x = self.attention(layer, x)
            if layer in self.config.dense_layers:
                x = self.dense(layer, x)
                continue
            x, ids = self.experts(layer, x, None if routes is None else routes[len(used)])
            used.append(ids)
        x = norm(x, self.tensors["model.norm.weight"], self.config.norm_eps)
        head = "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
        return x @ self.tensors[head].T, np.array(used)
