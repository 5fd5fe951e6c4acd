"""Reading the text of compiled programs, their loops and lines, in forms of other compilers too."""

import re

import pytest
from hlo_texts import ADD, GROUPS, MESH, REDUCE, computation, loop, read, text_of

import gspmd_mcmc as gm
from gspmd_mcmc.views.communication import read_report
from gspmd_mcmc.views.program.hlo import num_bytes_of, shapes_of, tuple_shapes


def seen(report):
    return [
        (c.kind, c.shape, c.num_bytes, c.operand_shape, c.operand_bytes) for c in report.collectives
    ]


# Shapes.


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [("f32[]", 4), ("f32[0]", 0), ("bf16[8,3]{1,0:T(8,128)(2,1)}", 48), ("f8e4m3fn[16]{0}", 16),
     ("f8e5m2[4,4]", 16), ("f8e8m0fnu[4]", 4), ("f4e2m1fn[10]", 5), ("s4[7]{0:E(4)}", 4), ("u4[16]", 8),
     ("s2[2,32]{1,0:E(2)}", 16), ("pred[8]", 8), ("c64[3]", 24), ("c128[3]", 48), ("f64[2,2]", 32),
     ("u8[5]{0:T(1024)(128)(4,1)S(1)}", 5), ("f32[<=8,2]", 64), ("token[]", 0),
     ("(f32[4]{0}, (s32[2]{0}, pred[3]), token[], opaque[])", 16 + 8 + 3),
     ("(f32[1], f32[1], f32[1], f32[1], f32[1], /*index=5*/f32[1])", 24)],
)  # fmt: skip
def test_bytes_of_a_shape(shape, num_bytes):
    assert num_bytes_of(shape) == num_bytes


def test_the_arrays_of_a_shape_and_the_parts_of_a_tuple():
    text = "(bf16[8,3]{1,0:T(8,128)(2,1)}, pred[], s4[<=7])"
    assert shapes_of(text) == (("bf16", (8, 3)), ("pred", ()), ("s4", (7,)))
    text = "((f32[4,2]{1,0:T(8,128)}, s32[]), f32[4]{0}, u32[]{:S(2)})"
    assert tuple_shapes(text) == ["(f32[4,2]{1,0:T(8,128)}, s32[])", "f32[4]{0}", "u32[]{:S(2)}"]
    assert tuple_shapes("f32[4,2]{1,0}") == ["f32[4,2]{1,0}"]


# Collectives that are one line.


KIND = re.compile(r" ([a-z\-]+)\(")
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
# The line, its result and its operands, with their bytes.
SYNCHRONOUS = [
    ("f32[32]{0} all-reduce(%p), to_apply=%add", "f32[32]", 128, "f32[32]", 128),
    ("bf16[256]{0:T(256)} all-gather(%q), dimensions={0}", "bf16[256]", 512, "bf16[64]", 128),
    ("f32[8]{0} reduce-scatter(%p), to_apply=%add", "f32[8]", 32, "f32[32]", 128),
    ("f32[32]{0} all-to-all(%p), dimensions={0}", "f32[32]", 128, "f32[32]", 128),
    ("f32[32]{0} collective-broadcast(%p)", "f32[32]", 128, "f32[32]", 128),
    (
        "bf16[96]{0} ragged-all-to-all(%q, %q, %i, %i, %i, /*index=5*/%i)",
        *("bf16[96]", 192),
        *("bf16[64], bf16[64], s32[8], s32[8], s32[8], s32[8]", 2 * 128 + 4 * 32),
    ),
    ("f32[32]{0} collective-permute(%p)", "f32[32]", 128, "f32[32]", 128),
]


