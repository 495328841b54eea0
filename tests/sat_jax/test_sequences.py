import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.objective.sequences import active_count, sequence_count, sequence_mean, sequence_sum

# Below, at, between and beyond the sizes at which columns are scattered in chunks and counts are added up in blocks.
LENGTHS = (1, 20, 64, 256, 300, 544)


def rows(length: int, longest: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    segment_BT = np.zeros((4, length), np.int32)
    for row in segment_BT[:3]:  # the last row is all padding
        lengths = rng.integers(1, longest + 1, length)
        real = rng.integers(1, length + 1)
        row[:real] = np.repeat(np.arange(1, length + 1), lengths)[:real]
    active_BT = (rng.random(segment_BT.shape) < 0.7) & (segment_BT > 0)
    return np.where(active_BT, rng.normal(size=active_BT.shape), 0).astype(np.float32), active_BT, segment_BT


def spread(function, value_BT: np.ndarray, segment_BT: np.ndarray) -> np.ndarray:
    same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    return function(np.where(same_BTS, value_BT[:, None, :].astype(np.float64), 0))


@pytest.mark.parametrize("longest", [2, 100])
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_counts_and_means_are_those_of_the_own_sequence(length, longest):
    value_BT, active_BT, segment_BT = rows(length, longest)
    sums_BT = spread(lambda v: v.sum(-1), value_BT, segment_BT)
    counts_BT = spread(lambda v: v.sum(-1), active_BT, segment_BT)
    np.testing.assert_array_equal(jax.jit(active_count)(active_BT, segment_BT), counts_BT)
    np.testing.assert_allclose(jax.jit(sequence_sum)(value_BT, segment_BT), sums_BT, atol=1e-5)
    mean_BT = jax.jit(sequence_mean)(value_BT, active_BT, segment_BT)
    np.testing.assert_allclose(mean_BT, sums_BT / np.maximum(counts_BT, 1), atol=1e-5)
    sequences = {(row, segment_BT[row, place]) for row, place in np.argwhere(active_BT)}
    assert sequence_count(jnp.asarray(active_BT), jnp.asarray(segment_BT)) == len(sequences)


def test_positions_of_a_sequence_need_not_touch():
    """Ids in any order: a block of 32 then holds many of them, and one that comes back."""
    value_BT, active_BT, _ = rows(64, 5)
    segment_BT = np.random.default_rng(1).integers(0, 9, active_BT.shape).astype(np.int32)
    counts_BT = spread(lambda v: v.sum(-1), active_BT, segment_BT)
    np.testing.assert_array_equal(active_count(jnp.asarray(active_BT), jnp.asarray(segment_BT)), counts_BT)
    mean_BT = sequence_mean(jnp.asarray(value_BT), jnp.asarray(active_BT), jnp.asarray(segment_BT))
    sums_BT = spread(lambda v: v.sum(-1), value_BT, segment_BT)
    np.testing.assert_allclose(mean_BT, sums_BT / np.maximum(counts_BT, 1), atol=1e-5)


@pytest.mark.parametrize("length", [45, 300])
def test_the_gradient_of_a_mean_is_the_slopes_mean(length):
    value_BT, active_BT, segment_BT = rows(length, 9)
    slope_BT = np.random.default_rng(2).normal(size=value_BT.shape).astype(np.float32)
    gradient_BT = jax.grad(lambda v: jnp.sum(sequence_mean(v, active_BT, segment_BT) * slope_BT))(value_BT)
    counts_BT = np.maximum(spread(lambda v: v.sum(-1), active_BT, segment_BT), 1)
    np.testing.assert_allclose(gradient_BT, spread(lambda v: v.sum(-1), slope_BT / counts_BT, segment_BT), atol=1e-5)


def test_a_sequence_longer_than_int16_is_counted():
    ones_BT = jnp.ones((1, 32800), bool)
    assert int(active_count(ones_BT, jnp.ones(ones_BT.shape, jnp.int32))[0, 0]) == 32800


def test_a_neighbour_does_not_reach_a_sequence_not_even_by_rounding():
    value_BT, active_BT, segment_BT = rows(544, 100)
    here_BT = segment_BT == 2
    other_BT = np.where(here_BT, value_BT, value_BT * 1e6).astype(np.float32)
    other_segment_BT = np.where(segment_BT > 2, 3 + np.arange(544) % 7, segment_BT).astype(np.int32)
    mean_BT = jax.jit(sequence_mean)(value_BT, active_BT, segment_BT)
    again_BT = jax.jit(sequence_mean)(other_BT, active_BT, other_segment_BT)
    assert here_BT.any()
    np.testing.assert_array_equal(np.asarray(mean_BT)[here_BT], np.asarray(again_BT)[here_BT])


def test_rows_on_several_devices_stay_there():
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    value_BT, active_BT, segment_BT = rows(544, 100)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    given = jax.device_put((value_BT, active_BT, segment_BT), sharding)
    gradient = jax.jit(jax.grad(lambda v, a, s: jnp.sum(sequence_mean(v, a, s) ** 2)))
    text = gradient.lower(*given).compile().as_text() or ""
    assert "all-gather" not in text
    assert "all-to-all" not in text
    np.testing.assert_allclose(gradient(*given), gradient(value_BT, active_BT, segment_BT), atol=1e-6)
