"""Host memory of loading a Hugging Face folder onto eight made-up devices: `python tools/bench/bench_load.py`.

Writes a random checkpoint, loads it in a fresh process, and prints one line of JSON. What is measured is anonymous
memory (RssAnon of /proc/self/status, every 2 ms): on a CPU the devices' shards are part of it and are subtracted; the
pages of the mapped files are not, because the kernel takes them back whenever somebody needs them. The pages are
reported beside it (RssFile).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from sat_jax.model.hf_names import Layout

MIB = 2**20
DEVICES = 8


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint, about (default: 2048)")
    parser.add_argument("--layout", choices=("per-expert", "fused"), default="per-expert")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the file")
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32", help="of the policy")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        sys.stdout.write(json.dumps(load(arguments.folder, arguments.param_dtype)) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        sizes = write(folder, arguments.mib, arguments.dtype, arguments.layout)
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        done = subprocess.run(
            [sys.executable, __file__, "--folder", str(folder), "--param-dtype", arguments.param_dtype],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            check=True,
        )
    result = {"bench": "load", "layout": arguments.layout, "dtype": arguments.dtype, **sizes, **json.loads(done.stdout)}
    result["above_over_largest"] = round(result["above_mib"] / result["largest_mib"], 3)
    sys.stdout.write(json.dumps(result) + "\n")


def write(folder: Path, mib: int, dtype: str, layout: Layout) -> dict[str, float]:
    """A random checkpoint of about this size; nine tenths of it are experts."""
    import jax.numpy as jnp

    from sat_jax.model import PolicyConfig, hf
    from sat_jax.model.hf_files import write_folder

    itemsize = jnp.dtype(dtype).itemsize
    width, hidden, experts = 1024, 512, 32
    layers = max(1, round(0.87 * mib * MIB / (3 * width * hidden * experts * itemsize)))
    config = PolicyConfig(
        vocab_size=mib * 16,
        width=width,
        layers=layers,
        query_heads=8,
        kv_heads=2,
        head_dim=64,
        experts=experts,
        experts_per_token=4,
        expert_hidden=hidden,
        dtype=dtype,
    )
    draw = np.random.default_rng(0)
    shapes = hf.tensor_shapes(config, layout)
    tensors = ((name, draw.normal(0, 0.02, shape).astype(jnp.dtype(dtype))) for name, shape in shapes.items())
    write_folder(tensors, config.to_hf(), folder)
    sizes = [int(np.prod(shape)) * itemsize for shape in shapes.values()]
    return {"file_mib": round(sum(sizes) / MIB, 1), "largest_mib": round(max(sizes) / MIB, 1), "layers": layers}


def load(folder: Path, param_dtype: str) -> dict[str, float | str]:
    """Loads it and says how far memory rose above the shards."""
    import jax
    from flax import nnx

    from sat_jax.mesh import MeshConfig, make_mesh
    from sat_jax.model import PolicyConfig, hf

    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    tiny = hf.import_tensors(PolicyConfig.tiny(), lambda name: np.zeros(hf.tensor_shapes(PolicyConfig.tiny())[name]))
    jax.block_until_ready(nnx.state(tiny))  # what the libraries allocate once is not the checkpoint's
    highest, done = {"RssAnon": 0.0, "RssFile": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for name, value in memory().items():
                highest[name] = max(highest[name], value)

    before = memory()
    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    policy = hf.load(folder, mesh=mesh, param_dtype=param_dtype)
    jax.block_until_ready(nnx.state(policy))
    seconds = time.monotonic() - start
    done.set()
    watcher.join()
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(policy, nnx.Param)))
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards) / MIB
    return {
        "devices": jax.device_count(),
        "param_dtype": param_dtype,
        "shards_mib": round(held, 1),
        "above_mib": round(highest["RssAnon"] - before["RssAnon"] - held, 1),
        "mapped_mib": round(highest["RssFile"] - before["RssFile"], 1),
        "seconds": round(seconds, 1),
    }


def memory() -> dict[str, float]:
    """Resident anonymous and file-backed memory of this process, MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


if __name__ == "__main__":
    main()
