"""Groups -> packed, aligned token batches. Input and target are split here, once; nobody shifts afterwards.

A sequence of prompt and completion, P + N tokens, becomes P + N - 1 positions: position t feeds token t and predicts
token t + 1. An engine routes exactly the tokens that it feeds, so row r of its trace is position `first_row + r`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from rollout_bridge.messages import Completion, Finish
from sat_jax.advantages import AdvantageConfig, group_advantages
from sat_jax.routing import id_dtype
from sat_jax.types import RoutingTrace, TokenBatch
from train.assemble_checks import check_groups
from train.assemble_stats import AssembleStats, merge_parts
from train.groups import Group
from train.place import place
from train.strict_toml import Range, check_fields

__all__ = ["AssembleConfig", "AssembleStats", "Assembled", "BatchConfig", "assemble", "pack", "place"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Sizes of an optimizer step and of its microbatches.

    Attributes:
      groups_per_step: P, prompts of one optimizer step.
      minibatches: k, optimizer steps of a batch; proximal log-probs are computed once, before the first of them.
      group_size: M, completions of one prompt.
      row_length: T, tokens of a packed row; the longest prompt and completion.
      rows: B, rows of one microbatch; a step takes as many microbatches as its tokens fill.
      buckets: shorter lengths, ascending, that a microbatch may have where its sequences fit into as many rows of it;
        each is a program of its own.
    """

    groups_per_step: Annotated[int, Range(at_least=1)]
    minibatches: Annotated[int, Range(at_least=1)]
    group_size: Annotated[int, Range(at_least=1)]
    row_length: Annotated[int, Range(at_least=2)]
    rows: Annotated[int, Range(at_least=1)]
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "batch")
        if list(self.buckets) != sorted({length for length in self.buckets if 2 <= length < self.row_length}):
            raise ValueError(
                f"batch.buckets: expected lengths from 2 to below row_length = {self.row_length}, ascending, got "
                f"{list(self.buckets)}"
            )
        if self.group_size == 1:
            raise ValueError(
                "batch.group_size: expected at least 2, got 1; the advantage compares a group's members, and groups of "
                "one have none to compare with"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AssembleConfig:
    """What a batch must look like.

    Attributes:
      batch: sizes.
      advantage: how rewards become advantages.
      vocab_size: V.
      moe_layers, experts, experts_per_token: L, E, K of a trace.
      temperature: the one log-prob definition that the trainer reproduces: at this temperature, before truncation.
      replay: whether traces are replayed; if not, every position routes freely and no trace is looked at.
    """

    batch: BatchConfig
    advantage: AdvantageConfig
    vocab_size: int
    moe_layers: int
    experts: int
    experts_per_token: int
    temperature: float
    replay: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """Host microbatches (NumPy leaves), equally shaped but for the lengths of their rows, and what is in them."""

    microbatches: tuple[TokenBatch, ...]
    stats: AssembleStats


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """A prompt with one completion, ready to be written into a row; `trained` as in `Group`, None = every token."""

    prompt: np.ndarray
    completion: Completion
    trained: np.ndarray | None
    advantage: np.float32
    positions: int


Exchange = Callable[[str, Any], list[Any]]


def _alone(_what: str, value: Any) -> list[Any]:
    """What the only process of a run hears."""
    return [value]


def assemble(groups: Sequence[Group], version: int, config: AssembleConfig, exchange: Exchange = _alone) -> Assembled:
    """Checks groups, computes advantages and packs every sequence, whole, into rows.

    Args:
      groups: of one optimizer step; of several processes, this one's.
      version: of the trainer; a token's lag is counted from it.
      config: what the batch must look like; of several processes, with this one's part of its rows.
      exchange: tells all processes a named value and gives everybody's; what JSON holds.

    Returns:
      As many microbatches of [rows, row_length] as the rows fill, the last one padded, each in the shortest bucket that
      holds it; a function of the arguments. In every process equally many, of the same lengths; advantages and stats
      are of the whole batch.

    Raises:
      ValueError: a group is not what it should be; group and member are named.
    """
    if not groups:
        raise ValueError("batch: expected at least one group, got none")
    check_groups(groups, version, config)
    advantage_PM = _global_advantages(groups, config.advantage, exchange)
    sequences = [
        _Sequence(
            prompt=group.prompt_tokens,
            completion=completion,
            trained=group.trained[m] if group.trained else None,
            advantage=advantage_PM[p, m],
            positions=len(group.prompt_tokens) + len(completion.tokens) - 1,
        )
        for p, group in enumerate(groups)
        for m, completion in enumerate(group.completions)
    ]
    packed = pack([sequence.positions for sequence in sequences], config.batch.row_length)
    rows = [[sequences[index] for index in row] for row in packed]
    size = config.batch.rows
    shortened = [_shorten(rows[first : first + size], config.batch) for first in range(0, len(rows), size)]
    lengths = _agreed([length for _, length in shortened], exchange)
    packed_rows = [*(rows for rows, _ in shortened), *([] for _ in lengths[len(shortened) :])]
    microbatches = tuple(
        _microbatch(rows, length, version, config) for rows, length in zip(packed_rows, lengths, strict=True)
    )
    parts = exchange("what was assembled", _part(sequences, microbatches, groups, advantage_PM, version))
    return Assembled(microbatches=microbatches, stats=merge_parts(parts, replay=config.replay))


def _agreed(lengths: Sequence[int], exchange: Exchange) -> list[int]:
    """Lengths of the microbatches' rows in every process: the longest of each, and as many as the fullest one has."""
    everybodys = exchange("lengths of the microbatches", list(lengths))
    count = max(map(len, everybodys))
    return [max(theirs[index] for theirs in everybodys if index < len(theirs)) for index in range(count)]


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: the longest sequence first, each into the first row that has room.

    At most 11/9 of the best possible number of rows, and one (Dosa 2007). Equal lengths keep their order.

    Args:
      lengths: positions of each sequence, in [1, row_length].
      row_length: positions of a row.

    Returns:
      The indices of the sequences of each row.
    """
    rows: list[list[int]] = []
    free = np.full(len(lengths), row_length)  # room in each row, also in those that are not open yet
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = int((free[: len(rows) + 1] >= lengths[index]).argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def _global_advantages(groups: Sequence[Group], config: AdvantageConfig, exchange: Exchange) -> np.ndarray:
    """float32[P, M] of these groups, among all of the batch: a method may compare with the rewards of others."""
    own = [(group.ticket, group.reward_M.tolist(), group.verified_M.tolist()) for group in groups]
    theirs = exchange("rewards", own)
    if len(theirs) == 1:
        judged: Iterable[Any] = own
    else:
        judged = sorted((judgement for part in theirs for judgement in part), key=lambda judgement: judgement[0])
    places = {ticket: place for place, (ticket, _, _) in enumerate(judged)}
    advantage_PM = _advantages(
        [np.array(reward, np.float32) for _, reward, _ in judged], [np.array(v, bool) for _, _, v in judged], config
    )
    return advantage_PM[[places[group.ticket] for group in groups]]


def _advantages(rewards: Sequence[np.ndarray], verified: Sequence[np.ndarray], config: AdvantageConfig) -> np.ndarray:
    """float32[P, M]: a completion without a reward is no member of its group, and a group of one has no baseline."""
    advantage_PM = np.zeros((len(rewards), len(rewards[0])), np.float32)
    judged = [(p, verified_M) for p, verified_M in enumerate(verified) if verified_M.sum() >= 2]
    rows = group_advantages([rewards[p][verified_M] for p, verified_M in judged], config)
    for (p, verified_M), row in zip(judged, rows, strict=True):
        advantage_PM[p, verified_M] = row
    return advantage_PM


def _shorten(rows: Sequence[Sequence[_Sequence]], batch: BatchConfig) -> tuple[Sequence[Sequence[_Sequence]], int]:
    """The rows of a microbatch in the shortest bucket in which their sequences fit, and its length."""
    sequences = [sequence for row in rows for sequence in row]
    lengths = [sequence.positions for sequence in sequences]
    for bucket in batch.buckets:
        if max(lengths) <= bucket and sum(lengths) <= bucket * batch.rows:
            packed = pack(lengths, bucket)
            if len(packed) <= batch.rows:
                return [[sequences[index] for index in row] for row in packed], bucket
    return rows, batch.row_length


def _microbatch(rows: Sequence[Sequence[_Sequence]], length: int, version: int, config: AssembleConfig) -> TokenBatch:
    shape = (config.batch.rows, length)
    experts_LBTK = np.zeros((config.moe_layers, *shape, config.experts_per_token), id_dtype(config.experts))
    present_BT = np.zeros(shape, bool)
    arrays: dict[str, Any] = {
        "input_BT": np.zeros(shape, np.int32),
        "target_BT": np.zeros(shape, np.int32),
        "segment_BT": np.zeros(shape, np.int32),
        "position_BT": np.zeros(shape, np.int32),
        "loss_mask_BT": np.zeros(shape, bool),
        "behavior_logp_BT": np.zeros(shape, np.float32),
        "advantage_BT": np.zeros(shape, np.float32),
        "lag_BT": np.zeros(shape, np.int32),
    }
    sequences = [sequence for row in rows for sequence in row]
    if sequences:
        # All sequences at once, by index into the rows behind each other: an assignment to a slice costs a microsecond
        # a sequence and field, which small completions by the hundred feel.
        positions = np.array([sequence.positions for sequence in sequences])
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        first = np.searchsorted(row_of, row_of)  # index of the first sequence in the same row
        before = _before(positions)
        starts = row_of * length + before - before[first]
        used = _indices(starts, positions)

        def write(name: str, where: np.ndarray, values: np.ndarray) -> None:
            arrays[name].reshape(-1)[where] = values

        completions = [sequence.completion for sequence in sequences]
        fed = [part for s in sequences for part in (s.prompt, s.completion.tokens[:-1])]
        write("input_BT", used, np.concatenate(fed))
        write("segment_BT", used, np.repeat(np.arange(1, len(sequences) + 1) - first, positions))
        write("position_BT", used, used - np.repeat(starts, positions))
        predicted = [part for s in sequences for part in (s.prompt[1:], s.completion.tokens)]
        write("target_BT", used, np.concatenate(predicted))
        # The last prompt token is the first position whose target was sampled.
        lengths = np.array([len(completion.tokens) for completion in completions])
        sampled = _indices(starts + positions - lengths, lengths)
        write("loss_mask_BT", sampled, _trained(sequences))
        write("behavior_logp_BT", sampled, np.concatenate([c.behavior_logp for c in completions]))
        write("advantage_BT", sampled, np.repeat([sequence.advantage for sequence in sequences], lengths))
        write("lag_BT", sampled, version - np.concatenate([completion.version for completion in completions]))
        for start, end, completion in zip(starts, starts + positions, completions, strict=True):
            if config.replay and completion.trace is not None:
                b, t = divmod(int(start), length)
                routed = slice(t + completion.trace.first_row, t + int(end - start))
                experts_LBTK[:, b, routed] = completion.trace.experts_TLK.transpose(1, 0, 2)
                present_BT[b, routed] = True
    trace: Any = RoutingTrace(experts_LBTK=experts_LBTK, present_BT=present_BT)  # type: ignore[arg-type]
    return TokenBatch(**arrays, trace=trace)


def _before(lengths: np.ndarray) -> np.ndarray:
    """Sum of the lengths before each."""
    return np.cumsum(lengths) - lengths


def _indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every run, one run behind the other."""
    return np.repeat(starts - _before(lengths), lengths) + np.arange(lengths.sum())


def _trained(sequences: Sequence[_Sequence]) -> np.ndarray:
    """bool: which of all sampled tokens are trained on, one completion's behind the other's."""
    lengths = [len(sequence.completion.tokens) for sequence in sequences]
    trained = np.ones(sum(lengths), bool)
    for sequence, end in zip(sequences, np.cumsum(lengths), strict=True):
        if sequence.trained is not None:
            trained[end - len(sequence.trained) : end] = sequence.trained
    return trained


def _part(
    sequences: Sequence[_Sequence],
    microbatches: Sequence[TokenBatch],
    groups: Sequence[Group],
    advantage_PM: np.ndarray,
    version: int,
) -> dict[str, Any]:
    """What this process assembled, in numbers that add up."""
    completions = [sequence.completion for sequence in sequences]
    sampled_by = np.concatenate([completion.version for completion in completions])[_trained(sequences)]
    lags, counts = np.unique(version - sampled_by, return_counts=True)
    rewards = np.concatenate([group.reward_M[group.verified_M] for group in groups])
    return {
        "sequences": len(sequences),
        # The sequences of a row are numbered from 1.
        "sequences_each": [int(micro.segment_BT.max(axis=1).sum()) for micro in microbatches],
        "positions": sum(sequence.positions for sequence in sequences),
        "size": sum(micro.input_BT.size for micro in microbatches),
        "rewards": len(rewards),
        "reward": float(rewards.sum(dtype=np.float64)),
        "replayed": sum(int(np.count_nonzero(micro.trace.present_BT)) for micro in microbatches),
        "truncated": sum(completion.finish is Finish.LENGTH for completion in completions),
        "groups": len(groups),
        "signal": int(advantage_PM.any(axis=1).sum()),
        "lags": list(zip(lags.tolist(), counts.tolist(), strict=True)),
    }
