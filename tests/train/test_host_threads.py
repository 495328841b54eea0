import os
import subprocess
import sys

from train.host_threads import cores, host_threads, shared_threads


def test_made_up_devices_have_four_threads_each():
    flags = "--xla_cpu_foo=1 --xla_force_host_platform_device_count=4 --xla_bar"
    assert host_threads({"XLA_FLAGS": flags}) == {"NPROC": "16"}


def test_one_device_and_what_was_chosen_are_left_alone():
    assert host_threads({}) == {}
    assert host_threads({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}) == {}
    assert host_threads({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "3"}) == {}


def test_processes_on_the_same_cores_take_a_part_of_them_each():
    four = [0, 1, 2, 3]
    assert shared_threads(["a", "a"], [four, four], 0, {}) == {"NPROC": "2"}
    assert shared_threads(["a", "a", "a"], [four] * 3, 2, {}) == {"NPROC": "1"}
    assert shared_threads(["a"] * 8, [four] * 8, 7, {}) == {"NPROC": "1"}


def test_processes_with_cores_or_hosts_of_their_own_share_nothing():
    assert shared_threads(["a", "b"], [[0, 1], [0, 1]], 1, {}) == {}
    assert shared_threads(["a", "a"], [[0, 1], [2, 3]], 1, {}) == {}
    assert shared_threads(["a", "a", "b"], [[0, 1], [0, 1], [0, 1]], 2, {}) == {}


def test_a_number_of_threads_that_was_chosen_stays():
    assert shared_threads(["a", "a"], [[0, 1], [0, 1]], 0, {"NPROC": "2"}) == {}


def test_cores_are_those_that_a_process_is_bound_to():
    assert len(cores()) == len(os.sched_getaffinity(0))
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import train.host_threads as h"
    said = subprocess.run([sys.executable, "-c", f"{bound}; print(h.cores())"], capture_output=True, text=True)
    assert said.stdout.split() == [f"[{cores()[0]}]"]
