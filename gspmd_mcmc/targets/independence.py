"""Whether a row's term depends on the other rows of its block, which differ from mesh to mesh.

A few real rows, taken far apart, are evaluated among each other, among other rows, in another order and
in a smaller block, at two points. A row's term has to be the same each time, up to rounding.
"""

import math
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets import bijections
from gspmd_mcmc.targets.local import cut, lay_out, zero_pad
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, is_staging, is_traced, path_str

BLOCK_ROWS = 32
BLOCK_BYTES = 16 << 20
# By how much the position is moved. Where it is zero much is hidden, such as what weights of zero
# multiply; elsewhere a density may not exist.
SCALES = (0.0, 1.0)
# Allowance for rounding: this many times what the last digit of the position changes, this many units
# of the term's last digit, and this share of what the term changes between the two points.
OF_POSITION = 200
OF_TERM = 100
OF_CHANGE = 1e-4

_TRIED: WeakKeyDictionary[Plate, Any] = WeakKeyDictionary()  # plate to its function's meaning then


_ADVICE = ". Latents of groups are those of each row's own group already: write them without an index"


class CoupledRows(ValueError):
    """The term of a row depends on the other rows of its block."""


class Trial(NamedTuple):
    """Terms of some rows of a plate in blocks of several kinds, at several points.

    Attributes
    ----------
    rows
        Numbers of the rows, shape [rows].
    terms
        Their terms in a block of these rows, shape [points, rows].
    others
        How else they were evaluated, in words, with the terms of all or of the first rows, shape
        [points, rows or fewer].
    tolerance
        By how much terms may differ by rounding, shape [points, rows].
    """

    rows: np.ndarray
    terms: np.ndarray
    others: dict[str, np.ndarray]
    tolerance: np.ndarray

    def coupling(self) -> str | None:
        """Say in words which row depends on the rows beside it, or None."""
        for how, other in self.others.items():
            num = other.shape[1]
            terms, tolerance = self.terms[:, :num], self.tolerance[:, :num]
            with np.errstate(invalid="ignore"):
                is_same = (np.abs(other - terms) <= tolerance) | (other == terms)
            # NaN is no different from NaN.
            one_alone = np.isfinite(other) != np.isfinite(terms)
            differs = one_alone | (np.isfinite(other) & np.isfinite(terms) & ~is_same)
            if np.any(differs):
                at = tuple(np.argwhere(differs)[0])
                row = self.rows[at[1]]
                return (
                    f"the term of row {row} is {terms[at]:.6g} in one block and {other[at]:.6g} {how}"
                )
        return None


def check_rows(target: Target, position: PyTree, chain: int | None = None) -> None:
    """Raise where a row's term depends on the other rows of its block; each plate is tried once.

    ``chain`` is the one to look at, of a position whose leaves have a leading axis of chains.

    Raises
    ------
    CoupledRows
        With the plate, the row, its two terms, and what to do; or with the leaf that a transform makes
        of several rows.
    """
    _check_transform(target, position, chain)
    for which, plate in enumerate(target.plates):
        coupling = coupling_of(target, which, position, chain)
        if coupling is not None:
            advice = _ADVICE if plate.has_group_latents else ""
            raise CoupledRows(
                f"{plate}: {coupling}. It depends on the rows beside it (a mean over the block, a "
                "sort, a cumulative sum, the number of rows, its place), which are other ones on each "
                "mesh and in each tile. Compute such values of all rows before, and place them with "
                "the data or bind them, Partial(log_likelihood, value); of a NumPyro model, pass them "
                f"as arguments or leave the plate out of plates={advice}"
            )