@pytest.mark.parametrize("row", SYNCHRONOUS, ids=lambda row: KIND.findall(row[0])[0])
def test_a_collective_is_read(row):
    line, *expected = row
    (kind,) = KIND.findall(line)
    devices = PAIRS if kind == "collective-permute" else GROUPS
    report = read(f"ROOT %out = {line}, {devices}")
    assert seen(report) == [(kind, *expected)]
    assert [(found.axes, found.group_size) for found in report.collectives] == [(("b",), 4)]
    assert report.unknown == ()


def test_a_fused_tuple_is_one_collective_with_the_bytes_of_all_its_arrays():
    report = read(f"ROOT %out = (f32[32]{{0}}, bf16[64], s32[8]{{0}}) all-reduce(%p, %q, %i), {GROUPS}")
    arrays = "f32[32], bf16[64], s32[8]"
    assert seen(report) == [("all-reduce", arrays, 128 + 128 + 32, arrays, 128 + 128 + 32)]


def test_operands_with_shapes_and_strings_with_parentheses_and_quotes_are_read():
    report = read(f"ROOT %out = f32[32]{{0}} all-reduce(f32[32]{{0}} %p), {GROUPS}, to_apply=%add")
    assert seen(report) == [("all-reduce", "f32[32]", 128, "f32[32]", 128)]
    line = r'%c = f32[32]{0} custom-call(%p), custom_call_target="a\\", backend_config="(\")("'
    assert seen(read(line, f"ROOT %out = f32[32]{{0}} all-reduce(%c), {GROUPS}, to_apply=%add")) == [
        ("all-reduce", "f32[32]", 128, "f32[32]", 128)
    ]


# Asynchronous collectives: a start, perhaps updates, and a done.


ASYNCHRONOUS = [
    ("all-reduce", "f32[32]{0}", "%p", "f32[32]{0}"),
    ("all-reduce", "(f32[32]{0}, bf16[64]{0})", "%p, %q", "(f32[32]{0}, bf16[64]{0})"),
    ("all-gather", "(f32[32]{0}, f32[128]{0})", "%p", "f32[128]{0}"),
    (
        "all-gather",
        "((f32[32]{0}, s32[8]{0}), (f32[128]{0}, s32[32]{0}))",
        "%p, %i",
        "(f32[128]{0}, s32[32]{0})",
    ),
    ("collective-permute", "(f32[32]{0}, f32[32]{0}, u32[]{:S(2)}, u32[]{:S(2)})", "%p", "f32[32]{0}"),
    ("collective-permute", "(bf16[64]{0}, bf16[64]{0})", "%q", "bf16[64]{0}"),
    ("reduce-scatter", "((f32[32]{0}), f32[8]{0})", "%p", "f32[8]{0}"),
    ("all-to-all", "((f32[32]{0}), f32[32]{0}, u32[], u32[])", "%p", "f32[32]{0}"),
    (
        "all-to-all",
        "((f32[32]{0}, f32[32]{0}), (f32[32]{0}, f32[32]{0}))",
        "%p, %p",
        "(f32[32], f32[32])",
    ),
    ("collective-broadcast", "((f32[32]{0}), f32[32]{0})", "%p", "f32[32]{0}"),
    (
        "ragged-all-to-all",
        "((bf16[64], bf16[64], s32[8], s32[8], s32[8], /*index=5*/s32[8]), bf16[96]{0})",
        "%q, %q, %i, %i, %i, /*index=5*/%i",
        "bf16[96]{0}",
    ),
]
BYTES = {"%p": 128, "%q": 128, "%i": 32}


@pytest.mark.parametrize(("kind", "state", "operands", "result"), ASYNCHRONOUS)
@pytest.mark.parametrize("later", ["done", "update and done", "elsewhere"])
def test_an_asynchronous_collective_counts_once_with_its_result(kind, state, operands, result, later):
    """The end may be in the next iteration of a loop: the start alone tells as much."""
    lines = [f"%s = {state} {kind}-start({operands}), {GROUPS}, dimensions={{0}}, to_apply=%add"]
    if later == "update and done":
        lines.append(f"%u = {state} {kind}-update(%s)")
    if later != "elsewhere":
        lines.append(f"ROOT %d = {result} {kind}-done({'%u' if 'update' in later else '%s'})")
    (found,) = read(*lines).collectives
    assert (found.kind, found.num_bytes) == (kind, num_bytes_of(result))
    assert found.operand_bytes == sum(BYTES[name] for name in re.findall(r"%\w", operands))
    assert found.axes == ("b",)


