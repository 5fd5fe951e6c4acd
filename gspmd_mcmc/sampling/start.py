"""Where chains start: positions as given, or drawn per chain until the log density is finite."""

import functools
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.errors import CALLER_OF_SAMPLE, SamplingWarning
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.layout import Layout, read_layout
from gspmd_mcmc.placement.modules import is_module
from gspmd_mcmc.sampling.mode import Mode
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.function import as_partial
from gspmd_mcmc.targets.local import cut, lay_out, zero_pad
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, path_str, roles

MAX_TRIES = 100
# Distances that flat latents are moved by. A wall (a box, a constraint) is as flat within; moves so
# long, either way, meet any.
REACHES = (0.0, 1e1, 1e2, 1e4, 1e6, 1e8)


def uniform_start(position: PyTree, radius: float = 2.0) -> Partial:
    """Start each chain at the position plus uniform jitter in (-radius, radius), element by element.

    Returns
    -------
    Partial
        ``start(rng_key) -> position`` of one chain, for `sample`'s ``initial_position``.
    """
    arrays = jax.tree.map(
        lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x), position
    )
    return Partial(_uniform, arrays, jnp.asarray(float(radius)))


def _uniform(position: PyTree, radius: jax.Array, rng_key: jax.Array) -> PyTree:
    leaves, treedef = jax.tree.flatten(position)
    moved = [
        x
        + radius.astype(x.dtype)
        * jax.random.uniform(jax.random.fold_in(rng_key, i), x.shape, x.dtype, minval=-1, maxval=1)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, moved)


@on_any_mesh
def prior_start(target: Target) -> Partial:
    """Start each chain at a draw of the latents from their prior.

    Draws are retried until the log density is finite (`sample`). They spread chains as widely as the
    prior does: if it is vague and far from the posterior, warm-up takes longer. A latent behind an
    observed site is drawn given the observation.

    Parameters
    ----------
    target
        Made by `from_numpyro`, or by ``condition`` of a joint distribution.

    Returns
    -------
    Partial
        ``start(rng_key) -> position`` of one chain, unconstrained, for `sample`'s
        ``initial_position``; the same values on every mesh. Latents of rows are laid out with those.

    Raises
    ------
    TypeError
        If the target was written as functions, which have no prior to draw from.
    ValueError
        If a distribution of the model, such as an improper one, cannot be drawn from.
    """
    if not isinstance(target, Target) or target.prior is None:
        raise TypeError(
            "prior_start: expected a target made by from_numpyro or by condition of a joint "
            f"distribution, got {type(target).__name__}, which was written as functions and has no "
            "prior to draw from. Pass sample a function rng_key -> position of your own, or "
            "gspmd_mcmc.uniform_start(position)"
        )
    start = as_partial(Partial(_draw_of_prior, target.prior))
    jax.eval_shape(start, jax.random.key(0))
    return start


def _draw_of_prior(draw: Partial, rng_key: jax.Array) -> PyTree:
    return draw(rng_key)


@dataclass(frozen=True, eq=False)
class PerChain:
    """A position whose leaves have a leading axis of chains."""

    position: PyTree


def per_chain(position: PyTree) -> PerChain:
    """Mark a position whose leaves have a leading axis of chains, for `sample` to use as it is."""
    return PerChain(position)


def start(
    kernel: Kernel, rng_key: jax.Array, initial: Any, mesh: Mesh | None, num_chains: int
) -> tuple[Layout, Any]:
    """Return the layout, and the states of all chains."""
    layout, drawn, positions = read_start(kernel.target, rng_key, initial, mesh, num_chains)
    if drawn is not None:
        return layout, _start_at_draws(kernel, rng_key, drawn, layout)
    states = init_chains(kernel, positions, layout=layout)
    require_finite(kernel, states)
    return layout, states


