"""Reading the text of a compiled program: its operations, the loops around them, their sources.

The text is XLA's HLO after all passes, as ``compiled.as_text()`` prints it. Whatever in it has a
form that is not known here is kept and reported, never skipped.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspmd_mcmc.views.program.trip_counts import trip_count

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
    copy cosine cosh count-leading-zeros custom-call divide domain dot
    dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft
    floor fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not opt-barrier optimization-barrier
    or outfeed pad parameter partition-id popcnt power ragged-dot real reduce reduce-precision
    reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
    select-and-scatter set-dimension-size shift-left shift-right-arithmetic shift-right-logical
    sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose
    triangular-solve tuple while xor async"""
LOCAL = frozenset(_LOCAL.split())
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_ASSIGNMENT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_PARENTHESES = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')  # and strings, as a whole
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(
    r"(?:to_apply|calls|called_computations|branch_computations|true_computation|false_computation)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_LOOP_PARTS = re.compile(r"(?:condition|body)=%?([\w.\-]+)")
_TRIPS = re.compile(r"known_trip_count[^\d]+(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# What only operations between devices have; the last two are those of Pallas kernels for TPUs.
_BETWEEN_DEVICES = re.compile(
    r"replica_groups=|source_target_pairs=|collective_id=|has_communication\W+true|collective_id\W+\d"
)
_TABLE_LINE = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_PACKAGE = f"{Path(__file__).parents[2]}/"
_DTYPES = {
    **{"bfloat": "bf", "float": "f", "uint": "u", "int": "s"},
    **{"complex": "c", "bool": "pred"},
}
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|f4\w+|[fsuc]\d+)\[([\d,<=]*)\]")
_PHASE = re.compile(r"-(start|update|done)$")  # of an operation that others may overlap with
_TRANSFORMED = re.compile(r"(?:vmap|jvp|transpose|checkpoint|remat)\((.*)\)")
# What JAX itself puts between a scope and a loop that stands in it.
_NO_SCOPE = re.compile(
    r"shard_map|checkpoint|rematted_computation|cond|branch_\d+_fun|custom_[jv][jv]p_call|eval_jaxpr|"
)


@dataclass(frozen=True)
class Frame:
    """A line of Python on the way to an operation."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Write it below the folder of this package or the working folder where it is there."""
        path = Path(self.file)
        folders = [f for f in (Path(__file__).parents[3], Path.cwd()) if path.is_relative_to(f)]
        file = path.relative_to(folders[0]) if folders else self.file
        return f"{file}:{self.line}" + (f" ({self.function})" if self.function else "")


@dataclass(frozen=True)
class Operation:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of the result, as the text has it
    operands: tuple[str, ...]  # names of other operations of the same computation
    attributes: str  # the text after the operands
    line: str

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation it comes from."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Loop:
    """A loop of the program."""

    name: str  # its ``jax.named_scope``, or else the Python function that made it
    trips: int | None  # how often it runs; None where the compiler does not know
    source: str = ""  # the line that made it

    def __str__(self) -> str:
        return f"{self.name} x {'?' if self.trips is None else self.trips}"


def own_line(stack: tuple[Frame, ...]) -> str:
    """Write the innermost line of the caller's own code, or else of this package; or nothing."""
    own = [frame for frame in stack if not frame.file.startswith(_PACKAGE)]
    return str((own or list(stack) or [""])[0])


Step = tuple[Operation, str, tuple[Loop, ...]]  # an operation, its computation, the loops around it


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, taken apart."""

    computations: dict[str, tuple[Operation, ...]]
    entry: str  # the name of the computation that runs
    frames: dict[int, tuple[Frame, ...]]  # the stack of each frame number, the innermost first
    unread: tuple[str, ...]  # lines of computations, or that look like it, of no known form
    num_devices: int = 1

    def walk(self, computation: str = "", loops: tuple[Loop, ...] = ()) -> Iterator[Step]:
        """Yield every operation that runs, once for each place that calls it, in all branches."""
        name = computation or self.entry
        for operation in self.computations.get(name, ()):
            yield operation, name, loops
            inside = (*loops, self.loop(operation)) if operation.opcode == "while" else loops
            for called in called_computations(operation):
                yield from self.walk(called, inside)

    def loop_nests(self) -> tuple[tuple[Loop, ...], ...]:
        """Return each loop that runs, after the loops around it."""
        nests = ((*loops, self.loop(o)) for o, _, loops in self.walk() if o.opcode == "while")
        return tuple(dict.fromkeys(nests))

    def stack(self, operation: Operation) -> tuple[Frame, ...]:
        """Return the Python lines that led to an operation, the innermost first."""
        number = _FRAME.search(operation.attributes)
        if number:
            return self.frames.get(int(number.group(1)), ())
        old = _OLD_SOURCE.search(operation.attributes)
        return (Frame(old.group(1), int(old.group(2)), ""),) if old else ()

    def loop(self, operation: Operation) -> Loop:
        """Return the loop that a ``while`` operation is."""
        known = _TRIPS.search(operation.attributes)
        trips = int(known.group(1)) if known else trip_count(self.computations, operation)
        frame = next(iter(self.stack(operation)), None)
        name = _scope(operation.op_name) or (frame and frame.function) or operation.name
        return Loop(name, trips, str(frame or ""))


def read_program(text: str) -> Program:
    """Take the text of a compiled program apart: tables of source lines, then computations."""
    computations: dict[str, list[Operation]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    unread: list[str] = []
    name, entry, table = "", "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head.group(2)
            computations[name] = []
            entry = name if head.group(1) else entry
        elif line.startswith("}"):
            name = ""
        elif name and line.strip():
            if operation := read_operation(line):
                computations[name].append(operation)
            else:
                unread.append(line.strip())
        elif _ASSIGNMENT.match(line):  # below a head that was not known as one
            unread.append(line.strip())
        elif line in tables:
            table = tables[line]
        elif table is not None and (row := _TABLE_LINE.match(line)):
            table[int(row.group(1))] = row.group(2) or row.group(3) or ""
    read = {name: tuple(operations) for name, operations in computations.items()}
    numbers = _DEVICES.findall(text.partition("\n")[0])
    num_devices = max(map(int, numbers), default=1)
    return Program(read, entry, _frames(tables), tuple(unread), num_devices)


def read_operation(line: str) -> Operation | None:
    """Read one line of a computation; None if it does not look like one."""
    assignment = _ASSIGNMENT.match(line)
    if assignment is None:
        return None
    name, rest = assignment.groups()
    shape_end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, shape_end) if shape_end > 0 else None
    end = _closing(rest, opcode.end() - 1) if opcode else -1
    if opcode is None or end < 0:
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
    if collective_kind(operation) or _is_host_transfer(operation):
        return False
    is_local = _base(operation.opcode) in LOCAL
    return not is_local or _BETWEEN_DEVICES.search(operation.attributes) is not None


def collective_kind(operation: Operation) -> str:
    """Return the kind of collective, or nothing; transfers to the host and from it are none."""
    base = _base(operation.opcode)
    return base if base in KINDS and not _is_host_transfer(operation) else ""


def is_start(operation: Operation) -> bool:
    """Tell whether an operation begins something, rather than being a later part of it."""
    return not operation.opcode.endswith(("-done", "-update"))


def result_shape(operation: Operation, siblings: Mapping[str, Operation]) -> str:
    """Return the shape of a collective's result, without the state that an asynchronous one keeps."""
    kind = collective_kind(operation)
    if kind in ("send", "recv"):  # (data, context, token)
        return tuple_shapes(operation.shape)[0]
    if operation.opcode == kind:
        return operation.shape
    end = _end(operation, siblings)
    if end is not None:
        return end.shape
    # The end is elsewhere, in the next iteration of a loop perhaps: (operands, result, ...).
    parts = tuple_shapes(operation.shape)
    return operation.shape if kind == "all-reduce" or len(parts) < 2 else parts[1]


def kind_and_result(
    operation: Operation, siblings: Mapping[str, Operation], *, is_fused: bool
) -> tuple[str, str]:
    """Return the kind of a collective and the shape of its result; of one in a fusion, the fusion's."""
    kept = kept_slice(operation, siblings) if is_fused else None
    if kept is not None:
        return "reduce-scatter", kept.shape
    return collective_kind(operation), result_shape(operation, siblings)


def kept_slice(operation: Operation, siblings: Mapping[str, Operation]) -> Operation | None:
    """Return the part that a fusion keeps of a sum over devices: both together are a reduce-scatter.

    The TPU's compiler writes one so. ``siblings`` are the operations of the fusion.
    """
    readers = [o for o in siblings.values() if operation.name in o.operands]
    if operation.opcode != "all-reduce" or [o.opcode for o in readers] != ["dynamic-slice"]:
        return None
    return readers[0] if readers[0].line.startswith("ROOT ") else None


def _end(operation: Operation, siblings: Mapping[str, Operation]) -> Operation | None:
    """Find the operation that ends an asynchronous one."""
    for other in siblings.values():
        if operation.name in other.operands and not is_start(other):
            return other if other.opcode.endswith("-done") else _end(other, siblings)
    return None


def _is_host_transfer(operation: Operation) -> bool:
    is_transfer = _base(operation.opcode) in ("send", "recv")
    return is_transfer and "is_host_transfer=true" in operation.attributes


def _base(opcode: str) -> str:
    """Return an opcode without the phase of an asynchronous one."""
    return _PHASE.sub("", opcode)


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis, outside strings, that closes that at ``start``; or -1."""
    depth = 0
    for match in _PARENTHESES.finditer(text, start):
        depth += (match.group() == "(") - (match.group() == ")")
        if depth == 0:
            return match.end()
    return -1


def _scope(op_name: str) -> str:
    """Return the named scope that a loop stands in directly, from the name that JAX gave it."""
    *scopes, last = op_name.split("/")
    if last != "while":
        return ""
    for scope in reversed(scopes):
        while (inner := _TRANSFORMED.fullmatch(scope)) is not None:
            scope = inner.group(1)
        if not _NO_SCOPE.fullmatch(scope):
            is_scope = scope not in ("body", "closed_call", "while") and not set("(<") & set(scope)
            return scope if is_scope else ""
    return ""


# The Python lines that operations come from


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[Frame, ...]]:
    """Return the stack of each frame number, the innermost line first."""

    def fields(table: str) -> dict[int, dict[str, int]]:
        pairs = ((number, re.findall(r"(\w+)=(\d+)", row)) for number, row in tables[table].items())
        return {number: {name: int(value) for name, value in found} for number, found in pairs}

    entries, locations = fields("StackFrames"), fields("FileLocations")
    # Some versions count parents from 1 with 1 for none: there the first frame is its own parent.
    shift = int(any(entry.get("parent_frame_id") == number for number, entry in entries.items()))
    frames: dict[int, tuple[Frame, ...]] = {}
    for number, entry in sorted(entries.items()):  # a parent stands before its children
        where = locations.get(entry.get("file_location_id", 0), {})
        file = tables["FileNames"].get(where.get("file_name_id", 0), "?")
        function = tables["FunctionNames"].get(where.get("function_name_id", 0), "")
        above = frames.get(entry.get("parent_frame_id", 0) - shift, ())
        frames[number] = (Frame(file, where.get("line", 0), function), *above)
    return frames


# Shapes


def shapes_of(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and dimensions of each array in the text of a shape."""
    found = _SHAPE.findall(text)
    return tuple(
        (dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)) for dtype, dims in found
    )


def hlo_dtype(dtype: Any) -> str:
    """Write a dtype as XLA does: float32 is f32, float8_e4m3fn is f8e4m3fn, bool is pred."""
    for ours, theirs in _DTYPES.items():
        if str(dtype).startswith(ours):
            return theirs + str(dtype).removeprefix(ours).replace("_", "")
    return str(dtype)


def num_bytes_of(text: str) -> int:
    """Bytes of all arrays in the text of a shape."""

    def num_bits(dtype: str) -> int:
        return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])

    return sum(math.ceil(math.prod(dims) * num_bits(dtype) / 8) for dtype, dims in shapes_of(text))


def tuple_shapes(shape: str) -> list[str]:
    """Return the shapes of a tuple's elements, or the shape alone if it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    cuts, depth = [0], 0
    for i, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 1:
            cuts.append(i)
    return [shape[a + 1 : b].strip() for a, b in itertools.pairwise([*cuts, len(shape) - 1])]
