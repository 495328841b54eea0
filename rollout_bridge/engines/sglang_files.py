"""Pushes as safetensors files in a folder that the SGLang server on the same host can read.

The folder is the bridge's own: one bridge at a time (a lock says so), nobody else may look into it, and what a killed
bridge left there is removed. By default it is in shared memory, so that a push costs no disk and at most one copy of
the weights. Files are written as the tensors come, sequentially: nothing but the tensor being written is held twice.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import Manifest, TensorSpec
from rollout_bridge.weights import spec_bytes

CONFIG = "config.json"
_FILE_BYTES = 4 << 30  # SGLang reads several files side by side
_CODES = {"float32": "F32", "bfloat16": "BF16"}


class StageRoot:
    """A bridge's folder of pushes."""

    def __init__(self, parent: Path, name: str) -> None:
        """Takes the folder `parent`/sat-jax-bridge-`name` and removes the weights that an earlier bridge left there.

        Raises:
          ValueError: another bridge holds it.
          OSError: it cannot be made.
        """
        self.path = parent / f"sat-jax-bridge-{name}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"staging folder {self.path}: expected one that no other bridge uses, got one that a running bridge "
                "holds; run one bridge for each SGLang server"
            ) from None
        # Folders that are left may be what the server calls its model; without weights they take no room.
        for left in self.path.glob("*/*.safetensors"):
            left.unlink()

    def begin(self, manifest: Manifest, config: Mapping[str, Any]) -> "Push":
        """A new push. There must be room for it.

        Args:
          manifest: that was checked against the model.
          config: `config.json` of the model, put beside the weights.

        Raises:
          Retryable: no room at the moment.
          Fatal: there never will be.
        """
        self._must_fit(sum(map(spec_bytes, manifest.tensors)), manifest.version)
        folder = self.path / f"v{manifest.version}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return Push(folder, manifest)

    def keep_only(self, folder: Path) -> None:
        """Removes every push, but of `folder` only the weights: the server holds them by now, and names that folder."""
        for weights in self.path.glob("*/*.safetensors"):
            weights.unlink()
        for other in self.path.iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other)

    def close(self) -> None:
        """Leaves the folder to the next bridge."""
        self._lock.close()

    def _must_fit(self, size: int, version: int) -> None:
        room = os.statvfs(self.path)
        free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        if size <= free:
            return
        text = (
            f"stage of version {version}: expected room for {size} bytes in {self.path}, got {free} free of {whole}; "
            "free some, enlarge it (containers: --shm-size), or choose another folder (--stage-folder)"
        )
        raise Retryable(text) if size <= whole else Fatal(text)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that lie one behind the other in a file, and between which bytes of it."""

    path: Path
    begin: int
    end: int
    tensors: tuple[TensorSpec, ...]


class Push:
    """One push, as files that are written in manifest order, by a thread while the next tensor is received."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._writer = _write_parts(folder, manifest)
        next(self._writer)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="sglang-stage")
        self._writing: concurrent.futures.Future[None] | None = None

    def put(self, array: np.ndarray) -> None:
        """Writes the next tensor of the manifest, as soon as the one before it has been written.

        Raises:
          Retryable: the disk was full for the one before it.
        """
        self._await()
        self._writing = self._thread.submit(self._writer.send, array)

    def finish(self) -> None:
        """All tensors have been put.

        Raises:
          Retryable: the disk was full for the last one.
        """
        self._await()
        self._thread.shutdown()
        with contextlib.suppress(StopIteration):
            next(self._writer)

    def buckets(self, size: int) -> Iterator[Bucket]:
        """All tensors in manifest order, as many in a bucket as `size` bytes hold; a larger one has its own."""
        for path, specs in _parts(self.folder, self.manifest):
            begin = end = len(header(specs))
            held: list[TensorSpec] = []
            for spec in specs:
                if held and end - begin + spec_bytes(spec) > size:
                    yield Bucket(path=path, begin=begin, end=end, tensors=tuple(held))
                    held, begin = [], end
                held.append(spec)
                end += spec_bytes(spec)
            yield Bucket(path=path, begin=begin, end=end, tensors=tuple(held))

    def remove(self) -> None:
        """Nothing of it stays."""
        self._thread.shutdown()
        self._writer.close()
        shutil.rmtree(self.folder)

    def _await(self) -> None:
        """Until what was put last has been written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Retryable(
                f"stage of version {self.manifest.version}: expected room in {self.folder.parent}, got {error.strerror}"
                "; the push is dropped: free some, or choose another folder (--stage-folder)"
            ) from error


def _write_parts(folder: Path, manifest: Manifest) -> Generator[None, np.ndarray, None]:
    """A coroutine that takes one array after the other and writes each to the file that it belongs to."""
    array = yield
    for path, specs in _parts(folder, manifest):
        with path.open("xb", buffering=0) as file:
            _write(file, header(specs))
            for spec in specs:
                assert (array.dtype.name, array.shape) == (spec.dtype, spec.shape), spec.name
                _write(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                array = yield


def _parts(folder: Path, manifest: Manifest) -> list[tuple[Path, list[TensorSpec]]]:
    """The files of a push, with the tensors of each."""
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in manifest.tensors:
        if parts[-1] and size + spec_bytes(spec) > _FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += spec_bytes(spec)
    names = (f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1))
    return [(folder / name, specs) for name, specs in zip(names, parts, strict=True)]


def header(specs: list[TensorSpec]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON padded to a multiple of 8.

    Source: the format's description in the safetensors repository.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers of PyTorch weights ask for it
    begin = 0
    for spec in specs:
        end = begin + spec_bytes(spec)
        entries[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: Any, data: bytes | memoryview) -> None:
    """All of it: a system call takes at most 2 GiB, and less when it likes."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
