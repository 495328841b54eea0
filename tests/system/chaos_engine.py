"""A fake engine behind a real bridge in a process of its own, told over standard input how to misbehave.

First line: {"model": ..., "listen": ..., "seconds_per_token": ...}. Later lines: {"fault": NAME, "times": n}. It ends
with its standard input.
"""

import json
import os
import sys

from rollout_bridge import serve
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.messages import ModelInfo, TensorSpec


def main() -> None:
    request = json.loads(sys.stdin.readline())
    model = request["model"]
    tensors = tuple(TensorSpec(name=t["name"], dtype=t["dtype"], shape=tuple(t["shape"])) for t in model["tensors"])
    engine = FakeEngine(ModelInfo(**{**model, "tensors": tensors}), seconds_per_token=request["seconds_per_token"])
    server = serve(engine, request["listen"])
    print(server.port, flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        engine.inject(Fault[said["fault"]], said["times"])
    os._exit(0)


if __name__ == "__main__":
    main()
