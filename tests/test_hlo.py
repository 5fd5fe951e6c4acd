"""Reading the text of compiled programs, in forms that other compilers write too."""

import re

import pytest
from hlo_texts import ADD, GROUPS, MESH, read, text_of

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
    [
        ("f32[]", 4),
        ("f32[0]", 0),
        ("bf16[8,3]{1,0:T(8,128)(2,1)}", 48),
        ("f8e4m3fn[16]{0}", 16),
        ("f8e5m2[4,4]", 16),
        ("f8e8m0fnu[4]", 4),
        ("f4e2m1fn[10]", 5),
        ("s4[7]{0:E(4)}", 4),
        ("u4[16]", 8),
        ("s2[2,32]{1,0:E(2)}", 16),
        ("pred[8]", 8),
        ("c64[3]", 24),
        ("c128[3]", 48),
        ("f64[2,2]", 32),
        ("u8[5]{0:T(1024)(128)(4,1)S(1)}", 5),
        ("f32[<=8,2]", 64),
        ("(f32[4]{0}, (s32[2]{0}, pred[3]), token[], opaque[])", 16 + 8 + 3),
        ("(f32[1], f32[1], f32[1], f32[1], f32[1], /*index=5*/f32[1])", 24),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, num_bytes):
    assert num_bytes_of(shape) == num_bytes


def test_the_arrays_of_a_shape():
    text = "(bf16[8,3]{1,0:T(8,128)(2,1)}, pred[], s4[<=7])"
    assert shapes_of(text) == (("bf16", (8, 3)), ("pred", ()), ("s4", (7,)))


def test_parts_of_a_tuple():
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


def test_operands_may_be_printed_with_their_shapes():
    report = read(f"ROOT %out = f32[32]{{0}} all-reduce(f32[32]{{0}} %p), {GROUPS}, to_apply=%add")
    assert seen(report) == [("all-reduce", "f32[32]", 128, "f32[32]", 128)]


def test_parentheses_and_quotes_in_strings_do_not_end_the_operands():
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


def test_a_custom_call_that_communicates_with_nobody_is_known():
    line = (
        '%u = f32[32]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config": {"body": "x", "has_communication": false}}'
    )
    assert read(line).unknown == ()


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
