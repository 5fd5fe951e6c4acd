"""Atomics on floats are found in the assembly of GPU kernels, with the lines of the model."""

import pytest

from gspmd_mcmc.planning.atomics import ADDITION, LOOP, find_atomics
from gspmd_mcmc.views.program.hlo import read_program

# As the H100's compiler writes them: the gradient of effect[index], and what only looks like it.
SWAP_FLOAT = """
	ld.relaxed.sys.global.b32 	%r14, [%rd5];
$L__BB0_3:
	add.rn.f32 	%r13, %r14, %r2;
	atom.relaxed.sys.global.cas.b32 	%r3, [%rd5], %r14, %r13;
	setp.ne.b32 	%p3, %r3, %r14;
	mov.b32 	%r14, %r3;
	@%p3 bra 	$L__BB0_3;
"""
SWAP_INTEGER = """
	sub.rn.f32 	%r2, %r11, %r12;
	cvt.rzi.s16.f32 	%rs1, %r13;
$L__BB0_3:
	shr.u32 	%r17, %r23, %r3;
	add.s16 	%rs5, %rs1, %rs4;
	atom.relaxed.sys.global.cas.b32 	%r5, [%rd5], %r23, %r22;
	@%p6 bra 	$L__BB0_3;
"""
SWAP_BFLOAT = """
$L__BB0_7:
	fma.rn.bf16 	%rs5, %rs1, %rs4, %rs2;
	atom.global.cas.b16 	%rs6, [%rd5], %rs3, %rs5;
	@%p6 bra 	$L__BB0_7;
"""
OTHERS = """
	atom.relaxed.sys.global.add.u32 	%r14, [%rd13], %r13;
	atom.relaxed.sys.global.max.s32 	%r13, [%rd5], %r4;
	atom.relaxed.sys.global.min.u32 	%r12, [%rd5], %r4;
	st.shared.b32 	[%rd17], %r62;
	bar.red.popc.u32 	%r1, 0, %p1;
"""


def kernel(name, body):
    return f".visible .entry {name}(\n\t.param .u64 {name}_param_0\n)\n{{{body}\tret;\n}}\n"


def kinds(text):
    return [(a.kernel, a.form, a.dtype, a.count) for a in find_atomics([text])]


@pytest.mark.parametrize(
    ("body", "found"),
    [(SWAP_FLOAT, [(LOOP, "f32", 1)]), (SWAP_FLOAT * 3, [(LOOP, "f32", 3)]),
     (SWAP_BFLOAT, [(LOOP, "bf16", 1)]), (SWAP_INTEGER, []), (OTHERS, []), ("", []),
     ("\tatom.global.add.f32 \t%r1, [%rd1], %r2;\n", [(ADDITION, "f32", 1)]),
     ("\tred.relaxed.gpu.global.add.f64 \t[%rd1], %fd2;\n", [(ADDITION, "f64", 1)]),
     ("\tatom.relaxed.sys.global.add.noftz.bf16 \t%rs2, [%rd4], %rs1;\n", [(ADDITION, "bf16", 1)]),
     ("\tatom.global.add.v2.f32 \t%r1, [%rd1], %r2;\n" + SWAP_FLOAT,
      [(LOOP, "f32", 1), (ADDITION, "f32", 1)])],
)  # fmt: skip
def test_atomics_on_floats_are_told_from_others(body, found):
    assert kinds(kernel("k", body)) == [("k", *one) for one in found]


def test_each_kernel_has_its_own():
    text = kernel("first", OTHERS) + kernel("second", SWAP_FLOAT) + kernel("third", "")
    assert kinds(text) == [("second", LOOP, "f32", 1)]
    assert kinds("// a module without a kernel\n") == []


PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/user/model.py"

FunctionNames
1 "log_likelihood"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=8 end_column=21}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %input_scatter_fusion.1 = f32[8]{0} fusion(%x), kind=kInput, calls=%f, metadata={stack_frame_id=1}
  ROOT %t = (s32[], f32[8]{0}) tuple(%n, %input_scatter_fusion.1)
}

ENTRY %main (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%c, body=%body, metadata={op_name="leapfrog/while"}
}
"""


def test_the_operation_its_loop_and_the_line_of_the_model_are_named_with_the_cure():
    text = kernel("input_scatter_fusion_1", SWAP_FLOAT)
    (found,) = find_atomics([text], read_program(PROGRAM))
    assert found.operation == "input_scatter_fusion.1"
    assert [loop.name for loop in found.loops] == ["leapfrog"]
    assert found.source == "/home/user/model.py:12 (log_likelihood)"
    said = str(found)
    assert said.startswith("/home/user/model.py:12 (log_likelihood): 1 x compare-and-swap loop on f32")
    assert "in leapfrog x ?" in said and "lookup" in said and "Groups" in said


def test_a_kernel_of_no_known_operation_is_still_named():
    (found,) = find_atomics([kernel("other", SWAP_FLOAT)], read_program(PROGRAM))
    assert (found.operation, found.source) == ("", "")
    assert str(found).startswith("no known source: 1 x compare-and-swap loop on f32, kernel other")