def read_start(
    target: Target, rng_key: jax.Array, initial: Any, mesh: Any, num_chains: int
) -> tuple[Layout, Partial | None, PyTree]:
    """Find out what kind of start this is; nothing is computed.

    Returns the layout, and either ``start(rng_key) -> position`` of one chain, or None and the
    positions of all chains.
    """
    if isinstance(initial, Mode):
        initial = uniform_start(initial.position, 0.0)
    if not callable(initial) or is_module(initial):
        is_marked = isinstance(initial, PerChain)
        position = initial.position if is_marked else initial
        checks.check_position(target, position)
        for path, leaf in jax.tree_util.tree_leaves_with_path(position) if is_marked else ():
            if np.shape(leaf)[:1] != (num_chains,):
                raise ValueError(
                    f"per_chain position {path_str(path)}: expected a leading axis of num_chains="
                    f"{num_chains}, got shape {np.shape(leaf)}"
                )
        if is_marked or _has_chain_axis(target, position, num_chains):
            return read_layout(mesh, target, position, num_chains, has_chains=True), None, position
        jax.eval_shape(_terms, target, _shapes(position))  # The target's own error, if it has one.
        initial = uniform_start(lay_out(target, position))
    drawn = as_partial(initial)
    example = jax.eval_shape(lambda start, key: start(key), drawn, rng_key)
    # `uniform_start` and `Mode.laplace_start` bind a position that is laid out.
    around = initial.args[0] if isinstance(initial, Partial) and initial.args else None
    example = around if jax.tree.structure(around) == jax.tree.structure(example) else example
    checks.check_position(target, example)
    return read_layout(mesh, target, example, num_chains, has_chains=False), drawn, None


def _has_chain_axis(target: Target, position: PyTree, num_chains: int) -> bool:
    """Tell whether every leaf has a leading axis of chains, by what the target accepts."""
    whole = _shapes(position)
    if not all(x.ndim and x.shape[0] == num_chains for x in jax.tree.leaves(whole)):
        return False
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


def _accepts(target: Target, position: PyTree) -> bool:
    try:
        jax.eval_shape(_terms, target, position)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return False
    return True


def _terms(target: Target, position: PyTree) -> PyTree:
    return target.terms(lay_out(target, position))


def _shapes(position: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), position)


@partial(jax.jit, static_argnames="layout")
def init_chains(kernel: Kernel, positions: PyTree, *, layout: Layout) -> Any:
    """Evaluate the kernel's state at each chain's position."""
    positions = layout.vmap(lay_out, (None, 0))(kernel.target, positions)
    positions = layout.pin_positions(positions)
    states = layout.vmap(type(kernel).init, (None, 0))(kernel, positions)
    return layout.pin(states, roles(states, layout.treedef, of_each_chain=True))


@partial(jax.jit, static_argnames="layout")
def draw_start(
    kernel: Kernel, start: Partial, rng_key: jax.Array, attempt: int, *, layout: Layout
) -> tuple[Any, jax.Array]:
    """Draw a start for each chain; return the states there, and whether they are finite, [chains]."""

    def draw(chain):
        # A pad that was drawn with the rest is cut, so that the new one copies a real row.
        position = start(jax.random.fold_in(key, chain))
        return lay_out(kernel.target, cut(kernel.target, position))

    key = jax.random.fold_in(jax.random.split(rng_key)[0], attempt)
    positions = layout.vmap(draw, (0,))(jnp.arange(layout.num_chains))
    states = init_chains(kernel, positions, layout=layout)
    return states, are_finite(states)


@jax.jit
def are_finite(states: Any) -> jax.Array:
    """Return for each chain whether its log density and all of its gradient are finite."""
    grads = jax.tree.leaves(states.log_density_grad)
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in grads]
    return functools.reduce(jnp.logical_and, finite, jnp.isfinite(states.log_density))


@partial(jax.jit, static_argnames="layout")
def _select(are_good: jax.Array, states: Any, fresh: Any, *, layout: Layout) -> Any:
    """Keep the states of the chains that are good, and take the fresh ones of the others."""
    return layout.vmap(tree.where, (0, 0, 0))(are_good, states, fresh)


