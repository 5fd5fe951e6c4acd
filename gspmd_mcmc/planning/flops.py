"""Floating-point operations of one operation of a compiled program."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gspmd_mcmc.planning.memory_traffic import ELEMENTWISE, elements, fused_operations
from gspmd_mcmc.views.program.hlo import Operation, Program, shapes_of

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED_IN_JSON = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_BATCH = re.compile(r'lhs_batch_dims=\{([\d,]*)\}|"lhs_batch_dimensions":\[([^\]]*)\]')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_SETTING = re.compile(r"(\w+)=([\dx_\-]+)")
_PRECISION = re.compile(r"operand_precision=\{(\w+),(\w+)\}")
_ALGORITHM = re.compile(r"algorithm=(\w+)")
_FACTORIZATIONS = ("cholesky", "triangular-solve", "fft")
# What goes through its rows one after the other, or many times: bytes and arithmetic say too little. A
# TPU's compiler has its own programs for these, and for gathers, of which it estimates nothing; a GPU's
# makes atomic operations of a scatter.
_ROW_BY_ROW = ("scatter", "sort", "select-and-scatter")
_UNCOUNTED = _FACTORIZATIONS + _ROW_BY_ROW
_STATED = re.compile(r'"cost_estimate":\{[^{}]*?"flops":"?(\d+)')
_PRODUCT_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__triton_gemm", "__onednn$matmul")


@dataclass(frozen=True)
class Product:
    """A matrix product, ``rows x terms`` by ``terms x columns``, or a convolution written as one.

    ``factors`` is the dtype of what is multiplied, with the precision or the algorithm that the text
    states: ``f32``, ``f32 high``, ``f32 dot_bf16_bf16_f32_x3``. A batch of products has all their rows.
    """

    factors: str
    rows: int
    terms: int
    columns: int

    @property
    def flops(self) -> int:
        """Floating-point operations: a product of n terms counts 2 n."""
        return 2 * self.rows * self.terms * self.columns


def flops_of(
    program: Program, operation: Operation, siblings: Mapping[str, Operation]
) -> tuple[tuple[Product, ...], int]:
    """Return the products of an operation and the floating-point operations of everything else.

    An elementwise operation, a transcendental one too, counts 1 an element; a reduction counts 1 for
    each element that it takes. What a fusion's code computes again for several results counts once.
    """
    if inside := fused_operations(program, operation):
        named = {o.name: o for o in inside}
        each = [flops_of(program, inner, named) for inner in inside]
        return tuple(p for products, _ in each for p in products), sum(rest for _, rest in each)
    operands = [siblings[name].shape for name in operation.operands if name in siblings]
    if product := _product(operation, operands):
        return (product,), 0
    if operation.opcode in ELEMENTWISE:
        return (), elements(operation.shape)
    is_reduction = operation.opcode in ("reduce", "reduce-window", "scatter", "sort")
    return (), sum(map(elements, operands)) if is_reduction else 0


def stated_flops(operation: Operation) -> int:
    """Return the floating-point operations that a kernel states of itself; 0: it states none.

    What a kernel that is no XLA program computes nobody else knows: ``pallas_call(cost_estimate=...)``.
    """
    stated = _STATED.search(operation.attributes) if operation.opcode == "custom-call" else None
    return int(stated.group(1)) if stated else 0


def is_uncounted(program: Program, operation: Operation) -> bool:
    """Tell whether nobody counts what an operation computes.

    Factorizations, calls that state nothing, and what goes through its rows one after the other.
    """
    inside = {operation.opcode, *(o.opcode for o in fused_operations(program, operation))}
    is_own = "kind=kCustom" in operation.attributes and "gather" in inside
    is_call = operation.opcode == "custom-call"
    is_product = any(target in operation.attributes for target in _PRODUCT_CALLS)
    is_known = is_product or stated_flops(operation) > 0
    return is_own or not inside.isdisjoint(_UNCOUNTED) or (is_call and not is_known)


def _product(operation: Operation, operands: list[str]) -> Product | None:
    if operation.opcode == "convolution":
        return _convolution(operation, operands)
    contracted = _CONTRACTED.search(operation.attributes)
    is_call = operation.opcode == "custom-call"
    if is_call and any(target in operation.attributes for target in _PRODUCT_CALLS):
        contracted = _CONTRACTED_IN_JSON.search(operation.attributes)
    elif operation.opcode not in ("dot", "scaled-dot", "ragged-dot"):
        return None
    (_, left), (_, right) = (shapes_of(shape)[0] for shape in operands[:2])
    terms = math.prod(
        left[int(i)] for i in re.findall(r"\d+", contracted.group(1) if contracted else "")
    )
    batch = math.prod(left[int(i)] for i in re.findall(r"\d+", _batch_axes(operation)))
    rows = math.prod(left) // max(terms, 1)
    return Product(
        _factors(operation, operands), rows, terms, math.prod(right) // max(terms * batch, 1)
    )


def _batch_axes(operation: Operation) -> str:
    found = _BATCH.search(operation.attributes)
    return (found.group(1) or found.group(2) or "") if found else ""


def _convolution(operation: Operation, operands: list[str]) -> Product | None:
    """Count the terms that fall on the input: a TPU writes batched products as sparse windows."""
    found = _LABELS.search(operation.attributes)
    if found is None:
        return None
    labels = found.groups()
    shapes = [shapes_of(shape)[0][1] for shape in (*operands[:2], operation.shape)]
    left, right, result = (dict(zip(*pair, strict=True)) for pair in zip(labels, shapes, strict=True))
    windows = _WINDOW.search(operation.attributes)
    window = dict(_SETTING.findall(windows.group(1))) if windows else {}
    rows, columns = result["b"], result["f"]
    met = 1
    for axis in (label for label in labels[2] if label.isdigit()):
        met *= _terms_on_input(left[axis], right[axis], result[axis], window, int(axis))
    # ``met`` counts, over all places of the result, the elements of the window that meet the input.
    return Product(_factors(operation, operands), rows * met, right["i"], columns)


def _terms_on_input(left: int, right: int, result: int, window: dict[str, str], axis: int) -> int:
    """Count pairs of a result and an element of the window that meet an element of the input."""

    def setting(name: str, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    stride, left_dilate, right_dilate = (
        int(setting(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(setting("pad", "0_0").split("_")[0])
    span = (left - 1) * left_dilate + 1
    starts = np.arange(result, dtype=np.int64) * stride - before
    count = 0
    for offset in range(right):
        at = starts + offset * right_dilate
        count += int(np.count_nonzero((at >= 0) & (at < span) & (at % left_dilate == 0)))
    return count


def _factors(operation: Operation, operands: list[str]) -> str:
    """Name what is multiplied: the wider dtype of the factors, and the precision if one is stated."""
    factors = [shapes_of(shape)[0][0] for shape in operands[:2]]
    dtype = max(factors, key=lambda name: int((re.findall(r"\d+", name) or ["8"])[0]))
    text = operation.attributes
    algorithm = _ALGORITHM.search(text)
    if algorithm:
        return f"{dtype} {algorithm.group(1)}"
    precision = _PRECISION.search(text)
    stated = {precision.group(1), precision.group(2)} if precision else _stated_in_json(text)
    named = [name for name in ("highest", "high") if name in stated]
    return f"{dtype} {named[0]}" if named else dtype


def _stated_in_json(text: str) -> set[str]:
    """Return the precisions that the configuration of a library's product states."""
    found = re.search(r'"operand_precision":(\[[^\]]*\])', text)
    return {str(name).lower() for name in json.loads(found.group(1))} if found else set()
