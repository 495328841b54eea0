"""Put on PYTHONPATH, this makes the wall clock of a process jump by up to an hour, back and forth, every second or so.

What a run decides must hang on no wall clock: deadlines are of the monotonic one.
"""

import random
import time

_true = time.time


def _jumping() -> float:
    second = int(_true())
    return _true() + random.Random(second).uniform(-3600.0, 3600.0)


time.time = _jumping
