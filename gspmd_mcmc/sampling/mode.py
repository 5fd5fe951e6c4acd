"""The mode of a target, and its curvature there: a place to start from, and a first metric."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.extras import need
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.layout import Pins
from gspmd_mcmc.placement.padding import is_padded, real_shape, values_of
from gspmd_mcmc.targets import checks, independence
from gspmd_mcmc.targets.local import cut
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree

LEAST_CURVATURE = 1e-3
# Above a warning of `find_mode` in a function: `find_mode`, its decorator, and the user's line.
CALLER_OF_FIND_MODE = 4


@dataclass(frozen=True, eq=False)
class Mode:
    """A maximum of a log density.

    Attributes
    ----------
    position
        The position of the maximum.
    curvature
        The diagonal of minus the Hessian there, a tree like the position, positive.
    log_density
        The log density there.
    num_steps
        The number of steps of the search.
    is_converged
        Whether the expected gain of a step fell below the tolerance.
    """

    position: PyTree
    curvature: PyTree
    log_density: jax.Array
    num_steps: int
    is_converged: bool

    @property
    def inverse_mass_matrix(self) -> PyTree:
        """The Laplace approximation's variances: one over the curvature."""
        return jax.tree.map(lambda c: 1 / c, self.curvature)

    def laplace_start(self) -> Partial:
        """Start each chain at the mode plus noise from the Laplace approximation.

        Returns
        -------
        Partial
            ``start(rng_key) -> position``, for `sample`'s ``initial_position``.
        """
        return Partial(_laplace, self.position, self.curvature)


def _laplace(position: PyTree, curvature: PyTree, rng_key: jax.Array) -> PyTree:
    noise = tree.normal_like(rng_key, position)
    return jax.tree.map(lambda x, z, c: x + z * jax.lax.rsqrt(c), position, noise, curvature)


@on_any_mesh
def find_mode(
    rng_key: jax.Array,
    target: Target,
    position: PyTree,
    *,
    max_steps: int = 500,
    tolerance: float = 1e-3,
    num_probes: int = 64,
) -> Mode:
    """Climb to a mode by L-BFGS; estimate the curvature's diagonal there. Needs the extra ``optim``.

    Parameters
    ----------
    rng_key
        For the probes of the curvature.
    target
        A `Posterior` or `LogDensity`.
    position
        Where to start; the search keeps its layout.
    max_steps
        The largest number of steps.
    tolerance
        The search ends when a step is expected to gain less than this, in nats. The log density is then
        about half as much below its maximum, whatever the scales of the latents.
    num_probes
        Hessian-vector products with random signs, whose mean is the diagonal (Hutchinson 1989; Bekas,
        Kokiopoulou and Saad 2007); 0 leaves the curvature at one. An estimate below a thousandth of
        its leaf's mean is raised to that, as noise could make it negative. Where a gradient cannot be
        differentiated, a warning says so before the search, and the curvature is left at one.

    References
    ----------
    Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical
    Programming 45 (1989).
    """
    checks.check_outside_programs("find_mode", (rng_key, target, position))
    position = checks.admit(target, position)
    optax = need("optax", "optim")
    # What may raise comes before the search, whose result it would lose.
    independence.check_rows(target, position)
    options = {"rng_key": rng_key, "num_probes": num_probes, "pins": Pins.of(position)}
    product = _hessian_product(target, position, options) if num_probes else None
    if isinstance(product, Exception):
        _warn_of_no_curvature(product)
    found, value, steps, gain, has_moved = _climb(target, position, tolerance, max_steps, optax=optax)
    checks.check_finite_start(target, found, value, ())
    is_converged = bool(gain <= tolerance)
    if not is_converged and not has_moved:
        _warn_of_no_step(float(gain))
    curvature = tree.ones_like(found)
    if callable(product):
        try:
            estimate = _curvature(target, found, product=product, **options)
            curvature = jax.block_until_ready(estimate)
        except jax.errors.JaxRuntimeError as error:  # No memory, or an error of a host callback.
            _warn_of_no_curvature(error)
    found, curvature = cut(target, found), cut(target, curvature)
    return Mode(found, curvature, value, int(steps), is_converged)


def _forward(grad: Callable, position: PyTree, vector: PyTree) -> PyTree:
    return jax.jvp(grad, (position,), (vector,))[1]


def _reverse(grad: Callable, position: PyTree, vector: PyTree) -> PyTree:
    return jax.vjp(grad, position)[1](vector)[0]  # The Hessian is symmetric.


