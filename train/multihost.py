"""Several processes, one run: who they are, and how they meet. One process without flags has nothing to do with this.

Who a process is comes from flags, or from the cluster's environment as JAX detects it (TPU pods, SLURM, Open MPI). The
coordination service runs beside process 0 (`train.coordinator`).
"""

import atexit
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import jax
from jax._src import clusters, distributed  # detection and the store have no public name

from train.coordinator import HEARTBEAT_SECONDS
from train.host_threads import cores, shared_threads
from train.preemption import PREEMPTED, Preempted, Preemption
from train.share import Share
from train.team import Alone, Members, Team, TeamConfig

_START_SECONDS = 300


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Who this process is; what is None is detected.

    Attributes:
      coordinator: "host:port", where process 0 opens the port.
      processes: how many there are.
      process: which this is, from 0.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self) -> None:
        """Checks that the three come together, and fit.

        Raises:
          ValueError: they do not.
        """
        values = (self.coordinator, self.processes, self.process)
        if None in values and values != (None, None, None):
            raise ValueError(
                "--coordinator, --processes, --process: expected all three or none, got "
                f"{self.coordinator}, {self.processes}, {self.process}"
            )
        if self.coordinator is None or self.processes is None or self.process is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--coordinator: expected host:port with a port of 1 to 65535, got {self.coordinator!r}")
        if self.processes < 1:
            raise ValueError(f"--processes: expected at least 1, got {self.processes}")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"--process: expected 0 to --processes - 1 = {self.processes - 1}, got {self.process}")


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Who this process is by the cluster's variables, or None where they speak of one process, or of none.

    A JobSet gives `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (see configs/launch). A SLURM
    step with several tasks, and a TPU slice with several workers, are left to JAX's detection.

    Raises:
      ValueError: the variables contradict each other.
    """
    named = [environment.get(f"JAX_{name}") for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")]
    if all(named):
        address, processes, process = map(str, named)
        return (
            None
            if processes == "1"
            else Launch(
                coordinator=address,
                processes=_whole("JAX_NUM_PROCESSES", processes),
                process=_whole("JAX_PROCESS_ID", process),
            )
        )
    if (
        "SLURM_PROCID" in environment
        and _whole("SLURM_STEP_NUM_TASKS", environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    ):
        return Launch()
    workers = environment.get("TPU_WORKER_HOSTNAMES") or environment.get("TPU_PROCESS_ADDRESSES") or ""
    return Launch() if len(workers.split(",")) > 1 else None


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return int(value)


@contextlib.contextmanager
def join(launch: Launch | None, preemption: Preemption, config: TeamConfig | None = None) -> Iterator[Team]:
    """Meets the other processes; within, they are watched. Must come before JAX's first computation.

    Args:
      launch: who this is; None = there is one process.
      preemption: of this process.
      config: deadlines.

    Raises:
      ValueError: nothing was detected.
      RuntimeError: the others did not come.
      ProcessLost: another process failed or is gone; the same command in every process resumes.
    """
    if launch is None:
        yield Alone()
        return
    address, share = _resolve(launch)
    with _service(address, share) as service:
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from `train.preemption`
        jax.distributed.initialize(
            address,
            share.processes,
            share.process,
            # The real one is beside this process; JAX insists on one within, which nobody is told of.
            coordinator_bind_address="127.0.0.1:0",
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=10,
        )
        store = distributed.global_state.client
        assert store is not None, "it has just been made"
        members = Members(share, store, config)
        try:
            with members.watching(preemption):
                members.meet(socket.gethostname())
                hosts, theirs = members.exchange("host", socket.gethostname()), members.exchange("cores", cores())
                os.environ |= shared_threads(hosts, theirs, share.process, os.environ)
                yield members
        except BaseException as error:
            _leave_at_exit(PREEMPTED if isinstance(error, Preempted) else 1)
            raise
        jax.distributed.shutdown()
        if service is not None:
            service.communicate("done\n", timeout=30)


def _resolve(launch: Launch) -> tuple[str, Share]:
    found = (launch.coordinator, launch.processes, launch.process)
    if launch.coordinator is None:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, _START_SECONDS)[
            :3
        ]
    address, processes, process = found
    if address is None or processes is None or process is None:
        raise ValueError(
            "--distributed: expected a cluster that JAX detects (a TPU slice, SLURM, Open MPI), got none; say "
            "--coordinator HOST:PORT --processes N --process I"
        )
    return address, Share(process=process, processes=processes)


@contextlib.contextmanager
def _service(address: str, share: Share) -> Iterator["subprocess.Popen[str] | None"]:
    """The coordination service, beside process 0."""
    if share.process:
        yield None
        return
    port = address.rpartition(":")[2]
    # A session of its own: what is sent to this process's group must not reach it.
    process = subprocess.Popen(
        [sys.executable, "-m", "train.coordinator", port, str(share.processes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        _, said = process.communicate()
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"--coordinator: expected to open port {port} on this host, got {last}")
    yield process


def _leave_at_exit(code: int) -> None:
    """Ends the process before JAX's own farewell, which would wait for processes that are gone."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
