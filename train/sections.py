"""Sections of a run's config that have no room of their own; the others stand beside the code that they configure."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from sat_jax.advantages import AdvantageConfig
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from sat_jax.objective.config import used_fields
from train.strict_toml import Range, check_fields, convert, field_types, nearest, read_table

DtypeName = Literal["float32", "bfloat16"]
# What is said of a policy whose architecture is a checkpoint's.
_BESIDE_PATH = ("path", "dtype", "remat")
_Count = Annotated[int, Range(at_least=1)]
_Maybe = Annotated[int, Range(at_least=0)]
_Positive = Annotated[float, Range(above=0)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolicySection:
    """The policy's architecture (Qwen3-MoE or dense Qwen3), and where its first weights are.

    Either `path`, `dtype` and `remat` are given, and the rest is the checkpoint's; or all but `path`: the weights are
    random then, and the vocabulary is the tokenizer's.

    Attributes:
      width, layers, query_heads, kv_heads, head_dim: D, decoder layers, H, G, C.
      experts, experts_per_token, expert_hidden: E, K, F; 0 where no layer has experts.
      dense_layers: numbers of the layers without experts, from 0.
      dense_hidden: F of these; 0 where there are none.
      rope_theta: base of the rotary frequencies.
      tie_embeddings: whether the head is the transposed embedding.
      dtype: compute type of the trainer.
      remat: what the backward pass recomputes of a layer: none, full (all of it), attention (all but attention),
        projections (neither attention nor its four projections).
      path: Hugging Face folder of the weights to start from; "" = none.
    """

    width: _Count
    layers: _Count
    query_heads: _Count
    kv_heads: _Count
    head_dim: _Count
    experts: _Maybe
    experts_per_token: _Maybe
    expert_hidden: _Maybe
    dense_layers: tuple[int, ...]
    dense_hidden: _Maybe
    rope_theta: _Positive
    tie_embeddings: bool
    dtype: DtypeName
    remat: str
    path: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        self.build(vocab_size=1, max_positions=1)  # the architecture's own checks, before a tokenizer is there

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> "PolicySection":
        """Reads the sizes, or `path` and what a checkpoint does not say.

        Raises:
          ValueError: a key is unknown, missing, or beside `path` though it is the checkpoint's; or that is unreadable.
        """
        if not isinstance(table, Mapping) or not table.get("path"):
            return read_table(cls, table, where)
        own = {name: table[name] for name in _BESIDE_PATH if name in table}
        sizes = {field.name for field in dataclasses.fields(cls)} - own.keys()
        if beside := sorted(sizes & table.keys()):
            raise ValueError(
                f"{where}.path: expected no key beside it that the checkpoint decides, got {', '.join(beside)}; remove "
                f"{'it' if len(beside) == 1 else 'them'}"
            )
        checkpoint = PolicyConfig.from_hf(str(table["path"]))
        fields = {name: getattr(checkpoint, name) for name in sizes if name not in _BESIDE_PATH}
        return read_table(cls, {**fields, **table}, where)

    def to_table(self) -> dict[str, Any]:
        """What `from_table` reads back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.path:
            return {name: fields[name] for name in _BESIDE_PATH}
        return {name: value for name, value in fields.items() if name != "path"}

    def build(self, vocab_size: int, max_positions: int) -> PolicyConfig:
        """The policy's own config.

        Args:
          vocab_size: the tokenizer's: V, or at most the checkpoint's V.
          max_positions: longest sequence, tokens.

        Raises:
          ValueError: the tokenizer has more tokens, or a sequence more positions, than the checkpoint.
        """
        if self.path:
            return self._of_checkpoint(vocab_size, max_positions)
        return PolicyConfig(vocab_size=vocab_size, max_positions=max_positions, **self.to_table())

    def _of_checkpoint(self, vocab_size: int, max_positions: int) -> PolicyConfig:
        checkpoint = PolicyConfig.from_hf(self.path)
        if vocab_size > checkpoint.vocab_size:
            raise ValueError(
                f"tokenizer: expected at most {checkpoint.vocab_size} tokens, the vocabulary of {self.path}, got "
                f"{vocab_size}; set tokenizer.path to the checkpoint's own tokenizer.json"
            )
        if max_positions > checkpoint.max_positions:
            raise ValueError(
                f"batch.row_length: expected at most {checkpoint.max_positions}, the longest sequence of {self.path}, "
                f"got {max_positions}"
            )
        return dataclasses.replace(checkpoint, dtype=self.dtype, remat=self.remat, max_positions=max_positions)


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
      endpoints: "host:port" of bridges, for engine "remote"; "dns:name:port" stands for every address of a name.
      listen: "host:port" where the local engine's bridge listens; port 0 = any free one.
      dtype: compute type of the local sampler, and of the tensors on the wire.
      slots: sequences that the local engine decodes at once.
      deadline: seconds without any completion after which the run stops.
      probe_tolerance: a version serves only if its log-probs of the probe agree to this (`ProbeReport.mean_abs`), nats.
      chunk_bytes: of a push.
      tls_ca: PEM file of the authority that signed the bridges' certificates; "" = no TLS.
      token_file: file that holds the bridges' bearer token; "" = none.
      function: "module:function" of yours that makes a trajectory out of several calls; empty = one call each.
      trajectories: that are made at once, with `function`.
    """

    engine: Literal["local", "remote"]
    endpoints: tuple[str, ...]
    listen: str
    dtype: DtypeName
    slots: _Count
    deadline: _Positive
    probe_tolerance: _Positive
    chunk_bytes: _Count
    tls_ca: str = ""
    token_file: str = ""
    function: str = ""
    trajectories: _Count = 64

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
      path: where, a folder of the run's name is made there: a path or "gs://bucket/..."; empty = in the run folder.
      atomic_rename: whether the file system there renames a folder in one step; if not (a mounted bucket, say), and
        always on gs://, a marker file is written last, and what lacks it does not count.
    """

    every: _Maybe
    keep: _Count
    keep_best: _Maybe = 0
    path: str = ""
    atomic_rename: bool = True

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
      prompts: held-out prompts, or problems of `path`, at most; 0 = no evaluation.
      path: file of problems in place of held-out prompts: {"prompt" or "problem": ..., "answer": ...} a line, such as
        AIME's; empty = the held-out prompts.
      samples: k, completions a problem.
    """

    every: _Maybe
    prompts: _Maybe
    path: str = ""
    samples: _Count = 1

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