def test_the_end_tells_the_result_where_a_state_has_another_form():
    (found,) = read(
        f"%s = (f32[32]{{0}}, (s32[8]{{0}}, f32[32]{{0}}), u32[]) all-reduce-start(%p), {GROUPS}",
        "ROOT %d = f32[32]{0} all-reduce-done(%s)",
    ).collectives
    assert (found.shape, found.num_bytes) == ("f32[32]", 128)


WRAPPED = """%wrapped (p.1: f32[32]) -> f32[8] {
  %p.1 = f32[32]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p.1), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}, execution_thread="parallel"
"""


@pytest.mark.parametrize("opcode", ["async", "call"])
def test_a_collective_that_a_generic_start_wraps_counts_once(opcode):
    state = "((f32[32]{0}), f32[8]{0}, s32[])"
    report = read(
        f'%s = {state} {opcode}-start(%p), async_execution_thread="parallel", calls=%wrapped',
        f"%u = {state} {opcode}-update(%s), calls=%wrapped",
        f"ROOT %d = f32[8]{{0}} {opcode}-done(%u), calls=%wrapped",
        before=ADD + "\n" + WRAPPED,
    )
    assert seen(report) == [("reduce-scatter", "f32[8]", 32, "f32[32]", 128)]
    assert report.unknown == ()


@pytest.mark.parametrize("opcode", ["copy", "slice", "dynamic-slice", "fusion", "custom-call"])
def test_local_operations_may_be_asynchronous_too(opcode):
    report = read(
        f"%s = (f32[32]{{0}}, f32[32]{{0}}, u32[]) {opcode}-start(%p)",
        f"ROOT %d = f32[32]{{0}} {opcode}-done(%s)",
    )
    assert (report.collectives, report.unknown) == ((), ())


# Sending and receiving.


@pytest.mark.parametrize(
    "pairs", ['="{{0,1},{1,2},{2,3},{3,0}}"', '="{{0,1}, {1,2}}"', "={{0,1},{1,2}}"]
)
def test_a_send_and_a_receive_carry_their_data_alone(pairs):
    attributes = f"channel_id=1, frontend_attributes={{_xla_send_recv_source_target_pairs{pairs}}}"
    report = read(
        f"%r = (f32[32]{{0}}, u32[], token[]) recv(%token), {attributes}",
        f"%s = (bf16[64]{{0}}, u32[], token[]) send(%q, %token), {attributes}",
        "%rd = (f32[32]{0}, token[]) recv-done(%r), channel_id=1",
        "%sd = token[] send-done(%s), channel_id=1",
    )
    assert seen(report) == [("recv", "f32[32]", 128, "", 0), ("send", "bf16[64]", 128, "bf16[64]", 128)]
    assert {c.axes for c in report.collectives} == {("b",)}
    assert report.unknown == ()


def test_what_goes_to_the_host_is_no_collective():
    """As infeeds and callbacks are none: no other device is asked."""
    report = read(
        "%s = (f32[32]{0}, u32[], token[]) send(%p, %token), channel_id=1, is_host_transfer=true",
        "%sd = token[] send-done(%s), channel_id=1, is_host_transfer=true",
        "%r = (f32[32]{0}, u32[], token[]) recv(%token), channel_id=2, is_host_transfer=true",
        "%rd = (f32[32]{0}, token[]) recv-done(%r), channel_id=2, is_host_transfer=true",
    )
    assert (report.collectives, report.unknown) == ((), ())
    line = (
        '%u = f32[32]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config": {"body": "x", "has_communication": false}}'
    )
    assert read(line).unknown == ()


