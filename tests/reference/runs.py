"""A run header and plausible steps, for the tests of what a run leaves behind."""

import math
from collections.abc import Iterator
from typing import Any

from train.run_folder import RunHeader, SampleLine


def make_header(**changes: Any) -> RunHeader:
    """The quickstart's header with some fields changed."""
    fields: dict[str, Any] = {
        "name": "quickstart",
        "steps": 240,
        "objective": "sat_grpo",
        "radii": "sat",
        "eps_low": 0.2,
        "eps_high": 0.2,
        "mode": "batch_wise",
        "lag": 4,
        "max_lag": 7,
        "replay": True,
        "reward": "exact_match",
        "seed": 0,
        "model": "Qwen3-MoE, 2 layers",
        "parameters": 141_632,
        "device": "1 x cpu",
        "warm_start_steps": 1000,
        "warm_start_noise": 0.2,
        "resume_command": "sat-jax train runs/quickstart/config.toml",
        "versions": {"python": "3.11.7"},
    }
    return RunHeader(**(fields | changes))


def make_metrics(version: int) -> dict[str, float]:
    """Healthy figures of one step: no alarm level is passed."""
    wave = math.sin(version)
    return {
        "reward/mean": 0.5 + 0.3 * (1 - math.exp(-version / 80)) + 0.02 * wave,
        "reward/zero_std": 0.2,
        "entropy": 0.6 * math.exp(-version / 200),
        "mismatch/abs_mean": 0.01 + 0.002 * wave,
        "mismatch/abs_max": 0.4,
        "mismatch/k3": 2e-4,
        "mismatch/ess": 0.99,
        "sat/threshold": 0.04,
        "sat/effective_low": 0.06,
        "sat/effective_high": 0.063,
        "sat/active_low": 1.0,
        "sat/active_high": 1.0,
        "sat/gate_rate": 0.1,
        "clip/fraction": 0.03,
        "clip/newly": 0.004,
        "lag/mean": 5.5,
        "lag/max": 7.0,
        "routing/agreement": 0.95,
        "routing/missing": 0.0,
        "grad_norm": 0.4,
        "tokens": 780.0,
        "compiles": 14.0,
        "pack/fill": 0.86,
        "learning_rate": 3e-4,
    }


def make_samples(reward: float = 1.0) -> tuple[SampleLine, ...]:
    """Two completions."""
    return (
        SampleLine(prompt="12+34=", completion="64", answer="64", reward=reward),
        SampleLine(prompt="7+85=", completion="28", answer="29", reward=0.0),
    )


def make_rows(steps: int) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    for version in range(1, steps + 1):
        yield {"version": version, "time": 1e9 + version, "seconds/step": 0.5, **make_metrics(version)}
