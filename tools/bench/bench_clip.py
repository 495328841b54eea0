"""Value and gradient of every objective preset: time against `ppo`, memory, and what goes between devices.

    python tools/bench/bench_clip.py [--log2-tokens 16 18 20 22] [--presets ppo sat_grpo] [--threads 1] [--json]

One process; the presets take turns within a repetition, and every repetition has fresh data, so that a busy machine
slows all alike and nothing is carried over. All presets are aggregated alike (`--aggregation`), so that the ratio is
that of the kernels; `own` gives each its authors' aggregation. The memory bound is the time that a plain copy would
need for the arrays that must be read and written once. On a CPU with one thread the clock is the process's own time,
which another process cannot steal.
"""

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

ROW = 4096
SEQUENCE = 512
# `sat_jax.order_statistic`: at most this many passes, each one turn of its loop.
LONGEST_SEARCH = 32
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def main() -> None:
    """Parses, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log2-tokens", type=int, nargs="+", default=[16, 18, 20, 22], metavar="N", help="12 or more")
    parser.add_argument("--presets", nargs="+", default=None, help="all by default; ppo is always among them")
    parser.add_argument("--aggregation", default="token_mean", help="of all presets; own = each its authors'")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a computation; 0 = as many as there are")
    parser.add_argument("--devices", type=int, default=1, help="shard the rows over so many (on a CPU: fake) devices")
    parser.add_argument("--json", action="store_true", help="one line for programs instead of a table")
    arguments = parser.parse_args()
    if min(arguments.log2_tokens) < 12:
        parser.error(f"--log2-tokens: expected 12 or more (a row has {ROW} tokens), got {min(arguments.log2_tokens)}")
    # JAX reads this when it is first imported, which is why the rest is imported late.
    os.environ["XLA_FLAGS"] = _flags(arguments.threads, arguments.devices)
    result = _measure(arguments)
    print(json.dumps(result) if arguments.json else _table(result))


def _flags(threads: int, devices: int) -> str:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    return " ".join(flag for flag in flags if flag)


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    from sat_jax.objective import ObjectiveConfig, preset_names

    names = list(dict.fromkeys(["ppo", *(arguments.presets or preset_names())]))
    own = arguments.aggregation == "own"
    fields = {} if own else {"aggregation": arguments.aggregation}
    configs = {name: ObjectiveConfig.preset(name, **fields) for name in names}
    device = jax.devices()[0]
    if jax.device_count() < arguments.devices:
        raise SystemExit(f"--devices: expected at most {jax.device_count()} here, got {arguments.devices}")
    alone = device.platform == "cpu" and arguments.threads == 1 and arguments.devices == 1
    clock = time.process_time if alone else time.perf_counter
    sizes = {
        str(2**power): _measure_size(2**power, configs, arguments.repetitions, arguments.devices, clock)
        for power in arguments.log2_tokens
    }
    return {
        "bench": "clip",
        "config": hashlib.sha256(repr(sorted(configs.items())).encode()).hexdigest()[:12],
        "commit": _commit(),
        "device": device.device_kind,
        "devices": arguments.devices,
        "clock": clock.__name__,
        "aggregation": arguments.aggregation,
        "repetitions": arguments.repetitions,
        "tokens": sizes,
    }


def _measure_size(
    tokens: int, configs: dict[str, Any], repetitions: int, devices: int, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    import jax

    fresh = jax.jit(_data, static_argnums=1, out_shardings=_rows_over(devices))
    first = fresh(jax.random.key(0), tokens)
    programs = {name: _program(config).lower(*first).compile() for name, config in configs.items()}
    copy = jax.jit(lambda array: array + 1)
    for program in programs.values():
        jax.block_until_ready(program(*first))
    seconds: dict[str, list[float]] = {name: [] for name in [*programs, "copy"]}
    for repetition in range(repetitions):
        inputs = jax.block_until_ready(fresh(jax.random.key(1 + repetition), tokens))
        for name, program in programs.items():
            seconds[name].append(_second_run(program, inputs, clock))
        seconds["copy"].append(_second_run(copy, inputs[:1], clock))
    bytes_a_second = 8 * tokens / statistics.median(seconds["copy"])
    return {
        name: _row(program, configs[name], tokens, seconds[name], seconds["ppo"], bytes_a_second)
        for name, program in programs.items()
    }


def _second_run(program: Any, inputs: Any, clock: Callable[[], float]) -> float:
    """Seconds of a run whose inputs and buffers are as warm as everybody else's: the first pays for its predecessor."""
    import jax

    jax.block_until_ready(program(*inputs))
    start = clock()
    jax.block_until_ready(program(*inputs))
    return clock() - start


