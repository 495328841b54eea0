import dataclasses
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge.messages import Completion, Finish, LogprobDefinition, Trace
from tests.reference.rollouts import make_completion, make_group
from train.groups import Group, from_bytes, to_bytes


def same(left, right):
    """Equal to the bit, dtypes and shapes included."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return type(left) is type(right) and left == right


floats = st.floats(width=32, allow_nan=True)


@st.composite
def completions(draw):
    count = draw(st.integers(0, 4))
    trace = None
    if draw(st.booleans()):
        rows, layers, slots = draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([np.uint8, np.uint16]))
        size = rows * layers * slots
        ids = draw(st.lists(st.integers(0, np.iinfo(dtype).max), min_size=size, max_size=size))
        trace = Trace(
            experts_TLK=np.array(ids, dtype).reshape(rows, layers, slots),
            first_row=draw(st.integers(0, 9)),
            version_T=np.arange(rows, dtype=np.int32),
        )
    return Completion(
        request_id=draw(st.text(max_size=4)),
        member=draw(st.integers(0, 3)),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)), np.int32),
        behavior_logp=np.array(draw(st.lists(floats, min_size=count, max_size=count)), np.float32),
        version=np.arange(count, dtype=np.int32),
        trace=trace,
        finish=draw(st.sampled_from(Finish)),
        engine_id=draw(st.text(max_size=4)),
        logprob=LogprobDefinition(
            temperature=draw(st.floats(0, 2, exclude_min=True)), after_truncation=draw(st.booleans())
        ),
    )


@st.composite
def groups(draw):
    members = draw(st.lists(completions(), max_size=3))
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    return Group(
        ticket=draw(st.integers(0, 2**40)),
        prompt_tokens=np.array(prompt, np.int32),
        answer=draw(st.text(max_size=4)),
        completions=tuple(members),
        reward_M=np.array(draw(st.lists(floats, min_size=len(members), max_size=len(members))), np.float32),
    )


@settings(max_examples=60, deadline=None)
@given(made=st.lists(groups(), max_size=4))
def test_groups_come_back_to_the_bit_and_equal_groups_give_equal_bytes(made):
    blob = to_bytes(made)
    assert same(from_bytes(blob), made)
    assert to_bytes(from_bytes(blob)) == blob


def test_restored_traces_do_not_keep_the_others_alive():
    (group,) = from_bytes(to_bytes([make_group()]))
    trace = group.completions[0].trace
    assert trace is not None
    assert trace.experts_TLK.flags.aligned
    whole = trace.experts_TLK
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    assert whole.nbytes == trace.experts_TLK.nbytes


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" + b[1:]])
def test_damaged_bytes_are_refused(damage):
    with pytest.raises(ValueError, match=r"saved groups: expected an intact \.npz"):
        from_bytes(damage(to_bytes([make_group()])))


def test_a_flipped_byte_in_the_tokens_is_noticed():
    blob = to_bytes([make_group(counts=(40, 40))])
    tokens = np.concatenate([c.tokens for c in make_group(counts=(40, 40)).completions]).tobytes()
    place = blob.index(tokens) + len(tokens) // 2
    with pytest.raises(ValueError, match="saved groups: expected an intact"):
        from_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])


def test_bytes_of_another_format_are_refused():
    with np.load(io.BytesIO(to_bytes([make_group()]))) as file:
        columns = {name: file[name] for name in file.files}
    columns["text"] = np.frombuffer(columns["text"].tobytes().replace(b'"format": 2', b'"format": 1'), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **columns)
    with pytest.raises(ValueError, match="saved groups: expected format 2, got 1"):
        from_bytes(buffer.getvalue())


def test_pickles_are_never_read():
    buffer = io.BytesIO()
    np.savez(buffer, text=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="saved groups"):
        from_bytes(buffer.getvalue())


def test_an_array_of_another_type_is_refused_rather_than_rounded():
    group = make_group()
    wrong = dataclasses.replace(group, reward_M=group.reward_M.astype(np.float64))
    with pytest.raises(ValueError, match="expected arrays of float32, got float64"):
        to_bytes([wrong])


def test_a_group_is_as_old_as_its_oldest_token():
    mixed = make_completion(0, 0, count=3, version=5)
    mixed = dataclasses.replace(mixed, version=np.array([4, 5, 7], np.int32))
    group = dataclasses.replace(make_group(version=6), completions=(mixed, make_completion(0, 1, count=2, version=6)))
    assert (group.oldest_version, group.newest_version, group.num_tokens) == (4, 7, 5)


def test_saving_is_columnar():
    many = [make_group(ticket, counts=(2,) * 8) for ticket in range(64)]
    with np.load(io.BytesIO(to_bytes(many))) as file:
        assert len(file.files) < 25
        assert math.prod(file["experts"].shape) == sum(
            c.trace.experts_TLK.nbytes for g in many for c in g.completions if c.trace
        )


def test_masks_come_back_bit_for_bit_beside_groups_without():
    masked = dataclasses.replace(
        make_group(1, counts=(2, 3)), trained=(np.array([False, False]), np.array([True, False, True]))
    )
    plain = make_group(2, counts=(4, 1))
    back = from_bytes(to_bytes([plain, masked, plain]))
    assert [group.trained for group in (back[0], back[2])] == [(), ()]
    assert [mask.tolist() for mask in back[1].trained] == [[False, False], [True, False, True]]
    assert back[1].verified_M.tolist() == [False, True]
    assert back[0].verified_M.tolist() == [True, True]
