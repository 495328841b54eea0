"""`sat-jax bench policy`: forward and backward, scoring and decoding against transformers, on the same weights.

transformers runs in a process of its own, under a Python that has it; the two take turns, one task at a time, so that a
busy machine slows both alike, and every figure that is judged is a ratio of medians. With one thread each counts its
own process's time, which other processes cannot steal. Before anything is timed the mean log-prob of the batch must
agree.

XLA reads its flags when JAX first makes a device: the verb sets them before it imports this.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sat_jax import sampler
from sat_jax.logprob import token_logp
from sat_jax.model import Policy, PolicyConfig, hf
from sat_jax.routing import free_trace
from sat_jax.types import TokenBatch
from train.host_memory import keep_freed_memory

TASKS = ("train", "score", "decode")
_AGREES = {"float32": 1e-4, "bfloat16": 3e-2}  # nats, between the two mean log-probs
# Head and tokens at which log-probs are compared with logits written out: of Qwen3-30B-A3B, and small enough to run.
_LARGE = {"width": 2048, "tokens": 4096, "vocabulary": 151_936}
_TIMED = {"width": 256, "tokens": 1024, "vocabulary": 151_936}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
      oracle: a Python with PyTorch and transformers.
      rows, length: of the batch that is trained on and scored.
      prompt, new: tokens of each of `rows` sequences that are decoded.
      dtype: compute type.
      repetitions: turns of each side.
      threads: CPU threads of a computation; 0 = as many as there are.
      remat: of the policy.
      head: also compare log-probs at a large vocabulary with logits written out (without transformers).
    """

    oracle: str
    rows: int = 128
    length: int = 31
    prompt: int = 5
    new: int = 26
    dtype: str = "float32"
    repetitions: int = 9
    threads: int = 1
    remat: str = "none"
    head: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "length", "prompt", "new", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.threads < 0:
            raise ValueError(f"--threads: expected 0 or more, got {self.threads}")

    @property
    def policy(self) -> PolicyConfig:
        """The configuration of the comparison: width 128, 4 layers of 8 experts, 2 of them a token."""
        return PolicyConfig(
            vocab_size=96,
            width=128,
            layers=4,
            query_heads=4,
            kv_heads=2,
            head_dim=32,
            experts=8,
            experts_per_token=2,
            expert_hidden=128,
            dtype=self.dtype,
            remat=self.remat,
        )


def measure(options: Options) -> dict[str, Any]:
    """All figures, ready for JSON.

    Raises:
      ValueError: the oracle cannot run, or computes something else.
    """
    _check_oracle(options.oracle)
    device = jax.devices()[0]
    keep_freed_memory(device.platform)  # as `sat-jax train` does
    alone = device.platform == "cpu" and options.threads == 1
    clock = time.process_time if alone else time.perf_counter
    policy = Policy(options.policy)
    tokens = np.random.default_rng(0).integers(0, 96, (2, options.rows, max(options.length, options.prompt)))
    ours = _tasks(policy, tokens, options)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        hf.save(policy, Path(scratch) / "model")
        request = {
            "folder": str(Path(scratch) / "model"),
            "dtype": options.dtype,
            "threads": options.threads or os.cpu_count(),
            "clock": clock.__name__,
            "input": tokens[0, :, : options.length].tolist(),
            "target": tokens[1, :, : options.length].tolist(),
            "prompt": tokens[0, :, : options.prompt].tolist(),
            "new": options.new,
        }
        oracle = stack.enter_context(_Oracle(options.oracle, request))
        tasks = {task: _compare(task, ours[task], oracle, options, clock) for task in TASKS}
    result = {
        "bench": "policy",
        "device": device.device_kind,
        "clock": clock.__name__,
        **{name: value for name, value in dataclasses.asdict(options).items() if name not in ("oracle", "head")},
        "oracle": oracle.versions,
        "tasks": tasks,
    }
    return result | ({"head": _head(options.repetitions, clock)} if options.head else {})


def report(result: dict[str, Any], *, as_json: bool) -> str:
    """One line for programs, or a table for people."""
    if as_json:
        return json.dumps(result)
    lines = [f"{'task':8} {'ours, ms':>10} {'theirs, ms':>10} {'ratio':>7} {'quartiles':>15}"]
    for task, row in result["tasks"].items():
        low, high = row["quartiles"]
        lines.append(
            f"{task:8} {row['ours_ms']:10.1f} {row['theirs_ms']:10.1f} {row['ratio']:7.2f} {low:7.2f} {high:7.2f}"
        )
    for name, row in result.get("head", {}).items():
        lines.append(f"head, {name}: {json.dumps(row)}")
    return "\n".join(lines)


