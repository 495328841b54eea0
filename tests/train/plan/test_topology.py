"""Names of machines."""

import jax
import pytest

from train.plan.topology import CHIPS, open_topology, parse


def test_a_name_says_its_chip_and_extent():
    assert parse("v5p:4x4x4") == (CHIPS["v5p"], (4, 4, 4))
    assert parse("h200:8") == (CHIPS["h200"], (8,))


def test_an_unknown_machine_gets_the_list_of_the_known_ones():
    with pytest.raises(ValueError, match=r"v5e:NxN, v5p:NxNxN, v6e:NxN, h200:N, cpu:N, got 'v9:2x2'"):
        parse("v9:2x2")


@pytest.mark.parametrize("name", ["v5p:4x4", "v5p", "v5e:0x2", "v5e:2x2x2", "cpu:two"])
def test_a_shape_of_another_kind_is_an_error_that_shows_the_right_one(name):
    with pytest.raises(ValueError, match=f"expected {name.split(':')[0]}:N"):
        parse(name)


def test_devices_of_this_machine_are_made_up_and_asked_for_by_a_flag():
    assert open_topology("cpu:1").devices == tuple(jax.devices("cpu")[:1])
    with pytest.raises(ValueError, match="--xla_force_host_platform_device_count=512"):
        open_topology("cpu:512")
