"""Where chains start: positions as given, or drawn per chain until the log density is finite."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.functions.function import as_partial
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.local import cut, lay_out
from gspmd_mcmc.tree import PyTree, path_str, roles

MAX_TRIES = 100


def uniform_start(position: PyTree, radius: float = 2.0) -> Partial:
    """Start each chain at the position plus uniform jitter in (-radius, radius), element by element.

    Returns
    -------
    Partial
        ``start(rng_key) -> position`` of one chain, for `sample`'s ``initial_position``.
    """
    return Partial(_uniform, jax.tree.map(jnp.asarray, position), jnp.asarray(float(radius)))


def _uniform(position: PyTree, radius: jax.Array, rng_key: jax.Array) -> PyTree:
    leaves, treedef = jax.tree.flatten(position)
    moved = [
        x
        + radius.astype(x.dtype)
        * jax.random.uniform(jax.random.fold_in(rng_key, i), x.shape, x.dtype, minval=-1, maxval=1)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, moved)


def example_of(start: Callable, rng_key: jax.Array) -> PyTree:
    """Return a tree in the shapes of one chain's start, laid out where that is known.

    `uniform_start` and `Mode.laplace_start` bind the position that they start around.
    """
    shapes = jax.eval_shape(as_partial(start), rng_key)
    around = start.args[0] if isinstance(start, Partial) and start.args else None
    return around if jax.tree.structure(around) == jax.tree.structure(shapes) else shapes


def has_chain_axis(target: Any, position: PyTree, num_chains: int) -> bool:
    """Tell whether every leaf has a leading axis of chains, by what the target accepts.

    Raises
    ------
    ValueError
        If the target accepts the position both with and without it.
    """
    leaves = jax.tree.leaves(position)
    if not all(np.ndim(x) and np.shape(x)[0] == num_chains for x in leaves):
        return False
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), position)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), whole)
    if not _accepts(target, one):
        return False
    if _accepts(target, whole):
        raise ValueError(
            f"initial_position: every leaf has a leading axis of num_chains={num_chains}, and the "
            "target accepts it with and without. Say which: gspmd_mcmc.per_chain(position) has one "
            "position a chain; gspmd_mcmc.uniform_start(position) spreads one position over chains"
        )
    return True


def require_accepted(kernel: Any, position: PyTree) -> None:
    """Let the target's own error out, if it does not accept a position."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), position)
    jax.eval_shape(_terms, kernel.target, shapes)


def _accepts(target: Any, position: PyTree) -> bool:
    try:
        jax.eval_shape(_terms, target, position)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return False
    return True


def _terms(target: Any, position: PyTree) -> PyTree:
    return target.terms(lay_out(target, position))


@dataclass(frozen=True, eq=False)
class PerChain:
    """A position whose leaves have a leading axis of chains."""

    position: PyTree


def per_chain(position: PyTree) -> PerChain:
    """Mark a position whose leaves have a leading axis of chains, for `sample` to use as it is."""
    return PerChain(position)


def require_same_precision(what: str, log_density: Any) -> None:
    """Raise where a run's log densities are of another precision than this program computes in."""
    now = jnp.zeros(()).dtype
    if log_density.dtype != now:
        raise ValueError(
            f"{what}: the run was computed in {log_density.dtype}, and JAX now computes in {now}: "
            "jax_enable_x64 was switched since. Set it as it was; or begin another run where this one "
            "ended, with a target built anew and "
            "gspmd_mcmc.per_chain(jax.tree.map(numpy.asarray, draws.state.position))"
        )


@jax.jit
def copied(states: Any) -> Any:
    """Return states in buffers of their own, laid out as they are."""
    return jax.tree.map(jnp.copy, states)


@partial(jax.jit, static_argnames="layout")
def init_chains(kernel: Kernel, positions: PyTree, *, layout: Layout) -> Any:
    """Evaluate the kernel's state at each chain's position, in buffers of its own."""
    return _init(kernel, positions, layout)


def _init(kernel: Kernel, positions: PyTree, layout: Layout) -> Any:
    positions = layout.vmap(lay_out, (None, 0))(kernel.target, positions)
    positions = layout.pin_positions(positions)
    states = layout.vmap(type(kernel).init, (None, 0))(kernel, positions)
    return layout.pin(states, roles(states, layout.treedef, of_each_chain=True))


@partial(jax.jit, static_argnames="layout")
def _draw(
    kernel: Kernel, start: Partial, rng_key: jax.Array, *, layout: Layout
) -> tuple[Any, jax.Array]:
    """Draw a start for each chain; return the states there, and whether they are finite, [chains]."""

    def draw(key):
        # A pad that was drawn with the rest is cut, so that the new one copies a real row.
        return lay_out(kernel.target, cut(kernel.target, start(key)))

    keys = jax.vmap(partial(jax.random.fold_in, rng_key))(jnp.arange(layout.num_chains))
    states = _init(kernel, layout.vmap(draw, (0,))(keys), layout)
    return states, are_finite(states)


@jax.jit
def are_finite(states: Any) -> jax.Array:
    """Tell of each chain whether its log density and all of its gradient are finite."""
    grads = jax.tree.leaves(states.log_density_grad)
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in grads]
    return functools.reduce(jnp.logical_and, finite, jnp.isfinite(states.log_density))


@partial(jax.jit, static_argnames="layout")
def _select(are_good: jax.Array, states: Any, fresh: Any, *, layout: Layout) -> Any:
    """Keep the states of the chains that are good, and take the fresh ones of the others."""
    return layout.vmap(tree.where, (0, 0, 0))(are_good, states, fresh)


def start_chains(kernel: Kernel, rng_key: jax.Array, start: Callable, layout: Layout) -> Any:
    """Draw each chain's start until its log density and gradient are finite; return the states."""
    start = as_partial(start)
    states, are_good = _draw(kernel, start, jax.random.fold_in(rng_key, 0), layout=layout)
    for attempt in range(1, MAX_TRIES):
        if np.all(to_host(are_good)):
            return states
        key = jax.random.fold_in(rng_key, attempt)
        fresh, fresh_are_good = _draw(kernel, start, key, layout=layout)
        states = _select(are_good, states, fresh, layout=layout)
        are_good |= fresh_are_good
    require_finite(kernel, states)
    return states


def require_finite(kernel: Any, states: Any) -> None:
    """Raise where a chain's log density or gradient is not finite, naming the chain and the cause."""
    bad = np.flatnonzero(~np.asarray(to_host(are_finite(states))))
    if not bad.size:
        return
    position = jax.tree.map(lambda x: x[bad[0]], states.position)
    raise checks.NonFiniteStart(
        f"chains {bad.tolist()} of {len(states.log_density)} start where the log density or its "
        f"gradient is not finite: in chain {bad[0]} {checks.blame(kernel.target, position)}"
    )


def require_chain_axis(position: PyTree, num_chains: int) -> None:
    """Raise unless every leaf has a leading axis of chains."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(position):
        if not np.ndim(leaf) or np.shape(leaf)[0] != num_chains:
            raise ValueError(
                f"per_chain position {path_str(path)}: expected a leading axis of num_chains="
                f"{num_chains}, got shape {np.shape(leaf)}"
            )
