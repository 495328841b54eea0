"""The real programs of an update, compiled for TPU topologies that are not there (needs libtpu, no TPU)."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig
from train import digest, moments
from train.abstract import abstract_batch, abstract_state
from train.state import OptimConfig
from train.step import Step


@pytest.fixture(scope="module", autouse=True)
def _libtpu_alone() -> Iterator[None]:
    """No metadata server to ask, and other processes may have libtpu open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield


def topology_devices(topology: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def lowered(topology: str, axes: dict[str, int], config: PolicyConfig, rows: int, length: int):
    mesh = make_mesh(MeshConfig(**axes), topology_devices(topology))
    optimizer = OptimConfig(peak_lr=1e-6).transformation()
    graph, state = abstract_state(config, optimizer, mesh)
    step = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 1.0, state)
    return step.lower(state, abstract_batch(config, rows, length, mesh), microbatches=2), state


def reductions(program: Any) -> list[str]:
    """Result types of the sums over devices."""
    return re.findall(r"= ([^=]*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", program)


def splash_kernels(program: Any) -> list[str]:
    """The passes of attention that a program runs, each as often as it is there."""
    return sorted(re.findall(r"%splash_mha_(fwd|dq|dkv)\w*[.\d]* = .*? custom-call\(", program))


@pytest.fixture(scope="module")
def tiny():
    config = PolicyConfig.tiny(dtype="bfloat16", remat="attention")
    return lowered("v5e:2x2", {"fsdp": 2, "expert": 2}, config, 4, 256)


@pytest.mark.plan
def test_the_tiny_gradient_compiles_for_v5e_with_its_kernels_and_sums_in_float32(tiny, capfd):
    program = tiny[0]["gradient"].compile().as_text()
    assert isinstance(program, str)
    # remat = "attention" keeps its output: the forward kernel does not run a second time in the backward pass.
    assert splash_kernels(program) == ["dkv", "dq", "fwd"]
    assert {"jit(gmm)", "jit(tgmm)"} <= set(re.findall(r"jit\(\w+\)", program))
    assert "ragged" not in program
    # Nothing but parameters' gradients and float32 activations is summed on a mesh without `tensor`.
    sums = reductions(program)
    assert any(re.search(r"f32\[\d+,\d+", kind) for kind in sums)
    assert not [kind for kind in sums if "bf16" in kind]
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.plan
def test_the_tiny_apply_updates_its_state_in_place(tiny):
    programs, state = tiny
    memory = programs["apply"].compile().memory_analysis()
    leaves = jax.tree.leaves((state.params, state.opt_state))
    held = sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert memory.alias_size_in_bytes >= held


@pytest.mark.plan
@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16"])
def test_the_tiny_apply_updates_moments_in_the_hosts_memory_in_place_a_slice_at_a_time(mu_dtype, monkeypatch):
    monkeypatch.setattr(moments, "_SLICE_BYTES", 1)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2), topology_devices("v5e:2x2"))
    optimizer = OptimConfig(peak_lr=1e-6, mu_dtype=mu_dtype).transformation()
    graph, state = abstract_state(PolicyConfig.tiny(layers=4), optimizer, mesh, "host")
    step = Step(graph, optimizer, ObjectiveConfig.preset("grpo"), 1.0, state)
    program = step.lower(state, abstract_batch(PolicyConfig.tiny(layers=4), 4, 256, mesh))["apply"].compile()
    memory: Any = program.memory_analysis()
    held = [
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.ndim
    ]
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes >= sum(held)
    text = program.as_text()
    assert isinstance(text, str)
    assert {"dynamic-slice-start", "dynamic-update-slice-start"} <= set(re.findall(r"= .* ([\w-]+-start)\(", text))


@pytest.mark.plan
def test_digests_of_arrays_in_the_hosts_memory_compile():
    mesh = make_mesh(MeshConfig(fsdp=4), topology_devices("v5e:2x2"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"), memory_kind="pinned_host")
    array = jax.ShapeDtypeStruct((8, 512, 128), jax.numpy.float32, sharding=sharding)
    memory: Any = digest._sums_of_hosted.trace(array).lower().compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == 8 * 128 * 128 * 4


@pytest.mark.plan
def test_the_tiny_accumulation_compiles_for_v5e(tiny):
    memory = tiny[0]["accumulate"].compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0  # the accumulator is taken over
