"""Which bridges there are: a list of addresses, or a name that stands for all of its addresses."""

import socket
from collections.abc import Sequence

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
