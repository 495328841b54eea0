"""How much work an optimizer step is: sequences to rows to microbatches, at mean and worst lengths."""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh

from sat_jax.mesh import platform
from sat_jax.model import PolicyConfig
from sat_jax.model.attention import attention_pairs
from sat_jax.model.experts import kernel_of
from train.config import RunConfig

# Of the longest prompt and completion, where nobody says what the mean is.
MEAN_SHARE = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One optimizer step when every sequence has one length.

    Attributes:
      case: "mean" or "worst".
      prompt: tokens.
      response: tokens.
      sequences: of the step: prompts times members.
      per_row: sequences that a packed row holds.
      microbatches: of the step.
      rows: B of a microbatch.
      row_length: T.
    """

    case: str
    prompt: int
    response: int
    sequences: int
    per_row: int
    microbatches: int
    rows: int
    row_length: int

    @property
    def sequence(self) -> int:
        """Input positions of one sequence: the last token is never fed."""
        return self.prompt + self.response - 1

    @property
    def positions(self) -> int:
        """Positions in use, of all microbatches."""
        return self.sequences * self.sequence

    @property
    def fill(self) -> float:
        """Share of the microbatches' positions that are in use, in [0, 1]."""
        return self.positions / (self.microbatches * self.rows * self.row_length)


def loads(config: RunConfig, response: int | None) -> tuple[Load, Load]:
    """The step at mean and at worst lengths.

    Args:
      config: the run.
      response: mean tokens of a completion; None = a quarter of the longest.

    Raises:
      ValueError: that is not between 1 and sampling.max_new_tokens.
    """
    longest = config.sampling.max_new_tokens
    if response is not None and not 1 <= response <= longest:
        raise ValueError(
            f"--response-tokens: expected 1 to {longest} (sampling.max_new_tokens), got {response}; it is the mean"
        )
    prompt = config.batch.row_length - longest + 1
    mean = _load(config, "mean", max(1, prompt // MEAN_SHARE), response or max(1, longest // MEAN_SHARE))
    return mean, _load(config, "worst", prompt, longest)


def _load(config: RunConfig, case: str, prompt: int, response: int) -> Load:
    batch = config.batch
    sequences = batch.groups_per_step * batch.group_size
    per_row = min(sequences, batch.row_length // (prompt + response - 1))
    return Load(
        case=case,
        prompt=prompt,
        response=response,
        sequences=sequences,
        per_row=per_row,
        microbatches=-(-sequences // (per_row * batch.rows)),
        rows=batch.rows,
        row_length=batch.row_length,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs of a query and a key, of one row and head: those that see each other, and those that are multiplied."""

    useful: float
    executed: float


def pairs(load: Load, mesh: Mesh) -> Pairs:
    """What attention over one row of this load multiplies, by the kernel of the mesh's platform."""
    place = jnp.arange(load.row_length)
    segment = jnp.where(place < load.per_row * load.sequence, place // load.sequence + 1, 0)
    useful, executed = attention_pairs(segment[None].astype(jnp.int32), mesh)
    return Pairs(useful=float(useful), executed=float(executed))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """What the busiest device's experts run in one layer of one microbatch.

    Attributes:
      held: choices (a token and a slot) that it runs in one round.
      chunk: rows of one step of the kernel's loop.
      chunks: steps of that loop in a round.
      rounds: of the exchange, where tokens are sent and not gathered; else 1.
      busy: experts that have any of the choices.
    """

    held: float
    chunk: int
    chunks: int
    rounds: int
    busy: int

    def executed(self, tile: int) -> float:
        """Rows that one step of the loop multiplies.

        Args:
          tile: rows of a tile; one that two experts share is visited by both.
        """
        shared = max(0, self.busy - 1) * tile
        return (self.held + shared) / self.chunks


def experts(load: Load, policy: PolicyConfig, mesh: Mesh, *, skewed: bool) -> Experts:
    """The load of the busiest device.

    Args:
      load: the step, whose real positions are spread evenly over its microbatches.
      policy: the architecture.
      mesh: where it lives.
      skewed: every token chooses the same K experts, on one shard if it holds as many; else all experts are equally
        busy.
    """
    shape, slots = mesh.shape, policy.experts_per_token
    shards = shape["expert"]
    held_experts = policy.experts // shards
    own = load.rows * load.row_length / (shape["data"] * shape["fsdp"] * shards)  # positions of a device
    real = own * load.fill
    chosen = min(slots, held_experts) if skewed else slots / shards
    kernel = kernel_of(mesh)
    chunk = kernel.rows(int(own) * shards * slots, policy.experts)
    # A round of the exchange has room for what a balanced routing sends.
    rounds = math.ceil(real / max(1, -(-int(own) * slots // shards))) if skewed and shards > slots else 1
    held = max(1.0, real * shards * chosen / rounds)
    busy = min(slots, held_experts) if skewed else held_experts
    return Experts(held=held, chunk=chunk, chunks=_chunks(held, chunk, busy, mesh), rounds=rounds, busy=busy)


def _chunks(held: float, chunk: int, busy: int, mesh: Mesh) -> int:
    """Steps of the kernel's loop: whole chunks of all experts' rows (TPU), or whole blocks of each expert's."""
    if platform(mesh) == "tpu":
        return math.ceil(held / chunk)
    return busy * math.ceil(held / busy / chunk)
