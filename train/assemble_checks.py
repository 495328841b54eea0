"""What groups must be before they are assembled.

The values of all completions are looked at together, and one by one only when some are wrong, to name the one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollout_bridge.messages import Completion
from train.groups import Group

if TYPE_CHECKING:  # which needs these checks
    from train.assemble import AssembleConfig

_SMALL = 1 << 16  # routes of a trace


def check_groups(groups: Sequence[Group], version: int, config: "AssembleConfig") -> None:
    """Checks the groups of a batch.

    Args:
      groups: at least one.
      version: of the trainer; no token may be of a later one.
      config: what the batch must look like.

    Raises:
      ValueError: names the group and member.
    """
    for group in groups:
        _check_form(group, config)
    if not _sound(groups, version, config):
        for group in groups:
            _check_values(group, version, config)


def _check_form(group: Group, config: "AssembleConfig") -> None:
    """Everything but the values: members, shapes, lengths, the definition of the log-probs."""
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
    if len(group.prompt_tokens) < 1:
        _check_tokens(group.prompt_tokens, config, f"prompt t{group.ticket}")
    for completion in group.completions:
        _check_completion_form(group, completion, config)


def _check_completion_form(group: Group, completion: Completion, config: "AssembleConfig") -> None:
    count = len(completion.tokens)
    positions = len(group.prompt_tokens) + count - 1
    if count < 1:
        _check_tokens(completion.tokens, config, _where(group, completion))
    if positions > config.batch.row_length:
        raise ValueError(
            f"{_where(group, completion)}: expected at most {config.batch.row_length} positions, got {positions}; "
            "raise row_length"
        )
    for name, values in (("behavior_logp", completion.behavior_logp), ("version", completion.version)):
        if len(values) != count:
            raise ValueError(f"{_where(group, completion)}: expected {count} of {name}, got {len(values)}")
    definition = completion.logprob
    if definition.temperature != config.temperature or definition.after_truncation:
        raise ValueError(
            f"{_where(group, completion)}: expected log-probs at temperature {config.temperature} before "
            f"truncation, got {definition}"
        )
    trace = completion.trace
    if config.replay and trace is not None:
        expected = (positions - trace.first_row, config.moe_layers, config.experts_per_token)
        if trace.first_row < 0 or trace.experts_TLK.shape != expected:
            raise ValueError(
                f"trace of {_where(group, completion)}: expected [rows, layers, slots] {list(expected)} (prompt + "
                f"tokens - 1 - first row {trace.first_row}), got {list(trace.experts_TLK.shape)}"
            )


def _sound(groups: Sequence[Group], version: int, config: "AssembleConfig") -> bool:
    """Whether every value of every completion is in its range; what `_check_values` says of each."""
    completions = [completion for group in groups for completion in group.completions]
    tokens = np.concatenate([*(group.prompt_tokens for group in groups), *(c.tokens for c in completions)])
    logp = np.concatenate([completion.behavior_logp for completion in completions])
    versions = np.concatenate([completion.version for completion in completions])
    traces = [c.trace.experts_TLK for c in completions if c.trace is not None] if config.replay else []
    # Small ones together; a copy of long ones would be as large as all routes of a step.
    together = [trace.reshape(-1) for trace in traces if trace.size <= _SMALL]
    alone = (trace.max() for trace in traces if trace.size > _SMALL)
    largest = max(int(np.concatenate(together).max(initial=0)) if together else 0, *alone, 0)
    return bool(
        tokens.min() >= 0
        and tokens.max() < config.vocab_size
        and (np.isfinite(logp) & (logp <= 0)).all()
        and versions.min() >= 0
        and versions.max() <= version
        and largest < config.experts
    )


def _check_values(group: Group, version: int, config: "AssembleConfig") -> None:
    _check_tokens(group.prompt_tokens, config, f"prompt t{group.ticket}")
    for completion in group.completions:
        where = _where(group, completion)
        _check_tokens(completion.tokens, config, where)
        logp = completion.behavior_logp
        good = np.isfinite(logp) & (logp <= 0)
        if not good.all():
            bad = int(np.argmin(good))
            raise ValueError(f"{where}: expected finite log-probs of at most 0, got {logp[bad]} at token {bad}")
        if not ((completion.version >= 0) & (completion.version <= version)).all():
            got = np.unique(completion.version).tolist()
            raise ValueError(f"{where}: expected versions 0 to {version}, got {got}")
        # That the ids of a row are distinct was checked when the completion arrived; a too large id would be clamped
        # silently on the device, so that one is looked at once more.
        trace = completion.trace
        if config.replay and trace is not None and int(trace.experts_TLK.max(initial=0)) >= config.experts:
            got = int(trace.experts_TLK.max())
            raise ValueError(f"trace of {where}: expected ids below {config.experts}, got {got}")


def _check_tokens(tokens: np.ndarray, config: "AssembleConfig", where: str) -> None:
    if len(tokens) < 1 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        got = f"{tokens.min()} to {tokens.max()}" if len(tokens) else "none"
        raise ValueError(f"{where}: expected at least one token id, each in 0 to {config.vocab_size - 1}, got {got}")


def _where(group: Group, completion: Completion) -> str:
    return f"completion t{group.ticket}/{completion.member} of engine {completion.engine_id}"
