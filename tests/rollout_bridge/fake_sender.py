"""A sender without PyTorch: the program of the real one, over a group that is a connection to the fake server.

Started by its path, and imports no package of ours: a test starts many.
"""

import contextlib
import importlib.util
import socket
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "rollout_bridge" / "engines" / "torch_sender.py"


class SocketGroup:
    """Rank 0 of two."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def listen(self) -> int:
        self._store = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return self._store.getsockname()[1]

    def join(self) -> None:
        self._peer = self._stack.enter_context(self._store.accept()[0])

    def send(self, path: Path, begin: int, end: int) -> None:
        self._peer.sendall(path.read_bytes()[begin:end])


def main() -> None:
    spec = importlib.util.spec_from_file_location("torch_sender", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    with contextlib.ExitStack() as stack:
        program.run(SocketGroup(stack), program.orders_until_the_end(sys.stdin), sys.stdout)


if __name__ == "__main__":
    main()
