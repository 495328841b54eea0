"""A push is put together from its chunks, or refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.weights import DTYPES, Assembly, Weights, is_finite


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return make(rng, {"a": (3, 5), "empty": (0, 4), "scalar": (), "b": (7,), "c": (2, 2, 2)})


def make(rng, shapes):
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        tensors[name] = rng.normal(size=shape).astype(ml_dtypes.bfloat16 if index % 2 else np.float32)
    return Weights(version=4, model_digest="m", tensors=tensors)


def assemble(weights, size):
    assembly, tensors = Assembly(weights.manifest), {}
    tensors.update(assembly.ready())
    for chunk in weights.chunks(size):
        assembly.add(chunk)
        tensors.update(assembly.ready())
    assembly.finish()
    return tensors, assembly.received


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4), st.integers(1, 40))
def test_any_tensors_in_any_chunks_come_together_bit_for_bit(shapes, size):
    weights = make(np.random.default_rng(1), {f"t{index}": tuple(shape) for index, shape in enumerate(shapes)})
    tensors, received = assemble(weights, size)
    assert list(tensors) == list(weights.tensors)
    assert received == weights.num_bytes == sum(array.nbytes for array in weights.tensors.values())
    for name, array in weights.tensors.items():
        assert tensors[name].dtype == array.dtype
        assert tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def test_the_digest_is_of_all_bytes_in_order(weights):
    whole = b"".join(array.tobytes() for array in weights.tensors.values())
    assert weights.manifest.digest == xxhash.xxh3_128_hexdigest(whole)
    assert weights.manifest.version == 4
    assert [spec.name for spec in weights.manifest.tensors] == ["a", "empty", "scalar", "b", "c"]


def test_a_view_that_is_not_contiguous_is_sent_as_it_reads():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    tensors, _ = assemble(Weights(version=0, model_digest="m", tensors={"a": array}), 7)
    np.testing.assert_array_equal(tensors["a"], array)


def test_types_that_cannot_travel_are_refused():
    for array in (np.zeros(2, np.float16), np.zeros(2, ">f4"), np.zeros(2, np.int32)):
        weights = Weights(version=0, model_digest="m", tensors={"odd": array})
        with pytest.raises(ValueError, match=f"float32 or bfloat16 tensors, got odd of {array.dtype}"):
            _ = weights.manifest


def test_a_corrupted_chunk_is_worth_another_try(weights):
    assembly = Assembly(weights.manifest)
    chunk = next(weights.chunks(16))
    with pytest.raises(Retryable, match="the bytes of a have another"):
        assembly.add(dataclasses.replace(chunk, data=bytes(15) + b"\x01"))


def test_chunks_out_of_order_beyond_their_tensor_or_after_the_end_are_refused(weights):
    first, second, *rest = weights.chunks(16)
    list((assembly := Assembly(weights.manifest)).ready())
    with pytest.raises(ValueError, match=r"byte 16: expected tensor 0 \(a\) at byte 0"):
        assembly.add(second)
    assembly.add(first)
    with pytest.raises(ValueError, match="byte 0: expected tensor 0"):
        assembly.add(first)
    with pytest.raises(ValueError, match="expected 1 to 44 bytes of a, got 0"):
        assembly.add(dataclasses.replace(second, data=b""))
    with pytest.raises(ValueError, match="expected 1 to 44 bytes of a, got 45"):
        assembly.add(dataclasses.replace(second, data=bytes(45)))
    for chunk in (second, *rest):
        assembly.add(chunk)
        list(assembly.ready())
    assembly.finish()
    with pytest.raises(ValueError, match="expected the end of the stream"):
        assembly.add(first)


def test_a_stream_that_ends_early_is_worth_another_try(weights):
    assembly = Assembly(weights.manifest)
    list(assembly.ready())
    assembly.add(next(weights.chunks(16)))
    with pytest.raises(Retryable, match=r"the stream ended in number 0 \(a\) at byte 16"):
        assembly.finish()


def test_tensors_that_change_under_the_push_are_found_out(weights):
    _ = weights.manifest
    weights.tensors["b"][3] += 1
    with pytest.raises(Fatal, match="the tensors changed between digest and push"):
        assemble(weights, 16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=6), st.sampled_from(sorted(DTYPES)))
def test_finite_is_what_numpy_says(numbers, dtype):
    array = np.array(numbers, np.float32).astype(DTYPES[dtype])
    assert is_finite(array) == bool(np.isfinite(array).all())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_number_among_the_largest_good_ones_is_found(dtype, bad):
    largest = ml_dtypes.finfo(DTYPES[dtype]).max
    array = np.array([[largest, -largest], [-0.0, bad]], np.float32).astype(DTYPES[dtype])
    assert not is_finite(array)
    assert is_finite(array[:1])
