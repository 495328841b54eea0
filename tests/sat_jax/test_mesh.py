import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from sat_jax.mesh import (
    AXES,
    LOGICAL,
    MeshConfig,
    batch_sharding,
    check_divides,
    make_mesh,
    one_device_mesh,
    spec,
)


def test_the_mesh_has_the_four_axes_in_order_and_partitions_automatically():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    assert mesh.axis_names == AXES
    assert tuple(mesh.shape.values()) == (2, 1, 4, 1)
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_given_devices_keep_their_order():
    devices = jax.devices()[::-1][:4]
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices)
    assert list(mesh.devices.flat) == devices
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_one_device_stands_under_the_same_names():
    assert one_device_mesh().axis_names == AXES
    assert one_device_mesh().size == 1


def test_a_product_that_is_not_the_number_of_devices_is_refused():
    with pytest.raises(ValueError, match=r"data 3 \* fsdp 1 \* expert 1 \* tensor 1 = 8 devices, got 3"):
        make_mesh(MeshConfig(data=3))


@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ValueError, match=r"mesh.expert: expected an integer of at least 1, got"):
        MeshConfig(expert=size)


def test_batch_shards_leave_the_tensor_axis_out():
    assert MeshConfig(data=2, fsdp=3, expert=5, tensor=7).batch_shards == 30


def test_specs_follow_the_table():
    assert spec("expert", "width", "expert_hidden") == PartitionSpec("expert", "fsdp", "tensor")
    assert spec("batch", "unsharded") == PartitionSpec(("data", "fsdp", "expert"), None)
    assert spec("vocabulary", "unsharded") == PartitionSpec(("tensor", "fsdp", "expert"), None)


def test_every_logical_axis_names_mesh_axes():
    assert {axis for axes in LOGICAL.values() for axis in axes} == set(AXES)


def test_a_mesh_axis_used_twice_is_refused_with_both_users():
    with pytest.raises(ValueError, match=r"got 'expert' for both 'batch' and 'expert'"):
        spec("batch", "expert")


def test_an_unknown_logical_axis_is_refused():
    with pytest.raises(ValueError, match=r"logical axis: expected one of batch, .*, got 'embed'"):
        spec("embed")


def test_batch_rows_are_sharded_wherever_their_axis_is():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2))
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp", "expert"))
    assert batch_sharding(mesh, leading=1).spec == PartitionSpec(None, ("data", "fsdp", "expert"))


def test_a_size_that_does_not_divide_is_refused_with_what_would():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    check_divides(mesh, "vocabulary", vocab_size=16)
    with pytest.raises(
        ValueError, match=r"vocab_size: expected a multiple of 8 \(mesh: tensor 1 \* fsdp 2 \* expert 4\), got 14; "
    ):
        check_divides(mesh, "vocabulary", vocab_size=14)
    with pytest.raises(
        ValueError, match=r"use a mesh with tensor \* fsdp \* expert one of 1, 2, 7, 14, or vocab_size = 16"
    ):
        check_divides(mesh, "vocabulary", vocab_size=14)