# What is not known is reported.


@pytest.mark.parametrize(
    "line",
    [
        "%u = f32[32]{0} quantum-teleport(%p)",
        "%u = f32[32]{0} all-scatter-start(%p), replica_groups={{0,1}}",
        f'%u = f32[32]{{0}} custom-call(%p), custom_call_target="nccl", {GROUPS}',
        "%u = f32[32]{0} fusion(%p), kind=kCustom, source_target_pairs={{0,1}}",
        '%u = f32[32]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config": {"body": "x", "has_communication": true}}',
        '%u = f32[32]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        r'backend_config="{\"custom_call_config\": {\"collective_id\": 7}}"',
        "%u is a line of no known form",
        "%u = f32[32]{0}",
        "%u = f32[32]{0} all-reduce(%p",
        "%u = (f32[32]{0}, f32[32]{0} all-reduce(%p)",
    ],
)
def test_what_has_no_known_form_is_reported(line):
    report = read(line, "ROOT %out = f32[32]{0} negate(%p)")
    assert report.unknown == (line,)
    assert report.collectives == ()
    with pytest.raises(gm.BudgetExceeded, match="unknown: at most 0") as raised:
        report.check()
    assert line[:100] in str(raised.value)
    assert report.check(unknown=1) is report


def test_a_computation_whose_head_is_unknown_is_reported_whole():
    strange = (
        "some %strange computation {\n  %z = f32[] parameter(0)\n  ROOT %y = f32[] add(%z, %z)\n}\n"
    )
    report = read("ROOT %out = f32[32]{0} negate(%p)", before=strange)
    assert report.unknown == ("%z = f32[] parameter(0)", "ROOT %y = f32[] add(%z, %z)")


def test_a_head_without_shapes_is_known():
    text = text_of(f"ROOT %out = f32[32]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add")
    bare = re.sub(r"ENTRY %main .* \{", "ENTRY %main {", text)
    assert bare != text
    report = read_report(bare, memory={}, arguments=(), mesh=MESH)
    assert (report.count("all-reduce"), report.unknown) == (1, ())


LOST = """%lost (p.1: f32[32]) -> f32[32] {
  %p.1 = f32[32]{0} parameter(0)
  ROOT %ar = f32[32]{0} all-reduce(%p.1), replica_groups={}, to_apply=%add
}
"""


def test_a_collective_of_which_it_is_not_known_who_calls_it_is_reported():
    report = read("ROOT %out = f32[32]{0} fusion(%p), somehow_runs=%lost", before=ADD + LOST)
    assert report.collectives == ()
    (line,) = report.unknown
    assert line.startswith("ROOT %ar = f32[32]{0} all-reduce(")


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
        ("jit(f)/leapfrog/eval_jaxpr/while", "leapfrog"),
        ("jit(f)/leapfrog/while/body/eval_jaxpr/while", "w"),
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


# What the TPU's compiler writes in other forms.


SCATTER = """%all-reduce-scatter (x: f32[32]) -> f32[8] {{
  %x = f32[32]{{0:T(128)}} parameter(0)
  %part = u32[] partition-id()
  %ar = f32[32]{{0:T(128)}} all-reduce(%x), {groups}, to_apply=%add
  {last}
}}
"""
SLICE = "dynamic-slice(%ar, %part), dynamic_slice_sizes={8}"
FUSED = (
    "%s = f32[8]{0:T(128)S(1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter, "
    'metadata={op_name="jit(f)/sum"}'
)


