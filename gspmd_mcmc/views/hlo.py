"""Reading the text of a compiled program: its operations, the loops around them, their sources.

The text is XLA's HLO after all passes, as ``compiled.as_text()`` prints it. Whatever in it has a
form that is not known here is kept and reported, never skipped.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gspmd_mcmc.views.stack_frames import Frame, read_frames

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
# The other operations of HLO (xla/hlo/ir/hlo_opcode.h). None of them talks to another device.
_LOCAL = """abs acos acosh add add-dependency after-all and asin asinh atan2 atanh
    batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call
    cbrt ceil cholesky clamp compare complex concatenate conditional constant convert convolution
    copy copy-done copy-start cosine cosh count-leading-zeros custom-call divide domain dot
    dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft
    floor fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not opt-barrier optimization-barrier
    or outfeed pad parameter partition-id popcnt power ragged-dot real reduce reduce-precision
    reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
    select-and-scatter set-dimension-size shift-left shift-right-arithmetic shift-right-logical
    sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose
    triangular-solve tuple while xor async-start async-update async-done"""
LOCAL = frozenset(_LOCAL.split())
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_ASSIGNMENT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|f4\w+|[fsuc]\d+)\[([\d,]*)\]")
_CALLS = re.compile(
    r"(?:to_apply|calls|called_computations|branch_computations|true_computation|false_computation)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_LOOP_PARTS = re.compile(r"(?:condition|body)=%?([\w.\-]+)")
_TRIPS = re.compile(r"known_trip_count[^\d]+(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# Attributes that only operations between devices have.
_BETWEEN_DEVICES = ("replica_groups=", "source_target_pairs=", "collective_id=")


@dataclass(frozen=True)
class Operation:
    """One line of a computation.

    Attributes
    ----------
    name, opcode, shape
        As the text has them; the shape is that of the result.
    operands
        Names of other operations of the same computation.
    attributes
        What follows the operands.
    line
        The whole line.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    line: str

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation it comes from."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Loop:
    """A loop of the program.

    Attributes
    ----------
    name
        Its ``jax.named_scope``, or else the Python function that made it.
    trips
        How often it runs; None where the compiler does not know.
    source
        The line that made it.
    """

    name: str
    trips: int | None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name} x {'?' if self.trips is None else self.trips}"


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, taken apart.

    Attributes
    ----------
    computations
        Name to the operations, in order.
    entry
        The name of the computation that runs.
    frames
        The stack of each frame number, the innermost first.
    unread
        Lines inside computations that have no known form.
    """

    computations: dict[str, tuple[Operation, ...]]
    entry: str
    frames: dict[int, tuple[Frame, ...]]
    unread: tuple[str, ...]

    def walk(self) -> Iterator[tuple[Operation, str, tuple[Loop, ...]]]:
        """Give every operation that runs, its computation, and the loops around it.

        A computation that is called from two places is given twice. All branches of a conditional
        are given.
        """
        yield from self._walk(self.entry, ())

    def _walk(self, name: str, loops: tuple[Loop, ...]):
        for operation in self.computations.get(name, ()):
            yield operation, name, loops
            inside = (*loops, self._loop(operation)) if operation.opcode == "while" else loops
            for called in called_computations(operation):
                yield from self._walk(called, inside)

    def stack(self, operation: Operation) -> tuple[Frame, ...]:
        """Return the Python lines that led to an operation, the innermost first."""
        number = _FRAME.search(operation.attributes)
        if number:
            return self.frames.get(int(number.group(1)), ())
        old = _OLD_SOURCE.search(operation.attributes)
        return (Frame(old.group(1), int(old.group(2)), ""),) if old else ()

    def _loop(self, operation: Operation) -> Loop:
        trips = _TRIPS.search(operation.attributes)
        stack = self.stack(operation)
        scope = _scope(operation.op_name)
        function = stack[0].function if stack else ""
        name = scope or function or operation.name
        return Loop(name, int(trips.group(1)) if trips else None, str(stack[0]) if stack else "")


def read_program(text: str) -> Program:
    """Take the text of a compiled program apart."""
    computations: dict[str, list[Operation]] = {}
    unread: list[str] = []
    name, entry = "", ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head.group(2)
            computations[name] = []
            entry = name if head.group(1) else entry
        elif line.startswith("}"):
            name = ""
        elif name and line.strip():
            operation = read_operation(line)
            if operation is None:
                unread.append(line.strip())
            else:
                computations[name].append(operation)
    read = {name: tuple(operations) for name, operations in computations.items()}
    return Program(read, entry, read_frames(text), tuple(unread))


def read_operation(line: str) -> Operation | None:
    """Read one line of a computation; None if it does not look like one."""
    assignment = _ASSIGNMENT.match(line)
    if assignment is None:
        return None
    name, rest = assignment.groups()
    shape_end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, shape_end) if shape_end > 0 else None
    if opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    if end < 0:
        return None
    operands = tuple(_NAME.findall(rest[opcode.end() : end - 1]))
    return Operation(name, opcode.group(1), rest[:shape_end], operands, rest[end:], line.strip())


def called_computations(operation: Operation) -> list[str]:
    """Name the computations that an operation runs; the end of an asynchronous pair runs none."""
    if operation.opcode == "while":
        return _LOOP_PARTS.findall(operation.attributes)
    if operation.opcode.endswith(("-done", "-update")):
        return []
    names = ",".join(several or one for several, one in _CALLS.findall(operation.attributes))
    return [name.strip().lstrip("%") for name in names.split(",") if name.strip()]


def is_unknown(operation: Operation) -> bool:
    """Tell whether an operation is of no known kind, or of a local kind with a group of devices."""
    kind = operation.opcode
    if collective_kind(kind):
        return False
    return kind not in LOCAL or any(mark in operation.attributes for mark in _BETWEEN_DEVICES)


def collective_kind(opcode: str) -> str:
    """Return the kind of collective that an opcode is a form of, or an empty string."""
    for end in ("", "-start", "-done", "-update"):
        if opcode.endswith(end) and opcode.removesuffix(end) in KINDS:
            return opcode.removesuffix(end)
    return ""


def shapes_of(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and dimensions of each array in the text of a shape."""
    found = _SHAPE.findall(text)
    return tuple((dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found)


def num_bytes_of(text: str) -> int:
    """Bytes of all arrays in the text of a shape."""
    return sum(math.ceil(math.prod(dims) * _num_bits(dtype) / 8) for dtype, dims in shapes_of(text))


def _num_bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at ``start``; -1 if none does.

    Parentheses in strings do not count.
    """
    depth, in_string = 0, False
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            in_string = not in_string
        elif not in_string:
            depth += (char == "(") - (char == ")")
            if depth == 0:
                return i + 1
    return -1


def _scope(op_name: str) -> str:
    """Return the named scope that a loop stands in directly, from the name that JAX gave it."""
    parts = op_name.split("/")
    if len(parts) < 2 or parts[-1] != "while":
        return ""
    scope = parts[-2]
    while (
        inner := re.fullmatch(r"(?:vmap|jvp|transpose|checkpoint|remat)\((.*)\)", scope)
    ) is not None:
        scope = inner.group(1)
    is_scope = scope and scope not in ("body", "cond", "closed_call", "while") and "(" not in scope
    return scope if is_scope and "<locals>" not in scope else ""
