import socket

import pytest

from train.cli import _launch, _parser
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
        (["--coordinator", "host", "--processes", "2", "--process", "0"], "expected host:port, got 'host'"),
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
