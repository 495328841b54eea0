"""How fast the real SGLang takes staged weights: from files in shared memory, and over a gloo process group.

    python tools/bench/bench_sglang_load.py [--rounds 5]

Needs the environment of `make test-sglang`. The two transports take turns on one server, from pause to continue, as the
bridge has them do, so that a busy machine slows both alike. Prints one JSON line; every figure is a median.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from rollout_bridge.engines import sglang_update
from rollout_bridge.engines.sglang_files import Push, StageRoot
from rollout_bridge.engines.sglang_group import ByGroup, GroupConfig
from rollout_bridge.engines.sglang_http import SglangHttp
from rollout_bridge.engines.sglang_server import read_facts
from rollout_bridge.engines.sglang_watch import Instance
from rollout_bridge.weights import Weights
from tests.sglang_cpu.server import SglangProcess, python_of_sglang
from tools.make_model import make_model

_CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_sglang.toml"
_SIZES = ("width=512", "layers=4", "experts=32", "expert_hidden=512", "query_heads=8", "kv_heads=2", "head_dim=64")
_SECONDS = 300.0


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(_CONFIG, folder / "model", overrides=tuple(f"policy.{size}" for size in _SIZES))
        server = SglangProcess(folder / "model", folder / "server.log", "--dtype", "bfloat16")
        stack.callback(server.kill)
        server.start()
        http = SglangHttp(server.url, api_key=None, admin_key=None)
        stack.callback(http.close)
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        root = StageRoot(shared, "bench")
        stack.callback(root.close)
        print(json.dumps(_measure(http, root, folder / "model", arguments.rounds)))


def _measure(http: SglangHttp, root: StageRoot, model: Path, rounds: int) -> dict[str, float]:
    weights = _weights(model)
    group = ByGroup(http, GroupConfig.with_python(python_of_sglang()))
    ways: dict[str, sglang_update.Transport] = {"disk": sglang_update.ByDisk(http), "gloo": group}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "write")}
    facts = read_facts(http, model, _SECONDS)
    instance = Instance(engine_id="bench", facts=facts)
    checksums: set[str] = set()
    with contextlib.closing(group):
        for number in range(rounds + 1):  # the first warms both up
            began = time.perf_counter()
            push = _stage(root, weights, facts.config)
            seconds["write"].append(time.perf_counter() - began)
            for name, way in ways.items():
                way.prepare(instance)
                seconds[name].append(_switch(http, way, push, f"{number}.{name}"))
                checksums.add(sglang_update.checksum(http, _SECONDS))
            push.remove()
    assert len(checksums) == 1, checksums
    disk, gloo, write = (statistics.median(found[1:]) for found in seconds.values())
    mebibytes = weights.num_bytes / (1 << 20)
    return {
        "mebibytes": mebibytes,
        "write_mib_s": mebibytes / write,
        "disk_mib_s": mebibytes / disk,
        "gloo_mib_s": mebibytes / gloo,
        "gloo_ratio": disk / gloo,
    }


def _weights(model: Path) -> Weights:
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(path).items()}
    return Weights(version=1, model_digest="bench", tensors=tensors)


def _stage(root: StageRoot, weights: Weights, config: Mapping[str, Any]) -> Push:
    push = root.begin(weights.manifest, config)
    for array in weights.tensors.values():
        push.put(array)
    push.finish()
    return push


def _switch(http: SglangHttp, way: sglang_update.Transport, push: Push, tag: str) -> float:
    """Seconds in which nothing was sampled."""
    began = time.perf_counter()
    sglang_update.switch(
        http,
        tag,
        lambda: way.load(push, tag, _SECONDS),
        abort=False,
        seconds=_SECONDS,
        changing=threading.Event().set,
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