def _check_transform(target: Target, position: PyTree, chain: int | None) -> None:
    """Raise where a transform reads the pad of local latents, or the order in which they are stored."""
    is_stored_otherwise = any(map(is_padded, jax.tree.leaves(position, is_leaf=is_padded)))
    if target.transform is None or not is_stored_otherwise or _is_abstract(target, position):
        return
    seen, stored = to_host(_transformed(target, position, chain=chain))
    paths = jax.tree_util.tree_leaves_with_path(seen)
    for (path, *pair), other in zip(paths, jax.tree.leaves(stored), strict=True):
        expected, found = (np.asarray(x, np.float64) for x in (*pair, other))
        with np.errstate(invalid="ignore"):
            largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
            is_same = (np.abs(found - expected) <= OF_CHANGE * largest) | (found == expected)
        is_same |= ~np.isfinite(expected)
        if not np.all(is_same):
            at = tuple(np.argwhere(~is_same)[0])
            raise CoupledRows(
                f"transform: {path_str(path)}{list(map(int, at)) if at else ''} is {expected[at]:.6g} "
                f"for local latents in your order, and {found[at]:.6g} for the same latents as they "
                "are stored, padded and in another order. A transform must act within each row of a "
                "local latent: no sum over rows, no index, no number of rows. Values per row are data "
                "of the plate"
            )


@partial(jax.jit, static_argnames="chain")
def _transformed(target: Target, position: PyTree, *, chain: int | None) -> tuple[PyTree, PyTree]:
    """Transform latents in the user's order, and the same ones as they are stored, with NaN as pad."""
    position = position if chain is None else jax.tree.map(lambda x: x[chain], position)
    leaves, treedef = jax.tree.flatten(cut(target, position))
    seen = treedef.unflatten(
        _moved(leaves, [False] * len(leaves), jnp.zeros(0), jnp.float32(1), jnp.float32(0))
    )
    laid = lay_out(target, seen)
    no_pad = zero_pad(target, tree.ones_like(laid))
    laid = jax.tree.map(lambda x, real: jnp.where(real == 0, jnp.nan, x), laid, no_pad)
    return target.transformed(seen), cut(target, target.transformed(laid))


