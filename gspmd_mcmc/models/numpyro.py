"""NumPyro models as targets: sharded plates are streamed, and the target is checked against NumPyro."""

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.models.numpyro_arguments import Bound, module
from gspmd_mcmc.models.numpyro_sites import NumpyroModel, read_sites
from gspmd_mcmc.models.numpyro_trace import trace_sites
from gspmd_mcmc.models.site_model import CannotStream
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.mesh import axes_of, named_sharding
from gspmd_mcmc.placement.padding import unpadded, values_of
from gspmd_mcmc.targets import independence
from gspmd_mcmc.targets.checks import check_outside_programs
from gspmd_mcmc.targets.function import as_partial, run
from gspmd_mcmc.targets.local import cut, lay_out
from gspmd_mcmc.targets.posterior import Posterior

CHECK_POINTS = 10
CHECK_TOLERANCE = 1e-3


@on_any_mesh
def from_numpyro(
    model: Callable,
    /,
    *args: Any,
    plates: dict[str, Any] | None = None,
    check: bool | None = None,
    **kwargs: Any,
) -> Posterior:
    """Turn a NumPyro model into a target. Needs the extra ``models``.

    Parameters
    ----------
    model
        A function with NumPyro's primitives.
    args, kwargs
        The model's arguments. `place` arrays with the rows of a sharded plate over its mesh axis first
        (they are `Padded` if the mesh does not divide them); the model sees blocks of their rows.
    plates
        Maps the name of a plate to the mesh axis, or axes, that its rows lie over. Latents inside it
        lie with their rows, observations inside it are streamed. A plate without latents may read one
        row of another plate for each of its own, by an index that is data (``effect[patient]``): its
        rows then lie with those that they read, as those of `Groups`. A plate with coupled rows (a
        latent of one row is read in another, or outside the plate) is evaluated at once, with a
        warning.
    check
        Whether to check the target now (None: yes). Some rows of each plate are evaluated in several
        blocks, as `sample` does too (``x - x.mean()`` couples rows). Log density and gradient at one
        point are compared with NumPyro's own, which takes as much memory as NumPyro does.

    Returns
    -------
    Posterior
        `Draws`, ``target.params`` and ``target.unconstrain`` have constrained values in the model's own
        shapes; draws hold ``deterministic`` sites too. A position is a dict of the unconstrained
        latents, by site; a latent of a sharded plate has that plate's rows first.
        ``target.origin()`` is a position to start around, which `sample` takes when it is given none.

    Raises
    ------
    ValueError
        If a plate is not in the model, a latent is discrete, an observation lies outside its support,
        an index lies outside the plate that it reads, or the target disagrees with NumPyro.
    """
    module("numpyro")
    check_outside_programs("from_numpyro", (args, kwargs))
    _refuse_own_keywords(model, {"plates": plates, "check": check})
    bound, sites = trace_sites(Bound.of(model, args, kwargs))
    sharded = _sharded_plates(sites, plates or {}, bound.arrays)
    while True:
        try:
            found = read_sites(bound, sites, sharded)
            target = found.posterior()
            break
        except CannotStream as error:
            sent = _sent_where_whole(error, sites, bound.arrays)
            warnings.warn(f"{error}. It is evaluated at once{sent}", stacklevel=3)
            sharded = {name: x for name, x in sharded.items() if name != error.plate}
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(bound.arrays)):
        return target  # of a mesh that is not there: nothing to check with
    arrays, origin, found = unpadded(bound.arrays), target.origin(), found.without_arrays()
    outside = run(as_partial(partial(_num_outside, found)), arrays, target, lay_out(target, origin))
    for name, count in outside.items():
        if int(count):
            raise ValueError(
                f"site {name!r}: {int(count)} of its observations lie outside the support of its "
                "distribution, where the density is 0"
            )
    if check is None or check:
        _check_against_numpyro(found, arrays, target)
    return target


def _refuse_own_keywords(model: Callable, ours: dict[str, Any]) -> None:
    """Raise where a model has an argument that is called as one of ours, and may be meant."""
    bound = getattr(model, "keywords", {})  # of a functools.partial
    for name, parameter in inspect.signature(model).parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if name in ours and name not in bound and (is_needed or ours[name] is not None):
            raise ValueError(
                f"{name}: the model has an argument of that name, and from_numpyro has one too. Bind "
                f"the model's own: from_numpyro(functools.partial(model, {name}=...), ...)"
            )


