"""Where prompts come from: a built-in task or a user's JSONL, in an order with random access by one integer.

A *ticket* is the number of a prompt in the run's endless, shuffled order. The order is a function of (data, seed), so
the whole data cursor of a run is its next ticket.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import grain
import numpy as np

from train.chat import ChatTemplate
from train.records import kind_of, read_records, text_of
from train.seeds import derive_seed
from train.strict_toml import Range, check_fields
from train.tasks import Example, TaskName, generate
from train.tokenizer import Tokenizer

_PLACE = "{prompt}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which prompts.

    Attributes:
      task: built-in generator, used when `path` is empty.
      path: of a JSONL file, one {"prompt": ..., "answer": ...} a line; other keys are ignored.
      holdout: distinct prompts kept out of training, for evaluation; of a file at most a tenth of its distinct prompts.
    """

    task: TaskName
    path: str
    holdout: Annotated[int, Range(at_least=0)]

    def __post_init__(self) -> None:
        check_fields(self, "data")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """What the policy is fed, and what ends its answer.

    Attributes:
      template: text around the data's prompt, which replaces `{prompt}`; every other brace is itself.
      stop: token strings that end a completion. The first one ends the answers of the supervised warm start.
      chat: whether the text is then put, as a user's message, into the chat template beside `tokenizer.path`.
      system: message before it, with `chat`; empty = none.
      checkpoint_stop: whether the tokens that config.json, generation_config.json and tokenizer_config.json beside
        `tokenizer.path` name end a completion, too.
    """

    template: str
    stop: tuple[str, ...]
    chat: bool = False
    system: str = ""
    checkpoint_stop: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "prompt")
        if self.system and not self.chat:
            raise ValueError('prompt.system: expected "" without prompt.chat, got a message; set prompt.chat=true')
        if self.template.count(_PLACE) != 1:
            raise ValueError(f"prompt.template: expected {_PLACE} exactly once, got {self.template!r}")
        if not self.stop or len(set(self.stop)) != len(self.stop):
            raise ValueError(f"prompt.stop: expected at least one token string, all distinct, got {list(self.stop)}")

    def render(self, prompt: str, chat: ChatTemplate | None = None) -> str:
        """The template with the data's prompt in it, in the chat template if there is one.

        Raises:
          ValueError: the chat template refuses it.
        """
        text = self.template.replace(_PLACE, prompt)
        if chat is None:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return chat.render([*system, {"role": "user", "content": text}])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, encoded.

    Attributes:
      text: the data's prompt, without the template.
      answer: the data's answer.
      tokens: int32[N], the rendered prompt, N >= 1.
      answer_tokens: int32, the answer (or response) and the first stop token: what a supervised example is trained on.
      metadata: the data's, for a user's reward function.
    """

    text: str
    answer: str
    tokens: np.ndarray
    answer_tokens: np.ndarray
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How examples become prompts, and how long they may be.

    Attributes:
      tokenizer: of the run.
      prompt: template and stop tokens.
      max_new_tokens: bound on a completion, stop token included.
      row_length: T; prompt and completion must fit.
      chat: around the template, or None.
    """

    tokenizer: Tokenizer
    prompt: PromptConfig
    max_new_tokens: int
    row_length: int
    chat: ChatTemplate | None = None

    def encode(self, example: Example) -> Prompt:
        """Encodes and checks one example.

        Raises:
          ValueError: a character without a token, a prompt that does not fit the row with its completion, or an answer
            that cannot be given in max_new_tokens; each with the example's place.
        """
        tokens, answer = self._texts(example)
        room = self.row_length - self.max_new_tokens
        if not 1 <= len(tokens) <= room:
            raise ValueError(
                f"{example.where}: expected a prompt of 1 to {room} tokens in its template (batch.row_length "
                f"{self.row_length} less sampling.max_new_tokens {self.max_new_tokens}), got {len(tokens)}; shorten it "
                f"or set batch.row_length to at least {len(tokens) + self.max_new_tokens}"
            )
        if len(answer) + 1 > self.max_new_tokens:
            raise ValueError(
                f"{example.where}: expected an answer of at most {self.max_new_tokens - 1} tokens "
                f"(sampling.max_new_tokens {self.max_new_tokens} less the stop token), got {len(answer)}; no "
                f"completion could be right: set sampling.max_new_tokens to at least {len(answer) + 1}"
            )
        answer_tokens = np.append(answer, np.int32(self._stop)).astype(np.int32)
        return Prompt(
            text=example.prompt,
            answer=example.answer,
            tokens=tokens,
            answer_tokens=answer_tokens,
            metadata=example.metadata,
        )

    def encode_pair(self, example: Example) -> tuple[list[int], list[int]]:
        """Encodes a supervised example, whose answer is a whole response: (prompt, response with the first stop token).

        Raises:
          ValueError: a character without a token, or the pair does not fit the row.
        """
        tokens, response = self._texts(example)
        if not 1 <= len(tokens) + len(response) + 1 <= self.row_length:
            raise ValueError(
                f"{example.where}: expected a prompt and a response of at most {self.row_length} tokens "
                f"(batch.row_length) with the stop token, got {len(tokens)} + {len(response)} + 1"
            )
        return tokens.tolist(), [*response.tolist(), self._stop]

    @property
    def _stop(self) -> int:
        return self.tokenizer.token_id(self.prompt.stop[0])

    def _texts(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the rendered prompt and of the answer."""
        try:
            tokens = self.tokenizer.encode(self.prompt.render(example.prompt, self.chat))
            answer = self.tokenizer.encode(example.response or example.answer)
        except ValueError as error:
            raise ValueError(f"{example.where}: {error}") from error
        if inside := [text for text in self.prompt.stop if self.tokenizer.token_id(text) in answer]:
            raise ValueError(
                f"{example.where}: expected an answer without a stop token (prompt.stop), got {inside[0]!r} in "
                f"{example.answer!r}; no completion could go beyond it"
            )
        return tokens, answer


class PromptData:
    """The prompts of a run: `data[ticket]` for training, `data.held_out` for evaluation."""

    def __init__(self, train: Sequence[Example], held_out: Sequence[Example], encoding: Encoding, seed: int) -> None:
        """Encodes everything once, so that a bad line is an error before the run and not in it.

        Args:
          train: examples to train on.
          held_out: examples to evaluate on.
          encoding: how.
          seed: of the run; the order follows from it.

        Raises:
          ValueError: an example cannot be used; see `Encoding.encode`.
        """
        self.train: tuple[Prompt, ...] = tuple(encoding.encode(example) for example in train)
        self.held_out: tuple[Prompt, ...] = tuple(encoding.encode(example) for example in held_out)
        self._order = grain.MapDataset.source(self.train).shuffle(seed=derive_seed(seed, "order"))

    def __len__(self) -> int:
        """Training prompts: the tickets of one epoch."""
        return len(self.train)

    def __getitem__(self, ticket: int) -> Prompt:
        """The prompt of any ticket from 0; every epoch is another order of all training prompts.

        Raises:
          ValueError: a negative ticket.
        """
        if ticket < 0:
            raise ValueError(f"ticket: expected 0 or more, got {ticket}")
        prompt = self._order[ticket]
        assert prompt is not None, "nothing filters the order"
        return prompt

    def digest(self) -> str:
        """A hash of every prompt and answer, in order: a cursor means the same only in the same data."""
        hashed = hashlib.sha256()
        for part in (self.train, self.held_out):
            hashed.update(f"{len(part)}\n".encode())
            for prompt in part:
                hashed.update(json.dumps([prompt.tokens.tolist(), prompt.text, prompt.answer]).encode())
        return hashed.hexdigest()


def read_examples(config: DataConfig) -> list[Example]:
    """Every example of the configured source, in its order.

    Raises:
      ValueError: the file has a line that cannot be used; see `read_jsonl`.
    """
    return read_jsonl(Path(config.path)) if config.path else generate(config.task)


def split(config: DataConfig, examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Splits into (training, held-out), the same for the same examples and seed.

    It is prompts that are held out, and each once: copies of one never fall on both sides.

    Raises:
      ValueError: holding out leaves nothing to train on, or a file is too short to hold anything out.
    """
    distinct = list(dict.fromkeys(example.prompt for example in examples))
    count = min(config.holdout, len(distinct) // 10) if config.path else config.holdout
    if config.holdout and not count:
        raise ValueError(
            f"data.holdout: expected at least 10 distinct prompts to hold any out, got {len(distinct)} "
            f"({config.path}); add lines, or set data.holdout=0 and eval.prompts=0"
        )
    if count >= len(distinct):
        raise ValueError(f"data.holdout: expected fewer than the {len(distinct)} prompts of the data, got {count}")
    chosen = set(random.Random(derive_seed(seed, "holdout")).sample(distinct, count))
    train, held_out = [], {}
    for example in examples:
        if example.prompt in chosen:
            held_out.setdefault(example.prompt, example)
        else:
            train.append(example)
    return train, list(held_out.values())


def read_jsonl(path: Path) -> list[Example]:
    """Reads {"prompt": text, "answer": text or integer} records; an object "metadata" is kept, other keys are not.

    Args:
      path: JSON lines (blank lines, CRLF and a leading BOM are accepted), `.parquet` or `.arrayrecord`.

    Raises:
      ValueError: the file cannot be read or is empty, or a record is not such a one; file and line are named.
    """
    examples = [_example(record, where) for record, where in read_records(path)]
    if not examples:
        raise ValueError(f'{path}: expected a line {{"prompt": ..., "answer": ...}}, got an empty file')
    return examples


def read_supervised(path: Path, encoding: Encoding) -> list[tuple[list[int], list[int]]]:
    """Reads {"prompt": text, "response": text} records as token ids: (prompt, response with the first stop token).

    Raises:
      ValueError: as `read_jsonl`, or a pair does not fit the row; file and line are named.
    """
    pairs = []
    for record, where in read_records(path):
        prompt, response = text_of(record, "prompt", where), text_of(record, "response", where)
        pairs.append(encoding.encode_pair(Example(prompt=prompt, answer=response, where=where)))
    if not pairs:
        raise ValueError(f'{path}: expected a line {{"prompt": ..., "response": ...}}, got an empty file')
    return pairs


def _example(record: Mapping[str, Any], where: str) -> Example:
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{where}: expected 'metadata' to be an object, got {kind_of(metadata)}")
    return Example(
        prompt=text_of(record, "prompt", where),
        answer=text_of(record, "answer", where, numbers=True),
        where=where,
        metadata=metadata,
    )
