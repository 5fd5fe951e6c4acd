"""Loops, calls, branches and source lines in the text of compiled programs."""

import pytest
from hlo_texts import ADD, GROUPS, REDUCE, computation, loop, read

# Calls, branches, loops.


def test_a_loop_in_a_call_in_a_conditional_is_walked():
    before = (
        ADD
        + computation("body", REDUCE)
        + computation("callee", "ROOT " + loop("inner", "body", 7))
        + computation("branch_0", *(f"%c{i} = f32[32]{{0}} call(%p), to_apply=%callee" for i in (1, 2)))
        + computation("branch_1", "ROOT %n = f32[32]{0} negate(%p)")
    )
    conditional = "conditional(%i, %p, %p), branch_computations={%branch_0, %branch_1}"
    report = read(f"ROOT %out = f32[32]{{0}} {conditional}", before=before)
    assert [(c.kind, c.trips) for c in report.collectives] == 2 * [("all-reduce", (7,))]
    assert report.runs("all-reduce") == 2 * 7  # what is called twice counts twice


@pytest.mark.parametrize("side", ["true", "false"])
def test_both_sides_of_a_predicated_conditional_are_read(side):
    sides = {"true": "negate(%p)", "false": "negate(%p)"} | {side: f"all-reduce(%p), {GROUPS}"}
    before = ADD + "".join(
        computation(name, f"ROOT %r = f32[32]{{0}} {line}") for name, line in sides.items()
    )
    called = "true_computation=%true, false_computation=%false"
    report = read(f"ROOT %out = f32[32]{{0}} conditional(%i, %p, %p), {called}", before=before)
    assert report.count("all-reduce") == 1


def test_loops_three_deep_with_and_without_counts():
    before = (
        ADD
        + computation("innermost", REDUCE)
        + computation("middle", "ROOT " + loop("tile", "innermost", 3))
        + computation("outermost", "ROOT " + loop("leapfrog", "middle"))
    )
    report = read("ROOT " + loop("step", "outermost", 10), before=before)
    (found,) = report.collectives
    assert [str(x) for x in found.loops] == ["step x 10", "leapfrog x ?", "tile x 3"]
    assert report.runs("all-reduce", within="leapfrog") == 3
    assert report.runs("all-reduce", within="tile") == 1
    assert report.with_trips(leapfrog=5).runs("all-reduce") == 10 * 5 * 3


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        ("jit(f)/leapfrog/while", "leapfrog"),
        ("jit(f)/jit(g)/tile rows/while", "tile rows"),
        ("jit(f)/vmap(leapfrog)/while", "leapfrog"),
        ("jit(f)/transpose(jvp(vmap(leapfrog)))/while", "leapfrog"),
        ("jit(f)/outer/leapfrog/while", "leapfrog"),
        ("jit(f)/leapfrog/vmap()/while", "leapfrog"),
        ("jit(f)/shard_map/leapfrog/cond/branch_1_fun/while", "leapfrog"),
        (
            "jit(f)/leapfrog/transpose(jvp(leapfrog))/jvp()/checkpoint/rematted_computation/while",
            "leapfrog",
        ),
        ("jit(f)/leapfrog/while/body/closed_call/while", "w"),
        ("jit(f)/leapfrog/while/cond/while", "w"),
        ("jit(f)/leapfrog/jit(g)/while", "w"),
        ("jit(f)/shard_map/while", "w"),
        ("jit(f)/while", "w"),
        ("", "w"),
    ],
)
def test_a_loop_has_the_name_of_the_scope_that_it_stands_in(op_name, name):
    """Else that of its function, which these texts have not, or its own, which is w."""
    metadata = f'metadata={{op_name="{op_name}"}}'
    line = f"ROOT %w = f32[32]{{0}} while(%p), condition=%cond.b, body=%b, {metadata}"
    report = read(line, before=ADD + computation("b", REDUCE))
    assert [x.name for x in report.loops] == [name]


# Source lines.


FRAMES = """
FileNames
1 "/home/me/model.py"
2 "/home/me/run me.py"

FunctionNames
1 "log_density"
2 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=2%s}
2 {file_location_id=1 parent_frame_id=%d}

"""


@pytest.mark.parametrize("frames", [FRAMES % ("", 1), FRAMES % (" parent_frame_id=1", 2)])
def test_stacks_are_read_however_parents_are_counted(frames):
    """From 1 in some versions; in others from 2, and a frame without one names itself."""
    line = (
        f'ROOT %ar = f32[32]{{0}} all-reduce(%p), {GROUPS}, metadata={{op_name="x" stack_frame_id=2}}'
    )
    (found,) = read(line, before=frames + ADD).collectives
    assert [str(f) for f in found.stack] == [
        "/home/me/model.py:12 (log_density)",
        "/home/me/run me.py:3 (<module>)",
    ]


def test_a_source_may_stand_in_the_line_itself():
    metadata = 'metadata={op_name="x" source_file="/home/me/model.py" source_line=12}'
    (found,) = read(f"ROOT %ar = f32[32]{{0}} all-reduce(%p), {GROUPS}, {metadata}").collectives
    assert found.source == "/home/me/model.py:12"
