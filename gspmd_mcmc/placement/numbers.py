"""What arrays lose when JAX takes them: it keeps 32 bits of a number, unless jax_enable_x64 is on."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import no_context_mesh
from gspmd_mcmc.tree import PyTree, is_traced, path_str

# At most this many rows and columns of an array of floats are examined, evenly spread.
MOST_ROWS, MOST_COLUMNS = 1024, 1024
# The most that rounding may change values, relative to the distance of a column's quartiles. A spread
# below the second number, relative to the values, is float64's own rounding: the column is constant.
MOST_ROUNDING, LEAST_SPREAD = 1e-3, 1e-12


def check_numbers(name: str, array: Any, share: float = 1.0) -> None:
    """Raise unless JAX holds the numbers of an array on the host as they are; see `check_resolution`.

    Raises
    ------
    ValueError
        For what is no number, for masks, and for integers and floats that 32 bits do not hold.
    """
    if not isinstance(array, np.ndarray | np.generic):
        return
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name}: the mask would be lost; fill it, and place the mask as a leaf")
    array = np.asarray(array)
    if array.dtype.kind in "mM":
        raise ValueError(
            f"{name}: expected an array of numbers, got {array.dtype}. Subtract the first and "
            "divide: (t - t[0]) / np.timedelta64(1, 's')"
        )
    if array.dtype.kind in "OUSV" and not jnp.issubdtype(array.dtype, jnp.number):
        advice = {
            "O": "; convert numbers, x.astype(float), and number labels by np.unique(x, "
            "return_inverse=True)",
            "V": "; place each of its fields as a leaf, {name: x[name] for name in x.dtype.names}",
        }.get(array.dtype.kind, "; number labels by np.unique(x, return_inverse=True)")
        raise ValueError(f"{name}: expected an array of numbers, got ndarray of {array.dtype}{advice}")
    if array.dtype in (np.longdouble, np.clongdouble):
        raise ValueError(
            f"{name}: expected an array of numbers that JAX holds, got {array.dtype}; convert it, "
            "x.astype(np.float64), or np.complex128"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if array.dtype.kind in "iu" and dtype.itemsize < array.dtype.itemsize and array.size:
        bounds = np.iinfo(dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise wrong_integers(name, dtype)
    check_resolution(name, array, dtype, share)


def as_array(name: str, value: Any) -> Any:
    """Return what is on the host as a jax array, after `check_numbers`; other arrays as they are."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or is_traced(value):
        return value
    if is_sparse(value):
        raise TypeError(
            f"{name}: got a {type(value).__name__}, which JAX does not take; give "
            "jax.experimental.sparse.BCOO.from_scipy_sparse(x), or x.todense()"
        )
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    check_numbers(name, array)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    with no_context_mesh():  # what no mesh has placed stays unplaced
        return jnp.asarray(converted(name, array, dtype))


