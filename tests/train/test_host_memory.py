import platform
import subprocess
import sys

import pytest

from train.host_memory import keep_freed_memory

# Pages that a process is given while it takes 100 MiB and gives them back, ten times.
_PROGRAM = """
import ctypes, resource
from train.host_memory import keep_freed_memory
kept = keep_freed_memory({platform!r})
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def once():
    piece = libc.malloc(100 * 2**20)
    ctypes.memset(piece, 1, 100 * 2**20)
    libc.free(ctypes.c_void_p(piece))
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(on):
    command = [sys.executable, "-c", _PROGRAM.format(platform=on)]
    kept, count = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_memory_that_was_freed_is_taken_again_without_new_pages():
    mine, before = pages("cpu"), pages("tpu")
    assert mine[0]
    assert not before[0]
    assert mine[1] < before[1] / 10
    assert before[1] > 200  # huge pages of 2 MiB at the least


def test_an_accelerators_host_is_left_alone():
    assert not keep_freed_memory("tpu")
    assert not keep_freed_memory("gpu")
