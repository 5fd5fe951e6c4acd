"""What one scheduled operation of a compiled program reads from memory and writes to it.

A fusion runs as one kernel: only its operands and results pass through memory. An operand that a fusion
only slices counts as the slice, and an array that it updates in place counts as the update.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gspmd_mcmc.views.program.hlo import (
    Operation,
    Program,
    collective_kind,
    num_bytes_of,
    result_shape,
    shapes_of,
    tuple_shapes,
)

_IDLE = """add-dependency after-all bitcast constant domain get-dimension-size get-tuple-element
    opt-barrier optimization-barrier parameter partition-id replica-id tuple"""
NO_KERNEL = frozenset(_IDLE.split())
SLICES = frozenset(("dynamic-slice", "gather", "slice"))
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the update
# What needs just those elements of its operands that are wanted of its result.
_BY_ELEMENT = """abs acos acosh add and asin asinh atan2 atanh bitcast bitcast-convert cbrt ceil clamp
    compare complex convert copy cosine cosh count-leading-zeros divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum
    multiply negate not opt-barrier optimization-barrier or popcnt power real
    reduce-precision remainder reshape reverse round-nearest-afz round-nearest-even rsqrt
    select shift-left shift-right-arithmetic shift-right-logical sign sine sinh sqrt
    stochastic-convert subtract tan tanh transpose xor"""
_ELEMENTWISE = frozenset(_BY_ELEMENT.split())
ELEMENTWISE = _ELEMENTWISE - {
    *("bitcast", "bitcast-convert", "copy", "opt-barrier", "optimization-barrier"),
    *("reshape", "reverse", "transpose"),
}  # those that compute something
_ARRAY = re.compile(r"\b(?:pred|bf16|f8\w+|f4\w+|[fsuc]\d+)\[[\d,<=]*\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_HOST = "5"  # the memory space of the host
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # and writes nothing


@dataclass(frozen=True)
class Amount:
    """Bytes in device memory: of the elements, and with what the tiles of a layout add to them."""

    num_bytes: float = 0
    tiled_bytes: float = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.num_bytes + other.num_bytes, self.tiled_bytes + other.tiled_bytes)

    def times(self, factor: float) -> "Amount":
        """Scale both."""
        return Amount(self.num_bytes * factor, self.tiled_bytes * factor)


def total(amounts: Iterable[Amount]) -> Amount:
    """Add amounts."""
    return sum(amounts, Amount())


def memory_amount(shape: str) -> Amount:
    """Bytes of all arrays in the text of a shape that lie in the device's memory.

    Only TPU layouts have tiles, ``T(8,128)``; there a memory space, ``S(1)``, is on the chip (vector,
    scalar memory). On a GPU ``S(1)`` is a part of its memory for collectives. ``S(5)`` is the host's.
    """
    found = Amount()
    for array in _ARRAY.finditer(shape):
        layout = array.group(1) or ""
        space = _SPACE.search(layout)
        number = space.group(1) if space else "0"
        if number == _HOST or (number != "0" and ":T(" in layout):
            continue
        num_bytes = num_bytes_of(array.group())
        found += Amount(num_bytes, _tiled_bytes(array.group(), layout, num_bytes))
    return found


def _tiled_bytes(array: str, layout: str, num_bytes: int) -> int:
    """Bytes of an array whose minor dimensions are filled up to whole tiles."""
    order, _, tiles = layout.partition(":T")
    if not tiles or not num_bytes:
        return num_bytes
    ((_, dims),) = shapes_of(array)
    major_first = [dims[int(i)] for i in reversed([i for i in order.split(",") if i])]
    tile = tiles[1:].partition(")")[0].split(",")
    padded = [1] * (len(tile) - len(major_first)) + major_first
    for i in range(-len(tile), 0):
        if tile[i] == "*":  # this dimension is one with the next
            padded[i + 1] *= padded[i]
            padded[i] = 1
        else:
            padded[i] = math.ceil(padded[i] / int(tile[i])) * int(tile[i])
    return math.ceil(num_bytes * math.prod(padded) / math.prod(dims))


def elements(shape: str) -> int:
    """Elements of all arrays in the text of a shape."""
    return sum(math.prod(dims) for _, dims in shapes_of(shape))


def is_kernel(operation: Operation) -> bool:
    """Tell whether an operation runs as a kernel; one that only begins another's work does."""
    is_later = operation.opcode.endswith(("-done", "-update"))
    return operation.opcode not in NO_KERNEL and not is_later and _ALLOCATES not in operation.attributes


def _result(operation: Operation, siblings: Mapping[str, Operation]) -> tuple[str, str]:
    """Return the opcode and the shape of the result, of an asynchronous beginning as of any other."""
    base = operation.opcode.removesuffix("-start")
    if collective_kind(operation):
        return base, result_shape(operation, siblings)
    parts = tuple_shapes(operation.shape)
    if operation.opcode == base or len(parts) < 2:
        return base, operation.shape
    # A copy begins with (result, operand, state), anything else with (operands, result, ...).
    return base, parts[0 if base == "copy" else 1]


