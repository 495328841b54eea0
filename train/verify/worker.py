"""Entry point of a verifier's process; `train.verify.pool` starts it and no person does.

Standard input: one line of JSON that says which function, then one line an attempt. Standard output: a line of JSON
`{"ready": true}` or `{"error": ...}`, then one answer an attempt. What the function itself prints goes nowhere. The
process ends when its input does.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

_SHOWN = 300  # characters of an error that are passed on
RULES = {
    "dapo": "train.verify.dapo:dapo",
    "dapo_boxed": "train.verify.dapo:dapo_boxed",
    "prime_math": "train.verify.prime_math:prime_math",
    "math_verify": "train.verify.math_verify:math_verify",
    "reasoning_gym": "train.verify.reasoning_gym:reasoning_gym",
}
_LIBRARIES = {"prime_math": "sympy", "math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}


def main() -> None:
    """Answers attempts until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    attempts = os.fdopen(os.dup(0), "rb")
    os.dup2(nowhere, 0)
    own = os.getpid()
    order = json.loads(attempts.readline())
    _limit(order["memory_bytes"])
    sys.path[:] = order["path"]
    try:
        function = _load(order["function"])
    except BaseException as error:  # also SystemExit: whatever a user's module does, the parent is told
        _tell(answers, own, {"error": _words(error)})
        return
    _tell(answers, own, {"ready": True})
    for line in attempts:
        attempt = json.loads(line)
        _tell(answers, own, {"id": attempt.pop("id"), **_answer(function, attempt), "alone": _alone()})


def _answer(function: Callable[..., Any], attempt: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = function(**attempt)
        if inspect.isawaitable(reward):
            reward = asyncio.run(_wait(reward))
        return {"reward": _number(reward)}
    except BaseException as error:  # an answer in any case; the parent decides what an error means
        return {"error": _words(error)}


async def _wait(reward: Any) -> Any:
    return await reward


def _number(reward: Any) -> float:
    # numbers.Real: NumPy's scalars are registered there; an array or a tensor of one element is not a number.
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"expected a finite number, got {_short(repr(reward))} ({type(reward).__name__})")
    return float(reward)


def _load(name: str) -> Callable[..., Any]:
    """The function; a rule takes fewer arguments than a user's function is given."""
    module, _, attribute = RULES.get(name, name).partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"expected {name} to be a function, got {type(function).__name__}")
    if name not in RULES:
        return function
    if name in _LIBRARIES:
        try:
            importlib.import_module(_LIBRARIES[name])  # now, and not within the time of an attempt
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; pip install 'sat-jax[math]'") from error
    if name == "reasoning_gym":
        return lambda completion, answer, metadata, **_: function(completion, answer, metadata)
    return lambda completion, answer, **_: function(completion, answer)


def _limit(memory_bytes: int) -> None:
    for which, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError):  # a lower hard limit is in force already
            resource.setrlimit(which, (most, most))


def _alone() -> bool:
    """Whether no child process of this one is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _tell(answers: BinaryIO, own: int, fields: dict[str, Any]) -> None:
    if os.getpid() != own:
        os._exit(0)  # a fork of this process came back from the function, too: its answer is not wanted
    answers.write(json.dumps(fields).encode() + b"\n")


def _words(error: BaseException) -> str:
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that a user's function left behind would keep the interpreter alive
