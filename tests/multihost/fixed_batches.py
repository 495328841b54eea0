"""One process of a test: gradients of recorded batches and the parameters after a step, on the mesh that it is given.

python -m tests.multihost.fixed_batches BATCHES OUT AXIS=N,... MEMORY [COORDINATOR PROCESSES PROCESS]
"""

import sys
from pathlib import Path

import numpy as np

from train.multihost import Launch, join
from train.preemption import Preemption


def main() -> None:
    batches, out, axes, memory, *rest = sys.argv[1:]
    launch = Launch(coordinator=rest[0], processes=int(rest[1]), process=int(rest[2])) if rest else None
    sizes = {axis: int(size) for axis, _, size in (entry.partition("=") for entry in axes.split(","))}
    with join(launch, Preemption()) as team:
        arrays = compute(sorted(Path(batches).glob("*.npz")), sizes, memory)
        if team.share.process == 0:
            np.savez(out, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]


def compute(paths: list[Path], sizes: dict[str, int], memory: str) -> dict[str, np.ndarray]:
    from flax import nnx

    from sat_jax.mesh import MeshConfig, make_mesh
    from sat_jax.objective import ObjectiveConfig
    from tests.train.test_step import OPTIM, POLICY
    from train.export import whole
    from train.place import place
    from train.recording import load_batch
    from train.state import init_policy, init_state
    from train.step import Step

    mesh = make_mesh(MeshConfig(**sizes))
    graph, params = init_policy(POLICY, 0, mesh)
    optimizer = OPTIM.transformation()
    state = init_state(params, optimizer, mesh, memory)
    step = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, state)
    found = {}

    def keep(name: str, tree: nnx.State) -> None:
        for path, leaf in nnx.to_flat_state(tree):
            found[f"{name}/{'.'.join(map(str, path))}"] = whole(leaf.get_raw_value())

    for number, path in enumerate(paths):
        batch = place(load_batch(path), mesh)
        measurement = step.measure(state, batch)
        gradients, metrics = step.gradients(state.params, batch, measurement)
        keep(f"gradient{number}", gradients)
        if "sat/gate_rate" in metrics:
            found[f"gate_rate{number}"] = np.asarray(metrics["sat/gate_rate"].value())
    batch = place(load_batch(paths[0]), mesh)
    state, done = step.update(state, batch, step.measure(state, batch))
    keep("parameters", state.params)
    found |= {f"metric/{name}": np.float64(value) for name, value in done.metrics.items()}
    return found


if __name__ == "__main__":
    main()