def moved(
    program: Program, operation: Operation, siblings: Mapping[str, Operation]
) -> tuple[Amount, Amount]:
    """Return what an operation reads and writes; nothing if it is not a kernel of its own."""
    if not is_kernel(operation):
        return Amount(), Amount()
    opcode, result = _result(operation, siblings)
    names = [name for name in operation.operands if name in siblings]
    operands = [siblings[name].shape for name in names]
    if inside := fused_operations(program, operation):
        shares = _parameter_shares(program, inside)
        of_operand = dict.fromkeys(names, 0.0)
        for i, name in enumerate(names):
            of_operand[name] = min(1.0, of_operand[name] + shares.get(i, 1.0))
        read = total(memory_amount(siblings[n].shape).times(of_operand[n]) for n in of_operand)
        return read, _written(inside, result)
    if opcode in SLICES:
        indices = total(memory_amount(shape) for shape in operands[1:])
        return _like(operands[0], result) + indices, memory_amount(result)
    if opcode in UPDATES:
        at = UPDATES[opcode]
        update, others = operands[at], operands[1:at] + operands[at + 1 :]
        again = memory_amount(update) if opcode == "scatter" else Amount()  # adds to what is there
        read = memory_amount(update) + again + total(memory_amount(shape) for shape in others)
        return read, _like(result, update)
    once = dict.fromkeys(names)  # an operand that is given twice is read once
    return total(memory_amount(siblings[name].shape) for name in once), memory_amount(result)


def _like(array: str, part: str) -> Amount:
    """Amount of a part of an array: in memory if the array is there."""
    return memory_amount(array).times(min(1.0, elements(part) / max(elements(array), 1)))


def fused_operations(program: Program, operation: Operation) -> tuple[Operation, ...]:
    """Return the operations of a fusion; () for anything else."""
    if not operation.opcode.startswith("fusion"):
        return ()
    called = re.search(r"calls=%?([\w.\-]+)", operation.attributes)
    return program.computations.get(called.group(1), ()) if called else ()


def _written(inside: tuple[Operation, ...], result: str) -> Amount:
    """Return what a fusion writes: its results, of those updated in place the updates."""
    named = {o.name: o for o in inside}
    root = _root(inside)
    several = root.opcode == "tuple"
    parts = tuple_shapes(result) if several else [result]
    sources = [named[name] for name in root.operands] if several else [root]
    if len(parts) != len(sources):
        return memory_amount(result)
    return total(
        memory_amount(shape).times(_updated_share(source, named))
        for shape, source in zip(parts, sources, strict=True)
    )


def _updated_share(source: Operation, named: Mapping[str, Operation]) -> float:
    """Return the share of a result that is written: less than 1 where an update is in place."""
    while source.opcode == "bitcast" and source.operands[0] in named:
        source = named[source.operands[0]]
    if source.opcode not in UPDATES:
        return 1.0
    update = named[source.operands[UPDATES[source.opcode]]]
    return min(1.0, elements(update.shape) / max(elements(source.shape), 1))


def _in_place(inside: tuple[Operation, ...]) -> set[str]:
    """Name the updates that are results of a fusion: what they update stays where it is."""
    named = {o.name: o for o in inside}
    root = _root(inside)
    names = list(root.operands) if root.opcode == "tuple" else [root.name]
    found = set()
    for name in names:
        while named[name].opcode == "bitcast":
            name = named[name].operands[0]
        found |= {name} if named[name].opcode in UPDATES else set()
    return found


def _root(inside: tuple[Operation, ...]) -> Operation:
    """Return the operation whose value a computation returns: it is marked, or else the last."""
    return next((o for o in inside if o.line.startswith("ROOT")), inside[-1])


def _parameter_shares(
    program: Program, inside: tuple[Operation, ...], wanted: float = 1.0
) -> dict[int, float]:
    """Return which share of each parameter of a fusion is read, its number to a share of 0 to 1."""
    named = {o.name: o for o in inside}
    in_place = _in_place(inside)
    shares = dict.fromkeys(named, 0.0)
    shares[_root(inside).name] = wanted
    for operation in reversed(inside):  # users stand after what they use
        share = shares[operation.name]
        for i, name in enumerate(operation.operands):
            if name in named:
                more = _operand_share(program, operation, i, share, named, in_place)
                shares[name] = min(1.0, shares[name] + more)
    numbers = {o.name: int(found.group(1)) for o in inside if (found := _PARAMETER.search(o.line))}
    return {number: shares[name] for name, number in numbers.items()}


def _operand_share(
    program: Program,
    user: Operation,
    index: int,
    share: float,
    named: Mapping[str, Operation],
    in_place: set[str],
) -> float:
    """Return the share of an operand that one user reads, of whose result ``share`` is wanted."""
    if user.opcode in SLICES:
        whole = elements(named[user.operands[0]].shape)
        return share * elements(user.shape) / max(whole, 1) if index == 0 else 1.0
    if user.opcode in UPDATES and index == 0 and user.name in in_place:
        update = named[user.operands[UPDATES[user.opcode]]]
        adds = user.opcode == "scatter"  # reads what is there, then adds
        return elements(update.shape) / max(elements(user.shape), 1) if adds else 0.0
    if user.opcode in _ELEMENTWISE or user.opcode == "tuple":
        return share
    if nested := fused_operations(program, user):
        return _parameter_shares(program, nested, share).get(index, 1.0)
    if user.opcode == "get-tuple-element":
        return share
    return 1.0 if share else 0.0
