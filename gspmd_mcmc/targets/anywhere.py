"""Decorators for kernels and targets, which know no mesh: results lie as the position does."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.placement.explicit import no_context_mesh, on_any_mesh, whole
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree

__all__ = ["no_context_mesh", "on_any_mesh"]  # for kernels, which import of targets alone


def init_anywhere(init: Callable) -> Callable:
    """Decorate a kernel's ``init(self, position)``: the state lies where the position does."""
    return on_any_mesh(init, like=lambda out, kernel, position: _like(kernel.target, position, out))


def step_anywhere(step: Callable) -> Callable:
    """Decorate a kernel's ``step(self, rng_key, state)``: the new state lies where the old one does."""
    return on_any_mesh(step, like=lambda out, kernel, rng_key, state: (state, whole(out[1])))


def grad_anywhere(grad: Callable) -> Callable:
    """Decorate a target's ``grad(self, position)``: it lies where the position does."""
    return on_any_mesh(grad, like=lambda out, target, position, *rest: position)


def terms_and_grad_anywhere(method: Callable) -> Callable:
    """Decorate a target's ``terms_and_grad(self, position)``: likewise."""
    return on_any_mesh(method, like=lambda out, target, position, *rest: (whole(out[0]), position))


def _like(target: Target, position: PyTree, state: Any) -> Any:
    """Say how a first state lies: as the position, rows and sums over rows with their plates."""
    leaves, found = jax.tree.leaves(position, is_leaf=is_padded), target.local_rows(position)
    laid = [x if rows is None else P(rows.axes) for x, rows in zip(leaves, found, strict=True)]
    like = jax.tree.unflatten(jax.tree.structure(state.position), laid)
    fields = dict.fromkeys(tree.fields_like_position(type(state)), like)
    return tree.replace(whole(state), terms=target.layout_of_terms(state.terms), **fields)
