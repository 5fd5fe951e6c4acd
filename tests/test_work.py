"""Bytes, kernels and arithmetic of compiled programs, from texts in the forms of each compiler."""

import re

import pytest

from gspmd_mcmc.planning.flops import Product
from gspmd_mcmc.planning.memory_traffic import memory_amount
from gspmd_mcmc.planning.work import Work, work_of
from gspmd_mcmc.views.program.hlo import read_program

BIG, SMALL = 4 * 1000 * 64, 4 * 10 * 64  # bytes of f32[1000,64] and f32[10,64]
ARGUMENTS = """
  %big = f32[1000,64]{1,0} parameter(0)
  %small = f32[10,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)"""


def program_of(*lines, before="", devices=8):
    body = "\n  ".join(lines)
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={devices}"
    return read_program(
        f"{head}\n\n{before}\n\nENTRY %main (p: f32[]) -> f32[] {{{ARGUMENTS}\n  {body}\n}}\n"
    )


def fused(root, *lines):
    """A fused computation of two parameters, an array and an index."""
    inside = "\n  ".join(
        ["%a = f32[1000,64]{1,0} parameter(0)", "%i = s32[] parameter(1)", "%z = s32[] constant(0)",
         *lines, f"ROOT {root}"]
    )  # fmt: skip
    return f"%fused (a: f32[1000,64], i: s32[]) -> f32[] {{\n  {inside}\n}}\n"


def moved(*lines, before=""):
    work = work_of(program_of(*lines, before=before))
    return work.bytes_read, work.bytes_written


# What one operation reads and writes.

SLICED = "dynamic_slice_sizes={10,64}"
MOVES = [
    ("ROOT %o = f32[1000,64]{1,0} add(%big, %big)", BIG, BIG),  # it is read once
    ("ROOT %o = f32[1000,64]{1,0} copy(%big)", BIG, BIG),
    ("ROOT %o = f32[64000]{0} bitcast(%big)", 0, 0),
    (f"ROOT %o = f32[10,64]{{1,0}} dynamic-slice(%big, %at, %zero), {SLICED}", SMALL + 8, SMALL),
    ("ROOT %o = f32[10,64]{1,0} slice(%big), slice={[0:10], [0:64]}", SMALL, SMALL),
    ("ROOT %o = f32[1000,64]{1,0} dynamic-update-slice(%big, %small, %at, %zero)", SMALL + 8, SMALL),
    ("ROOT %o = f32[1010,64]{1,0} pad(%big, %at), padding=0_10x0_0", BIG + 4, BIG + SMALL),
    ('ROOT %o = (f32[10,64]{1,0}, s8[4096]{0}) custom-call(%big, %small), '
     'custom_call_target="a_library"', BIG + SMALL, SMALL + 4096),
    ('ROOT %o = f32[1000,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0, 0),
    ("ROOT %o = f32[1000,64]{1,0} all-reduce(%big), replica_groups={}, to_apply=%add", BIG, BIG),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "read", "written"), MOVES, ids=lambda v: str(v).partition("(%")[0][-20:]
)
def test_what_an_operation_moves(line, read, written):
    assert moved(line) == (read, written)


