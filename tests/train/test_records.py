import json

import pytest

from train.records import read_records, write_records

RECORDS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "é\n", "answer": "x", "metadata": {"a": [1, None]}}]


@pytest.mark.parametrize("name", ["d.jsonl", "d.arrayrecord"])
def test_records_come_back_in_order_with_their_place_and_twice_gives_the_same_bytes(tmp_path, name):
    path = tmp_path / name
    assert write_records(path, RECORDS) == 2
    first = path.read_bytes()
    assert list(read_records(path)) == [(RECORDS[0], f"{path}:1"), (RECORDS[1], f"{path}:2")]
    write_records(path, RECORDS)
    assert path.read_bytes() == first
    assert not list(tmp_path.glob("*.part"))


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "d.jsonl"
    write_records(path, RECORDS)

    def broken():
        yield RECORDS[0]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_records(path, broken())
    assert len(list(read_records(path))) == 2


def test_what_is_no_array_record_is_named(tmp_path):
    path = tmp_path / "d.arrayrecord"
    path.write_bytes(b"not one" * 100_000)
    with pytest.raises(ValueError, match=r"d\.arrayrecord: expected ArrayRecord"):
        list(read_records(path))


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"d\.parquet: expected pyarrow .*pip install 'sat-jax\[parquet\]'"):
        list(read_records(path))


def test_a_folder_and_a_missing_file_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="got: a folder"):
        read_records(tmp_path)
    with pytest.raises(ValueError, match="got: No such file"):
        read_records(tmp_path / "gone.jsonl")


def test_numbers_that_json_does_not_have_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records(tmp_path / "d.jsonl", [{"a": float("nan")}])
    assert json.loads(json.dumps(RECORDS)) == RECORDS
