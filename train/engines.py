"""The fleet of a run: remote bridges, or a local engine in a process of its own that the run starts and restarts."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout_bridge import ClientOptions, ClientTls, Fatal, Fleet, FleetOptions, Lease, Retryable, Security, serve
from rollout_bridge.discovery import resolve
from train.config import RunConfig
from train.engine_process import EngineProcessConfig, LocalEngineProcess
from train.local_engine import LocalEngine, LocalEngineConfig
from train.sections import RolloutConfig
from train.setup import Problem, make_problem
from train.share import Share

ENGINE_LOG = "engine.log"
_READY_SECONDS = 180.0  # a local engine compiles before it answers
_SILENT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Engines:
    """A fleet that has answered, and the local engine's process if the run has one."""

    fleet: Fleet
    process: LocalEngineProcess | None

    def describe(self) -> str:
        """Where every engine stands, for errors about waiting."""
        parts = [
            f"{address} {status.state.value}" + (f" ({status.reason})" if status.reason else "")
            for address, status in self.fleet.status().items()
        ]
        ended = self.process.poll() if self.process is not None else None
        return "; ".join(parts) + (f"; its process ended: {ended}" if ended else "")


@contextlib.contextmanager
def attach_fleet(
    config: RunConfig,
    problem: Problem,
    folder: Path,
    on_event: Callable[[str, str], None],
    errand: str = "training",
    run: Path | str | None = None,
) -> Iterator[Engines]:
    """Connects to the fleet, starting a local engine where the config says so.

    Args:
      config: the run's.
      problem: for the policy's architecture.
      folder: of the run; the local engine's log goes there.
      on_event: called with a kind and a text when an engine is lost, restarted, or published to again.
      errand: what the fleet is for; while one process publishes to an engine, another run or errand is refused.
      run: the run's folder, where `folder` is another one; or its name for the engines, "host:folder", where several
        processes of it have each a part of the fleet.

    Raises:
      ValueError: the local engine's port is in use.
      rollout_bridge.errors.BridgeError: an engine did not answer, or holds another model.
    """
    with contextlib.ExitStack() as stack:
        process = None
        endpoints = config.rollout.endpoints
        if config.rollout.engine == "local":
            process = stack.enter_context(_start_local(config, problem, folder))
            endpoints = (process.endpoint,)
        options = FleetOptions(
            client=ClientOptions(
                chunk_bytes=config.rollout.chunk_bytes,
                security=_security(config.rollout),
                lease=Lease(
                    holder=f"{errand} of {run if isinstance(run, str) else run_name(run or folder)}",
                    start=uuid.uuid4().hex,
                ),
            ),
            progress_seconds=_progress_seconds(config),
            on_lost=None if process is None else lambda _endpoint: _restart(process, on_event),
            on_event=on_event,
        )
        fleet = stack.enter_context(Fleet(endpoints, options=options))
        if process is None:
            _await(fleet, on_event)
        _check_model(fleet, problem, config)
        yield Engines(fleet=fleet, process=process)


def run_name(folder: Path) -> str:
    """How engines know the run of this folder, when this host began it."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def deal_endpoints(config: RunConfig, share: Share) -> RunConfig:
    """The config with a process's own part of the fleet; a local engine every process has for itself.

    Raises:
      ValueError: there are fewer engines than processes.
    """
    if share.processes == 1 or config.rollout.engine == "local":
        return config
    endpoints = sorted(resolve(config.rollout.endpoints))  # a name's addresses come in any order
    if len(endpoints) < share.processes:
        raise ValueError(
            f"rollout.endpoints: expected at least one engine for each of {share.processes} processes, got "
            f"{len(endpoints)}; start more engines, or fewer processes"
        )
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, endpoints=share.deal(endpoints)))


def _security(rollout: RolloutConfig) -> Security:
    """How the bridges are spoken to. Secrets are in files, never in the config.

    Raises:
      OSError: a file cannot be read.
    """
    tls = ClientTls(ca=Path(rollout.tls_ca).read_bytes()) if rollout.tls_ca else None
    token = Path(rollout.token_file).read_text(encoding="utf-8").strip() if rollout.token_file else None
    return Security(tls=tls, token=token)


def serve_local(config: RunConfig, listen: str) -> None:
    """Serves the config's policy with the local engine in this process until SIGTERM or Ctrl-C."""
    problem = make_problem(config)
    engine = LocalEngine(problem.policy, _engine_config(config))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with contextlib.closing(engine), serve(engine, listen) as server:
        sys.stderr.write(f"sat-jax: serving on {server.address}, at no version until a trainer publishes one\n")
        while not stopped.wait(1.0):
            if engine.failure is not None:
                raise Fatal(f"local engine: expected its thread to run, got {engine.failure!r}") from engine.failure


def _progress_seconds(config: RunConfig) -> float:
    """How long a call may go without a completion. Bounded, a call is one prompt, which is then asked for elsewhere."""
    if config.schedule.mode == "bounded":
        return min(config.schedule.request_deadline, config.rollout.deadline)
    return config.rollout.deadline


def _engine_config(config: RunConfig) -> LocalEngineConfig:
    return LocalEngineConfig(dtype=config.rollout.dtype, slots=config.rollout.slots, max_tokens=config.batch.row_length)


@contextlib.contextmanager
def _start_local(config: RunConfig, problem: Problem, folder: Path) -> Iterator[LocalEngineProcess]:
    cores = os.cpu_count() or 1
    process = LocalEngineProcess(
        EngineProcessConfig(
            policy=problem.policy,
            engine=_engine_config(config),
            listen=config.rollout.listen,
            log=folder / ENGINE_LOG,
            threads=max(1, cores // 2),  # the trainer needs the others
        )
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(process)
        except RuntimeError as error:
            raise Fatal(str(error)) from error
        yield process


def _restart(process: LocalEngineProcess, on_event: Callable[[str, str], None]) -> None:
    """Called before each attempt to reach a lost engine: starts it again if its process has ended."""
    ended = process.poll()
    if ended is None:
        return
    on_event("restart", f"the local engine's process ended with {ended.splitlines()[0]}; started again")
    try:
        process.restart(ended.splitlines()[0])
    except RuntimeError as error:
        raise Fatal(str(error)) from error


def _await(fleet: Fleet, on_event: Callable[[str, str], None]) -> None:
    """Says early where a remote fleet does not answer; it is waited for all the same."""
    try:
        fleet.wait_ready(_SILENT_SECONDS)
    except Retryable as error:
        on_event("waiting", f"{error}; is a bridge started there (rollout.endpoints), and reachable from this host?")


def _check_model(fleet: Fleet, problem: Problem, config: RunConfig) -> None:
    """The fleet must hold the trainer's architecture and take what the publisher sends."""
    model = fleet.wait_ready(_READY_SECONDS)
    if model.model_digest != problem.policy.digest():
        raise Fatal(
            f"fleet: expected the trainer's architecture {problem.policy.digest()}, got {model.model_digest} "
            f"({', '.join(fleet.status())}); serve with the config that the trainer runs"
        )
    if model.dtype != config.rollout.dtype:
        raise Fatal(
            f"fleet: expected engines of rollout.dtype {config.rollout.dtype}, got {model.dtype} "
            f"({', '.join(fleet.status())}); set rollout.dtype to what they serve"
        )
    if model.max_tokens < config.batch.row_length:
        raise Fatal(
            f"fleet: expected engines that hold {config.batch.row_length} tokens (batch.row_length), got "
            f"{model.max_tokens} ({', '.join(fleet.status())}); lower batch.row_length or serve with more"
        )
