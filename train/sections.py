"""Sections of a run's config that have no room of their own; the others stand beside the code that they configure."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from sat_jax.advantages import AdvantageConfig
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from sat_jax.objective.config import used_fields
from train.strict_toml import Range, check_fields, convert, field_types, nearest

DtypeName = Literal["float32", "bfloat16"]
_Count = Annotated[int, Range(at_least=1)]
_Maybe = Annotated[int, Range(at_least=0)]
_Positive = Annotated[float, Range(above=0)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolicySection:
    """The policy's architecture (Qwen3-MoE); its vocabulary is the tokenizer's.

    Attributes:
      width, layers, query_heads, kv_heads, head_dim, experts, experts_per_token, expert_hidden: D, L, H, G, C, E, K, F.
      rope_theta: base of the rotary frequencies.
      tie_embeddings: whether the head is the transposed embedding.
      dtype: compute type of the trainer.
      remat: full: every layer is recomputed in the backward pass; none: nothing is.
    """

    width: _Count
    layers: _Count
    query_heads: _Count
    kv_heads: _Count
    head_dim: _Count
    experts: _Count
    experts_per_token: _Count
    expert_hidden: _Count
    rope_theta: _Positive
    tie_embeddings: bool
    dtype: DtypeName
    remat: str

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        self.build(vocab_size=1, max_positions=1)  # the architecture's own checks, before a tokenizer is there

    def build(self, vocab_size: int, max_positions: int) -> PolicyConfig:
        """The policy's own config.

        Args:
          vocab_size: V, the tokenizer's.
          max_positions: longest sequence, tokens.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return PolicyConfig(vocab_size=vocab_size, max_positions=max_positions, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the fleet samples for training: no top-p and no top-k, whose log-probs the trainer does not reproduce.

    Attributes:
      temperature: the trainer divides its logits by the same value.
      max_new_tokens: bound on a completion, stop token included.
    """

    temperature: _Positive
    max_new_tokens: _Count

    def __post_init__(self) -> None:
        check_fields(self, "sampling")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSection:
    """The loss and its advantages: a preset, with fields overridden.

    Attributes:
      preset: its name.
      replay: whether to train on the experts that the sampler chose (R3).
      config: the resolved objective; any of its fields may be a key of the table.
      advantage: the resolved advantages; keys `advantage_std` and `advantage_baseline`, else the preset's authors'.
    """

    preset: str
    replay: bool
    config: ObjectiveConfig
    advantage: AdvantageConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> "ObjectiveSection":
        """Reads `preset`, `replay` and overrides.

        Raises:
          ValueError: an unknown preset or field, or one that the preset does not use.
        """
        own = {"preset": str, "replay": bool}
        shaping = {"advantage_std": str, "advantage_baseline": str}
        types: dict[str, Any] = own | shaping | field_types(ObjectiveConfig)
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}: expected a table, got {table!r}; write [{where}]")
        for key in table:
            if key not in types:
                raise ValueError(f"{where}.{key}: expected a known key, got {key!r}; {nearest(key, types)}")
        for key in own:
            if key not in table:
                raise ValueError(f"{where}.{key}: expected a value, got none; a file holds every key of its run")
        values = {key: convert(types[key], value, f"{where}.{key}") for key, value in table.items()}
        preset, replay = values.pop("preset"), values.pop("replay")
        shaped = {key.removeprefix("advantage_"): values.pop(key) for key in shaping if key in values}
        try:
            config = ObjectiveConfig.preset(preset, **values)
            advantage = dataclasses.replace(AdvantageConfig.for_objective(preset), **shaped)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return cls(preset=preset, replay=replay, config=config, advantage=advantage)

    def to_table(self) -> dict[str, Any]:
        """Every field that the objective uses, so that a later release's preset cannot change a saved run."""
        values = dataclasses.asdict(self.config)
        read = used_fields(values)
        used = {name: value for name, value in values.items() if name in read and value is not None}
        shaping = {"advantage_std": self.advantage.std, "advantage_baseline": self.advantage.baseline}
        return {"preset": self.preset, "replay": self.replay, **used, **shaping}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The fleet, and how it is fed.

    Attributes:
      engine: local: the run starts its own sampler process; remote: `endpoints` are bridges.
      endpoints: "host:port" of bridges, for engine "remote".
      listen: "host:port" where the local engine's bridge listens; port 0 = any free one.
      dtype: compute type of the local sampler, and of the tensors on the wire.
      slots: sequences that the local engine decodes at once.
      deadline: seconds without any completion after which the run stops.
      probe_tolerance: a version serves only if its log-probs of the probe agree to this (`ProbeReport.mean_abs`), nats.
      chunk_bytes: of a push.
    """

    engine: Literal["local", "remote"]
    endpoints: tuple[str, ...]
    listen: str
    dtype: DtypeName
    slots: _Count
    deadline: _Positive
    probe_tolerance: _Positive
    chunk_bytes: _Count

    def __post_init__(self) -> None:
        check_fields(self, "rollout")
        if self.engine == "remote" and not self.endpoints:
            raise ValueError('rollout.endpoints: expected at least one "host:port" with engine = "remote", got none')
        if self.engine == "local" and self.endpoints:
            raise ValueError(
                f'rollout.endpoints: expected none with engine = "local", got {list(self.endpoints)}; '
                'set rollout.engine = "remote"'
            )
        for address in (self.listen, *self.endpoints):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f'rollout: expected addresses "host:port", got {address!r}')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, and how many to keep.

    Attributes:
      every: steps, rounded up to the edge of a window; 0 = only at the end.
      keep: newest checkpoints that stay.
      keep_best: beside them, those with the highest training reward since the checkpoint before them.
    """

    every: _Maybe
    keep: _Count
    keep_best: _Maybe = 0

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogConfig:
    """When a run that does not move is ended.

    Attributes:
      seconds: that one computation, save or copy of weights may take; then the run writes every thread's stack into
        its folder, and ends when that part has not moved after as long again. Waits for the fleet have deadlines of
        their own (`rollout.deadline`).
    """

    seconds: _Positive = 1800.0

    def __post_init__(self) -> None:
        check_fields(self, "watchdog")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation.

    Attributes:
      every: steps; 0 = only before and after.
      prompts: held-out prompts, at most; 0 = no evaluation.
    """

    every: _Maybe
    prompts: _Maybe

    def __post_init__(self) -> None:
        check_fields(self, "eval")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlarmsConfig:
    """Levels above which a figure raises a warning; what is normal depends on model size and learning rate.

    Attributes:
      mismatch_abs_mean: mean |log pi - log mu| over trained tokens, nats.
      mismatch_k3: the k3 estimate of KL(mu || pi), nats.
      mismatch_mult_prob_error: mean of exp |log pi - log mu|.
    """

    mismatch_abs_mean: _Positive
    mismatch_k3: _Positive
    mismatch_mult_prob_error: Annotated[float, Range(above=1)]

    def __post_init__(self) -> None:
        check_fields(self, "alarms")

    def levels(self) -> dict[str, float]:
        """By metric name."""
        return {
            "mismatch/abs_mean": self.mismatch_abs_mean,
            "mismatch/k3": self.mismatch_k3,
            "mismatch/mult_prob_error": self.mismatch_mult_prob_error,
        }
