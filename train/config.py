"""A run, described: one complete TOML file, read strictly, into frozen dataclasses that each room provides.

An unknown key, a wrong type, a value out of range or settings that contradict each other are errors before anything
starts, with the file and the key. Nothing is inherited from another file.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sat_jax.mesh import MeshConfig
from train.assemble import BatchConfig
from train.data import DataConfig, PromptConfig
from train.rewards import check_name
from train.sections import (
    AlarmsConfig,
    CheckpointConfig,
    EvalConfig,
    ObjectiveSection,
    PolicySection,
    RolloutConfig,
    SamplingConfig,
    WatchdogConfig,
)
from train.staleness import BoundedSchedule, Schedule, ScheduleConfig
from train.state import OptimConfig
from train.strict_toml import Range, apply_overrides, check_fields, dump, read_file, read_table
from train.tokenizer import TokenizerConfig
from train.verify.pool import VerifierConfig
from train.warm_start import WarmStartConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that a run depends on; `configs/quickstart.toml` explains every key.

    Attributes:
      name: the run folder is runs/<name>.
      seed: every random choice of the run follows from this and from counters.
      steps: optimizer steps after the warm start.
      reward: the verifier: a built-in one, or a function of yours, "module:function".
      schedule, data, tokenizer, prompt, policy, sampling, batch, objective, optim, warm_start, rollout, checkpoint,
        eval, alarms, mesh, watchdog, verifier: the sections.

    Raises:
      ValueError: settings that do not go together.
    """

    name: str
    seed: Annotated[int, Range(at_least=0, below=2**32)]
    steps: Annotated[int, Range(at_least=1)]
    reward: str
    schedule: ScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    prompt: PromptConfig
    policy: PolicySection
    sampling: SamplingConfig
    batch: BatchConfig
    objective: ObjectiveSection
    optim: OptimConfig
    warm_start: WarmStartConfig
    rollout: RolloutConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    alarms: AlarmsConfig
    mesh: MeshConfig
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    verifier: VerifierConfig = dataclasses.field(default_factory=VerifierConfig)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: expected letters, digits, '.', '_' and '-', not beginning with a sign, got {self.name!r}; "
                "it names the run folder"
            )
        check_name(self.reward)
        if self.tokenizer.kind != "file" and (self.prompt.chat or self.prompt.checkpoint_stop):
            raise ValueError(
                "prompt.chat, prompt.checkpoint_stop: expected false without a checkpoint's tokenizer, got true with "
                f'tokenizer.kind = "{self.tokenizer.kind}"'
            )
        if self.verifier.overlong_cache > self.sampling.max_new_tokens:
            raise ValueError(
                f"verifier.overlong_cache: expected at most sampling.max_new_tokens = {self.sampling.max_new_tokens}, "
                f"got {self.verifier.overlong_cache}"
            )
        if self.sampling.max_new_tokens >= self.batch.row_length:
            raise ValueError(
                f"batch.row_length: expected more than sampling.max_new_tokens = {self.sampling.max_new_tokens}, so "
                f"that a prompt fits before its completion, got {self.batch.row_length}"
            )
        if self.batch.rows % self.mesh.batch_shards:
            raise ValueError(
                f"batch.rows: expected a multiple of mesh data * fsdp * expert = {self.mesh.batch_shards}, got "
                f"{self.batch.rows}; use {-(-self.batch.rows // self.mesh.batch_shards) * self.mesh.batch_shards}"
            )
        _ = self.plan  # the schedule's own checks
        if not self.eval.path and self.eval.prompts > self.data.holdout:
            raise ValueError(
                f"eval.prompts: expected at most data.holdout = {self.data.holdout}, got {self.eval.prompts}"
            )

    @property
    def plan(self) -> Schedule | BoundedSchedule:
        """The run's schedule, as arithmetic."""
        if self.schedule.mode == "bounded":
            return BoundedSchedule(
                max_lag=self.schedule.max_lag,
                publish_every=self.schedule.publish_every,
                steps=self.steps,
                groups_per_step=self.batch.groups_per_step,
                minibatches=self.batch.minibatches,
            )
        return Schedule(
            lag=self.schedule.lag,
            steps=self.steps,
            groups_per_step=self.batch.groups_per_step,
            minibatches=self.batch.minibatches,
        )


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config file.

    Args:
      path: of the TOML file.
      overrides: `a.b=c` each, applied in order; c is read as TOML, and as a plain string where that fails.

    Raises:
      ValueError: the file, the key and what was expected there.
    """
    table = read_file(Path(path))
    try:
        return read_table(RunConfig, apply_overrides(RunConfig, table, overrides))
    except ValueError as error:
        changed = f" with {', '.join(overrides)}" if overrides else ""
        raise ValueError(f"{path}{changed}: {error}") from error


def to_toml(config: RunConfig) -> str:
    """The resolved config as a TOML file that loads back equal."""
    return (
        f"# The resolved config of the run {config.name!r}: the file it came from, with its overrides.\n{dump(config)}"
    )
