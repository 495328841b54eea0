"""The committed stubs say what the proto says."""

import pathlib
import shutil

from tools.generate_stubs import PROTO, SUFFIXES, main, stale

ROOT = pathlib.Path(__file__).parents[2]


def test_the_committed_stubs_are_fresh():
    assert main(["--check"]) == 0


def test_a_changed_proto_makes_them_stale(tmp_path):
    folder = tmp_path / PROTO.parent
    shutil.copytree(ROOT / PROTO.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert stale(tmp_path) == []
    text = (folder / PROTO.name).read_text()
    (folder / PROTO.name).write_text(text.replace("int32 waiting = 6;", "int32 waiting = 7;"))
    assert stale(tmp_path) == [str(PROTO.with_name(PROTO.stem + SUFFIXES[0]))]
    (folder / PROTO.name).write_text(text.replace("int32 waiting = 6;", "int32 queued = 6;"))
    assert str(PROTO.with_name(PROTO.stem + SUFFIXES[2])) in stale(tmp_path)