def _sharded_plates(sites: dict, plates: dict[str, Any], arrays: dict) -> dict[str, tuple[int, Any]]:
    """Return name to rows and mesh axes of the plates that are to be sharded."""
    of_model = {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}
    # A plate within a scan is no site.
    of_model |= {f.name: f.size for site in sites.values() for f in site.get("cond_indep_stack", ())}
    shardings = [named_sharding(values_of(x)) for x in arrays.values()]
    axes = {axis for s in shardings if s is not None for axis in s.mesh.axis_names}
    for name, over in plates.items():
        if name not in of_model:
            raise ValueError(f"plates: the model has no plate {name!r}; it has {sorted(of_model)}")
        if axes and set(axes_of(over)) - axes:
            raise ValueError(
                f"plates: {name!r} is to lie over {over!r}, but the arguments lie on a mesh with axes "
                f"{sorted(axes)}"
            )
    # A plate without sample sites, of a model whose likelihood is left out, has nothing to stream.
    samples = [site for site in sites.values() if site["type"] == "sample"]
    in_use = {frame.name for site in samples for frame in site["cond_indep_stack"]}
    return {name: (of_model[name], over) for name, over in plates.items() if name in in_use}


def _sent_where_whole(error: CannotStream, sites: dict, arrays: dict) -> str:
    """Say what each leapfrog sends of a plate that is whole, and that rows of another one read."""
    shardings = [named_sharding(values_of(x)) for x in arrays.values()]
    in_plate = [
        np.zeros(0, s["value"].dtype).itemsize * math.prod(s["unconstrained"])
        for s in sites.values()
        if "unconstrained" in s and any(f.name == error.plate for f in s["cond_indep_stack"])
    ]
    if error.read_by is None or not in_plate or not any(s and s.mesh.size > 1 for s in shardings):
        return ""
    return (
        f": its latents are whole on every device, and a leapfrog sends their gradient, "
        f"{sum(in_plate):,} bytes a chain"
    )


def _num_outside(model: NumpyroModel, arrays: dict, target: Posterior, position: dict) -> dict:
    """Count each observed site's values outside the support."""
    return model.num_outside(cut(target, target.constrained(position)), arrays)


def _check_against_numpyro(model: NumpyroModel, arrays: dict, target: Posterior) -> None:
    """Compare log density and gradient with NumPyro's at a point, everything at once."""
    origin = target.origin()
    independence.check_rows(target, lay_out(target, origin))
    theirs = as_partial(model.numpyros_log_density)
    for i in range(CHECK_POINTS):
        with explained_loops(model.name):
            position, value, grad = _value_and_grad(theirs, jax.random.key(i), origin, arrays)
        if np.isfinite(value):
            break
    else:
        raise ValueError(
            f"NumPyro's log density is not finite at {CHECK_POINTS} points: look at the model"
        )
    our_value, our_grad = _our_value_and_grad(target, lay_out(target, position))
    _compare("log density", our_value, value)
    for name, leaf in cut(target, our_grad).items():
        _compare(f"gradient of {name!r}", leaf, grad[name])


@contextlib.contextmanager
def explained_loops(name: str) -> Iterator[None]:
    """Say what to do about a loop that gradients cannot run backwards."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Reverse-mode differentiation"):
            raise
        raise ValueError(
            f"{name}: it has a loop whose number of rounds is not known (lax.while_loop, or fori_loop "
            "with bounds that are computed), and reverse-mode gradients run loops backwards. Write "
            "lax.scan, or fori_loop with fixed bounds, with as many rounds as are ever needed and "
            "jnp.where for those after the end; or give the loop a jax.custom_vjp. NumPyro's "
            "forward_mode_differentiation has no counterpart"
        ) from error


@jax.jit
def _value_and_grad(
    function: Callable, rng_key: jax.Array, origin: dict, arrays: dict
) -> tuple[dict, jax.Array, dict]:
    """Return a random position near the origin, and the function's value and gradient there."""
    position = jax.tree.map(lambda z: z / 2, tree.normal_like(rng_key, origin))
    return position, *jax.value_and_grad(function)(position, arrays)


@jax.jit
def _our_value_and_grad(target: Posterior, position: dict) -> tuple[jax.Array, dict]:
    terms, grad = target.terms_and_grad(position)
    return tree.total(terms), grad


def _compare(what: str, ours: Any, theirs: Any) -> None:
    ours, theirs = (np.asarray(to_host(x), np.float64) for x in (ours, theirs))
    apart = np.linalg.norm(ours - theirs) / (1 + np.linalg.norm(theirs))
    if not apart <= CHECK_TOLERANCE:
        raise ValueError(
            f"the streamed {what} differs from NumPyro's by {apart:.2g} of its size, so a block of "
            "rows does not stand alone in this model: rows may be coupled, or an array be closed over "
            "whole and not passed as an argument. Leave the plate out of plates="
        )
