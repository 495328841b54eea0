"""Which bridges there are: a list of addresses, or a name that stands for all of its addresses, now and later."""

import socket
import threading
from collections.abc import Callable, Sequence

from rollout_bridge.transport import split_address

PREFIX = "dns:"


def resolve(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Replaces each "dns:name:port" by the name's addresses at this moment, in order; leaves the others as they are.

    A headless service of a cluster resolves to one address for each of its pods. Under TLS the bridges' certificates
    must hold these addresses.

    Raises:
      ValueError: a name has no address; names it.
    """
    found: list[str] = []
    for endpoint in endpoints:
        if not endpoint.startswith(PREFIX):
            found.append(endpoint)
            continue
        name, port = split_address(endpoint.removeprefix(PREFIX))
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(
                f"endpoint {endpoint}: expected a name with addresses, got: {error}; is the fleet started, and the "
                "name known on this host?"
            ) from error
        hosts = sorted({str(info[4][0]) for info in infos})
        found += [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return tuple(found)


class Follow:
    """Looks again and again, in a thread of its own, which addresses there are."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        """Starts.

        Args:
          look: one look, and what follows from it; it must not raise.
          seconds: from one look to the next.
        """
        self._look = look
        self._seconds = seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; returns when a look that is under way has ended (or after a few seconds: a name server may hang)."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._look()