SLICE = "%s = f32[10,64]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={10,64}"
FUSIONS = {
    "all of it": ("%r = f32[1000,64]{1,0} negate(%a)", (), "f32[1000,64]{1,0}", BIG, BIG),
    "a slice": ("%r = f32[10,64]{1,0} negate(%s)", (SLICE,), "f32[10,64]{1,0}", SMALL, SMALL),
    "a slice of what is converted": (
        "%r = bf16[10,64]{1,0} dynamic-slice(%c, %i, %z), dynamic_slice_sizes={10,64}",
        ("%c = bf16[1000,64]{1,0} convert(%a)",), "bf16[10,64]{1,0}", SMALL, SMALL // 2,
    ),
    "a slice and all of it": (
        "%r = (f32[10,64]{1,0}, f32[1000,64]{1,0}) tuple(%s, %n)",
        (SLICE, "%n = f32[1000,64]{1,0} negate(%a)"),
        "(f32[10,64]{1,0}, f32[1000,64]{1,0})", BIG, SMALL + BIG,
    ),
    "an update in place": (
        "%r = f32[1000,64]{1,0} dynamic-update-slice(%a, %n, %i, %z)",
        (SLICE, "%n = f32[10,64]{1,0} negate(%s)"), "f32[1000,64]{1,0}", SMALL, SMALL,
    ),
    "an update in place, in a tuple, behind a bitcast": (
        "%r = (f32[64000]{0}, f32[10,64]{1,0}) tuple(%b, %n)",
        (SLICE, "%n = f32[10,64]{1,0} negate(%s)",
         "%u = f32[1000,64]{1,0} dynamic-update-slice(%a, %n, %i, %z)",
         "%b = f32[64000]{0} bitcast(%u)"),
        "(f32[64000]{0}, f32[10,64]{1,0})", SMALL, 2 * SMALL,
    ),
    "an update that is not in place": (
        "%r = f32[1000,64]{1,0} negate(%u)",
        (SLICE, "%u = f32[1000,64]{1,0} dynamic-update-slice(%a, %s, %i, %z)"),
        "f32[1000,64]{1,0}", BIG, BIG,
    ),
    "a product of a slice reads the slice": (
        "%r = f32[10,10]{1,0} dot(%s, %s), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        (SLICE,), "f32[10,10]{1,0}", SMALL, 400,
    ),
    "rows added to in place are read and written": (
        "%r = f32[1000,64]{1,0} scatter(%a, %i, %e), to_apply=%add",
        ("%e = f32[10,64]{1,0} broadcast(%z), dimensions={}",), "f32[1000,64]{1,0}", SMALL, SMALL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSIONS)
def test_what_a_fusion_moves(name):
    root, lines, shape, read, written = FUSIONS[name]
    line = f"ROOT %o = {shape} fusion(%big, %at), kind=kLoop, calls=%fused"
    index = 4 * any("%i" in text for text in (root, *lines))  # where it is read
    assert moved(line, before=fused(root, *lines)) == (read + index, written)


def test_a_fusion_in_a_fusion_reads_the_slice_too():
    inner = fused("%r = f32[10,64]{1,0} negate(%s)", SLICE)
    outer = fused("%r = f32[10,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused").replace(
        "%fused (", "%outer ("
    )
    line = "ROOT %o = f32[10,64]{1,0} fusion(%big, %at), kind=kOutput, calls=%outer"
    assert moved(line, before=f"{inner}\n{outer}") == (SMALL + 4, SMALL)


# Memory on the chip, and tiles.


@pytest.mark.parametrize(
    ("shape", "num_bytes", "tiled_bytes"),
    [("f32[7500,10]{1,0:T(8,128)}", 300_000, 4 * 7504 * 128),
     ("f32[7500,10]{0,1:T(8,128)}", 300_000, 4 * 16 * 7552),
     ("bf16[100,784]{1,0:T(8,128)(2,1)}", 156_800, 2 * 104 * 896),
     ("u8[7500,784]{0,1:T(8,128)(4,1)}", 5_880_000, 784 * 7552),
     ("f32[10]{0:T(256)}", 40, 1024), ("f32[]{:T(256)}", 4, 1024),
     ("f32[3,5,100]{2,1,0:T(8,128)}", 6000, 4 * 3 * 8 * 128),
     ("f32[7500,10]{1,0:T(8,128)S(1)}", 0, 0), ("u32[]{:T(256)S(6)}", 0, 0),
     ("f32[100]{0:S(5)}", 0, 0),  # on the host
     ("f32[100]{0:S(1)}", 400, 400),  # a GPU's memory for collectives
     ("f32[100]{0:T(256)S(0)}", 400, 1024), ("f32[0,4]{1,0:T(8,128)}", 0, 0),
     ("(f32[100]{0}, (s8[3]{0}, token[]))", 403, 403)],
)  # fmt: skip
def test_bytes_in_memory(shape, num_bytes, tiled_bytes):
    found = memory_amount(shape)
    assert (found.num_bytes, found.tiled_bytes) == (num_bytes, tiled_bytes)


def test_a_copy_onto_the_chip_counts_once_and_its_uses_do_not():
    tiled = program_of(
        "%large = f32[1000,64]{1,0:T(8,128)} parameter(3)",
        "%start = (f32[1000,64]{1,0:T(8,128)S(1)}, f32[1000,64]{1,0:T(8,128)}, u32[]{:S(2)}) "
        "copy-start(%large)",
        "%done = f32[1000,64]{1,0:T(8,128)S(1)} copy-done(%start)",
        "ROOT %o = f32[1000,64]{1,0:T(8,128)S(1)} negate(%done)",
    )
    work = work_of(tiled)
    assert (work.bytes_read, work.bytes_written, work.tile_bytes) == (BIG, 0, BIG)
    assert work.kernels == 2


def test_an_asynchronous_slice_reads_the_slice():
    lines = (
        "%start = ((f32[1000,64]{1,0}), f32[10,64]{1,0}, s32[]) slice-start(%big), "
        "slice={[0:10], [0:64]}",
        "ROOT %o = f32[10,64]{1,0} slice-done(%start)",
    )
    assert moved(*lines) == (SMALL, SMALL)


def test_an_asynchronous_collective_counts_once():
    lines = (
        "%start = (f32[10,64]{1,0}, f32[80,64]{1,0}) all-gather-start(%small), "
        "replica_groups=[1,8]<=[8], dimensions={0}",
        "ROOT %o = f32[80,64]{1,0} all-gather-done(%start)",
    )
    work = work_of(program_of(*lines))
    assert (work.bytes_read, work.bytes_written, work.kernels) == (SMALL, 8 * SMALL, 1)
    (sent,) = work.collectives
    assert (sent.kind, sent.group_size, sent.num_bytes, sent.operand_bytes, sent.runs) == (
        *("all-gather", 8, 8 * SMALL, SMALL, 1),
    )
    assert work.count("all-gather") == 1 and work.count("all-reduce") == 0


@pytest.mark.parametrize(
    ("attributes", "devices"),
    [("replica_groups={{0,1,2,3},{4,5,6,7}}", 4), ("replica_groups={}", 8),
     ("replica_groups=[2,4]<=[8]", 4), ("source_target_pairs={{0,1},{1,2},{2,0}}", 3),
     ("replica_groups={{0,1},{2}}", 0)],
)  # fmt: skip
def test_how_many_devices_take_part_is_read(attributes, devices):
    kind = "collective-permute" if "pairs" in attributes else "all-reduce"
    work = work_of(program_of(f"ROOT %o = f32[10,64]{{1,0}} {kind}(%small), {attributes}"))
    assert [c.group_size for c in work.collectives] == [devices]


# Loops and branches.

STATE = "(s32[], f32[1000,64]{1,0})"
PARTS = f"""%state = {STATE} parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[1000,64]{{1,0}} get-tuple-element(%state), index=1"""
CONDITION = f"""%cond (state: {STATE}) -> pred[] {{
  {PARTS}
  ROOT %less = pred[] compare(%n, %n), direction=LT
}}
"""


def loop_text(name, body, trips=None, condition="cond"):
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return (
        f"%{name} = {STATE} while(%init), condition=%{condition}, body=%{body}, "
        f'metadata={{op_name="jit(f)/{name}/while"}}{known}'
    )


def body_text(name, *lines):
    inside = "\n  ".join([PARTS, *lines])
    return (
        f"%{name} (state: {STATE}) -> {STATE} {{\n  {inside}\n  ROOT %t = {STATE} tuple(%n, %y)\n}}\n"
    )


NEGATE = "%y = f32[1000,64]{1,0} negate(%x)"
INIT = f"%init = {STATE} tuple(%at, %big)"
# An iteration: the condition reads a number and writes a predicate.
READ, WRITTEN = BIG + 4, BIG + 1


def test_one_iteration_of_a_loop_has_its_condition():
    program = program_of(
        INIT, "ROOT " + loop_text("leapfrog", "body"), before=CONDITION + body_text("body", NEGATE)
    )
    work = work_of(program, "leapfrog")
    assert (work.bytes_read, work.bytes_written, work.kernels) == (READ, WRITTEN, 2)
    assert work.other_flops == 64_000 + 1
    assert work.readbacks == 1  # of the condition: the compiler does not know the trips


def test_an_inner_loop_counts_by_its_trips():
    body = body_text(
        "outer", f"%init = {STATE} tuple(%n, %x)", loop_text("tiles", "body", trips=7),
        "%y = f32[1000,64]{1,0} get-tuple-element(%tiles), index=1",
    )  # fmt: skip
    program = program_of(
        INIT, "ROOT " + loop_text("leapfrog", "outer"),
        before=CONDITION + body_text("body", NEGATE) + body,
    )  # fmt: skip
    work = work_of(program, "leapfrog")
    assert (work.bytes_read, work.bytes_written) == (7 * READ + 4, 7 * WRITTEN + 1)
    assert work.readbacks == 1  # of the outer loop alone
    whole = work_of(program, trips={"leapfrog": 3})
    assert (whole.bytes_read, whole.kernels) == (3 * work.bytes_read, 3 * work.kernels)


def test_a_loop_of_unknown_trips_is_refused_unless_they_are_given():
    program = program_of(
        INIT, "ROOT " + loop_text("leapfrog", "body"), before=CONDITION + body_text("body", NEGATE)
    )
    with pytest.raises(ValueError, match=r"'leapfrog'.*no trip count.*trips=\{'leapfrog': \.\.\.\}"):
        work_of(program)
    with pytest.raises(ValueError, match=r"no loop 'tree'; it has \['leapfrog'\]"):
        work_of(program, "tree")


def test_two_loops_of_a_name_count_together_and_it_is_said():
    again = loop_text("leapfrog", "body").replace("%leapfrog", "%again").replace("%init", "%leapfrog")
    program = program_of(
        INIT, loop_text("leapfrog", "body"), "ROOT " + again,
        before=CONDITION + body_text("body", NEGATE),
    )  # fmt: skip
    work = work_of(program, "leapfrog")
    assert work.bytes_read == 2 * READ
    assert work.notes == ("2 loops are named 'leapfrog': they count together",)


def test_the_branch_that_moves_most_counts_and_is_named():
    branches = body_text("negated", NEGATE) + body_text(
        "copied", "%y = f32[1000,64]{1,0} get-tuple-element(%state), index=1"
    )
    line = (
        f"ROOT %cond.1 = {STATE} conditional(%at, %init, %init), "
        "branch_computations={%copied, %negated}"
    )
    work = work_of(program_of(INIT, line, before=branches))
    assert (work.bytes_read, work.bytes_written) == (BIG, BIG)
    assert work.notes == (
        f"cond.1: branch 1 of 2 counts, which moves most ({2 * BIG:,} bytes; the least, 0)",
    )


def test_a_call_runs_its_computation():
    inside = "%a = f32[10]{0} parameter(0)\n  ROOT %r = f32[10]{0} negate(%a)"
    before = f"%called (a: f32[10]) -> f32[10] {{\n  {inside}\n}}\n"
    work = work_of(program_of("ROOT %o = f32[10]{0} call(%small), to_apply=%called", before=before))
    assert (work.bytes_read, work.bytes_written, work.kernels) == (40, 40, 1)


# Arithmetic.

PRODUCTS = [
    ("f32[1000,10]{1,0} dot(%big, %small), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
     Product("f32", 1000, 64, 10)),
    ("f32[1000,10]{1,0} dot(%big, %small), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
     "operand_precision={highest,highest}", Product("f32 highest", 1000, 64, 10)),
    ("f32[1000,10]{1,0} dot(%big, %small), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
     "algorithm=dot_bf16_bf16_f32_x3", Product("f32 dot_bf16_bf16_f32_x3", 1000, 64, 10)),
    ("f32[64,1000,1]{2,1,0} dot(%batched, %vectors), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
     "rhs_batch_dims={0}, rhs_contracting_dims={1}", Product("bf16", 64 * 1000, 20, 1)),
    ('(f32[1000,10]{1,0}, s8[64]{0}) custom-call(%big, %small), custom_call_target="__cublas$gemm", '
     'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
     '"lhs_batch_dimensions":[]},"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}',
     Product("f32 highest", 1000, 64, 10)),
    ("f32[1000,10]{1,0} convolution(%big, %small), dim_labels=bf_oi->bf, "
     "operand_precision={high,high}", Product("f32 high", 1000, 64, 10)),
]  # fmt: skip


@pytest.mark.parametrize(("line", "product"), PRODUCTS, ids=lambda v: re.split(r"[ (%]", str(v))[1])
def test_a_product_has_its_sizes_and_its_precision(line, product):
    work = work_of(
        program_of(
            "%batched = bf16[64,1000,20]{2,1,0} parameter(3)",
            "%vectors = bf16[64,20,1]{2,1,0} parameter(4)",
            f"ROOT %o = {line}",
        )
    )
    assert work.each[-1].products == (product,)
    assert work.product_flops == {product.factors: product.flops}
    assert work.other_flops == 0


def test_a_batched_product_written_as_a_convolution_counts_only_what_meets_the_input():
    # Of 8 products, [5, 3] by [3, 2]: the compiler of the TPU slides a sparse window over the batch.
    line = (
        "ROOT %o = f32[8,5,2]{2,1,0} convolution(%left, %right), "
        "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf"
    )
    given = ("%left = f32[8,5,3]{2,1,0} parameter(3)", "%right = f32[8,3,2]{2,1,0} parameter(4)")
    work = work_of(program_of(*given, line))
    assert work.product_flops == {"f32": 2 * 8 * 5 * 3 * 2}


@pytest.mark.parametrize(
    ("line", "is_noted"),
    [('custom-call(%big), custom_call_target="a_library"', True), ("cholesky(%big), lower=true", True),
     ("sort(%big), dimensions={0}", True), ("negate(%big)", False),
     (PRODUCTS[4][0].partition("} ")[2], False),
     ('custom-call(), custom_call_target="AllocateBuffer"', False)],
)  # fmt: skip
def test_arithmetic_that_is_not_counted_is_noted(line, is_noted):
    work = work_of(program_of(f"ROOT %o = f32[1000,64]{{1,0}} {line}"))
    assert bool(work.notes) == is_noted != work.is_counted
    assert not work.notes or "is not counted" in work.notes[0]


@pytest.mark.parametrize(
    ("root", "kind", "is_counted"),
    [
        ("scatter(%a, %i, %a), to_apply=%add", "kLoop", False),
        ("scatter(%a, %i, %a), to_apply=%add", "kInput", False),
        ("gather(%a, %i), slice_sizes={1,64}", "kCustom", False),
        ("gather(%a, %i), slice_sizes={1,64}", "kLoop", True),
        ("negate(%a)", "kCustom", True),
    ],
)
@pytest.mark.parametrize("cycles", ["", ', backend_config={"estimated_cycles":"125"}'])
def test_what_adds_row_by_row_is_not_counted_unless_the_compiler_estimates_it(
    root, kind, is_counted, cycles
):
    line = f"ROOT %o = f32[1000,64]{{1,0}} fusion(%big, %at), kind={kind}, calls=%fused{cycles}"
    work = work_of(program_of(line, before=fused(f"%r = f32[1000,64]{{1,0}} {root}")))
    assert work.is_counted == (is_counted or bool(cycles)) != bool(work.notes)


@pytest.mark.parametrize(("stated", "flops"), [("4026531840", 4026531840), ("0", 0)])
def test_a_kernel_s_arithmetic_is_what_it_states_of_itself(stated, flops):
    """Of a kernel that states none nothing is known."""
    line = (
        'custom-call(%big), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
        f'{{"body":"TUzvUg","cost_estimate":{{"flops":"{stated}","transcendentals":"7"}}}}}}'
    )
    work = work_of(program_of(f"ROOT %o = f32[1000,64]{{1,0}} {line}"))
    assert work.stated_flops == flops and work.times(3).stated_flops == 3 * flops
    assert work.is_counted == (flops > 0)
    (note,) = work.notes
    assert ("what the kernel states of itself" if flops else "is not counted") in note


def test_the_compiler_s_own_cycles_are_added_up():
    line = 'negate(%big), backend_config={"window_config":{"estimated_cycles":"125"}}'
    program = program_of(f"%o = f32[1000,64]{{1,0}} {line}", f"ROOT %q = f32[1000,64]{{1,0}} {line}")
    assert work_of(program).estimated_cycles == 250
    assert (Work() + Work()).estimated_cycles is None
