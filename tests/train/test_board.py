import os
import subprocess
import sys
import textwrap

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from train.board import Board


def events(path):
    """Reads an event file: a length, its checksum, the event, its checksum, again and again."""
    content, found, at = path.read_bytes(), [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        found.append(Event.FromString(content[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


def test_scalars_are_there_when_the_call_returns(tmp_path):
    board = Board(tmp_path / "tb", 3)
    board.scalars(3, {"loss": 0.5, "nothing": None})
    board.scalars(4, {"loss": 0.25})
    (path,) = (tmp_path / "tb").iterdir()
    values = [(e.step, v.tag, v.simple_value) for e in events(path) for v in e.summary.value]
    assert values == [(3, "loss", 0.5), (4, "loss", 0.25)]
    assert any(e.session_log.status == 1 and e.step == 3 for e in events(path))
    board.close()


def test_a_full_disk_is_an_error_and_not_a_hang(tmp_path):
    script = """
        import resource, signal, sys
        from pathlib import Path
        from train.board import Board
        board = Board(Path(sys.argv[1]), 0)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            for step in range(1000):
                board.scalars(step, {"loss": 1.0})
        except OSError as error:
            print("error", error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert "error 27" in done.stdout
