"""Weight files: opens a Hugging Face folder of safetensors lazily, and writes one. Knows named arrays, no policy."""

import collections
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sat_jax.model.hf_names import some

# The library copies what it writes, so that a file costs twice its size in memory while it is written.
_FILE_BYTES = 2 * 2**30
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class WeightFolder:
    """The open weights of a folder; a context manager. Nothing is read before it is asked for.

    Attributes:
      shapes: of every tensor, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Opens every file and reads its header.

        Raises:
          ValueError: there are no weights; a file is cut off or damaged; the index does not agree with the files; a
            tensor is in two files, or of a type that is no float.
        """
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._slices: dict[str, Any] = {}
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        self.shapes = {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def __enter__(self) -> "WeightFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def read(self, name: str, index: tuple[slice | int, ...] = ()) -> np.ndarray:
        """A rectangle of a tensor, in memory of its own; all of it, without an index.

        Raises:
          ValueError: a number in it is not finite.
        """
        part = self._slices[name]
        tensor = part[index or tuple(slice(None) for _ in part.get_shape())]
        # In float32, because finiteness of bfloat16 is computed one number at a time.
        if not np.isfinite(tensor.astype(np.float32, copy=False)).all():
            raise ValueError(f"tensor {name}: expected finite numbers, got NaN or infinity ({self._folder})")
        return tensor

    def _open(self) -> None:
        owner: dict[str, Path] = {}
        mapped = self._mapped()
        for file in self._files(mapped):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="np"))
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"weights: expected a whole safetensors file, got: {error} ({file})") from error
            if twice := [name for name in slices if name in owner]:
                raise ValueError(
                    f"weights: expected each tensor once, got {some(twice)} in {owner[twice[0]]} and in {file}; remove "
                    "the file that is not the model's"
                )
            owner |= dict.fromkeys(slices, file)
            self._slices |= slices
        for name, part in self._slices.items():
            if part.get_dtype() not in _FLOATS:
                raise ValueError(f"tensor {name}: expected a float type, got {part.get_dtype()} ({owner[name]})")
        if mapped is not None:
            _check_index(mapped, owner, self._folder / _INDEX)

    def _mapped(self) -> Mapping[str, str] | None:
        """File of each tensor by the index; None without an index."""
        path = self._folder / _INDEX
        if not path.exists():
            return None
        try:
            mapped = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            known = {file: (self._folder / file).is_file() for file in mapped.values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"weights: expected an index with a weight_map, got: {error!r} ({path})") from error
        if absent := sorted(file for file, there in known.items() if not there):
            raise ValueError(f"weights: expected every file of the index, got no {some(absent)} ({path})")
        return mapped

    def _files(self, mapped: Mapping[str, str] | None) -> list[Path]:
        there = sorted(self._folder.glob("*.safetensors"))
        if not there:
            raise ValueError(f"weights: expected safetensors files, got none ({self._folder})")
        if mapped is None:
            return there
        if (self._folder / _ONE_FILE).exists() and _ONE_FILE not in mapped.values():
            raise ValueError(
                f"weights: expected {_ONE_FILE} or an index, got both ({self._folder}); remove what is not the model's"
            )
        return [self._folder / file for file in sorted(set(mapped.values()))]


def write_folder(
    tensors: Iterator[tuple[str, np.ndarray]], config: Mapping[str, Any], folder: Path, beside: Sequence[Path] = ()
) -> None:
    """Writes tensors and a `config.json`; the folder appears whole or not at all.

    Holds one file of at most 2 GiB (or one larger tensor) at a time, twice.

    Args:
      tensors: by name, in any order.
      config: what `config.json` says; the type of the tensors is added.
      folder: it must not exist, or be empty.
      beside: files to copy into it.

    Raises:
      ValueError: the folder exists and holds something.
      OSError: the disk refuses.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"weights: expected a new or empty folder, got one that holds something ({folder}); remove it")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        stored = _write_files(tensors, partial)
        typed = {"torch_dtype": stored} | ({"dtype": stored} if "dtype" in config else {})
        (partial / "config.json").write_text(json.dumps({**config, **typed}, indent=2) + "\n", encoding="utf-8")
        for path in beside:
            shutil.copyfile(path, partial / path.name)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_index(mapped: Mapping[str, str], owner: Mapping[str, Path], index: Path) -> None:
    wrong = [name for name, file in mapped.items() if name not in owner or owner[name].name != Path(file).name]
    extra = [name for name in owner if name not in mapped]
    if wrong or extra:
        raise ValueError(
            f"weights: expected an index that agrees with the files, got {some([*wrong, *extra])} elsewhere or in one "
            f"of the two alone ({index}); a file is of another model, or the index is"
        )


def _write_files(tensors: Iterator[tuple[str, np.ndarray]], folder: Path) -> str:
    """Writes the files and, where there are several, their index; returns the type that most of it has."""
    file_of: dict[str, int] = {}
    held: dict[str, np.ndarray] = {}
    files = total = room = 0
    stored: collections.Counter[str] = collections.Counter()
    for name, tensor in tensors:
        if tensor.nbytes > room:
            _write_part(folder, files, held)
            files, held, room = files + 1, {}, max(_FILE_BYTES, tensor.nbytes)
        held[name], file_of[name] = tensor, files
        stored[tensor.dtype.name] += tensor.nbytes
        room, total = room - tensor.nbytes, total + tensor.nbytes
    _write_part(folder, files, held)

    names = {n: f"model-{n:05}-of-{files:05}.safetensors" if files > 1 else _ONE_FILE for n in range(1, files + 1)}
    for number, file in names.items():
        os.replace(folder / f"{number}.part", folder / file)
    if files > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[number] for name, number in file_of.items()},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return stored.most_common(1)[0][0]


def _write_part(folder: Path, number: int, tensors: dict[str, np.ndarray]) -> None:
    if tensors:
        # Readers of PyTorch weights refuse a file that does not name its format.
        path = folder / f"{number}.part"
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"weights: expected to write {path}, got: {error}; free some space") from error