def _is_abstract(target: Target, position: PyTree) -> bool:
    """Tell whether there are no values to compare, as in a program that is being staged."""
    leaves = jax.tree.leaves((target, position))
    return is_staging() or any(is_traced(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


def coupling_of(target: Target, which: int, position: PyTree, chain: int | None = None) -> str | None:
    """Say in words which row of a plate depends on the rows beside it; None if none does.

    A plate is tried once, and only where it and the position are arrays: a program that is being staged
    has no values to compare.
    """
    plate = target.plates[which]
    meaning = jax.tree.structure(plate.log_likelihood)
    is_tried = plate in _TRIED and _TRIED[plate] == meaning
    if is_tried or _is_abstract(target, position) or plate.rows.num_rows < 2:
        return None
    coupling = try_rows(target, which, position, chain).coupling()
    if coupling is None:
        _TRIED[plate] = meaning
    return coupling


def try_rows(target: Target, which: int, position: PyTree, chain: int | None = None) -> Trial:
    """Evaluate some rows of a plate in several blocks, in one small program."""
    plate = target.plates[which]
    rows, rest = _far_apart(plate)
    one, other = (np.asarray(to_host(plate.slots.laid_row(x))) for x in (rows, rest))
    even = np.arange(len(one)) % 2 == 0
    takes = [one, np.where(even, one, other), np.where(even, other, one), one[::-1], one]
    runs = [(take, scale, i == 4) for scale in SCALES for i, take in enumerate(takes)]
    take, scale, is_noise = (np.asarray(x) for x in zip(*runs, strict=True))
    scale, is_noise = scale.astype(np.float32), is_noise.astype(np.float32)
    out = to_host(_terms(target, position, take, scale, is_noise, which=which, chain=chain))
    whole, few = (np.asarray(x, np.float64).reshape(len(SCALES), len(takes), -1) for x in out)
    terms = whole[:, 0]
    others = {
        "among other rows": np.where(even, whole[:, 1], whole[:, 2]),
        "in another order": whole[:, 3, ::-1],
        "in a smaller block": few[:, 0],
    }
    eps = float(jnp.finfo(out[0].dtype).eps)
    return Trial(rows, terms, others, _tolerance(terms, whole[:, 4], eps))


def _tolerance(terms: np.ndarray, moved: np.ndarray, eps: float) -> np.ndarray:
    """By how much terms [points, rows] may differ; ``moved``: by last digits of the position."""
    with np.errstate(invalid="ignore"):
        sizes = np.abs(moved - terms), np.abs(terms[:1] - terms[1:]), np.abs(terms)
    noise, change, size = (np.where(np.isfinite(x), x, 0) for x in sizes)
    noise = np.maximum(noise, np.median(noise, axis=1, keepdims=True))
    return OF_POSITION * noise + OF_TERM * eps * size + OF_CHANGE * change


def _far_apart(plate: Plate) -> tuple[np.ndarray, np.ndarray]:
    """Choose two sets of rows from all over the plate; sets of few rows are two orders of them.

    Not at even distances, where rows may repeat themselves.
    """
    num_rows = plate.rows.num_rows
    row_bytes = sum(x.nbytes for x in jax.tree.leaves(plate.data)) / plate.rows.num_padded
    most = int(min(BLOCK_ROWS, max(4, BLOCK_BYTES // max(1, row_bytes))))
    num = min(2 * most, num_rows)
    edges = np.arange(num + 1) * num_rows // num
    generator = np.random.default_rng(0)
    rows = generator.permutation(generator.integers(edges[:-1], edges[1:]))
    return rows[:most], rows[::-1][:most]


@partial(jax.jit, static_argnames=("which", "chain"))
def _terms(
    target: Target,
    position: PyTree,
    takes: jax.Array,
    scales: jax.Array,
    noises: jax.Array,
    *,
    which: int,
    chain: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Terms of the rows that each run takes, and of its first few in a block of their own."""
    plate = target.plates[which]
    position = position if chain is None else jax.tree.map(lambda x: x[chain], position)
    leaves, treedef = jax.tree.flatten(params := target.transformed(position))
    is_local = [rows is not None for rows in plate.local_rows(params)]
    is_shared = [rows is None for rows in target.local_rows(params)]
    hidden = target.hidden_from(plate, params)
    few = max(2, takes.shape[1] // 4)

    def of_run(run):
        take, scale, noise = run
        # Latents of a group move alike in all of its rows.
        owner = plate.slots.latent_of(take)
        own = [x[owner] if local else x for x, local in zip(leaves, is_local, strict=True)]
        moved = treedef.unflatten(_moved(own, is_local, owner, scale, noise))
        moved, _ = bijections.constrain(target.bijections, moved, is_shared)
        block = jax.tree.map(lambda x: x[take], plate.data)
        pairs = zip(jax.tree.leaves(moved), is_local, strict=True)
        first = treedef.unflatten([x[:few] if local else x for x, local in pairs])
        first_block = jax.tree.map(lambda x: x[:few], block)
        return plate.block_terms(moved, block, hidden), plate.block_terms(first, first_block, hidden)

    with jax.default_matmul_precision("highest"):  # blocks of other sizes would be rounded otherwise
        out = jax.lax.map(of_run, (takes, scales, noises))
    mesh = plate.rows.mesh
    if not isinstance(mesh, Mesh):
        return out
    return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P()))


def _moved(
    leaves: list, is_local: list[bool], take: jax.Array, scale: jax.Array, noise: jax.Array
) -> list:
    """Move parameters by a wave, and by last digits; latents of rows by what goes with their row.

    Random numbers would take longer to compile.
    """
    moved = []
    for i, (x, local) in enumerate(zip(leaves, is_local, strict=True)):
        shape = x.shape[1:] if local else x.shape
        place = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) + i
        if local:
            place = place[None] + take.astype(jnp.float32).reshape(-1, *(1,) * len(shape))
        step, digit = (jnp.sin(rate * place + 1).astype(x.dtype) for rate in (1.7, 2.3))
        step, digit = scale.astype(x.dtype) * step, noise.astype(x.dtype) * digit
        moved.append((x + step) * (1 + digit * jnp.finfo(x.dtype).eps))
    return moved
