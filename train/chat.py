"""What a checkpoint's own files say of prompts and ends: its chat template, and the tokens that stop it.

Templates are programs of whoever made the checkpoint: they run in Jinja's sandbox, see messages and special tokens, and
no clock, so that a prompt is a function of the data.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from train.tokenizer import Tokenizer

Message = Mapping[str, Any]
_STOP_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what the assistant says; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Replaces the block by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Messages -> the text that the model was trained to continue."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        """Compiles the template.

        Args:
          source: Jinja.
          special: special tokens by name, e.g. {"bos_token": "<s>"}.
          where: its file, for messages.

        Raises:
          ValueError: it is no Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._where = where
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: expected Jinja, got: {error} ({where})") from error

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """The template beside a checkpoint's tokenizer: `chat_template.jinja`, else in `tokenizer_config.json`.

        Raises:
          ValueError: there is none, or a file cannot be read.
        """
        path = folder / "tokenizer_config.json"
        config = _read_json(path) if path.exists() else {}
        special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _text(config.get(name)))
        }
        own = folder / "chat_template.jinja"
        if own.exists():
            return cls(own.read_text(encoding="utf-8"), special, str(own))
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise ValueError(
                f"chat template: expected {own.name}, or the key chat_template in {path.name}, got neither ({folder}); "
                "set prompt.chat=false and write the form of a prompt in prompt.template"
            )
        return cls(source, special, str(path))

    def render(self, messages: Sequence[Message]) -> str:
        """The text of these messages, up to where the assistant is to speak.

        Args:
          messages: {"role": ..., "content": ...} each, in order.

        Raises:
          ValueError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **self._special
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"chat template: {type(error).__name__}: {error} ({self._where})") from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopTokens:
    """Which tokens a checkpoint's files say to stop at.

    Attributes:
      by_file: ids that each file names; a file that is absent, or names none, is left out.
      ids: all of them, ascending.
    """

    by_file: Mapping[str, tuple[int, ...]]

    @property
    def ids(self) -> tuple[int, ...]:
        """Every id that any file names: a model that learnt either end must be stopped by either."""
        return tuple(sorted({token for ids in self.by_file.values() for token in ids}))

    def disagreements(self, tokenizer: Tokenizer) -> list[str]:
        """A sentence for every file that does not name all of them."""
        return [
            f"{file} names {_named(ids, tokenizer)} and not {_named(missing, tokenizer)}"
            for file, ids in self.by_file.items()
            if (missing := tuple(token for token in self.ids if token not in ids))
        ]


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> StopTokens:
    """Reads `eos_token_id` of the model's and the generation's config, and `eos_token` of the tokenizer's.

    Raises:
      ValueError: a file is no JSON, or names what is no token.
    """
    found = {}
    for name in _STOP_FILES:
        path = folder / name
        if not path.exists():
            continue
        config = _read_json(path)
        if name == "tokenizer_config.json":
            text = _text(config.get("eos_token"))
            ids: Any = tokenizer.token_id(text) if text else None
        else:
            ids = config.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"{path}: expected eos_token_id in 0 to {tokenizer.vocab_size - 1} (the tokenizer's), got {token!r}"
                )
        if ids:
            found[name] = tuple(ids)
    return StopTokens(by_file=found)


def _named(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, got: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _text(token: Any) -> str:
    """A special token is written as its text, or as an object with the key "content"."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape for HTML


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
