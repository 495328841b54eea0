import dataclasses
import tomllib
from typing import Annotated, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train.strict_toml import Range, apply_overrides, check_fields, dump, read_file, read_table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    count: Annotated[int, Range(at_least=1)]
    share: Annotated[float, Range(at_least=0, below=1)] = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    mode: Literal["fast", "slow"]
    flag: bool
    weights: tuple[float, ...]
    inner: Inner
    limit: float | None = None


def table(**changes):
    return {"name": "x", "mode": "fast", "flag": True, "weights": [1, 2.5], "inner": {"count": 2}} | changes


def test_a_table_becomes_the_dataclass_with_integers_as_floats():
    config = read_table(Outer, table(inner={"count": 3, "share": 0}))
    assert config == Outer(
        name="x", mode="fast", flag=True, weights=(1.0, 2.5), inner=Inner(count=3, share=0.0), limit=None
    )
    assert isinstance(config.inner.share, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nmae": "y"}, r"^nmae: expected a known key, got 'nmae'; did you mean 'name'\?"),
        ({"inner": {"cuont": 1}}, r"^inner\.cuont: .* did you mean 'count'\?"),
        ({"zzz": 1}, r"^zzz: .* known are flag, inner, limit, mode, name, weights"),
        ({"count": 1}, r"^count: .* did you mean 'inner.count'\?"),
        ({"inner": {}}, r"^inner\.count: expected a value, got none"),
        ({"inner": 3}, r"^inner: expected a table, got 3"),
        ({"name": 3}, r"^name: expected a string, got 3"),
        ({"flag": 1}, r"^flag: expected true or false, got 1"),
        ({"inner": {"count": True}}, r"^inner\.count: expected an integer, got true"),
        ({"inner": {"count": 2.0}}, r"^inner\.count: expected an integer, got 2\.0"),
        ({"inner": {"count": 0}}, r"^inner\.count: expected at least 1, got 0"),
        ({"inner": {"count": 1, "share": 1.0}}, r"^inner\.share: expected at least 0 and below 1, got 1\.0"),
        ({"inner": {"count": 1, "share": float("nan")}}, r"^inner\.share: expected a finite number, got nan"),
        ({"mode": "fats"}, r"^mode: expected one of 'fast', 'slow', got \"fats\"; did you mean 'fast'\?"),
        ({"weights": [10**400]}, r"^weights\[0\]: expected a finite number, got inf"),
        ({"weights": 1.0}, r"^weights: expected a list, got 1\.0; write \[1\.0\]"),
        ({"weights": [1.0, "a"]}, r"^weights\[1\]: expected a number, got \"a\""),
    ],
)
def test_what_the_dataclass_does_not_say_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_table(Outer, table(**changes))


def test_fields_are_checked_also_without_a_file():
    with pytest.raises(ValueError, match=r"inner\.count: expected at least 1, got -2"):
        check_fields(Inner(count=-2), "inner")


def test_overrides_are_toml_or_the_bare_string_where_a_string_is_due():
    changed = apply_overrides(
        Outer, table(), ["name=2024", "mode=slow", "inner.share=1e-3", "flag = false", "weights=[3]", "limit=2"]
    )
    config = read_table(Outer, changed)
    assert config == Outer(
        name="2024", mode="slow", flag=False, weights=(3.0,), inner=Inner(count=2, share=1e-3), limit=2.0
    )


def test_overrides_leave_the_original_and_the_last_one_wins():
    original = table()
    assert apply_overrides(Outer, original, ["inner.count=7", "inner.count=8"])["inner"] == {"count": 8}
    assert original == table()


def test_an_override_may_quote_hold_equal_signs_and_be_empty():
    changed = apply_overrides(Outer, table(), ['name="a b"', "mode=a=b"])
    assert (changed["name"], changed["mode"]) == ("a b", "a=b")
    assert apply_overrides(Outer, table(), ["name="])["name"] == ""


@pytest.mark.parametrize("override", ["name", "a b=1", "=3", "inner..count=1"])
def test_an_override_without_a_key_or_value_is_refused(override):
    with pytest.raises(ValueError, match="expected key=value"):
        apply_overrides(Outer, table(), [override])


def test_an_override_through_a_scalar_is_refused():
    with pytest.raises(ValueError, match="expected a table at 'name'"):
        apply_overrides(Outer, table(), ["name.x=1"])


def test_an_override_of_an_unknown_key_is_an_error_of_reading():
    with pytest.raises(ValueError, match=r"inner\.cout: .*did you mean 'count'"):
        read_table(Outer, apply_overrides(Outer, table(), ["inner.cout=3"]))


@settings(max_examples=60, deadline=None)
@example(name='\x7f\x00\n"\\é😀', weights=[-0.0, 5e-324, 1.7e308], count=1, share=0.0, limit=None)
@given(
    name=st.text(),
    weights=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    count=st.integers(min_value=1, max_value=2**62),
    share=st.floats(min_value=0, max_value=1, exclude_max=True),
    limit=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_written_reads_back_equal(name, weights, count, share, limit):
    config = Outer(
        name=name, mode="slow", flag=False, weights=tuple(weights), inner=Inner(count=count, share=share), limit=limit
    )
    assert read_table(Outer, tomllib.loads(dump(config))) == config


def test_a_file_that_is_no_toml_says_where(tmp_path):
    path = tmp_path / "x.toml"
    with pytest.raises(ValueError, match=r"x\.toml: expected a readable TOML file, got: No such file"):
        read_file(path)
    path.write_text("a = 1\nb = [")
    with pytest.raises(ValueError, match=r"x\.toml: expected TOML, got: .*"):
        read_file(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(ValueError, match="expected UTF-8, got byte 0xff at 5"):
        read_file(path)