class _Oracle:
    """transformers in its process; a context manager."""

    def __init__(self, python: str, request: dict[str, Any]) -> None:
        self._python, self._request = python, request
        self.versions: dict[str, Any] = {}

    def __enter__(self) -> "_Oracle":
        script = Path(__file__).with_name("bench_policy_oracle.py")
        self._process = subprocess.Popen(
            [self._python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self._request["threads"]), "HF_HUB_OFFLINE": "1"},
        )
        self.versions = self._ask(json.dumps(self._request))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self, task: str) -> tuple[float, float]:
        """Seconds of a task, and the number that it gave."""
        answer = self._ask(task)
        return answer["seconds"], answer["value"]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the empty answer below says so, with its reason
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            said = self._process.communicate()[1].strip().splitlines()
            raise ValueError(f"--oracle: expected an answer, got: {said[-1] if said else 'nothing'} ({self._python})")
        return json.loads(answer)


def _check_oracle(python: str) -> None:
    try:
        done = subprocess.run(
            [python, "-c", "import torch, transformers"], capture_output=True, text=True, timeout=300, check=False
        )
        said = done.stderr.strip().splitlines() if done.returncode else []
    except OSError as error:
        said = [str(error)]
    if said:
        raise ValueError(
            f"--oracle: expected a Python with PyTorch and transformers, got: {said[-1]} ({python}); make test-parity "
            "leaves one: --oracle .venv-parity/bin/python"
        )


def _compare(
    task: str, ours: Callable[[], float], oracle: _Oracle, options: Options, clock: Callable[[], float]
) -> dict[str, Any]:
    # Both warm up; what they compute must be the same before it matters how fast.
    mine, theirs = ours(), oracle.turn(task)[1]
    if abs(mine - theirs) > _AGREES[options.dtype]:
        raise ValueError(
            f"bench policy, {task}: expected transformers' {theirs} within {_AGREES[options.dtype]}, got {mine}"
        )
    seconds: list[tuple[float, float]] = []
    for _ in range(options.repetitions):
        start = clock()
        ours()
        seconds.append((clock() - start, oracle.turn(task)[0]))
    medians = [statistics.median(side) for side in zip(*seconds, strict=True)]
    ratios = sorted(mine / theirs for mine, theirs in seconds)
    quarter = len(ratios) // 4
    return {
        "ours_ms": round(1e3 * medians[0], 2),
        "theirs_ms": round(1e3 * medians[1], 2),
        "ratio": round(medians[0] / medians[1], 3),
        "quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
    }


def _tasks(policy: Policy, tokens: np.ndarray, options: Options) -> dict[str, Callable[[], float]]:
    graph, params = nnx.split(policy, nnx.Param)
    batch = _batch(tokens[:, :, : options.length], options.policy)

    def mean_logp(params: nnx.State, batch: TokenBatch) -> jax.Array:
        return nnx.merge(graph, params).score(batch).logp_BT.mean()

    score = jax.jit(mean_logp)
    train = jax.jit(jax.value_and_grad(mean_logp))

    def run_train() -> float:
        return float(jax.block_until_ready(train(params, batch))[0])

    return {
        "train": run_train,
        "score": lambda: float(score(params, batch)),
        "decode": _decode_task(graph, params, tokens[0, :, : options.prompt], options),
    }


