"""Records of data files, one JSON object each, with the place that each came from.

JSON lines are read without any library, Parquet with pyarrow (extra `parquet`), ArrayRecord with grain's own reader.
Every error names file and line.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ARRAY_RECORD = ".arrayrecord"
_BOM = b"\xef\xbb\xbf"
_PARQUET_ROWS = 1024  # read together


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields every record of a file with its place, in order.

    Args:
      path: `.parquet`, `.arrayrecord`, or anything else: JSON lines, where blank lines, CRLF and a leading BOM are
        accepted.

    Raises:
      ValueError: the file cannot be read, or a line is no JSON object; file and line are named.
    """
    if not path.is_file():
        raise ValueError(f"data.path: expected a readable file, got: {_why_not(path)} ({path})")
    if path.suffix == ".parquet":
        return _parquet(path)
    return _array_record(path) if path.suffix == ARRAY_RECORD else _json_lines(path)


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Writes records, one JSON object each, keys as given; equal records give equal bytes.

    The file appears whole or not at all.

    Args:
      path: `.arrayrecord`, or anything else: JSON lines.
      records: in order.

    Returns:
      How many.

    Raises:
      OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False).encode() for record in records)
    count = _write_array_record(part, lines) if path.suffix == ARRAY_RECORD else _write_lines(part, lines)
    part.replace(path)
    return count


def text_of(record: Mapping[str, Any], key: str, where: str, *, numbers: bool = False) -> str:
    """A text of a record.

    Args:
      record: of a file.
      key: of the text.
      where: its place.
      numbers: whether an integer is accepted, too.

    Raises:
      ValueError: it is absent, empty, of another type, or no Unicode.
    """
    if key not in record:
        raise ValueError(f"{where}: expected the key {key!r}, got {', '.join(map(repr, record)) or 'none'}")
    value = record[key]
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected {key!r} to be a string, got {kind_of(value)}; write it in quotes")
    if not value:
        raise ValueError(f"{where}: expected {key!r} to be a string that is not empty, got an empty one")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: expected {key!r} to be Unicode text, got half of a surrogate pair in {value!r}")
    return value


def kind_of(value: Any) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """One JSON object.

    Raises:
      ValueError: it is none; the place is named.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at byte {error.start}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected one JSON object, got: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {kind_of(record)}")
    return record


def _json_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                yield parse_record(text, f"{path}:{number}"), f"{path}:{number}"


def _parquet(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: expected pyarrow to read Parquet, got none; pip install 'sat-jax[parquet]', or convert the file "
            "to JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield record, f"{path}:{number}"
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        raise ValueError(f"{path}: expected Parquet, got, after {number} rows: {error}") from error


def _array_record(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    number = 0
    try:
        reader = _library(path).ArrayRecordReader(str(path))
        try:
            for number in range(reader.num_records()):
                where = f"{path}:{number + 1}"
                yield parse_record(reader.read([number])[0], where), where
        finally:
            reader.close()
    except RuntimeError as error:  # what the library raises for every damage
        raise ValueError(f"{path}: expected ArrayRecord, got, at record {number + 1}: {error}") from error


def _write_lines(path: Path, lines: Iterable[bytes]) -> int:
    count = 0
    with path.open("wb") as file:
        for line in lines:
            file.write(line + b"\n")
            count += 1
    return count


def _write_array_record(path: Path, lines: Iterable[bytes]) -> int:
    writer = _library(path).ArrayRecordWriter(str(path), "group_size:1")  # read back in any order
    count = 0
    try:
        for line in lines:
            writer.write(line)
            count += 1
    finally:
        writer.close()
    return count


def _library(path: Path) -> Any:
    try:
        return importlib.import_module("array_record.python.array_record_module")
    except ModuleNotFoundError as error:  # grain brings it where there is a build of it
        raise ValueError(
            f"{path}: expected array_record for ArrayRecord, got none; pip install array_record, or use JSON lines"
        ) from error


def _why_not(path: Path) -> str:
    return "a folder" if path.is_dir() else "No such file or directory"
