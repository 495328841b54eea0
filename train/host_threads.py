"""How many threads XLA takes of a host's cores, where its own count is wrong: for made-up devices, and shared hosts."""

import os
import re
from collections.abc import Mapping, Sequence

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


def cores() -> list[int]:
    """The cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shared_threads(
    hosts: Sequence[str], cores: Sequence[Sequence[int]], process: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """What to add to the environment of one of several processes before JAX opens its CPU.

    XLA has a thread for every core that a process may run on. Processes that share their cores would have more threads
    than there are cores, and each waits in every collective for what the others' threads hold up: two on two cores
    took 1.36 times the time of one with two devices, with a thread each 1.2 times (docs/benchmarks.md).

    Args:
      hosts: name of every process's host.
      cores: that every process may run on. Processes bound to cores of their own share none.
      process: which of them this is.
      environment: of the process; what it says already is left alone.

    Returns:
      This process's part of its cores, one thread at least; nothing where it shares them with nobody.
    """
    sharing = sum(
        host == hosts[process] and not set(theirs).isdisjoint(cores[process])
        for host, theirs in zip(hosts, cores, strict=True)
    )
    if sharing == 1 or "NPROC" in environment:
        return {}
    return {"NPROC": str(max(1, len(cores[process]) // sharing))}
