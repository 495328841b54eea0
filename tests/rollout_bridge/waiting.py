"""Waiting for what another thread or process will do."""

import time


def eventually(what, seconds=30.0):
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "did not come to pass"
        time.sleep(0.005)
