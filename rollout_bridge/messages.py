"""The records that cross the bridge: frozen, NumPy, validated where they arrive.

Importable without JAX. `codec` turns them into protobuf and back; `checks` holds what is checked once, at the boundary.
"""

import dataclasses
import enum

import numpy as np


class Finish(enum.Enum):
    """Why a completion ended. An ABORT may hold a partial completion; with no tokens it is always ABORT."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class InFlight(enum.Enum):
    """What a commit does to running requests.

    FINISH: they run to their end on the old weights before the new ones go live.
    RETRACT: they keep their tokens, their cache is rebuilt under the new weights, and they go on with those.
    ABORT: they return what they have as ABORT; the client continues them.
    """

    FINISH = "finish"
    RETRACT = "retract"
    ABORT = "abort"


class Serving(enum.Enum):
    """NOT_SERVING: holds no verified version. PAUSED: holds one, samples nothing."""

    SERVING = "serving"
    PAUSED = "paused"
    NOT_SERVING = "not_serving"


class Staged(enum.Enum):
    """What became of a push: its bytes were received, or it was staged or live before and nothing was transferred."""

    RECEIVED = "received"
    ALREADY_STAGED = "already_staged"
    ALREADY_LIVE = "already_live"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample.

    Attributes:
      temperature: logits are divided by it; 0 is greedy (and its log-probs are those of temperature 1).
      top_p: nucleus mass, 1 = off.   top_k: -1 = off.
      max_new_tokens: bound on sampled tokens of one completion, `already_sampled` included.
      stop_ids: sampling ends *after* one of these is sampled; it is part of the completion.
      seed: member m's token number t draws from a key made of (seed, m, t) alone, so a completion does not depend on
        its companions, and a continued one equals the undivided one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A prompt and the members of its group that are wanted.

    Attributes:
      request_id: unique within a run.
      prompt_tokens: int32[N], N >= 1.
      sampling: how.
      members: which members to sample, e.g. (0, 1, 2, 3); one completion each.
      want_trace: whether routes are to be returned.
      already_sampled: how many trailing `prompt_tokens` are this (single) member's own earlier tokens: a continuation.
    """

    request_id: str
    prompt_tokens: np.ndarray
    sampling: Sampling
    members: tuple[int, ...]
    want_trace: bool = True
    already_sampled: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogprobDefinition:
    """What a reported log-prob is.

    Attributes:
      temperature: the temperature that the logits were divided by.
      after_truncation: True if renormalised over what top-p/top-k kept.
    """

    temperature: float
    after_truncation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Routed expert ids of a completion; row r is input position `first_row + r` of prompt + completion.

    Attributes:
      experts_TLK: uint8 if E <= 256 else uint16; MoE layers only, forward order; T = prompt + tokens - 1 - first_row
        (the last sampled token was never fed).
      first_row: input position of row 0.
      version_T: int32; the version of the weights that routed each row.
    """

    experts_TLK: np.ndarray
    first_row: int
    version_T: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
      request_id, member: whose it is.
      tokens: int32[N]; a stop token is included.
      behavior_logp: float32[N], log mu, finite and <= 0, nats.
      version: int32[N], version of the weights that sampled each token.
      trace: routes, or None when not wanted (or when N == 0).
      finish: why it ended.
      engine_id: instance that sampled it (a restart is another instance).
      logprob: what `behavior_logp` is.
      truncated_logp: float32[N], log mu renormalised over what top-p/top-k kept; None when neither is on, or when the
        engine does not tell it.
    """

    request_id: str
    member: int
    tokens: np.ndarray
    behavior_logp: np.ndarray
    version: np.ndarray
    trace: Trace | None
    finish: Finish
    engine_id: str
    logprob: LogprobDefinition
    truncated_logp: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor on the wire, by its Hugging Face name. dtype is "float32" or "bfloat16" (little endian)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Says what a push contains before it is sent.

    Attributes:
      version: optimizer steps applied to these weights.
      model_digest: of the architecture (see ModelInfo); another model is refused.
      digest: of all tensors' bytes in order; a push is idempotent by (version, digest).
      tensors: every tensor of the model, exactly once.
    """

    version: int
    model_digest: str
    digest: str
    tensors: tuple[TensorSpec, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of one tensor: `data` belongs at byte `offset` of tensor number `tensor`; `checksum` is its xxh3_64."""

    tensor: int
    offset: int
    data: bytes | memoryview
    checksum: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """The outcome of a push to one engine; `num_bytes` were received, and for `seconds_write` waited on the writing."""

    staged: Staged
    num_bytes: int
    engine_id: str
    seconds_write: float = 0.0


