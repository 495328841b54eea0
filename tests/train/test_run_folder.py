import dataclasses
import errno
import io
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.runs import make_header
from train import run_folder
from train.run_folder import (
    JsonLines,
    encode,
    installed_versions,
    read_header,
    read_json,
    read_lines,
    rewrite,
    write_atomic,
)

TEXTS = st.text(st.characters(codec=None), max_size=20)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.dictionaries(TEXTS, TEXTS | st.floats(allow_nan=False, allow_infinity=False) | st.none()), max_size=4)
)
def test_what_is_appended_is_read_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    file = JsonLines(path)
    for record in records:
        file.append(record)
    # Every line is in the operating system's hands before the file is closed.
    assert read_lines(path) == records
    file.close()


def test_a_record_is_strict_json():
    assert encode({"a": 0.5, "b": None, "c": "é\ud800"}) == '{"a":0.5,"b":null,"c":"\\u00e9\\ud800"}'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            encode({"a": value})


def test_a_line_that_a_kill_cut_off_is_not_read_and_not_continued(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"version":1}\n{"version":2,"rew')
    assert read_lines(path) == [{"version": 1}]
    file = JsonLines(path)
    file.append({"version": 2})
    file.close()
    assert path.read_text() == '{"version":1}\n{"version":2}\n'


@pytest.mark.parametrize("line", ['{"version":', "[1]", '{"a":NaN}', '{"a":Infinity}', "", "\xff"])
def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"version":1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: expected one JSON object, got"):
        read_lines(path)


def test_absent_files_are_empty(tmp_path):
    assert read_lines(tmp_path / "none.jsonl") == []
    assert read_json(tmp_path / "none.json") is None
    assert read_header(tmp_path) is None


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    rewrite(path, [{"version": 1}])

    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"expected to write it, got 'No space left on device'.*x\.jsonl") as failed:
        write_atomic(path, "other")
    assert failed.value.errno == errno.ENOSPC
    assert read_lines(path) == [{"version": 1}]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    class FullDisk(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = JsonLines(tmp_path / "x.jsonl")
    file.close()
    monkeypatch.setattr(file, "_file", FullDisk())
    with pytest.raises(OSError, match=r"expected to write it, got 'No space left on device'.*x\.jsonl") as failed:
        file.append({"version": 1})
    assert failed.value.errno == errno.ENOSPC


def test_the_header_comes_back_as_it_was(tmp_path):
    header = make_header(levels={"mismatch/k3": 0.1}, max_lag=None)
    (tmp_path / run_folder.RUN).write_text(encode(dataclasses.asdict(header)))
    assert read_header(tmp_path) == header


def test_a_header_of_another_version_is_an_error_that_names_the_difference(tmp_path):
    (tmp_path / run_folder.RUN).write_text(json.dumps({"name": "x", "colour": 1}))
    with pytest.raises(ValueError, match=r"run\.json: expected the fields of a run header, got .*'colour'"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "lag 4 to 7"),
        ({"lag": 0, "max_lag": 0}, "synchronous"),
        ({"mode": "bounded", "max_lag": 8}, "bounded, lag at most 8"),
    ],
)
def test_a_schedule_is_said_in_words(changes, words):
    assert make_header(**changes).lag_words == words


def test_versions_name_python_and_what_decides_the_numbers():
    assert {"python", "jax", "flax", "numpy"} <= installed_versions().keys()
