"""The process that sends staged weights into a process group with an SGLang server. It alone needs PyTorch.

A program of its own, started by the bridge (`sglang_group.Sender`) with an interpreter that has PyTorch, SGLang's say;
therefore it imports nothing of this package. It is rank 0 of the group, the server's workers are the others. Orders
come as JSON lines on stdin, each is answered by one on stdout, and the end of stdin is the end of the process, whatever
it is doing: a killed bridge leaves no sender behind.
"""

import argparse
import datetime
import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO


class Group(Protocol):
    """A process group whose rank 0 this is."""

    def listen(self) -> int:
        """Opens the store where the ranks meet; returns its port."""
        ...

    def join(self) -> None:
        """Until every rank is there."""
        ...

    def send(self, path: Path, begin: int, end: int) -> None:
        """Broadcasts bytes [begin, end) of a file as one tensor; returns when they have gone out."""
        ...


class TorchGroup:
    """A group of torch.distributed, by the private name that SGLang itself makes its side with.

    The public way ignores the group's name, and the ranks would look for each other under different keys.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._torch: Any = importlib.import_module("torch")
        self._c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        self._device = self._torch.device(arguments.device)
        self._timeout = datetime.timedelta(seconds=arguments.seconds)
        self._store: Any = None
        self._group: Any = None
        self._mapped: tuple[Path, Any] | None = None

    def listen(self) -> int:
        """Opens the store at any free port."""
        if self._device.type != "cpu":
            self._torch.accelerator.set_device_index(self._device.index or 0)
        self._store = self._torch.distributed.TCPStore(
            self._arguments.address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        return self._store.port

    def join(self) -> None:
        """Meets the server's ranks under the name of the group."""
        name = self._arguments.group
        self._group, _ = self._c10d._new_process_group_helper(
            self._arguments.world_size,
            0,
            [],
            self._c10d.Backend(self._arguments.backend),
            self._c10d.PrefixStore(name, self._store),
            group_name=name,
            timeout=self._timeout,
        )

    def send(self, path: Path, begin: int, end: int) -> None:
        """Broadcasts from the mapped file: on the CPU without a copy of it."""
        if self._mapped is None or self._mapped[0] != path:
            size = path.stat().st_size
            self._mapped = path, self._torch.from_file(str(path), shared=False, size=size, dtype=self._torch.uint8)
        self._group.broadcast(self._mapped[1][begin:end].to(self._device), 0).wait()
        if self._device.type != "cpu":
            self._torch.accelerator.synchronize()


def run(group: Group, orders: Iterable[str], answers: TextIO) -> None:
    """Does what each line asks for, until they end.

    Args:
      group: to send into.
      orders: {"do": "listen"}, {"do": "join"} or {"do": "send", "path", "begin", "end"}, a JSON object each.
      answers: takes one JSON object for each.
    """
    steps: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "listen": lambda _order: {"port": group.listen()},
        "join": lambda _order: {"joined": group.join() is None},
        "send": lambda order: {"sent": group.send(Path(order["path"]), order["begin"], order["end"]) is None},
    }
    for line in orders:
        order = json.loads(line)
        answers.write(json.dumps(steps[order["do"]](order)) + "\n")
        answers.flush()


def orders_until_the_end(source: TextIO) -> Iterable[str]:
    """Lines of `source`, read by a thread that ends the process when they end: a broadcast cannot be interrupted."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    while True:
        yield lines.get()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="of this host, as the server's ranks reach it")
    parser.add_argument("--backend", required=True, help="gloo or nccl")
    parser.add_argument("--device", required=True, help="cpu, or cuda:N")
    parser.add_argument("--group", required=True, help="its name")
    parser.add_argument("--world-size", required=True, type=int, help="this process and the server's ranks")
    parser.add_argument("--seconds", required=True, type=float, help="that a rank waits for the others")
    run(TorchGroup(parser.parse_args()), orders_until_the_end(sys.stdin), sys.stdout)


if __name__ == "__main__":
    main()
