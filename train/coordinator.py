"""JAX's coordination service in a process of its own; `train.multihost` starts it beside process 0, and no person does.

Within process 0 it would die with it, and JAX then aborts all others at once, before they could say who is gone. Here
it outlives process 0 by as long as the others need to notice, say so, and end.

    python -m train.coordinator PORT PROCESSES
"""

import os
import sys
import time

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # the service has no public name

HEARTBEAT_SECONDS = 300  # JAX's own; ours are far shorter (`train.team`)
_LINGER_SECONDS = 60.0


def main() -> None:
    """Serves until standard input is closed, and a minute more; "done" there ends it at once."""
    port, processes = int(sys.argv[1]), int(sys.argv[2])
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", processes, heartbeat_timeout=HEARTBEAT_SECONDS, shutdown_timeout=10
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads it from here on
    told = sys.stdin.readline()
    if told.strip() != "done":
        time.sleep(_LINGER_SECONDS)
    service.shutdown()


if __name__ == "__main__":
    main()
    os._exit(0)
