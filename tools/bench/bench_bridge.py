"""Throughput of a push against a bare gRPC byte stream of the same chunk size, and the cost of decoding completions.

    python tools/bench/bench_bridge.py [--mebibytes 256] [--rounds 5]

Two processes on loopback. The bare stream, a push that is kept in memory, and one that is written to shared memory as
for SGLang take turns, so that a busy machine slows all alike. Prints one JSON line; a ratio is of medians, or, where it
says so, of the fastest rounds, which other programs disturbed least.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent import futures
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np

from rollout_bridge import Client, Completion, Finish, LogprobDefinition, Manifest, ModelInfo, Trace, codec, serve
from rollout_bridge.checks import check_completion
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.sglang_files import Push, StageRoot
from rollout_bridge.messages import SampleRequest, Sampling, TensorSpec
from rollout_bridge.transport import CHUNK_BYTES, MAX_MESSAGE_BYTES, common_options
from rollout_bridge.weights import Weights

_SHAPE = (768, 2048)  # one expert matrix of a 30B-A3B model, 3 MiB in bfloat16
_METHOD = "/bare.Bytes/Send"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of a push")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = _model(arguments.mebibytes)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, model), daemon=True)
    process.start()
    try:
        result = _push(here.recv(), model, arguments.rounds) | _decode(arguments.rounds)
    finally:
        here.send(None)
        process.join(10)
    print(json.dumps(result))


def _model(mebibytes: int) -> ModelInfo:
    count = max(1, mebibytes * (1 << 20) // (2 * _SHAPE[0] * _SHAPE[1]))
    tensors = tuple(TensorSpec(name=f"expert.{index}", dtype="bfloat16", shape=_SHAPE) for index in range(count))
    return ModelInfo(
        model_digest="bench",
        vocab_size=151_936,
        moe_layers=48,
        num_experts=128,
        top_k=8,
        max_tokens=1 << 17,
        tensors=tensors,
        dtype="bfloat16",
    )


class _Keeping(FakeEngine):
    """Keeps a push in memory and computes nothing from it."""

    def stage(self, manifest: Manifest) -> "_Shelf":  # type: ignore[override]
        """Begins a push."""
        return _Shelf()


class _Shelf:
    def __init__(self) -> None:
        self._tensors: dict[str, np.ndarray] = {}

    def put(self, name: str, array: np.ndarray) -> None:
        self._tensors[name] = array

    def finish(self) -> None:
        self._tensors.clear()

    def discard(self) -> None:
        self._tensors.clear()


class _Writing(FakeEngine):
    """Stages a push as the SGLang engine does: as files in shared memory."""

    def __init__(self, model: ModelInfo, root: StageRoot) -> None:
        super().__init__(model)
        self._root = root

    def stage(self, manifest: Manifest) -> "_Writer":  # type: ignore[override]
        """Begins a push."""
        return _Writer(self._root.begin(manifest, {}))


class _Writer:
    def __init__(self, push: Push) -> None:
        self._push = push

    def put(self, name: str, array: np.ndarray) -> None:
        self._push.put(array)

    def finish(self) -> None:
        self._push.finish()
        self._push.remove()

    def discard(self) -> None:
        self._push.remove()


def _serve(pipe: Connection, model: ModelInfo) -> None:
    """The receiving process: the bridge, and a bare stream that keeps its bytes as well."""

    def receive(chunks, _context):
        return str(sum(map(len, list(chunks)))).encode()

    bare = grpc.server(futures.ThreadPoolExecutor(4), options=common_options(MAX_MESSAGE_BYTES))
    handler = grpc.stream_unary_rpc_method_handler(receive)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bytes", {"Send": handler}),))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writing = _Writing(model, StageRoot(Path(folder), "bench"))
        with serve(_Keeping(model), "127.0.0.1:0") as keeper, serve(writing, "127.0.0.1:0") as writer:
            pipe.send((keeper.address, f"127.0.0.1:{port}", writer.address))
            pipe.recv()


def _push(addresses: tuple[str, str, str], model: ModelInfo, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    tensors = {spec.name: rng.integers(0, 0x7F80, spec.shape, np.uint16) for spec in model.tensors}  # finite numbers
    views = {name: array.view(ml_dtypes.bfloat16) for name, array in tensors.items()}
    weights = Weights(version=1, model_digest="bench", tensors=views)
    began = time.perf_counter()
    size = weights.num_bytes
    digest = time.perf_counter() - began
    chunks = [bytes(chunk.data) for chunk in weights.chunks(CHUNK_BYTES)]
    seconds: dict[str, list[float]] = {"bare": [], "push": [], "written": [], "write": []}
    with (
        Client(addresses[0]) as client,
        grpc.insecure_channel(addresses[1]) as channel,
        Client(addresses[2]) as writer,
    ):
        send = channel.stream_unary(_METHOD)
        for _ in range(rounds + 1):  # the first warms both up
            began = time.perf_counter()
            assert int(send(iter(chunks), timeout=300)) == size
            seconds["bare"].append(time.perf_counter() - began)
            began = time.perf_counter()
            assert client.stage(weights).num_bytes == size
            seconds["push"].append(time.perf_counter() - began)
            client.discard()
            began = time.perf_counter()
            report = writer.stage(weights)
            seconds["written"].append(time.perf_counter() - began)
            seconds["write"].append(report.seconds_write)
            writer.discard()
    bare, push, written, write = (statistics.median(seconds[name][1:]) for name in seconds)
    fastest = {name: min(found[1:]) for name, found in seconds.items()}
    mebibytes = size / (1 << 20)
    return {
        "mebibytes": mebibytes,
        "push_ratio_fastest": fastest["bare"] / fastest["push"],
        "written_ratio_fastest": fastest["bare"] / fastest["written"],
        "bare_mib_s": mebibytes / bare,
        "push_mib_s": mebibytes / push,
        "push_ratio": bare / push,
        "push_ratio_with_digest": bare / (push + digest),
        "written_mib_s": mebibytes / written,
        "written_ratio": bare / written,
        "written_ratio_with_digest": bare / (written + digest),
        "write_share": write / written,
        "digest_mib_s": mebibytes / digest,
    }


def _decode(rounds: int) -> dict[str, float]:
    """Seconds for a million tokens of a 30B-A3B model, in completions of 8192."""
    model, prompt, count = _model(3), np.arange(1, dtype=np.int32), 8192
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((count, 48, 16), np.float32), axis=-1)[:, :, :8].astype(np.uint8)
    request = SampleRequest(
        request_id="t0",
        prompt_tokens=prompt,
        sampling=Sampling(max_new_tokens=count, stop_ids=(), seed=0),
        members=(0,),
    )
    completion = Completion(
        request_id="t0",
        member=0,
        tokens=rng.integers(0, model.vocab_size, count).astype(np.int32),
        behavior_logp=-rng.random(count, np.float32),
        version=np.full(count, 7, np.int32),
        trace=Trace(experts_TLK=experts, first_row=0, version_T=np.full(count, 7, np.int32)),
        finish=Finish.LENGTH,
        engine_id="e",
        logprob=LogprobDefinition(temperature=1.0),
    )
    encoded = codec.encode_completion(completion).SerializeToString()
    kind = type(codec.encode_completion(completion))
    decode, check = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        decoded = codec.decode_completion(kind.FromString(encoded))
        decode.append(time.perf_counter() - began)
        began = time.perf_counter()
        check_completion(decoded, request, model)
        check.append(time.perf_counter() - began)
    scale = 1e6 / count
    return {
        "bytes_per_token": len(encoded) / count,
        "decode_s_per_million_tokens": statistics.median(decode) * scale,
        "check_s_per_million_tokens": statistics.median(check) * scale,
    }


if __name__ == "__main__":
    main()