def converted(name: str, part: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a copy of another dtype, as JAX may share an array's memory with its owner.

    Raises
    ------
    ValueError
        If an integer would be another, or a finite float infinite.
    """
    try:
        with np.errstate(over="raise"):
            copy = np.array(part, dtype=dtype)
    except FloatingPointError as error:
        raise _beyond(name, dtype) from error
    if np.issubdtype(dtype, np.integer) and not np.can_cast(part.dtype, dtype) and np.any(copy != part):
        raise wrong_integers(name, dtype)
    return copy


def is_sparse(node: Any) -> bool:
    """Tell whether a node of a tree is a sparse matrix, of JAX, SciPy or PyData (for ``is_leaf=``)."""
    return hasattr(node, "todense")


def refuse_sparse(what: str, tree: PyTree) -> None:
    """Raise if a tree of rows holds a sparse matrix: its arrays have nonzeros, and no rows."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(node):
            raise TypeError(
                f"{what}{path_str(path)}: expected an array of rows, got a sparse matrix, "
                f"{type(node).__name__}, whose arrays are nonzeros. Give dense rows, x.todense(); or "
                "its nonzeros as rows of Groups, whose keys are its rows or its columns; or, where all "
                "rows read it whole, bind it: jax.tree_util.Partial(function, "
                "jax.experimental.sparse.BCOO.from_scipy_sparse(x))"
            )


def as_arrays(what: str, tree: PyTree) -> PyTree:
    """Return a tree whose NumPy arrays are jax arrays, by `as_array`; JAX's sparse matrices stay."""

    def taken(path: KeyPath, leaf: Any) -> Any:
        is_taken = isinstance(leaf, np.ndarray | np.generic) or is_sparse(leaf)
        return as_array(f"{what}{jax.tree_util.keystr(path)}", leaf) if is_taken else leaf

    return jax.tree_util.tree_map_with_path(taken, tree)


def check_leaves(what: str, tree: PyTree) -> None:
    """Check the numbers of all NumPy arrays of a tree."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_numbers(f"{what}{jax.tree_util.keystr(path)}", leaf)


def wrong_integers(name: str, dtype: Any) -> ValueError:
    """Return the error for integers that a dtype cannot hold."""
    return ValueError(
        f"{name}: holds integers that {dtype} cannot; number them anew, or set jax_enable_x64"
    )


def _beyond(name: str, dtype: Any) -> ValueError:
    return ValueError(
        f"{name}: holds numbers beyond {np.finfo(dtype).max:.3g}, the largest of {dtype}; scale them, "
        "or set jax_enable_x64"
    )


def check_resolution(name: str, array: np.ndarray, dtype: Any, share: float) -> None:
    """Raise where floats of another dtype cannot tell the values of a column apart.

    A sample of the rows is examined. On average rounding may change values by a thousandth of the
    distance of their column's quartiles: of numbers around 10⁹ with a spread of 1,000, float32 leaves
    ten values. An array that is a ``share`` of all rows may change by more: if rows are sorted, all of
    them together are spread that much wider.
    """
    is_cut = array.dtype.kind in "fc" and dtype.itemsize < array.dtype.itemsize
    if not is_cut or not array.ndim or not array.size:
        return
    rows = np.linspace(0, len(array) - 1, min(len(array), MOST_ROWS)).astype(int)
    some = np.asarray(array[rows]).reshape(len(rows), -1)
    some = some[:, np.linspace(0, some.shape[1] - 1, min(some.shape[1], MOST_COLUMNS)).astype(int)]
    parts = (np.real(some), np.imag(some)) if array.dtype.kind == "c" else (some,)
    for part in parts:
        part = np.where(np.isfinite(part), part, 0)
        with np.errstate(all="ignore"):
            rounding = np.mean(np.abs(part - np.real(part.astype(dtype))), axis=0)
        low, high = np.quantile(part, [0.25, 0.75], axis=0)
        spread = np.where(high > low, high - low, np.ptp(part, axis=0))
        is_constant = spread <= LEAST_SPREAD * np.max(np.abs(part), axis=0)
        if np.isinf(rounding).any():
            raise _beyond(name, dtype)
        size = np.max(np.abs(part), axis=0)
        is_lost = (np.ptp(part, axis=0) <= LEAST_SPREAD * size) & (rounding > MOST_ROUNDING * size)
        if is_lost.any():
            raise ValueError(
                f"{name}: {dtype} cannot hold {size[np.argmax(is_lost)]:.3g}; scale it, or set "
                "jax_enable_x64"
            )
        worst = np.argmax(np.where(is_constant, 0, rounding / np.where(is_constant, 1, spread)))
        if not is_constant[worst] and share * rounding[worst] > MOST_ROUNDING * spread[worst]:
            raise ValueError(
                f"{name}: {dtype} cannot tell its values apart: they lie around "
                f"{np.median(part[:, worst]):.6g} within {spread[worst]:.3g} of each other, and "
                f"rounding changes them by {rounding[worst]:.2g}. Subtract their mean before (NumPy, "
                f"{array.dtype}), or set jax_enable_x64"
            )


def nonfinite(of: PyTree) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path of each leaf that has values that are not finite, and how many."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(of):
        if count := num_nonfinite(leaf):
            yield path, count


def num_nonfinite(leaf: Any) -> int:
    """Count the values of an array that are NaN or infinite."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return 0
    return int(to_host(jnp.sum(~jnp.isfinite(leaf))))
