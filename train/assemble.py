"""Groups -> packed, aligned token batches. Input and target are split here, once; nobody shifts afterwards.

A sequence of prompt and completion, P + N tokens, becomes P + N - 1 positions: position t feeds token t and predicts
token t + 1. An engine routes exactly the tokens that it feeds, so row r of its trace is position `first_row + r`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from rollout_bridge.messages import Completion, Finish
from sat_jax.advantages import AdvantageConfig, group_advantages
from sat_jax.routing import id_dtype
from sat_jax.types import RoutingTrace, TokenBatch
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
    """A prompt with one completion, ready to be written into a row."""

    tokens: np.ndarray
    prompt_length: int
    completion: Completion
    trained: np.ndarray
    advantage: np.float32

    @property
    def positions(self) -> int:
        return len(self.tokens) - 1


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
    for group in groups:
        _check_group(group, version, config)
    advantage_PM = _global_advantages(groups, config.advantage, exchange)
    sequences = [
        _Sequence(
            tokens=np.concatenate([group.prompt_tokens, completion.tokens]),
            prompt_length=len(group.prompt_tokens),
            completion=completion,
            trained=group.trained_tokens(m),
            advantage=advantage_PM[p, m],
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
    free = np.zeros(len(lengths), np.int64)  # room in each row that is open
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fits = free[: len(rows)] >= lengths[index]
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = row_length
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
    for b, row in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(row, start=1):
            end = start + sequence.positions
            arrays["input_BT"][b, start:end] = sequence.tokens[:-1]
            arrays["target_BT"][b, start:end] = sequence.tokens[1:]
            arrays["segment_BT"][b, start:end] = segment
            arrays["position_BT"][b, start:end] = np.arange(sequence.positions)
            # The last prompt token is the first position whose target was sampled.
            sampled = slice(start + sequence.prompt_length - 1, end)
            arrays["loss_mask_BT"][b, sampled] = sequence.trained
            arrays["behavior_logp_BT"][b, sampled] = sequence.completion.behavior_logp
            arrays["advantage_BT"][b, sampled] = sequence.advantage
            arrays["lag_BT"][b, sampled] = version - sequence.completion.version
            trace = sequence.completion.trace
            if config.replay and trace is not None:
                experts_LBTK[:, b, start + trace.first_row : end] = trace.experts_TLK.transpose(1, 0, 2)
                present_BT[b, start + trace.first_row : end] = True
            start = end
    trace: Any = RoutingTrace(experts_LBTK=experts_LBTK, present_BT=present_BT)  # type: ignore[arg-type]
    return TokenBatch(**arrays, trace=trace)


def _part(
    sequences: Sequence[_Sequence],
    microbatches: Sequence[TokenBatch],
    groups: Sequence[Group],
    advantage_PM: np.ndarray,
    version: int,
) -> dict[str, Any]:
    """What this process assembled, in numbers that add up."""
    completions = [sequence.completion for sequence in sequences]
    sampled_by = np.concatenate([sequence.completion.version[sequence.trained] for sequence in sequences])
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
        "lags": sorted(Counter((version - sampled_by).tolist()).items()),
    }


def _check_group(group: Group, version: int, config: AssembleConfig) -> None:
    members = [completion.member for completion in group.completions]
    if members != list(range(config.batch.group_size)):
        raise ValueError(
            f"group t{group.ticket}: expected members 0 to {config.batch.group_size - 1} in order, got {members}"
        )
    if group.reward_M.shape != (len(members),) or not np.isfinite(group.reward_M).all():
        raise ValueError(
            f"group t{group.ticket}: expected {len(members)} finite rewards, got {group.reward_M.tolist()}"
        )
    if group.trained and [len(mask) for mask in group.trained] != [len(c.tokens) for c in group.completions]:
        raise ValueError(
            f"group t{group.ticket}: expected a mask as long as each completion, got "
            f"{[len(mask) for mask in group.trained]} for {[len(c.tokens) for c in group.completions]}"
        )
    _check_tokens(group.prompt_tokens, config, f"prompt t{group.ticket}")
    for completion in group.completions:
        _check_completion(group, completion, version, config)


def _check_completion(group: Group, completion: Completion, version: int, config: AssembleConfig) -> None:
    where = f"completion t{group.ticket}/{completion.member} of engine {completion.engine_id}"
    _check_tokens(completion.tokens, config, where)
    count = len(completion.tokens)
    positions = len(group.prompt_tokens) + count - 1
    if positions > config.batch.row_length:
        raise ValueError(
            f"{where}: expected at most {config.batch.row_length} positions, got {positions}; raise row_length"
        )
    for name in ("behavior_logp", "version"):
        if len(getattr(completion, name)) != count:
            raise ValueError(f"{where}: expected {count} of {name}, got {len(getattr(completion, name))}")
    logp = completion.behavior_logp
    if not (np.isfinite(logp) & (logp <= 0)).all():
        bad = int(np.argmin(np.isfinite(logp) & (logp <= 0)))
        raise ValueError(f"{where}: expected finite log-probs of at most 0, got {logp[bad]} at token {bad}")
    if not ((completion.version >= 0) & (completion.version <= version)).all():
        raise ValueError(f"{where}: expected versions 0 to {version}, got {np.unique(completion.version).tolist()}")
    definition = completion.logprob
    if definition.temperature != config.temperature or definition.after_truncation:
        raise ValueError(
            f"{where}: expected log-probs at temperature {config.temperature} before truncation, got {definition}"
        )
    if config.replay and completion.trace is not None:
        _check_trace(completion, positions, config, where)


def _check_tokens(tokens: np.ndarray, config: AssembleConfig, where: str) -> None:
    if len(tokens) < 1 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        got = f"{tokens.min()} to {tokens.max()}" if len(tokens) else "none"
        raise ValueError(f"{where}: expected at least one token id, each in 0 to {config.vocab_size - 1}, got {got}")


def _check_trace(completion: Completion, positions: int, config: AssembleConfig, where: str) -> None:
    trace = completion.trace
    assert trace is not None, "the caller looks"
    expected = (positions - trace.first_row, config.moe_layers, config.experts_per_token)
    if trace.first_row < 0 or trace.experts_TLK.shape != expected:
        raise ValueError(
            f"trace of {where}: expected [rows, layers, slots] {list(expected)} (prompt + tokens - 1 - first row "
            f"{trace.first_row}), got {list(trace.experts_TLK.shape)}"
        )
    # That the ids of a row are distinct was checked when the completion arrived; a too large id would be clamped
    # silently on the device, so that one is looked at once more.
    if trace.experts_TLK.size and int(trace.experts_TLK.max()) >= config.experts:
        raise ValueError(f"trace of {where}: expected ids below {config.experts}, got {int(trace.experts_TLK.max())}")
