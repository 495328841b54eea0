"""The programs of an optimizer step, compiled for a topology: memory and collectives of each, and a cache of them."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from train.plan.collectives import Collective, collectives

_GIB = 2**30
# The compiler's two ways to say that a program does not fit.
_TOO_LARGE = (
    re.compile(r"total memory required[^(]*\(([\d.]+)([KMG])i?B?\) exceeds available \w+ \(([\d.]+)([KMG])"),
    re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": _GIB}
# A cached result of another form than this is compiled anew.
_FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the compiler lays out on each device for one program, bytes.

    Attributes:
      argument, output, temporary: sizes. Temporaries may be more than fits: not all of them live at once.
      alias: of outputs that take over an argument's place.
      peak: the most that lives at once, arguments included; this is what has to fit. On TPU it is the compiler's own
        figure: a program of 21.6 GiB of temporaries and a peak of 14.5 compiles for 15.75 GiB, one with a peak of 21.0
        does not. Elsewhere temporaries are one allocation, and that figure leaves them out: it is the sum.
      host_argument, host_output: of the host's memory, for each device; in none of the others.
    """

    argument: int
    output: int
    temporary: int
    alias: int
    peak: int
    host_argument: int = 0
    host_output: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One program.

    Attributes:
      memory: None where it does not fit.
      required: bytes that the compiler wanted where it does not fit, else 0.
      available: bytes that it had, where it said so, else 0.
      collectives: largest first.
      seconds: that compiling took, on the machine that compiled it.
    """

    memory: Memory | None
    required: int
    available: int
    collectives: tuple[Collective, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """For what is compiled.

    Attributes:
      topology: its name.
      kind: of its chips: tpu, cuda or cpu.
      shape: sizes of the mesh by axis.
      cache: folder of results by program, topology and versions; None = none.
    """

    topology: str
    kind: str
    shape: Mapping[str, int]
    cache: Path | None


def compile_program(
    name: str,
    traced: jax.stages.Traced,
    where: Where,
    say: Callable[[str], None],
) -> Compiled:
    """Compiles a program, or finds it in the cache.

    Args:
      name: for the progress.
      traced: the program.
      where: for what, and the cache.
      say: progress, a line each.
    """
    lowered = traced.lower()
    path = None if where.cache is None else where.cache / f"{_digest(lowered.as_text(), where.topology)}.json"
    if path is not None and path.is_file() and (found := _read(path, say)) is not None:
        say(f"{name}: known from {path}")
        return found
    say(f"{name}: compiling for {where.topology}")
    began = time.monotonic()
    compiled = dataclasses.replace(_compile(lowered, where), seconds=time.monotonic() - began)
    say(f"{name}: {'compiled' if compiled.memory else 'does not fit'}, {compiled.seconds:.0f} s")
    if path is not None:
        # Of this process, for another one may plan the same.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(compiled)}), encoding="utf-8")
        partial.replace(path)
    return compiled


def open_cache(folder: Path | None) -> None:
    """Makes the folder of cached results, if there is to be one, before minutes are spent on what it is to hold.

    Raises:
      ValueError: nothing can be written there.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"plan's cache: expected a folder that can be written, got {folder}: {error.strerror}; choose another one "
            "with --runs, or --no-cache"
        ) from error


def _compile(lowered: jax.stages.Lowered, where: Where) -> Compiled:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        required, available = too_large(str(error))
        if not required:
            raise
        return Compiled(memory=None, required=required, available=available, collectives=(), seconds=0.0)
    stats: Any = compiled.memory_analysis()
    argument, output, alias = (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
    )
    laid_out = argument + stats.temp_size_in_bytes + output - alias
    memory = Memory(
        argument=argument,
        output=output,
        temporary=stats.temp_size_in_bytes,
        alias=alias,
        # What TPU's compiler names as the peak is of both memories; what is in the host's stays there throughout.
        peak=stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes if where.kind == "tpu" else laid_out,
        host_argument=stats.host_argument_size_in_bytes,
        host_output=stats.host_output_size_in_bytes,
    )
    found = collectives(compiled.as_text() or "", where.shape)
    return Compiled(memory=memory, required=0, available=0, collectives=found, seconds=0.0)


def too_large(message: str) -> tuple[int, int]:
    """Bytes that a compiler wanted and had, from its refusal; zeros where the message is about something else."""
    for pattern in _TOO_LARGE:
        if match := pattern.search(message):
            wanted, unit, had, had_unit = match.groups()
            return int(float(wanted) * _UNITS[unit]), int(float(had) * _UNITS[had_unit])
    return 0, 0


def _digest(text: str, topology: str) -> str:
    versions = [f"{name} {_version(name)}" for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")]
    return hashlib.sha256("\n".join([topology, *versions, text]).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _read(path: Path, say: Callable[[str], None]) -> Compiled | None:
    """A cached result; None where it is of another form, or damaged."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("format", None) != _FORMAT:
            return None
        memory = saved.pop("memory")
        found = tuple(Collective(**{**one, "axes": tuple(one["axes"])}) for one in saved.pop("collectives"))
        return Compiled(memory=None if memory is None else Memory(**memory), collectives=found, **saved)
    except (ValueError, TypeError, KeyError, AttributeError):
        say(f"{path} is damaged, and is replaced")
        return None
