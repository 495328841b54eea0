"""Threads for made-up devices: what a CPU needs lest many devices on few cores wait for each other for ever."""

import re
from collections.abc import Mapping

_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_A_DEVICE = 4


def host_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process before JAX opens its CPU.

    XLA runs every device's part of a program in a thread of one pool, which has as many as there are cores or devices,
    and a part that waits in a collective keeps its thread. With another program under way at the same time the last
    part may find no thread: all wait, and after 40 seconds XLA aborts the process. (Four devices on two cores, three
    of six processes; with four threads a device none of eight.)

    Args:
      environment: of the process; what it says already is left alone.

    Returns:
      Nothing for one device.
    """
    found = _COUNT.search(environment.get("XLA_FLAGS", ""))
    if found is None or int(found[1]) == 1 or "NPROC" in environment:
        return {}
    return {"NPROC": str(_A_DEVICE * int(found[1]))}
