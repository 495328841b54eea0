"""Attention, experts and token log-probs against their naive forms: one JSON line. Runs on whatever JAX finds.

python tools/bench/bench_kernels.py --what memory            # compiles only
python tools/bench/bench_kernels.py --what time --repeat 5   # runs, naive and ours taking turns
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax.logprob import token_logp, token_scores
from sat_jax.mesh import one_device_mesh
from sat_jax.model.attention import attend, attention_pairs, packed_attention
from sat_jax.model.dispatch import ExpertWeights, Routed
from sat_jax.model.experts import kernel_of, run_experts
from sat_jax.types import TokenScores

MIB = 2**20


def _struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def temporaries(function: Callable[..., Any], *arguments: Any) -> float:
    """MiB of temporaries of a compiled function, from the compiler."""
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert memory is not None, "this backend reports its memory"
    return memory.temp_size_in_bytes / MIB


def _naive_logp(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array) -> jax.Array:
    logp_BTV = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", hidden_BTD, head_DV), axis=-1)
    return jnp.take_along_axis(logp_BTV, target_BT[..., None], -1)[..., 0].sum()


def _ours_logp(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array) -> jax.Array:
    return token_logp(hidden_BTD, head_DV, target_BT)[0].sum()


def logp_memory() -> dict[str, float]:
    """At D = 2048, T = 4096, V = 151,936, forward and backward."""
    arguments = (_struct(1, 4096, 2048), _struct(2048, 151_936), _struct(1, 4096, dtype=jnp.int32))
    ours, naive = (temporaries(jax.grad(f, argnums=(0, 1)), *arguments) for f in (_ours_logp, _naive_logp))
    return {"ours_mib": ours, "naive_mib": naive, "ratio": ours / naive}


def attention_memory(heads: int = 32, groups: int = 4, channels: int = 128) -> dict[str, float]:
    """Forward and backward of one row, by its length."""
    mesh, table = one_device_mesh(), {}
    for length in (4096, 8192, 16384, 32768):
        q, kv = (_struct(1, length, n, channels, dtype=jnp.bfloat16) for n in (heads, groups))
        loss = jax.grad(lambda q, k, v, s: packed_attention(q, k, v, s, mesh).sum().astype(jnp.float32), (0, 1, 2))
        table[f"{length}_mib"] = temporaries(loss, q, kv, kv, _struct(1, length, dtype=jnp.int32))
    return table | {"ratio_32k_to_4k": table["32768_mib"] / table["4096_mib"]}


def in_turns(functions: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median seconds of each, taking turns so that a busy machine meets all alike; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeat + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _written_out(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `token_logp` gives, from logits that are all there."""
    logp_BTV = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", hidden_BTD, head_DV), axis=-1)
    entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(axis=-1)
    return jnp.take_along_axis(logp_BTV, target_BT[..., None], -1)[..., 0], entropy_BT


def logp_time(repeat: int, tokens: int, width: int, vocabulary: int, *, both: bool = True) -> dict[str, Any]:
    """Log-probs and entropies: forward alone, and with gradients for hidden states and head.

    `alone`: log-probs have a gradient and entropies none, as in training. `measured`: the same where a pass before has
    measured the batch, whose scores are then known. `both`: entropies have a gradient too; written out, that takes some
    six arrays of logits.
    """
    draw = np.random.default_rng(0)
    hidden_BTD = jnp.asarray(draw.normal(size=(1, tokens, width)), jnp.float32)
    head_DV = jnp.asarray(draw.normal(0, width**-0.5, (width, vocabulary)), jnp.float32)
    target_BT = jnp.asarray(draw.integers(0, vocabulary, (1, tokens)), jnp.int32)

    def gradients(form: Callable[..., Any], entropy_weight: float) -> Callable[..., Any]:
        def loss(hidden_BTD: jax.Array, head_DV: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
            logp_BT, entropy_BT = form(hidden_BTD, head_DV, *rest)
            weighted = entropy_weight * entropy_BT.sum() if entropy_weight else 0
            return logp_BT.sum() + weighted, entropy_BT

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    def known_logp(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array, known: TokenScores) -> Any:
        scores = token_scores(hidden_BTD, head_DV, target_BT, known=known)
        return scores.logp_BT, scores.entropy_BT

    arguments = (hidden_BTD, head_DV, target_BT)
    known = jax.jit(token_scores)(*arguments)
    run: dict[str, Callable[[], Any]] = {}
    for name, form in {"ours": token_logp, "naive": _written_out}.items():
        run[f"{name}_forward"] = functools.partial(jax.jit(form), *arguments)
        run[f"{name}_alone"] = functools.partial(gradients(form, 0), *arguments)
        if both:
            run[f"{name}_both"] = functools.partial(gradients(form, 0.01), *arguments)
    run["ours_measured"] = functools.partial(gradients(known_logp, 0), *arguments, known)
    seconds = in_turns(run, repeat)
    against = {"forward": "forward", "alone": "alone", "measured": "alone"} | ({"both": "both"} if both else {})
    ratios = {f"ratio_{what}": seconds[f"ours_{what}"] / seconds[f"naive_{than}"] for what, than in against.items()}
    step = {name: seconds[f"{name}_forward"] for name in ("ours", "naive")}
    step = (step["ours"] + seconds["ours_measured"]) / (step["naive"] + seconds["naive_alone"])
    return seconds | ratios | {"ratio_step": step, "tokens": tokens, "width": width, "vocabulary": vocabulary}


def attention_time(repeat: int, length: int, sequences: int) -> dict[str, float]:
    """One row of equal sequences against the same row as one sequence, and against whole rows where they fit."""
    mesh, draw = one_device_mesh(), np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.normal(size=(1, length, n, 64)), jnp.bfloat16) for n in (8, 2, 2))
    packed_BT = jnp.asarray(np.repeat(np.arange(1, sequences + 1), length // sequences)[None], jnp.int32)
    whole_BT = jnp.ones_like(packed_BT)

    def naive(q: jax.Array, k: jax.Array, v: jax.Array, segment_BT: jax.Array) -> jax.Array:
        place = jnp.arange(length)
        return attend(q, k, v, (place[:, None] >= place) & (segment_BT[:, :, None] == segment_BT[:, None, :]))

    def gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda *a: function(*a).sum().astype(jnp.float32), (0, 1, 2)))

    ours = gradient(functools.partial(packed_attention, mesh=mesh))
    run = {"packed": lambda: ours(q, k, v, packed_BT), "one_sequence": lambda: ours(q, k, v, whole_BT)}
    if length <= 8192:
        whole = gradient(naive)
        run["naive"] = lambda: whole(q, k, v, packed_BT)
    useful, executed = attention_pairs(packed_BT, mesh)
    return in_turns(run, repeat) | {"executed_per_useful": float(executed / useful)}


