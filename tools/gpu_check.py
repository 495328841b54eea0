"""The tests and benchmarks that need a GPU: one JSON record on stdout, and in a file if asked.

    python tools/gpu_check.py [--out record.json]

Exit code 0: all passed, or there is no GPU (the record then says so, and what to do); 1: something failed. Nothing here
imports JAX: the interpreter with the CUDA build of it is `--python`, and `make gpu-check` makes one.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_REMEDY = (
    "run `make gpu-check` on a machine with an NVIDIA GPU and its driver (CUDA 12); nothing was tested or measured here"
)


def gpus() -> tuple[list[str], str]:
    """Name, memory and driver of each GPU, and why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not on the path: no NVIDIA driver"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    found = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not found:
        return [], f"nvidia-smi found no GPU: {(done.stderr or done.stdout).strip() or 'it printed nothing'}"
    return found, ""


def run(command: list[str]) -> tuple[int, str]:
    """Exit code and output of a command that sees the GPU, run in the repository."""
    # Memory is taken as needed, so that the tests and another program can share a GPU.
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def last_json(output: str) -> Any:
    """The JSON object on the last line that holds one, None if there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def check(python: str) -> dict[str, Any]:
    """The record."""
    found, why_none = gpus()
    record: dict[str, Any] = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "gpus": found}
    if not found:
        return record | {"status": "no gpu", "why": why_none, "remedy": _REMEDY}
    code, output = run([python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"])
    record["tests"] = {"exit_code": code, "summary": output.strip().splitlines()[-1:]}
    if code:
        return record | {"status": "tests failed", "output": output[-20_000:]}
    code, output = run([python, "tools/bench/bench_kernels.py", "--what", "all"])
    record["benchmarks"] = last_json(output)
    if code or record["benchmarks"] is None:
        return record | {"status": "benchmarks failed", "output": output[-20_000:]}
    return record | {"status": "passed"}


def main() -> int:
    """Checks, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with jax[cuda12] and pytest")
    parser.add_argument("--out", type=Path, help="also write the record there")
    parser.add_argument("--only-look", action="store_true", help="exit with 3 if there is no GPU, run nothing")
    arguments = parser.parse_args()
    if arguments.only_look:
        return 0 if gpus()[0] else 3
    record = check(arguments.python)
    print(json.dumps(record))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if record["status"] in ("passed", "no gpu") else 1


if __name__ == "__main__":
    sys.exit(main())
