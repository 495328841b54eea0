import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "tools/gpu_check.py"


def run(folder, *arguments, nvidia_smi=None):
    """The program with a `PATH` on which nvidia-smi is what is given, or nothing."""
    folder.mkdir(exist_ok=True)
    if nvidia_smi is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (folder / "nvidia-smi").chmod(0o755)
    command = [sys.executable, str(PROGRAM), *arguments]
    environment = os.environ | {"PATH": f"{folder}:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_without_a_driver_the_record_says_so_and_what_to_do(tmp_path):
    done = run(tmp_path / "bin", "--out", str(tmp_path / "record.json"))
    record = json.loads(done.stdout)
    assert (done.returncode, record["status"], record["gpus"]) == (0, "no gpu", [])
    assert "nvidia-smi is not on the path" in record["why"]
    assert "make gpu-check" in record["remedy"]
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert run(tmp_path / "bin", "--only-look").returncode == 3


def test_a_driver_without_a_gpu_is_told_apart(tmp_path):
    done = run(tmp_path / "bin", nvidia_smi='echo "No devices were found" >&2; exit 6')
    assert json.loads(done.stdout)["why"] == "nvidia-smi found no GPU: No devices were found"


def test_tests_that_fail_fail_the_check(tmp_path):
    gpu = 'echo "NVIDIA H200, 143771 MiB, 570.00"'
    done = run(tmp_path / "bin", "--python", "/bin/false", nvidia_smi=gpu)
    record = json.loads(done.stdout)
    assert (done.returncode, record["status"]) == (1, "tests failed")
    assert record["gpus"] == ["NVIDIA H200, 143771 MiB, 570.00"]
    assert run(tmp_path / "bin", "--only-look", nvidia_smi=gpu).returncode == 0
