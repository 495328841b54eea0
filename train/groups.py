"""Groups: the completions of one prompt with their rewards, and their form on disk.

The disk form is columns in an uncompressed `.npz` (each array with its CRC), one column of every completion's tokens
behind the other: a few dozen arrays however many groups there are, no pickle, and every bit comes back.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_bridge.messages import Completion, Finish, LogprobDefinition, Trace

_FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt's completions, all of them.

    Attributes:
      ticket: number of the prompt in the run.
      prompt_tokens: int32[N], as the engine was fed.
      answer: the data's.
      completions: of members 0 .. M - 1, in that order.
      reward_M: float32, finite, by member; 0 where it has none (see `verified_M`).
      trained: bool[N] of every completion, whether each of its tokens is trained on: False for tokens that code
        inserted, and for all of a completion that could not be verified. Empty where every token of all of them is.
    """

    ticket: int
    prompt_tokens: np.ndarray
    answer: str
    completions: tuple[Completion, ...]
    reward_M: np.ndarray
    trained: tuple[np.ndarray, ...] = ()

    @property
    def verified_M(self) -> np.ndarray:
        """bool[M]: which completions have a reward; the others are trained on nowhere."""
        if not self.trained:
            return np.ones(len(self.completions), bool)
        return np.array([mask.any() for mask in self.trained])

    def trained_tokens(self, member: int) -> np.ndarray:
        """bool[N]: which tokens of a completion are trained on."""
        return self.trained[member] if self.trained else np.ones(len(self.completions[member].tokens), bool)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, stop tokens included."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token: a group is as old as that."""
        return int(np.concatenate([completion.version for completion in self.completions]).min())

    @property
    def newest_version(self) -> int:
        """Version of the newest token."""
        return int(np.concatenate([completion.version for completion in self.completions]).max())


def to_bytes(groups: Sequence[Group]) -> bytes:
    """Writes groups without pickle; equal groups give equal bytes."""
    completions = [completion for group in groups for completion in group.completions]
    traces = [completion.trace for completion in completions if completion.trace is not None]
    text = {
        "format": _FORMAT,
        "answer": [group.answer for group in groups],
        "request_id": [completion.request_id for completion in completions],
        "engine_id": [completion.engine_id for completion in completions],
        "finish": [completion.finish.value for completion in completions],
        "experts_dtype": [trace.experts_TLK.dtype.str for trace in traces],
    }
    columns: dict[str, np.ndarray] = {
        "text": np.frombuffer(json.dumps(text).encode(), np.uint8),
        "ticket": np.array([group.ticket for group in groups], np.int64),
        "prompt_length": np.array([len(group.prompt_tokens) for group in groups], np.int64),
        "prompt_tokens": _join([group.prompt_tokens for group in groups], np.int32),
        "members": np.array([len(group.completions) for group in groups], np.int64),
        "reward": _join([group.reward_M for group in groups], np.float32),
        "masked": np.array([bool(group.trained) for group in groups], bool),
        "trained": _join([mask for group in groups for mask in group.trained], np.bool_),
        "member": np.array([completion.member for completion in completions], np.int64),
        "length": np.array([len(completion.tokens) for completion in completions], np.int64),
        "tokens": _join([completion.tokens for completion in completions], np.int32),
        "behavior_logp": _join([completion.behavior_logp for completion in completions], np.float32),
        "version": _join([completion.version for completion in completions], np.int32),
        "temperature": np.array([completion.logprob.temperature for completion in completions], np.float64),
        "after_truncation": np.array([completion.logprob.after_truncation for completion in completions], bool),
        "traced": np.array([completion.trace is not None for completion in completions], bool),
        "first_row": np.array([trace.first_row for trace in traces], np.int64),
        "experts_shape": np.array([trace.experts_TLK.shape for trace in traces], np.int64).reshape(-1, 3),
        "experts": _join([_as_bytes(trace.experts_TLK) for trace in traces], np.uint8),
        "trace_version": _join([trace.version_T for trace in traces], np.int32),
    }
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **columns)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def from_bytes(blob: bytes) -> list[Group]:
    """Reads what `to_bytes` wrote, bit for bit.

    Raises:
      ValueError: the bytes are damaged, or of another format.
    """
    try:
        with np.load(io.BytesIO(blob), allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        text = json.loads(columns["text"].tobytes())
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"saved groups: expected an intact .npz of groups, got {len(blob)} bytes: {error}") from error
    if text.get("format") != _FORMAT:
        raise ValueError(
            f"saved groups: expected format {_FORMAT}, got {text.get('format')}; use the sat-jax they are of"
        )
    completions = iter(_completions(columns, text))
    prompts = _cut(columns["prompt_tokens"], columns["prompt_length"])
    rewards = _cut(columns["reward"], columns["members"])
    lengths = _cut(columns["length"], columns["members"])
    masks = iter(
        _cut(
            columns["trained"],
            [n for each, masked in zip(lengths, columns["masked"], strict=True) if masked for n in each],
        )
    )
    return [
        Group(
            ticket=int(columns["ticket"][index]),
            prompt_tokens=prompts[index],
            answer=text["answer"][index],
            completions=tuple(next(completions) for _ in range(int(members))),
            reward_M=rewards[index],
            trained=tuple(next(masks) for _ in range(int(members))) if columns["masked"][index] else (),
        )
        for index, members in enumerate(columns["members"])
    ]


def _completions(columns: dict[str, np.ndarray], text: dict[str, Any]) -> list[Completion]:
    tokens, logps, versions = (
        _cut(columns[name], columns["length"]) for name in ("tokens", "behavior_logp", "version")
    )
    traces = iter(_traces(columns, text))
    return [
        Completion(
            request_id=text["request_id"][index],
            member=int(columns["member"][index]),
            tokens=tokens[index],
            behavior_logp=logps[index],
            version=versions[index],
            trace=next(traces) if traced else None,
            finish=Finish(text["finish"][index]),
            engine_id=text["engine_id"][index],
            logprob=LogprobDefinition(
                temperature=float(columns["temperature"][index]),
                after_truncation=bool(columns["after_truncation"][index]),
            ),
        )
        for index, traced in enumerate(columns["traced"])
    ]


def _traces(columns: dict[str, np.ndarray], text: dict[str, Any]) -> list[Trace]:
    dtypes = [np.dtype(name) for name in text["experts_dtype"]]
    shapes = [tuple(map(int, shape)) for shape in columns["experts_shape"]]
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    experts = _cut(columns["experts"], sizes)
    versions = _cut(columns["trace_version"], [shape[0] for shape in shapes])
    return [
        Trace(
            # Copied: a slice of the column is not aligned for its type, and would keep the whole column alive.
            experts_TLK=np.frombuffer(piece.tobytes(), dtype).reshape(shape),
            first_row=int(first_row),
            version_T=version_T,
        )
        for piece, dtype, shape, first_row, version_T in zip(
            experts, dtypes, shapes, columns["first_row"], versions, strict=True
        )
    ]


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _join(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    if any(array.dtype != dtype for array in arrays):
        got = sorted({str(array.dtype) for array in arrays})
        raise ValueError(f"groups to save: expected arrays of {np.dtype(dtype)}, got {', '.join(got)}")
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _cut(column: np.ndarray, lengths: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """The pieces of a column, each a view."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    return [column[end - length : end] for end, length in zip(ends, lengths, strict=True)]
