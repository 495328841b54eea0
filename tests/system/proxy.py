"""A TCP proxy that misbehaves: what a network does to a bridge's connections."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Stands before one port of this machine. `cut`, `delay` and `corrupt` strike what passes through it next."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._until = 0.0
        self._corrupt = 0
        self.corrupted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks every connection in the middle of whatever it carries."""
        with self._lock:
            connections, self._open = list(self._open), set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def delay(self, seconds: float) -> None:
        """Holds all bytes back for this long."""
        self._until = time.monotonic() + seconds

    def corrupt(self) -> None:
        """Flips a bit in the next large piece that goes to the engine: a chunk of a push."""
        with self._lock:
            self._corrupt += 1

    def close(self) -> None:
        """Takes no more connections, and ends those that are there."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._join(client)

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._open |= {client, server}
        for source, sink, inward in ((client, server, True), (server, client, False)):
            threading.Thread(target=self._pump, args=(source, sink, inward), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, inward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while (left := self._until - time.monotonic()) > 0:
                    time.sleep(min(left, 0.05))
                sink.sendall(self._spoilt(data) if inward else data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        with self._lock:
            self._open -= {source, sink}

    def _spoilt(self, data: bytes) -> bytes:
        with self._lock:
            if not self._corrupt or len(data) < 4096:
                return data
            self._corrupt -= 1
            self.corrupted += 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
