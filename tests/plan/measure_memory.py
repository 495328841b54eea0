"""One optimizer step on made-up devices, twice: what `plan` says that it needs, and what the second one takes.

Prints a JSON object with both, bytes over all devices. Run in a process of its own, whose XLA_FLAGS make the devices
and whose MALLOC_MMAP_THRESHOLD_ gives freed arrays back to the machine.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from sat_jax.mesh import make_mesh
from train.abstract import abstract_batch
from train.config import load
from train.plan import PlanOptions, make_plan
from train.plan.plan import policy_of
from train.state import init_policy, init_state
from train.step import Step


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def trim() -> None:
    """Gives back what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def main(config_path: str, topology: str, overrides: list[str]) -> None:
    config = load(config_path, overrides)
    plan = make_plan(config, PlanOptions(topology=topology), lambda line: print(line, file=sys.stderr))
    mesh, policy, optimizer = make_mesh(config.mesh), policy_of(config), config.optim.transformation()
    shapes = abstract_batch(policy, config.batch.rows, config.batch.row_length, mesh)

    def batch():
        # Every position real and trained on: one sequence a row.
        micro = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype, device=s.sharding), shapes)
        return (micro, *(jax.tree.map(jnp.copy, micro) for _ in range(plan.loads[1].microbatches - 1)))

    def fresh():
        graph, params = init_policy(policy, 0, mesh)
        return graph, init_state(params, optimizer, mesh, config.optim.moments_memory)

    graph, state = fresh()
    step = Step(graph, optimizer, config.objective.config, config.sampling.temperature, state)
    del state

    def once() -> None:
        _, state = fresh()
        micros = batch()
        measurement = step.measure(state, micros)
        reset_peak()
        _, done = step.update(state, micros, measurement)
        assert done.finite

    def reset_peak() -> None:
        trim()
        Path("/proc/self/clear_refs").write_text("5")

    once()
    trim()
    before = status("VmRSS")
    once()
    print(json.dumps({"planned": plan.fullest.need * plan.devices, "used": status("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
