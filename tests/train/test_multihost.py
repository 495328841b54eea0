import os
import socket
import subprocess
import sys

import pytest

from train.cli import _launch, _parser
from train.host_threads import cores
from train.multihost import Launch, join, launch_of
from train.preemption import Preemption
from train.share import Share
from train.team import Alone

JAX = {"JAX_COORDINATOR_ADDRESS": "trainer-0:1234", "JAX_NUM_PROCESSES": "16", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # within sbatch, outside of srun
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"JAX_COORDINATOR_ADDRESS": "trainer-0:1234"},
    ],
)
def test_an_environment_of_one_process_changes_nothing(environment):
    assert launch_of(environment) is None
    with join(launch_of(environment), Preemption()) as team:
        assert isinstance(team, Alone)
        assert team.share == Share()


def test_a_clusters_environment_is_left_to_jax():
    assert launch_of({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}) == Launch()
    assert launch_of({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "1"}) == Launch()
    assert launch_of({"TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}) == Launch()


def test_a_jobset_says_who_a_process_is():
    assert launch_of(JAX) == Launch(coordinator="trainer-0:1234", processes=16, process=3)
    with pytest.raises(ValueError, match="JAX_PROCESS_ID: expected a whole number, got 'three'"):
        launch_of(JAX | {"JAX_PROCESS_ID": "three"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "2"], "--coordinator, --processes, --process: expected all three or none, got None, 2, None"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "2"], "--process: expected 0 to .* = 1, got 2"),
        (["--coordinator", "h:1", "--processes", "0", "--process", "0"], "--processes: expected at least 1, got 0"),
        *(
            (["--coordinator", where, "--processes", "2", "--process", "0"], f"a port of 1 to 65535, got '{where}'")
            for where in ("host", ":1", "host:", "host:0", "host:65536", "host:a")
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, message):
    arguments = _parser().parse_args(["train", "x.toml", *flags])
    with pytest.raises(ValueError, match=message):
        _launch(arguments)


def test_flags_say_who_a_process_is():
    flags = ["--coordinator", "h:1", "--processes", "2", "--process", "1"]
    assert _launch(_parser().parse_args(["train", "x.toml", *flags])) == Launch(
        coordinator="h:1", processes=2, process=1
    )
    assert _launch(_parser().parse_args(["train", "x.toml", "--distributed"])) == Launch()


def test_a_port_that_is_taken_is_an_error_before_jax_starts():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = Launch(coordinator=f"127.0.0.1:{port}", processes=2, process=0)
        with pytest.raises(ValueError, match=f"expected to open port {port} on this host"), join(launch, Preemption()):
            pass


def test_two_processes_of_a_host_take_half_of_its_cores_each():
    code = (
        "import os, sys; from train.multihost import Launch, join; from train.preemption import Preemption\n"
        "launch = Launch(coordinator=sys.argv[1], processes=2, process=int(sys.argv[2]))\n"
        "with join(launch, Preemption()): sys.stderr.write(f\"threads {os.environ.get('NPROC')}\\n\")\n"
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(process)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for process in (0, 1)
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for text in said:
        assert f"threads {max(1, len(cores()) // 2)}\n" in text
