"""Entry point of the local engine's own process; `train.engine_process` starts it and no person does.

Standard input: one line of JSON that says what to serve, then nothing, until the parent is gone: its end of file ends
this process. Standard output: one line of JSON, `{"port": ...}` or `{"error": ...}`; everything else goes to standard
error, the log.
"""

import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

_LOOK_SECONDS = 0.5  # how often the parent and the engine's thread are looked at
_GRACE_SECONDS = 2.0


def main() -> int:
    """Serves until SIGTERM or the parent's end (0), a user's mistake (2) or a defect (1)."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not look like an answer
    parent = os.getppid()
    request = json.loads(sys.stdin.readline())
    os.environ.update(request["environment"])  # read by JAX when it is imported, which is below
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return _serve(request, answer, parent, stopped)
    except ValueError as error:
        _tell(answer, {"error": str(error)})
        return 2


def _serve(request: dict[str, Any], answer: Any, parent: int, stopped: threading.Event) -> int:
    from rollout_bridge import serve

    engine = _engine(request)
    server = serve(engine, request["listen"])
    _tell(answer, {"port": server.port})
    while not stopped.wait(_LOOK_SECONDS) and engine.failure is None:
        if os.getppid() != parent:
            _leave(0, "its parent is gone")
    server.stop(_GRACE_SECONDS)
    if engine.failure is not None:
        traceback.print_exception(engine.failure)
        return 1
    return 0


def _engine(request: dict[str, Any]) -> Any:
    from sat_jax.model import PolicyConfig
    from train.local_engine import LocalEngine, LocalEngineConfig, model_info
    from train.paced_engine import PacedEngine
    from train.stand_in import StandInEngine

    policy, config = PolicyConfig(**request["policy"]), LocalEngineConfig(**request["engine"])
    seconds = request["seconds_per_request"]
    if request["stand_in"]:
        return PacedEngine(StandInEngine(model_info(policy, config)), seconds)
    return PacedEngine(LocalEngine(policy, config), seconds) if seconds else LocalEngine(policy, config)


def _end_with_parent() -> None:
    """Blocks until the parent's end of standard input is closed, by its death or on purpose."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _leave(0, "its standard input was closed")


def _leave(code: int, reason: str) -> NoReturn:
    """Ends at once, whatever the device or a call is doing."""
    sys.stderr.write(f"local engine {os.getpid()}: ends with code {code} because {reason}\n")
    sys.stderr.flush()
    os._exit(code)


def _tell(answer: Any, fields: dict[str, Any]) -> None:
    answer.write(json.dumps(fields) + "\n")
    answer.flush()


if __name__ == "__main__":
    # Not sys.exit: the interpreter would wait for a compilation, or tear the device down under a running step.
    _leave(main(), "it was told to, or could not go on")
