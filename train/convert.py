"""`sat-jax convert`: a Hugging Face folder, or a run's checkpoint, to a Hugging Face folder that can be deployed.

Weights pass through the host's memory a tensor (of a checkpoint: a leaf, all layers of one kind) and an output file at
a time; no device is used. What an engine needs beside the weights is copied: tokenizer, generation config, template.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sat_jax.model import PolicyConfig
from sat_jax.model.hf import export_leaves, read_tensors
from sat_jax.model.hf_files import write_folder
from sat_jax.model.hf_names import Layout
from train.checkpoint import Folder, parameter_reader, read_meta
from train.config import load
from train.run_folder import CONFIG
from train.store import cut_folder, versions

# What stands beside the weights in a Hugging Face folder and means the same after a conversion.
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to convert.

    Attributes:
      dtype: "float32" or "bfloat16"; None = as stored.
      layout: of the experts: per-expert or fused.
      version: of a run's checkpoint; None = the newest.
    """

    dtype: str | None = None
    layout: Layout = "per-expert"
    version: int | None = None


def convert(source: Path, target: Path, options: Options) -> str:
    """Writes a Hugging Face folder; it appears whole or not at all.

    Args:
      source: a Hugging Face folder or a run folder.
      target: must not exist, or be empty.
      options: how.

    Returns:
      What was written, in a line.

    Raises:
      ValueError: the source is neither, is not whole, or holds what cannot be converted; the target holds something.
      OSError: the disk refuses.
    """
    if (source / "config.json").exists():
        if options.version is not None:
            raise ValueError(f"--version: expected a run folder, got a Hugging Face folder ({source})")
        return _convert_folder(source, target, options)
    if (source / CONFIG).exists():
        return _convert_run(source, target, options)
    raise ValueError(f"{source}: expected a Hugging Face folder (config.json) or a run folder ({CONFIG}), got neither")


def _convert_folder(source: Path, target: Path, options: Options) -> str:
    policy = PolicyConfig.from_hf(source)
    tensors = read_tensors(source, policy, options.dtype, options.layout)
    return _write(tensors, _read_config(source), target, beside=_beside(source))


def _convert_run(source: Path, target: Path, options: Options) -> str:
    config = load(source / CONFIG)
    checkpoints = cut_folder(source, config)
    version = _version(checkpoints, options.version)
    read = parameter_reader(checkpoints, version)
    policy = config.policy.build(vocab_size=len(read(("embedding_VD",))), max_positions=config.batch.row_length)
    saved = read_meta(checkpoints, version)["identity"]["policy"]
    if policy.digest() != saved:
        raise ValueError(
            f"checkpoint {version}: expected the policy of {source / CONFIG} ({policy.digest()}), got another one "
            f"({saved}); restore the [policy] that the checkpoint was made with"
        )
    beside = _beside(Path(config.tokenizer.path).parent) if config.tokenizer.kind == "file" else ()
    hf = _read_config(Path(config.policy.path)) if config.policy.path else policy.to_hf()
    tensors = export_leaves(read, policy, options.dtype, options.layout)
    return f"version {version}: {_write(tensors, hf, target, beside=beside)}"


def _read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _version(checkpoints: Folder, wanted: int | None) -> int:
    there = versions(checkpoints)
    if not there or (wanted is not None and wanted not in there):
        raise ValueError(
            f"checkpoint: expected {'one' if wanted is None else f'version {wanted}'}, got "
            f"{'versions ' + ', '.join(map(str, there)) if there else 'none'} ({checkpoints})"
        )
    return there[-1] if wanted is None else wanted


def _beside(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in _BESIDE if (folder / name).is_file())


def _write(
    tensors: Iterator[tuple[str, np.ndarray]], config: Mapping[str, Any], target: Path, beside: tuple[Path, ...]
) -> str:
    seen = {"tensors": 0, "bytes": 0}

    def counted() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in tensors:
            seen["tensors"] += 1
            seen["bytes"] += tensor.nbytes
            yield name, tensor

    write_folder(counted(), config, target, beside)
    also = f" beside {', '.join(path.name for path in beside)}" if beside else ""
    return f"{seen['tensors']} tensors, {seen['bytes'] / 2**20:.1f} MiB in {target}{also}"