# nats. A token that a sharp policy holds for impossible moves by several nats when another numerics flips one expert
# of its route; a wrong tensor moves many tokens.
PROBE_CAP = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What an engine must reproduce before a version goes live.

    Several sequences such as the policy is trained on, one behind the other: on text far from that, the numerics of a
    half-precision engine are noise that hides a wrong tensor.

    Attributes:
      tokens: int32[N], N >= 256, of all sequences.
      lengths: tokens of each sequence, at least 2 each; they add up to N.
      logp: float32[N - 1], the trainer's log-prob of tokens[1:] at temperature 1, free routing, at the pushed version;
        anything where the next token begins another sequence.
      tolerance: largest accepted `ProbeReport.mean_abs`, nats.
      expert_coverage: share in [0, 1] of (layer, expert) pairs that the probe's own routes touch.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    logp: np.ndarray
    tolerance: float
    expert_coverage: float

    @property
    def segments(self) -> np.ndarray:
        """int32[N], the sequence that each token belongs to, from 1."""
        return np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)

    @property
    def positions(self) -> np.ndarray:
        """int32[N], each token's position in its own sequence."""
        return np.concatenate([np.arange(length, dtype=np.int32) for length in self.lengths])

    @property
    def compared(self) -> np.ndarray:
        """bool[N - 1]: whether tokens[1:] goes on with the sequence of the token before it."""
        segments = self.segments
        return segments[1:] == segments[:-1]

    def compare(self, logp: np.ndarray) -> "ProbeReport":
        """How an engine's log-probs of tokens[1:], float32[N - 1], reproduce the trainer's."""
        difference = np.abs(logp - self.logp)[self.compared]
        return ProbeReport(mean_abs=float(np.minimum(difference, PROBE_CAP).mean()), max_abs=float(difference.max()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """How the engine's log-probs of the probe compare.

    Attributes:
      mean_abs: mean of |difference|, each counted as at most `PROBE_CAP`, nats.
      max_abs: the largest |difference|, nats.
      checksum: the engine's own over the weights that it now serves, where it has one; equal in engines of a kind that
        serve the same weights.
      seconds_held: for which nothing new began.
      seconds_load: of these, the switch itself, in which nothing was sampled.
      seconds_verify: of these, the verification.
    """

    mean_abs: float
    max_abs: float
    checksum: str = ""
    seconds_held: float = 0.0
    seconds_load: float = 0.0
    seconds_verify: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What the engine holds, so that nothing has to be assumed.

    Attributes:
      model_digest: hash of the architecture.
      vocab_size, moe_layers, num_experts, top_k: sizes; moe_layers = 0 for a dense model.
      max_tokens: longest prompt + completion.
      tensors: what a manifest must cover exactly.
      dtype: compute dtype, "float32" or "bfloat16".
    """

    model_digest: str
    vocab_size: int
    moe_layers: int
    num_experts: int
    top_k: int
    max_tokens: int
    tensors: tuple[TensorSpec, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """A moment of an engine. `version` is the verified version that serves, -1 when there is none."""

    engine_id: str
    serving: Serving
    version: int
    staged_version: int | None
    running: int
    waiting: int
