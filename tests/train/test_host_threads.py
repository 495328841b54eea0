from train.host_threads import host_threads


def test_made_up_devices_have_four_threads_each():
    flags = "--xla_cpu_foo=1 --xla_force_host_platform_device_count=4 --xla_bar"
    assert host_threads({"XLA_FLAGS": flags}) == {"NPROC": "16"}


def test_one_device_and_what_was_chosen_are_left_alone():
    assert host_threads({}) == {}
    assert host_threads({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}) == {}
    assert host_threads({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "3"}) == {}