def _decode_task(
    graph: nnx.GraphDef, params: nnx.State, prompt_BT: np.ndarray, options: Options
) -> Callable[[], float]:
    rows, length = prompt_BT.shape
    config = sampler.SlotsConfig(slots=rows, positions=length + options.new, stop_ids=1)
    held = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
    token_BS = np.zeros((rows, config.positions), np.int32)
    token_BS[:, :length] = prompt_BT

    def whole(value: float, dtype: Any = np.int32) -> np.ndarray:
        return np.full(rows, value, dtype)

    terms = sampler.Terms(
        prompt_B=whole(length),
        sampled_B=whole(0),
        limit_B=whole(config.positions),
        seed_low_B=np.arange(rows, dtype=np.uint32),
        seed_high_B=whole(0, np.uint32),
        member_B=whole(0, np.uint32),
        temperature_B=whole(1, np.float32),
        top_p_B=whole(1, np.float32),
        top_k_B=whole(0),
        stop_ids=np.full((rows, 1), -1, np.int32),
    )
    admission = sampler.Admission(new_B=whole(True, bool), token_BS=token_BS, terms=terms)
    admit = jax.jit(sampler.admit, donate_argnums=0)
    decode = jax.jit(
        lambda held, slots: sampler.decode(
            nnx.merge(graph, held), slots, jnp.int32(0), jnp.int32(config.positions), jnp.int32(rows)
        ),
        donate_argnums=1,
    )

    def run() -> float:
        slots = decode(held, admit(sampler.empty_slots(config, options.policy), admission))
        return float(np.median(np.asarray(slots.known_B)) - length)

    return run


def _batch(tokens: np.ndarray, config: PolicyConfig) -> TokenBatch:
    input_BT, target_BT = jnp.asarray(tokens, jnp.int32)
    zero_BT = jnp.zeros(input_BT.shape, jnp.float32)
    rows, length = input_BT.shape
    return TokenBatch(
        input_BT=input_BT,
        target_BT=target_BT,
        segment_BT=jnp.ones_like(input_BT),
        position_BT=jnp.broadcast_to(jnp.arange(input_BT.shape[1], dtype=jnp.int32), input_BT.shape),
        loss_mask_BT=jnp.ones(input_BT.shape, bool),
        behavior_logp_BT=zero_BT,
        advantage_BT=zero_BT,
        lag_BT=jnp.zeros_like(input_BT),
        trace=free_trace(config.moe_layers, rows, length, config.experts_per_token, config.experts),
    )


def _head(repetitions: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Log-probs in chunks of the vocabulary against logits written out: memory at a large size, time at a small one."""

    def shapes(sizes: dict[str, int]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((1, sizes["tokens"], sizes["width"]), jnp.float32),
            jax.ShapeDtypeStruct((sizes["width"], sizes["vocabulary"]), jnp.float32),
            jax.ShapeDtypeStruct((1, sizes["tokens"]), jnp.int32),
        ]

    def chunked(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array) -> jax.Array:
        return token_logp(hidden_BTD, head_DV, target_BT)[0].mean()

    def naive(hidden_BTD: jax.Array, head_DV: jax.Array, target_BT: jax.Array) -> jax.Array:
        logits_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, head_DV)
        logp_BTV = jax.nn.log_softmax(logits_BTV)
        return jnp.take_along_axis(logp_BTV, target_BT[..., None], axis=-1).mean()

    jitted = {way.__name__: jax.jit(jax.value_and_grad(way, argnums=(0, 1))) for way in (chunked, naive)}
    temporary = {}
    for name, program in jitted.items():
        memory = program.lower(*shapes(_LARGE)).compile().memory_analysis()
        assert memory is not None, "XLA tells it of every CPU, GPU and TPU program"
        temporary[name] = memory.temp_size_in_bytes / 2**20
    return {
        "memory": {
            **_LARGE,
            **{f"{name}_mib": round(size, 1) for name, size in temporary.items()},
            "ratio": round(temporary["chunked"] / temporary["naive"], 4),
        },
        "time": _TIMED | _head_times(jitted, shapes(_TIMED), min(repetitions, 5), clock),
    }


def _head_times(
    jitted: dict[str, Any], shapes: list[jax.ShapeDtypeStruct], repetitions: int, clock: Callable[[], float]
) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    hidden_BTD, head_DV = (jnp.asarray(draw.normal(size=part.shape) / 16, jnp.float32) for part in shapes[:2])
    target_BT = jnp.asarray(draw.integers(0, head_DV.shape[1], shapes[2].shape), jnp.int32)
    seconds: dict[str, list[float]] = {name: [] for name in jitted}
    for turn in range(repetitions + 1):
        for name, program in jitted.items():
            start = clock()
            jax.block_until_ready(program(hidden_BTD, head_DV, target_BT))
            if turn:  # the first one compiles
                seconds[name].append(clock() - start)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    return {
        **{f"{name}_ms": round(1e3 * median, 1) for name, median in medians.items()},
        "ratio": round(medians["chunked"] / medians["naive"], 3),
    }