def _start_at_draws(kernel: Kernel, rng_key: jax.Array, start: Partial, layout: Layout) -> Any:
    """Draw each chain's start until its log density and gradient are finite; return the states."""
    states, are_good = draw_start(kernel, start, rng_key, 0, layout=layout)
    for attempt in range(1, MAX_TRIES):
        if np.all(to_host(are_good)):
            return states
        fresh, fresh_are_good = draw_start(kernel, start, rng_key, attempt, layout=layout)
        states = _select(are_good, states, fresh, layout=layout)
        are_good |= fresh_are_good
    require_finite(kernel, states)
    return states


def require_finite(kernel: Kernel, states: Any) -> None:
    """Raise where a chain's log density or gradient is not finite, naming the chain and the cause."""
    bad = np.flatnonzero(~np.asarray(to_host(are_finite(states))))
    if bad.size:
        position = jax.tree.map(lambda x: x[bad[0]], states.position)
        raise checks.NonFiniteStart(
            f"chains {bad.tolist()} of {len(states.log_density)} start where the log density or its "
            f"gradient is not finite: in chain {bad[0]} {checks.blame(kernel.target, position)}"
        )


def warn_of_flat_latents(target: Target, states: Any, layout: Layout) -> None:
    """Warn of elements of the position that nothing gives a density.

    Their gradient is exactly 0 where every chain starts, which costs nothing to see; and wherever they
    are moved the terms of the log density stay the same, to the bit. The first alone has other causes:
    a unit that is dead there, the middle of a box, a start at a mode.
    """
    flags, counts = _without_slope(target, states.log_density_grad, layout=layout)
    num_flat, num_real = np.asarray(to_host(counts))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(flags)
    for i in np.flatnonzero(num_flat):
        only = [x if j == i else jnp.zeros_like(x) for j, (_, x) in enumerate(leaves)]
        if to_host(_is_same_anywhere(target, states.position, treedef.unflatten(only), layout=layout)):
            warnings.warn(
                f"position {path_str(leaves[i][0])}: the log density is the same whatever "
                f"{num_flat[i]} of its {num_real[i]} numbers are, so that chains wander off in them "
                "forever. Give them a prior, or leave them out of the position",
                SamplingWarning,
                stacklevel=CALLER_OF_SAMPLE,
            )


@partial(jax.jit, static_argnames="layout")
def _without_slope(target: Target, grads: PyTree, *, layout: Layout) -> tuple[PyTree, jax.Array]:
    """Return for each element whether its gradient is 0 in all chains.

    Of each leaf also how many there are, and how many elements; shape [2, leaves]. Pad is none.
    """
    real = layout.vmap(zero_pad, (None, 0))(target, jax.tree.map(jnp.ones_like, grads))
    real = jax.tree.map(lambda r: jnp.all(r != 0, axis=0), real)
    flags = jax.tree.map(lambda x, r: jnp.all(x == 0, axis=0) & r, grads, real)
    return flags, jnp.stack([jnp.stack(list(map(jnp.sum, jax.tree.leaves(x)))) for x in (flags, real)])


@partial(jax.jit, static_argnames="layout")
def _is_same_anywhere(target: Target, positions: PyTree, flags: PyTree, *, layout: Layout) -> jax.Array:
    """Tell whether all terms, in all chains, are the same to the bit where elements are moved."""

    def move(x: jax.Array, flag: jax.Array, reach: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(0), x.shape, x.dtype)
        return jnp.where(flag[None], x + reach.astype(x.dtype) * noise, x)

    def terms_at(reach: jax.Array) -> PyTree:
        moved = jax.tree.map(lambda x, flag: move(x, flag, reach), positions, flags)
        return layout.vmap(lambda target, x: target.terms(x), (None, 0))(target, moved)

    terms = jax.lax.map(terms_at, jnp.asarray(REACHES))
    return jnp.all(jnp.stack([jnp.all(x[1:] == x[:1]) for x in jax.tree.leaves(terms)]))
