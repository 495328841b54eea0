"""Reward functions as users write them, good and bad; loaded by name in a verifier's process."""

import asyncio
import os
import sys
import time


class Tensor:
    """What a library's array of one element is like: it converts to a number, and is none."""

    def __float__(self):
        return 1.0

    def __repr__(self):
        return "tensor(1.)"


def good(prompt, completion, answer, metadata):
    return float(completion == answer) + metadata.get("bonus", 0)


async def slow_but_good(prompt, completion, answer, metadata):
    await asyncio.sleep(0.01)
    return 1


def says_which_process(**_):
    return os.getpid()


def raises(**_):
    raise KeyError("no such unit")


def exits(**_):
    sys.exit(3)


def dies(**_):
    os._exit(7)


def hangs(completion, **_):
    if completion == "hang":
        while True:
            time.sleep(1)
    return 1.0


def hangs_in_c(**_):
    return sum(1 for _ in iter(int, 1))


def forks_and_both_return(**_):
    return float(os.fork() > 0)


def forks_and_leaves_a_child(metadata, **_):
    if os.fork() == 0:
        time.sleep(1.0)
        with open(metadata["mark"], "w") as file:
            file.write("the child lived on")
        os._exit(0)
    return 1.0


def prints(**_):
    line = "x" * (1 << 20) + "\n"
    for _ in range(64):
        sys.stdout.write(line)
        sys.stderr.write(line)
        os.write(1, line.encode())
    return 1.0


def eats_memory(**_):
    return float(len(bytearray(8 << 30)))


def returns_none(**_):
    return None


def returns_nan(**_):
    return float("nan")


def returns_a_tensor(**_):
    return Tensor()


def returns_text(**_):
    return "1"


def reads_input(**_):
    return float(len(sys.stdin.read()) == 0)


def hangs_and_forks_now_and_then(completion, answer, **_):
    if completion.endswith("7"):
        while True:
            time.sleep(1)
    if completion.endswith("3") and os.fork() == 0:
        time.sleep(60)
    return float(completion == answer)
