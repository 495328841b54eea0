"""What is read of a compiled program's text, on texts in XLA's spellings with figures worked by hand."""

import pytest

from train.plan.collectives import collectives, summed

MESH = {"data": 1, "fsdp": 8, "expert": 8, "tensor": 1}
HEAD = """HloModule jit_f, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %add = f32[] add(%a, %b)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(48), metadata={op_name="while"}
  %at = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %bound), direction=LT
}

%open_condition (p: (s32[], s32[])) -> pred[] {
  %at.1 = s32[] get-tuple-element(%p), index=0
  %end = s32[] get-tuple-element(%p), index=1
  ROOT %less.1 = pred[] compare(%at.1, %end), direction=LT
}
"""
EXPERT = "replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"
FSDP = "replica_groups={{0,8,16,24,32,40,48,56},{1,9,17,25,33,41,49,57}}"


def program(body: str, entry: str) -> str:
    body = f"%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{\n{body}\n}}\n"
    return f"{HEAD}\n{body}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{entry}\n}}\n"


def only(line: str):
    (found,) = collectives(program("  %nothing = s32[] constant(1)", f"  {line}"), MESH)
    return found


LOOP = "  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body"
GATHER = f'  %g = bf16[262144,2048]{{1,0}} all-gather(%x), {EXPERT}, dimensions={{0}}, metadata={{op_name="a/b/c/d/e"}}'


def test_a_collective_in_a_loop_runs_as_often_as_the_constant_in_its_condition_says():
    (found,) = collectives(program(GATHER, LOOP), MESH)
    assert (found.kind, found.axes, found.shards, found.times) == ("all-gather", ("expert",), 8, 48)
    assert found.bytes == 262144 * 2048 * 2
    assert found.wire_bytes == 48 * 2**30 * 7 / 8
    assert not found.at_least
    assert found.place == "b/c/d/e"


def test_a_trip_count_that_the_text_states_goes_before_the_condition():
    line = LOOP + ', backend_config={"known_trip_count":{"n":"3"}}'
    (found,) = collectives(program(GATHER, line), MESH)
    assert found.times == 3


def test_a_loop_whose_bound_is_data_is_counted_once_and_says_so():
    (found,) = collectives(program(GATHER, LOOP.replace("%condition", "%open_condition")), MESH)
    assert (found.times, found.at_least) == (1, True)


def test_what_stands_behind_a_kernels_metadata_of_several_lines_is_not_lost():
    kernel = '  %k = f32[8] custom-call(%x), frontend_attributes={kernel_metadata={\n"a": "{}"\n}}, metadata={}'
    (found,) = collectives(program(f"{kernel}\n{GATHER}", LOOP), MESH)
    assert found.times == 48


def test_a_called_computation_is_followed():
    entry = "  %f = f32[8] fusion(%x), kind=kLoop, calls=%body"
    (found,) = collectives(program(GATHER, entry), MESH)
    assert found.times == 1


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (FSDP, ("fsdp",)),
        ("replica_groups=mesh['a'=8,'b'=1,'c'=8] {'a'}", ("fsdp",)),
        ("replica_groups=mesh['a'=1,'b'=8,'c'=8] {'c'}", ("expert",)),
        ("replica_groups=mesh['a'=64,'b'=1] {'a','b'}", ("fsdp", "expert")),
        ("replica_groups=[8,8]<=[64]", ("expert",)),
        ("replica_groups=[8,8]<=[8,8]T(1,0)", ("fsdp",)),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ()),
    ],
)
def test_groups_are_named_by_the_mesh_axes_that_vary_in_them(groups, axes):
    assert only(f"%r = f32[16]{{0}} all-reduce(%x), {groups}, to_apply=%sum").axes == axes


def test_a_reduce_scatter_counts_what_goes_in_and_a_sum_goes_round_twice():
    scatter = only(f"%r = f32[32768,2048]{{1,0}} reduce-scatter(%x), {EXPERT}, dimensions={{0}}, to_apply=%sum")
    assert scatter.bytes == 8 * 32768 * 2048 * 4
    assert scatter.wire_bytes == scatter.bytes * 7 / 8
    reduce = only(f"%r = (f32[4,8]{{1,0}}, s32[]) all-reduce(%x, %y), {EXPERT}, to_apply=%sum")
    assert reduce.bytes == 4 * 8 * 4 + 4
    assert reduce.wire_bytes == 2 * reduce.bytes * 7 / 8


def test_an_asynchronous_start_holds_its_input_too_which_is_not_counted():
    found = only(f"%g = (bf16[16]{{0}}, bf16[128]{{0}}) all-gather-start(%x), {EXPERT}, dimensions={{0}}")
    assert found.bytes == 256


def test_sums_are_by_kind_and_axes_largest_first():
    two = f"{GATHER}\n  %h = f32[2]{{0}} all-gather(%y), {FSDP}, dimensions={{0}}\n{GATHER}"
    assert summed(collectives(program("", two), MESH)) == {
        ("all-gather", ("expert",)): 2 * 2**30 * 7 / 8,
        ("all-gather", ("fsdp",)): 8 * 7 / 8,
    }


def test_a_fusion_of_an_all_reduce_and_its_slice_is_a_reduce_scatter():
    # The spelling of libtpu 0.0.42, shortened.
    fusion = f"""%all-reduce-scatter.clone.1 (input.10: f32[262144,2048]) -> f32[32832,2048] {{
  %input.10 = f32[262144,2048]{{1,0:T(8,128)}} parameter(0)
  %pad.427 = f32[262656,2048]{{1,0:T(8,128)}} pad(%input.10, %zero), padding=0_512x0_0
  %all-reduce.98 = f32[262656,2048]{{1,0:T(8,128)}} all-reduce(%pad.427), channel_id=97, {EXPERT}, to_apply=%sum
  ROOT %slice = f32[32832,2048]{{1,0:T(8,128)}} dynamic-slice(%all-reduce.98, %at, %zero)
}}
"""
    body = "  %f = f32[32832,2048]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1, backend_config={}"
    (found,) = collectives(fusion + program(body, LOOP), MESH)
    assert (found.kind, found.axes, found.shards, found.times) == ("reduce-scatter", ("expert",), 8, 48)
    assert found.bytes == 262656 * 2048 * 4
    assert found.wire_bytes == 48 * found.bytes * 7 / 8
