"""Text <-> token ids. Two tokenizers of one protocol; neither adds a token that the text does not hold."""

import dataclasses
import difflib
import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import tokenizers

PAD = "<pad>"
EOS = "<eos>"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer.

    Attributes:
      kind: char: one token a character; file: a tokenizer.json (Hugging Face tokenizers).
      path: of tokenizer.json, for kind "file".
      alphabet: characters, for kind "char"; empty = those of the data, sorted.

    Raises:
      ValueError: a setting of the other kind is given, or the one of this kind is not.
    """

    kind: Literal["char", "file"]
    path: str
    alphabet: str

    def __post_init__(self) -> None:
        if self.kind == "file" and not self.path:
            raise ValueError('tokenizer.path: expected the path of a tokenizer.json with kind = "file", got ""')
        if self.kind == "file" and self.alphabet:
            raise ValueError(f'tokenizer.alphabet: expected "" with kind = "file", got {self.alphabet!r}')
        if self.kind == "char" and self.path:
            raise ValueError(
                f'tokenizer.path: expected "" with kind = "char", got {self.path!r}; set tokenizer.kind = "file"'
            )


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer. Ids are int32 in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the policy's V."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int32[N]; no token is added.

        Raises:
          ValueError: the text cannot be written in this vocabulary.
        """
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; special tokens appear as their names.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        ...

    def token_id(self, token: str) -> int:
        """Id of one token by its string, e.g. "<eos>".

        Raises:
          ValueError: there is no such token; the nearest ones are named.
        """
        ...

    def digest(self) -> str:
        """A hash of the vocabulary: equal digests give equal ids."""
        ...


class CharTokenizer:
    """One token a character: `<pad>` is 0, `<eos>` is 1, then the alphabet in its order."""

    def __init__(self, alphabet: str) -> None:
        """Fixes the vocabulary.

        Args:
          alphabet: distinct characters, in the order of their ids.

        Raises:
          ValueError: it is empty, or a character occurs twice.
        """
        if not alphabet:
            raise ValueError("tokenizer.alphabet: expected at least one character, got none")
        twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"tokenizer.alphabet: expected distinct characters, got {twice[0]!r} more than once")
        self._tokens = (PAD, EOS, *alphabet)
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}

    @property
    def vocab_size(self) -> int:
        """Characters and the two special tokens."""
        return len(self._tokens)

    def encode(self, text: str) -> np.ndarray:
        """Ids of the characters, int32[N]."""
        try:
            return np.array([self._ids[character] for character in text], np.int32)
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"tokenizer: expected characters of its alphabet {self._alphabet!r}, got {character!r} "
                f"({_name(character)}) in {text!r}; add it to tokenizer.alphabet or leave that empty"
            ) from None

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Characters of the ids, special tokens by name."""
        ids = _check_ids(tokens, self.vocab_size)
        return "".join([self._tokens[token] for token in ids])

    def token_id(self, token: str) -> int:
        """Id of a character or of `<pad>` or `<eos>`."""
        return _lookup(self._ids.get(token), token, self._tokens)

    def digest(self) -> str:
        """Hash of the alphabet."""
        return hashlib.sha256(f"char/1/{self._alphabet}".encode()).hexdigest()

    @property
    def _alphabet(self) -> str:
        return "".join(self._tokens[2:])


class FileTokenizer:
    """A tokenizer.json. Its post-processor is not run: what begins a prompt is written in the template."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
          ValueError: it cannot be read, or is no tokenizer.json.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"tokenizer.path: expected a readable file, got: {error.strerror} ({path})") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.path: expected a tokenizer.json, got: {error} ({path})") from error
        # A file may ask for padding or truncation; either would change a prompt without a word.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._digest = hashlib.sha256(content).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id (ids may have gaps)."""
        return max(self._vocabulary.values()) + 1

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int32[N]; special tokens written in the text are recognised, none is added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, special tokens by name."""
        return self._tokenizer.decode(_check_ids(tokens, self.vocab_size), skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        """Id of a token of the vocabulary by its string."""
        return _lookup(self._tokenizer.token_to_id(token), token, self._vocabulary)

    def digest(self) -> str:
        """Hash of the file's bytes."""
        return self._digest


def decode_sampled(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Text of sampled ids. A checkpoint's vocabulary is often padded beyond its tokenizer's: such an id has no text.

    Args:
      tokenizer: of the run.
      tokens: int32[N], below the policy's vocabulary size.

    Returns:
      What `tokenizer.decode` gives of the ids that it has; U+FFFD for each of the others.
    """
    known = tokens < tokenizer.vocab_size
    if known.all():
        return tokenizer.decode(tokens)
    edges = np.flatnonzero(np.diff(known)) + 1
    runs = np.split(tokens, edges)
    return "".join(tokenizer.decode(run) if run[0] < tokenizer.vocab_size else "\ufffd" * len(run) for run in runs)


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The configured tokenizer.

    Args:
      config: which.
      texts: everything that will be encoded (prompts in their template, answers); only read where the alphabet is to
        be derived from them.

    Raises:
      ValueError: see the classes.
    """
    if config.kind == "file":
        return FileTokenizer(Path(config.path))
    return CharTokenizer(config.alphabet or "".join(sorted(set().union(*texts))))


def stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """Ids of the stop tokens, in their order.

    Raises:
      ValueError: one of them is no token.
    """
    return tuple(tokenizer.token_id(token) for token in stop)


def _lookup(token_id: int | None, token: str, known: Iterable[str]) -> int:
    if token_id is not None:
        return token_id
    close = difflib.get_close_matches(token, known, n=3, cutoff=0.5)
    remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "no token is like it"
    raise ValueError(f"token: expected a token of the vocabulary, got {token!r}; {remedy}")


def _check_ids(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    ids = tokens.tolist() if isinstance(tokens, np.ndarray) else [int(token) for token in tokens]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = [token for token in ids if not 0 <= token < vocab_size]
        raise ValueError(f"token id: expected 0 to {vocab_size - 1}, got {outside[0]}")
    return ids


def _name(character: str) -> str:
    return f"U+{ord(character):04X} {unicodedata.name(character, 'unnamed')}"
