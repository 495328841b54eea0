"""Strict TOML <-> frozen dataclasses: what a key means is said once, in the field's annotation.

Knows nothing of a run: it reads a table into a dataclass, refuses what the dataclass does not say, and writes it back
so that it reads equal. An annotation may carry a `Range`, e.g. `Annotated[int, Range(at_least=1)]`.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bounds of a number; `None` is no bound.

    Attributes:
      at_least: inclusive lower bound.   above: exclusive lower bound.
      at_most: inclusive upper bound.    below: exclusive upper bound.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` is within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return " and ".join(f"{word} {bound}" for word, bound in words if bound is not None)


def read_file(path: Path) -> dict[str, Any]:
    """Parses a TOML file.

    Raises:
      ValueError: it cannot be read, is not UTF-8, or is not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: expected a readable TOML file, got: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: expected TOML, got: {error}") from error


def read_table(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Builds the dataclass `cls` from a parsed table, nested tables included; integers are accepted as floats.

    Args:
      cls: a dataclass; a field whose type is itself a dataclass is read from a table of that name. A dataclass with a
        classmethod `from_table(table, where)` reads itself.
      table: as parsed.
      where: dotted name of the table, for messages.

    Raises:
      ValueError: a key is unknown (the nearest known one is named), missing, of another type or out of its range.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table, got {_show(table)}; write [{where}]")
    hints = field_types(cls)
    for key in table:
        if key not in hints:
            raise ValueError(f"{_dotted(where, key)}: expected a known key, got {key!r}; {_suggest(cls, key, where)}")
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = _dotted(where, field.name)
        if field.name in table:
            values[field.name] = convert(hints[field.name], table[field.name], name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name}: expected a value, got none; a file holds every key of its run")
    return cls(**values)


def check_fields(config: Any, where: str) -> None:
    """Checks every field of a dataclass against its annotation, also when it was not read from a file.

    Raises:
      ValueError: a field has another type or is out of its range.
    """
    for name, hint in field_types(type(config)).items():
        convert(hint, getattr(config, name), _dotted(where, name))


def field_types(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass's own fields, resolved, with their `Range`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def apply_overrides(cls: type, table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Replaces values of a parsed table: `a.b=c`, with c as TOML or, where that fails or a string is due, as it stands.

    Args:
      cls: the dataclass that the table will be read into; says where a string is due.
      table: as parsed; not changed.
      overrides: as given on the command line, later ones win.

    Returns:
      A changed copy.

    Raises:
      ValueError: an override has no `=`, or its key runs through something that is no table.
    """
    result: dict[str, Any] = _copy(table)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(_SEGMENT.fullmatch(part) for part in path):
            raise ValueError(f"override {override!r}: expected key=value with a dotted key, e.g. optim.peak_lr=1e-4")
        inner = result
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ValueError(f"override {override!r}: expected a table at {part!r}, got {_show(inner)}")
        inner[path[-1]] = _override_value(_hint_at(cls, path), text.strip())
    return result


def dump(config: Any) -> str:
    """Writes a dataclass as TOML that `read_table` reads back equal; a dataclass may write itself by `to_table()`."""
    return "\n".join(_lines(_plain(config), "")) + "\n"


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for a misspelt name: the closest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


def convert(hint: Any, value: Any, name: str) -> Any:
    """Checks one value against a type annotation and returns it, integers as floats and lists as tuples where due.

    Args:
      hint: the annotation: a scalar, a `Literal`, a tuple of one type, a dataclass, any of them optional or annotated.
      value: as parsed.
      name: dotted name of the key, for messages.

    Raises:
      ValueError: another type, or out of its range.
    """
    if typing.get_origin(hint) is typing.Annotated:
        base, *extras = typing.get_args(hint)
        value = convert(base, value, name)
        for bounds in extras:
            if isinstance(bounds, Range) and value is not None and not bounds.holds(value):
                raise ValueError(f"{name}: expected {bounds}, got {_show(value)}")
        return value
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            close = difflib.get_close_matches(str(value), map(str, allowed), n=1)
            remedy = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {_show(value)}{remedy}")
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _convert_optional(hint, value, name)
    if typing.get_origin(hint) is tuple:
        return _convert_tuple(hint, value, name)
    if dataclasses.is_dataclass(hint):
        return _convert_table(hint, value, name)
    return _convert_scalar(hint, value, name)


def _convert_optional(hint: Any, value: Any, name: str) -> Any:
    (base,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return None if value is None else convert(base, value, name)


def _convert_tuple(hint: Any, value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected a list, got {_show(value)}; write [{_show(value)}]")
    item = typing.get_args(hint)[0]
    return tuple(convert(item, entry, f"{name}[{i}]") for i, entry in enumerate(value))


def _convert_table(cls: Any, value: Any, name: str) -> Any:
    if isinstance(value, cls):
        return value
    return cls.from_table(value, name) if hasattr(cls, "from_table") else read_table(cls, value, name)


def _convert_scalar(hint: Any, value: Any, name: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1023 else math.inf
    kind = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}.get(hint)
    if kind is None:
        raise TypeError(f"{name}: no rule for the annotation {hint!r}")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{name}: expected {kind}, got {_show(value)}")
    if hint is float and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def _suggest(cls: type, key: str, where: str) -> str:
    elsewhere = [
        _dotted(table, key)
        for table, hint in field_types(cls).items()
        if dataclasses.is_dataclass(hint) and key in field_types(hint)  # type: ignore[arg-type]
    ]
    if elsewhere:
        return f"did you mean {' or '.join(repr(_dotted(where, name)) for name in elsewhere)}?"
    return nearest(key, field_types(cls))


def _hint_at(cls: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not dataclasses.is_dataclass(cls):
            return None
        cls = field_types(cls).get(part)  # type: ignore[arg-type]
    return cls


def _override_value(hint: Any, text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if hint is str and not isinstance(value, str) else value


def _plain(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_table"):
        return config.to_table()
    plain = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            plain[field.name] = _plain(value) if dataclasses.is_dataclass(value) else value
    return plain


def _lines(table: Mapping[str, Any], where: str) -> list[str]:
    lines = [f"{key} = {_write(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = _dotted(where, key)
            lines += ["", f"[{name}]", *_lines(value, name)]
    return lines


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    raise TypeError(f"no TOML form for {value!r}")


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | list | dict) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in table.items()}
