"""Writes a model folder (config.json and safetensors, Hugging Face names) for a run's policy, with random weights.

    python tools/make_model.py configs/quickstart_sglang.toml FOLDER [--seed 0] [--set policy.width=64]

What an SGLang server is started with for a run that begins from scratch; the trainer pushes its own weights before
anything is sampled. A run that begins at a checkpoint starts its servers with that checkpoint in place of this.
"""

import argparse
import dataclasses
from pathlib import Path

from flax import nnx

from sat_jax.model import Policy
from sat_jax.model.hf import save
from train.config import load
from train.setup import make_problem

_MIN_POSITIONS = 2048  # SGLang keeps some of a model's positions to itself


def make_model(config: Path, folder: Path, *, seed: int = 0, overrides: tuple[str, ...] = ()) -> None:
    """Writes the folder.

    Args:
      config: of the run.
      folder: must not exist, or be empty.
      seed: of the weights.
      overrides: of the config, `a.b=c` each.
    """
    policy = make_problem(load(config, overrides)).policy
    policy = dataclasses.replace(policy, max_positions=max(policy.max_positions, _MIN_POSITIONS))
    save(Policy(policy, nnx.Rngs(seed)), folder)


def main() -> None:
    """Parses and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    arguments = parser.parse_args()
    make_model(arguments.config, arguments.folder, seed=arguments.seed, overrides=tuple(arguments.overrides))


if __name__ == "__main__":
    main()