def _row(
    program: Any, config: Any, tokens: int, seconds: list[float], ppo: list[float], bytes_a_second: float
) -> dict[str, Any]:
    median = statistics.median(seconds)
    ratios = [one / other for one, other in zip(seconds, ppo, strict=True)]
    compulsory = _compulsory_bytes(config)
    return {
        "median_ms": round(1e3 * median, 3),
        "spread_ms": round(1e3 * (max(seconds) - min(seconds)), 3),
        "ratio": round(statistics.median(ratios), 3),
        "bytes_a_token": compulsory,
        "share_of_bound": round(compulsory * tokens / bytes_a_second / median, 3),
        "temporary_a_token": round(program.memory_analysis().temp_size_in_bytes / tokens, 2),
        "collectives": collective_bytes(program.as_text()),
    }


def _compulsory_bytes(config: Any) -> int:
    """What must be read (log-probs, mu, advantage, mask; more where a method needs it) and written (the gradient)."""
    sequences = config.mismatch != "token" or config.aggregation != "token_mean"
    sequences |= config.gate in ("mis", "geo", "opsm", "trm_max_k2", "trm_mean_k3") or config.weight == "tis_sequence"
    return 17 + 4 * sequences + 4 * (config.anchor != "behavior")


def _program(config: Any) -> Any:
    import jax

    from sat_jax.objective import policy_loss

    def loss(logp_BT: jax.Array, batch: Any, prox_logp_BT: jax.Array) -> jax.Array:
        return policy_loss(logp_BT, batch, config, prox_logp_BT=prox_logp_BT).loss

    return jax.jit(jax.value_and_grad(loss))


def _data(key: Any, tokens: int) -> Any:
    """Heavy-tailed mismatch, three tokens in ten inactive, eight sequences a row."""
    import jax
    import jax.numpy as jnp

    from sat_jax.types import RoutingTrace, TokenBatch

    shape = (tokens // ROW, ROW)
    keys = jax.random.split(key, 6)
    behavior_logp_BT = -jax.random.exponential(keys[0], shape)
    logp_BT = behavior_logp_BT + 0.05 * jax.random.t(keys[1], 3.0, shape)
    prox_logp_BT = logp_BT + 0.01 * jax.random.normal(keys[2], shape)
    position_T = jnp.arange(ROW, dtype=jnp.int32)
    row_BT = jnp.zeros(shape, jnp.int32)
    batch = TokenBatch(
        input_BT=row_BT,
        target_BT=row_BT,
        segment_BT=row_BT + position_T // SEQUENCE + 1,
        position_BT=row_BT + position_T % SEQUENCE,
        loss_mask_BT=jax.random.uniform(keys[3], shape) < 0.7,
        behavior_logp_BT=behavior_logp_BT,
        advantage_BT=jax.random.normal(keys[4], shape),
        lag_BT=jax.random.randint(keys[5], shape, 0, 8),
        trace=RoutingTrace(experts_LBTK=jnp.zeros((1, *shape, 1), jnp.uint8), present_BT=row_BT > 0),
    )
    return logp_BT, batch, prox_logp_BT


def _rows_over(devices: int) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if devices == 1:
        return None
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows, layers_first = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec(None, "data"))
    shapes = jax.eval_shape(lambda: _data(jax.random.key(0), devices * ROW))
    return jax.tree.map(lambda leaf: layers_first if leaf.ndim == 4 else rows, shapes)


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes that each kind of collective hands to a device, by a compiled program's text.

    Args:
      text: HLO; a collective in a loop's body counts as often as the longest search turns.

    Returns:
      Bytes by kind; kinds that do not occur are left out.
    """
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    found: dict[str, int] = {}
    computation = ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        computation = head[1] if head else computation
        operation = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if operation:
            turns = LONGEST_SEARCH if computation in bodies else 1
            found[operation[2]] = found.get(operation[2], 0) + turns * _shape_bytes(operation[1])
    return found


def _shape_bytes(shapes: str) -> int:
    total = 0
    for width, dimensions in re.findall(r"\b(?:pred|[a-z]+(\d+))\[([\d,]*)\]", shapes):
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += count * max(1, int(width or 8) // 8)
    return total


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, {result['devices']} device(s), aggregation {result['aggregation']}, "
        f"{result['repetitions']} repetitions, clock {result['clock']}, commit {result['commit']}"
    ]
    for tokens, rows in result["tokens"].items():
        lines += [
            "",
            f"{int(tokens):,} tokens",
            f"{'preset':<14}{'ms':>9}{'spread':>9}{'x ppo':>8}{'of bound':>10}{'temp B/tok':>12}  collectives",
        ]
        for name, row in rows.items():
            moved = ", ".join(f"{kind} {size:,} B" for kind, size in row["collectives"].items())
            lines.append(
                f"{name:<14}{row['median_ms']:>9.2f}{row['spread_ms']:>9.2f}{row['ratio']:>8.2f}"
                f"{row['share_of_bound']:>10.2f}{row['temporary_a_token']:>12.1f}  {moved}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