def experts_time(repeat: int, tokens: int) -> dict[str, float]:
    """Forward and backward of 32 experts, four a token, and the rows run per useful one."""
    mesh, draw, (width, hidden, experts, slots) = one_device_mesh(), np.random.default_rng(0), (256, 128, 32, 4)
    shapes = {"gate_EDF": (width, hidden), "up_EDF": (width, hidden), "down_EFD": (hidden, width)}
    held = ExpertWeights(**{n: jnp.asarray(draw.normal(0, 0.1, (experts, *s)), jnp.float32) for n, s in shapes.items()})
    routed = Routed(
        x_ND=jnp.asarray(draw.normal(size=(tokens, width)), jnp.bfloat16),
        ids_NK=jnp.asarray(np.argsort(draw.random((tokens, experts)), -1)[:, :slots], jnp.int32),
        weight_NK=jnp.full((tokens, slots), 1 / slots),
    )

    def loss(held: ExpertWeights, routed: Routed) -> tuple[jax.Array, jax.Array]:
        out_ND, executed = run_experts(mesh, kernel_of(mesh), routed, held)
        return out_ND.sum().astype(jnp.float32), executed

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    seconds = in_turns({"ours": lambda: gradient(held, routed)}, repeat)["ours"]
    useful = tokens * slots
    flops = 3 * 2 * 3 * useful * width * hidden
    return {
        "seconds": seconds,
        "useful_gflops_per_second": flops / seconds / 1e9,
        "executed_per_useful": int(gradient(held, routed)[1].sum()) / useful,
    }


def measure(what: str, repeat: int) -> dict[str, Any]:
    """The record: what was measured, and on what."""
    device = jax.devices()[0]
    record: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    if what in ("memory", "all"):
        record["memory"] = {"logp": logp_memory(), "attention": attention_memory()}
    if what in ("time", "all"):
        big = device.platform != "cpu"
        record["time"] = {
            "logp": logp_time(repeat, *((4096, 2048, 151_936) if big else (512, 2048, 65_536))),
            "attention": attention_time(repeat, 32768 if big else 4096, 8),
            "experts": experts_time(repeat, 32768 if big else 2048),
        }
    return record


def rounded(value: Any) -> Any:
    """Four significant digits are what such a measurement is worth."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, 3 - math.floor(math.log10(abs(value))))
    return value


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("memory", "time", "all"), default="all")
    parser.add_argument("--repeat", type=int, default=5, help="turns that are counted")
    parser.add_argument("--logp", type=int, nargs=3, metavar=("T", "D", "V"), help="log-probs alone, of this size")
    parser.add_argument("--no-both", action="store_true", help="with --logp: no gradient of entropies, for its memory")
    arguments = parser.parse_args()
    if arguments.logp:
        print(json.dumps(rounded(logp_time(arguments.repeat, *arguments.logp, both=not arguments.no_both))))
    else:
        print(json.dumps(rounded(measure(arguments.what, arguments.repeat))))


if __name__ == "__main__":
    main()
