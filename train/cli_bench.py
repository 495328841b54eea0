"""`sat-jax bench`: the arguments of its parts, and what they call."""

import argparse
import os
import sys
from pathlib import Path


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Adds the parts of the verb `bench`."""
    benches = parser.add_subparsers(required=True, metavar="PART")
    _clip_arguments(benches.add_parser("clip", help="value and gradient of every objective preset, against ppo"))
    _policy_arguments(benches.add_parser("policy", help="train, score and decode, against transformers"))
    _async_arguments(benches.add_parser("async", help="bounded against synchronous, the engine at the trainer's pace"))


def xla_flags(threads: int, devices: int) -> str:
    """XLA_FLAGS with so many threads of a computation (1, or 0 for all) and made-up devices; JAX reads them once."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    if devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    return " ".join(flag for flag in flags if flag)


def _stay_on_one_core(threads: int) -> None:
    """One thread is meant: XLA runs operations that do not wait for each other on as many as there are cores.

    Two that share a core's caches and wait for each other take half as much processor time again.
    """
    if threads == 1 and hasattr(os, "sched_setaffinity"):  # not on a Mac
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _clip_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log2-tokens", type=int, nargs="+", default=[16, 18, 20, 22], metavar="N", help="batches of 2^N tokens"
    )
    parser.add_argument("--presets", nargs="+", default=[], metavar="NAME", help="all by default; ppo is always there")
    parser.add_argument("--aggregation", default="token_mean", help="of all presets; own = each its authors'")
    parser.add_argument("--repetitions", type=int, default=9, metavar="N", help="with fresh data each (default: 9)")
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU threads of a computation; 0 = all (default: 1)"
    )
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="shard the rows over N devices (on a CPU: made-up ones)"
    )
    parser.add_argument(
        "--train-step", type=Path, metavar="CONFIG", help="also (sat_gspo - gspo) as a share of this run's train step"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_bench_clip)


def _policy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--oracle",
        default=sys.executable,
        metavar="PYTHON",
        help="one with PyTorch and transformers, such as .venv-parity/bin/python (default: this one)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute type")
    parser.add_argument("--repetitions", type=int, default=9, metavar="N", help="turns of each side (default: 9)")
    parser.add_argument(
        "--threads", type=int, choices=(0, 1), default=1, help="CPU threads of a computation; 0 = all (default: 1)"
    )
    parser.add_argument("--remat", default="none", metavar="NAME", help="of the policy (default: none)")
    parser.add_argument("--head", action="store_true", help="also log-probs at a vocabulary of 151,936 against logits")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_bench_policy)


def _async_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.toml"), help="TOML file")
    parser.add_argument("--max-lag", type=int, default=1, metavar="N", help="of the bounded runs (default: 1)")
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="of every run (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of both kinds (default: 3)")
    parser.add_argument("--stand-in", action="store_true", help="an engine of made-up tokens, which keeps its pace")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_bench_async)


def _bench_clip(arguments: argparse.Namespace) -> None:
    # XLA reads this once, when JAX first makes a device.
    os.environ["XLA_FLAGS"] = xla_flags(arguments.threads, arguments.devices)
    _stay_on_one_core(arguments.threads)
    from train.bench_clip import Options, measure, report

    options = Options(
        log2_tokens=tuple(arguments.log2_tokens),
        presets=tuple(arguments.presets),
        aggregation=arguments.aggregation,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        devices=arguments.devices,
        train_step=arguments.train_step,
    )
    sys.stdout.write(report(measure(options), as_json=arguments.json) + "\n")


def _bench_policy(arguments: argparse.Namespace) -> None:
    os.environ["XLA_FLAGS"] = xla_flags(arguments.threads, 1)
    _stay_on_one_core(arguments.threads)
    from train.bench_policy import Options, measure, report

    options = Options(
        oracle=arguments.oracle,
        dtype=arguments.dtype,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        remat=arguments.remat,
        head=arguments.head,
    )
    sys.stdout.write(report(measure(options), as_json=arguments.json) + "\n")


def _bench_async(arguments: argparse.Namespace) -> None:
    from train.bench_async import Options, measure, report

    options = Options(
        config=arguments.config,
        max_lag=arguments.max_lag,
        steps=arguments.steps,
        rounds=arguments.rounds,
        stand_in=arguments.stand_in,
    )
    sys.stdout.write(report(measure(options), as_json=arguments.json) + "\n")