@pytest.mark.parametrize(
    ("last", "lines", "kind", "shape"),
    [
        (f"ROOT %s = f32[8]{{0:T(128)}} {SLICE}", [FUSED], "reduce-scatter", "f32[8]"),
        # All devices keep the same part.
        ("ROOT %s = f32[8] slice(%ar), slice={[0:8]}", [FUSED], "all-reduce", "f32[32]"),
        # The sum is read whole, or what is kept of it is not the end; or it is not fused.
        (f"%s = f32[8]{{0}} {SLICE}\n  ROOT %t = f32[8] negate(%s)", [FUSED], "all-reduce", "f32[32]"),
        (
            f"%t = f32[32] negate(%ar)\n  ROOT %s = f32[8]{{0}} {SLICE}",
            [FUSED],
            "all-reduce",
            "f32[32]",
        ),
        (
            *(f"ROOT %s = f32[8]{{0}} {SLICE}", [FUSED.replace("fusion", "call")]),
            *("all-reduce", "f32[32]"),
        ),
    ],
)
def test_a_sum_of_which_a_fusion_keeps_a_part_is_a_reduce_scatter(last, lines, kind, shape):
    report = read(*lines, before=ADD + SCATTER.format(groups=GROUPS, last=last))
    assert seen(report) == [(kind, shape, 4 * int(shape[4:-1]), "f32[32]", 128)]
    assert report.unknown == ()
    assert report.collectives[0].op_name == ("jit(f)/sum" if FUSED in lines else "")


COUNTED = """%cond.t (c: (f32[32], s32[])) -> pred[] {{
  %c = (f32[32]{{0}}, s32[]{{:T(256)}}) parameter(0)
  %end = s32[]{{:T(256)}} constant({end})
  %i = s32[]{{:T(256)}} get-tuple-element(%c), index=1
  ROOT %lt = pred[]{{:T(1024)}} compare(%i, {bound}), direction={direction}
}}
%t (c: (f32[32], s32[])) -> (f32[32], s32[]) {{
  %c = (f32[32]{{0}}, s32[]{{:T(256)}}) parameter(0)
  %x = f32[32]{{0}} get-tuple-element(%c), index=0
  %i = s32[]{{:T(256)}} get-tuple-element(%c), index=1
  %copy.1 = s32[]{{:T(256)}} copy(%i)
  %by..sunk.1 = s32[]{{:T(256)}} constant({by})
  %next = s32[]{{:T(256)}} add(%by..sunk.1, %copy.1), control-predecessors={{%copy.1}}
  %ar = f32[32]{{0}} all-reduce(%x), {groups}, to_apply=%add
  ROOT %out = (f32[32]{{0}}, s32[]{{:T(256)}}) tuple(%ar, {carried})
}}
"""
COUNTS = {"end": 5, "bound": "%end", "direction": "LT", "by": 1, "carried": "%next", "start": "%zero"}


@pytest.mark.parametrize(
    ("changed", "trips"),
    [
        ({}, 5),
        ({"end": -3}, 0),
        ({"start": "%two"}, 3),
        # What no constant ends or begins, what counts otherwise, or not at all, is not known.
        ({"bound": "%i"}, None),
        ({"direction": "GT"}, None),
        ({"direction": "NE"}, None),
        ({"by": 2}, None),
        ({"carried": "%i"}, None),
        ({"start": "%unknown"}, None),
    ],
)
def test_a_loop_that_counts_between_constants_has_its_count(changed, trips):
    given = COUNTS | changed
    report = read(
        "%constant.9 = s32[]{:T(256)} constant(0)",
        "%zero = s32[]{:T(256)} copy(%constant.9)",
        "%two = s32[] constant(2)",
        "%unknown = s32[] get-tuple-element(%i), index=0",
        f"%begin = (f32[32]{{0}}, s32[]) tuple(%p, {given['start']})",
        "%w = (f32[32]{0}, s32[]) while(%begin), condition=%cond.t, body=%t",
        before=ADD + COUNTED.format(groups=GROUPS, **given),
    )
    assert [x.trips for x in report.loops] == [trips]
    assert report.count("all-reduce") == 1


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
