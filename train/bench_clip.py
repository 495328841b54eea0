"""`sat-jax bench clip`: value and gradient of every objective preset, against `ppo`: time, memory, collectives.

One process; the presets take turns within a repetition, each repetition begins with another preset and has fresh data,
so that a busy machine slows all alike, no preset is always the first, and nothing is carried over. All presets are
aggregated alike (`Options.aggregation`), so that the ratio is that of the kernels; `own` gives each its authors'
aggregation. The memory bound is the time that a plain copy would need for the arrays that must be read and written
once. On a CPU with one thread the clock is the process's own time, which another process cannot steal.

XLA reads its flags when JAX first makes a device: the verb sets them before it imports this.
"""

import dataclasses
import hashlib
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sat_jax.objective import ObjectiveConfig, policy_loss, preset_names
from sat_jax.types import RoutingTrace, TokenBatch

ROW = 4096
SEQUENCE = 512
# `sat_jax.order_statistic`: at most this many passes, each one turn of its loop.
LONGEST_SEARCH = 32
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

Clock = Callable[[], float]
Inputs = tuple[jax.Array, TokenBatch, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
      log2_tokens: sizes of the batch; 12 or more, because a row has 4096 tokens.
      presets: which; empty = all. `ppo` is always among them.
      aggregation: of all presets; own = each its authors'.
      repetitions: with fresh data each.
      threads: CPU threads of a computation; 0 = as many as there are.
      devices: shard the rows over so many.
      train_step: also weigh SAT on a sequence ratio against the whole train step of this run's file.
    """

    log2_tokens: tuple[int, ...] = (16, 18, 20, 22)
    presets: tuple[str, ...] = ()
    aggregation: str = "token_mean"
    repetitions: int = 9
    threads: int = 1
    devices: int = 1
    train_step: Path | None = None

    def __post_init__(self) -> None:
        if not self.log2_tokens or min(self.log2_tokens) < 12:
            got = ", ".join(map(str, self.log2_tokens)) or "none"
            raise ValueError(f"--log2-tokens: expected numbers of 12 or more (a row has {ROW} tokens), got {got}")
        for name, least in (("repetitions", 1), ("threads", 0), ("devices", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name}: expected {least} or more, got {getattr(self, name)}")
        if 2 ** min(self.log2_tokens) // ROW % self.devices:
            raise ValueError(
                f"--devices: expected a divisor of the {2 ** min(self.log2_tokens) // ROW} rows of the smallest size, "
                f"got {self.devices}"
            )


def measure(options: Options) -> dict[str, Any]:
    """All figures, ready for JSON.

    Raises:
      ValueError: an unknown preset, aggregation or run file, or more devices than there are.
    """
    names = list(dict.fromkeys(["ppo", *(options.presets or preset_names())]))
    fields = {} if options.aggregation == "own" else {"aggregation": options.aggregation}
    configs = {name: ObjectiveConfig.preset(name, **fields) for name in names}
    if jax.device_count() < options.devices:
        raise ValueError(f"--devices: expected at most {jax.device_count()} here, got {options.devices}")
    device = jax.devices()[0]
    alone = device.platform == "cpu" and options.threads == 1 and options.devices == 1
    clock = time.process_time if alone else time.perf_counter
    result = {
        "bench": "clip",
        "config": hashlib.sha256(repr(sorted(configs.items())).encode()).hexdigest()[:12],
        "commit": _commit(),
        "device": device.device_kind,
        "devices": options.devices,
        "clock": clock.__name__,
        "aggregation": options.aggregation,
        "repetitions": options.repetitions,
        "tokens": {str(2**power): _measure_size(2**power, configs, options, clock) for power in options.log2_tokens},
    }
    if options.train_step is not None:
        from train.bench_step import measure_step  # the whole trainer: only where it is asked for

        result["train_step"] = measure_step(options.train_step, options.repetitions, clock)
    return result


def report(result: dict[str, Any], *, as_json: bool) -> str:
    """One line for programs, or a table for people."""
    return json.dumps(result) if as_json else _table(result)


def _measure_size(
    tokens: int, configs: dict[str, ObjectiveConfig], options: Options, clock: Clock
) -> dict[str, dict[str, Any]]:
    fresh = jax.jit(lambda key: made_up(key, tokens // ROW, ROW, SEQUENCE), out_shardings=_rows_over(options.devices))
    first = fresh(jax.random.key(0))
    programs = {name: program(config).lower(*first).compile() for name, config in configs.items()}
    copy = jax.jit(lambda array: array + 1)
    for compiled in programs.values():
        jax.block_until_ready(compiled(*first))
    seconds: dict[str, list[float]] = {name: [] for name in [*programs, "copy"]}
    names = list(programs)
    for repetition in range(options.repetitions):
        inputs = jax.block_until_ready(fresh(jax.random.key(1 + repetition)))
        # Whoever runs first after new data pays for the caches and pages of all: that is nobody's figure.
        jax.block_until_ready(programs[names[-1]](*inputs))
        first_name = repetition % len(names)
        for name in names[first_name:] + names[:first_name]:
            seconds[name].append(second_run(programs[name], inputs, clock))
        seconds["copy"].append(second_run(copy, inputs[:1], clock))
    bytes_a_second = 8 * tokens / statistics.median(seconds["copy"])
    return {
        name: _row(compiled, configs[name], tokens, (seconds[name], seconds["ppo"]), bytes_a_second)
        for name, compiled in programs.items()
    }


def second_run(function: Callable[..., Any], inputs: Any, clock: Clock) -> float:
    """Seconds of a run whose inputs and buffers are as warm as everybody else's: the first pays for its predecessor."""
    jax.block_until_ready(function(*inputs))
    start = clock()
    jax.block_until_ready(function(*inputs))
    return clock() - start


def _row(
    compiled: Any, config: ObjectiveConfig, tokens: int, seconds: tuple[list[float], list[float]], bytes_a_second: float
) -> dict[str, Any]:
    own, ppo = seconds
    median = statistics.median(own)
    compulsory = _compulsory_bytes(config)
    return {
        "median_ms": round(1e3 * median, 3),
        "spread_ms": round(1e3 * (max(own) - min(own)), 3),
        "ratio": round(statistics.median(one / other for one, other in zip(own, ppo, strict=True)), 3),
        "bytes_a_token": compulsory,
        "share_of_bound": round(compulsory * tokens / bytes_a_second / median, 3),
        "temporary_a_token": round(compiled.memory_analysis().temp_size_in_bytes / tokens, 2),
        "collectives": collective_bytes(compiled.as_text()),
    }


def _compulsory_bytes(config: ObjectiveConfig) -> int:
    """What must be read (log-probs, mu, advantage, mask; more where a method needs it) and written (the gradient)."""
    sequences = config.mismatch != "token" or config.aggregation != "token_mean" or config.weight == "tis_sequence"
    sequences |= config.gate in ("mis", "geo", "opsm", "trm_max_k2", "trm_mean_k3")
    return 17 + 4 * sequences + 4 * (config.anchor != "behavior")


def program(config: ObjectiveConfig) -> Any:
    """The jitted value and gradient of a method."""

    def loss(logp_BT: jax.Array, batch: TokenBatch, prox_logp_BT: jax.Array) -> jax.Array:
        return policy_loss(logp_BT, batch, config, prox_logp_BT=prox_logp_BT).loss

    return jax.jit(jax.value_and_grad(loss))


def made_up(key: jax.Array, rows: int, length: int, sequence: int) -> Inputs:
    """Heavy-tailed mismatch, three tokens in ten inactive, rows of sequences of one length."""
    shape = (rows, length)
    keys = jax.random.split(key, 6)
    behavior_logp_BT = -jax.random.exponential(keys[0], shape)
    logp_BT = behavior_logp_BT + 0.05 * jax.random.t(keys[1], 3.0, shape)
    prox_logp_BT = logp_BT + 0.01 * jax.random.normal(keys[2], shape)
    place_T = jnp.arange(length, dtype=jnp.int32)
    zero_BT = jnp.zeros(shape, jnp.int32)
    batch = TokenBatch(
        input_BT=zero_BT,
        target_BT=zero_BT,
        segment_BT=zero_BT + place_T // sequence + 1,
        position_BT=zero_BT + place_T % sequence,
        loss_mask_BT=jax.random.uniform(keys[3], shape) < 0.7,
        behavior_logp_BT=behavior_logp_BT,
        advantage_BT=jax.random.normal(keys[4], shape),
        lag_BT=jax.random.randint(keys[5], shape, 0, 8),
        trace=RoutingTrace(experts_LBTK=jnp.zeros((1, *shape, 1), jnp.uint8), present_BT=zero_BT > 0),
    )
    return logp_BT, batch, prox_logp_BT


def _rows_over(devices: int) -> Any:
    if devices == 1:
        return None
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows, layers_first = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec(None, "data"))
    shapes = jax.eval_shape(lambda: made_up(jax.random.key(0), devices, ROW, SEQUENCE))
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
            f"{'preset':<14}{'ms':>9}{'spread':>9}{'x ppo':>8}{'B/tok':>7}{'of bound':>10}{'temp B/tok':>12}"
            "  collectives",
        ]
        for name, row in rows.items():
            moved = ", ".join(f"{kind} {size:,} B" for kind, size in row["collectives"].items())
            lines.append(
                f"{name:<14}{row['median_ms']:>9.2f}{row['spread_ms']:>9.2f}{row['ratio']:>8.2f}"
                f"{row['bytes_a_token']:>7}{row['share_of_bound']:>10.2f}{row['temporary_a_token']:>12.2f}  {moved}"
            )
    if (step := result.get("train_step")) is not None:
        lines += [
            "",
            f"train step of {step['run']}, {step['rows']} rows of {step['length']}: {step['step_ms']:.2f} ms; "
            f"sat_gspo {step['sat_gspo_ms']:.3f} ms, gspo {step['gspo_ms']:.3f} ms: the difference is "
            f"{step['share']:.2%} of the step (from {step['share_low']:.2%} to {step['share_high']:.2%})",
        ]
    return "\n".join(line.rstrip() for line in lines)