def _hessian_product(target: Target, position: PyTree, options: dict) -> Callable | Exception:
    """Return a way to multiply by the Hessian, or why the gradient has no derivative.

    A function with its own gradient, such as an ODE's solution, often has only the reverse one.
    """
    found: Callable | Exception = _forward
    for product in (_forward, _reverse):
        try:
            # Lowered, not only traced: JAX refuses some derivatives there.
            _curvature.lower(target, position, product=product, **options)
            return product
        except Exception as error:  # What JAX and its users raise while they differentiate.
            found = error
    return found


def _warn_of_no_curvature(error: Exception) -> None:
    warnings.warn(
        "find_mode: the Hessian cannot be computed, so the curvature is left at one. The mode holds, "
        "but inverse_mass_matrix and the noise of laplace_start are not of the target. Pass "
        f"num_probes=0 if that is meant. {type(error).__name__}: {str(error).splitlines()[0]}",
        SamplingWarning,
        stacklevel=CALLER_OF_FIND_MODE,
    )


def _warn_of_no_step(gain: float) -> None:
    warnings.warn(
        f"find_mode: the search stopped where a step should gain {gain:.3g} nats, and no step gains "
        "any. The gradient is not that of the density, the density has a kink or a jump there, or "
        "rounding hides the gain. is_converged is False; check the position before you start from it",
        SamplingWarning,
        stacklevel=CALLER_OF_FIND_MODE,
    )


@partial(jax.jit, static_argnames="optax")
def _climb(target, position, tolerance, max_steps, *, optax):
    direction = optax.lbfgs(linesearch=None)
    search = optax.scale_by_zoom_linesearch(20, initial_guess_strategy="one")

    def value_and_grad(x):
        terms, grad = target.terms_and_grad(x)
        return -tree.total(terms), jax.tree.map(jnp.negative, grad)

    def climbs(carry):
        *_, gain, has_moved, step = carry
        return (step < max_steps) & (gain > tolerance) & has_moved

    def climb(carry):
        x, (memory, tried), value, grad, _, _, step = carry
        toward, memory = direction.update(grad, memory, x)
        updates, tried = search.update(
            toward, tried, x, value=value, grad=grad, value_fn=_with_grad(value_and_grad)
        )
        # The step of a search that fails gains nothing, however far the mode is.
        gain = jnp.maximum(-tree.dot(toward, grad), -tree.dot(updates, grad))
        before, x = x, tree.add(x, updates)
        has_moved = tree.dot(tree.sub(x, before), toward) != 0
        value, grad = value_and_grad(x)
        return x, (memory, tried), value, grad, gain, has_moved, step + 1

    value, grad = value_and_grad(position)
    no_gain, states = jnp.full_like(value, jnp.inf), (direction.init(position), search.init(position))
    carry = (position, states, value, grad, no_gain, True, 0)
    x, _, value, _, gain, has_moved, steps = jax.lax.while_loop(climbs, climb, carry)
    return x, -value, steps, gain, has_moved


def _with_grad(value_and_grad):
    """Return the value as a function whose derivative is the streamed gradient."""

    @jax.custom_jvp
    def value(x):
        return value_and_grad(x)[0]

    @value.defjvp
    def _(primals, tangents):
        out, grad = value_and_grad(primals[0])
        return out, tree.dot(grad, tangents[0]).astype(out.dtype)

    return value


@partial(jax.jit, static_argnames=("num_probes", "pins", "product"))
def _curvature(target, position, rng_key, *, num_probes, pins, product):
    def probe(total, i):
        key = jax.random.fold_in(rng_key, i)
        signs = jax.tree.map(jnp.sign, tree.normal_like(key, position))
        hessian_signs = product(target.grad, position, signs)
        return jax.tree.map(lambda t, s, h: t - s * h / num_probes, total, signs, hessian_signs), None

    total, _ = jax.lax.scan(probe, jax.tree.map(jnp.zeros_like, position), jnp.arange(num_probes))
    return pins(jax.tree.map(_raised, total, is_leaf=is_padded))


def _raised(curvature: Any) -> Any:
    """Raise a leaf to a share of the mean of its real elements; that of pad is zero."""
    mean = jnp.sum(jnp.abs(values_of(curvature))) / math.prod(real_shape(curvature))
    return jax.tree.map(lambda c: jnp.maximum(c, LEAST_CURVATURE * mean), curvature)
