"""What the sites of a NumPyro model are, from running it in the abstract."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.jax_private import open_program, without_unused
from gspmd_mcmc.models.numpyro_arguments import Bound, module, start
from gspmd_mcmc.models.site_model import must_be_continuous
from gspmd_mcmc.models.supports import bijection_for, bijection_of, is_tree
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.padding import num_real_rows, unpadded, values_of
from gspmd_mcmc.targets.bijections import ByModel
from gspmd_mcmc.targets.function import as_partial, run
from gspmd_mcmc.targets.streaming.rows import row_axes


def trace_sites(bound: Bound) -> tuple[Bound, dict[str, dict]]:
    """Run a model in the abstract; return its sites.

    Latents get three entries more: ``unconstrained``, the shape of that value, ``bijection``, and for
    one that the model computes and no latent decides ``bounds``: that bijection as it is, and the names
    of the arguments that it is computed from.
    """
    bound, sites = bound.traced(_of_latent)
    _check_sites(sites)
    latents = {n: s for n, s in sites.items() if "bijection" in s}
    if not latents:
        _refuse_params([n for n, s in sites.items() if s["type"] == "param"])
        names = [n for n, s in sites.items() if s["type"] == "deterministic"]
        raise ValueError(
            f"{bound.name}: the model has no latents, so there is nothing to sample: its sample sites "
            f"are all observed. Its deterministic sites {names} follow from the arguments alone"
        )
    _warn_of_sites(bound, sites, latents)
    computed = [n for n, s in latents.items() if isinstance(s["bijection"], ByModel)]
    arrays = unpadded(bound.arrays)
    function = partial(_sites_and_supports, bound.without_arrays(), computed)
    params = {n: s["value"] for n, s in sites.items() if s["type"] == "param"}
    values = {n: s["value"] for n, s in latents.items()}
    values, params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (values, params)
    )
    key = jax.random.key(0)
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(arrays, key, values, params)
    inputs = [*sorted(arrays), "key", *sorted(values)]
    inputs += [f"param {n}" for n in sorted(params) for _ in jax.tree.leaves(params[n])]
    owners = [None] * len(jax.tree.leaves(shapes[0]))
    owners += [n for n in sorted(shapes[1]) for _ in jax.tree.leaves(shapes[1][n])]

    def read_by(owner: str | None) -> set[str]:
        _, reads = without_unused(open_program(jaxpr), [x == owner for x in owners])
        return {name for name, is_read in zip(inputs, reads, strict=True) if is_read}

    _refuse_params([n for n in sorted(params) if f"param {n}" in read_by(None)])
    if "key" in read_by(None):
        warnings.warn(
            f"{bound.name}: its density depends on random numbers that are no latents (sites that "
            "handlers.block hides, numpyro.prng_key). They are drawn once, and stay the same in all "
            "draws. To sample them, let the handler show them; or pass them as an argument",
            stacklevel=4,
        )
    reads = {name: read_by(name) for name in shapes[1]}
    fixed = [name for name in shapes[1] if reads[name] <= arrays.keys()]
    found = _supports(bound, fixed, arrays) if fixed else {}
    for name, bijection in found.items():
        sites[name]["bounds"] = (bijection, reads[name])
    return bound, sites


def _refuse_params(read: list[str]) -> None:
    """Raise where the density reads param sites; what `random_flax_module` replaces is read nowhere."""
    if read:
        raise ValueError(
            f"the model has numpyro.param sites, and its density reads {read}; HMC samples sample "
            "sites only. Give them a prior by numpyro.sample, or pass their values as arguments. Of a "
            "network, random_flax_module, random_nnx_module and random_eqx_module sample the "
            "parameters that prior= names: name all, or give one distribution for all"
        )


def _check_sites(sites: dict[str, dict]) -> None:
    for name, site in sites.items():
        size, subsample = site["args"] if site["type"] == "plate" else (None, None)
        if subsample not in (None, size):
            raise ValueError(
                f"plates: {name!r} draws {subsample} of its {size} rows; HMC needs all of them. Leave "
                "subsample_size out: a plate's rows are streamed"
            )


def _warn_of_sites(bound: Bound, sites: dict[str, dict], latents: dict[str, dict]) -> None:
    """Warn where a model is evaluated otherwise than it may seem."""
    for name, site in latents.items():
        if site.get("is_substituted"):
            warnings.warn(
                f"site {name!r}: handlers.substitute gives it a value, and it is sampled all the same, "
                "as by NumPyro's MCMC. handlers.condition(model, data=...) holds it fixed",
                stacklevel=5,
            )
        is_masked = getattr(site["fn"], "_mask", None) is not None
        if (site["scale"] is not None or is_masked) and not _is_whole_line(site["fn"].support):
            warnings.warn(
                f"site {name!r}: its {'mask' if is_masked else 'scale'} is on its log probability "
                "alone. NumPyro scales and masks the Jacobian of a constrained latent too, so that its "
                "density depends on the parameterization",
                stacklevel=5,
            )
    placed = {n: x for n, x in bound.arrays.items() if row_axes(values_of(x)) is not None}
    rows = {num_real_rows(x, f"argument {n}") for n, x in placed.items()}
    for name, site in ((n, s) for n, s in sites.items() if s["type"] == "sample"):
        in_plates = {frame.dim for frame in site["cond_indep_stack"]}
        shape, dim = _missing_plate(site, in_plates)
        # NumPyro warns too where a site lies in other plates.
        if dim is not None and (in_plates or shape[dim] in rows):
            warnings.warn(
                f"site {name!r}: its {shape[dim]} rows (batch dimension {dim}) lie in no plate, so "
                "they cannot be streamed over a mesh. Write with numpyro.plate(name, size): around it",
                stacklevel=5,
            )


def _missing_plate(site: dict, in_plates: set[int]) -> tuple[tuple[int, ...], int | None]:
    """Return a site's batch shape, and its last dimension of several rows that no plate has."""
    of_value = jnp.shape(site["value"])
    of_value = of_value[: len(of_value) - len(site["fn"].event_shape)]
    shape = np.broadcast_shapes(site["fn"].batch_shape, of_value)
    dims = range(-1, -len(shape) - 1, -1)
    if "_scan_current_index" in site["infer"]:
        dims = dims[:-1]  # the rounds of a scan
    return shape, next((d for d in dims if shape[d] > 1 and d not in in_plates), None)


def _is_whole_line(support: Any) -> bool:
    base = getattr(support, "base_constraint", support)
    return base is module("numpyro.distributions").constraints.real


def _of_latent(site: dict) -> dict[str, Any]:
    """Return the bijection of a latent, and the shape of its unconstrained value."""
    if site["type"] != "sample" or site["is_observed"]:
        return {}
    name, support = site["name"], site["fn"].support
    if support.is_discrete:
        raise must_be_continuous(f"site {name!r} is discrete (support {support})")
    bijection, shape = bijection_for(name, f"site {name!r}", site["fn"], shape_of(site))
    return {"bijection": bijection, "unconstrained": shape, "value": jnp.asarray(site["value"])}


def _sites_and_supports(
    bound: Bound, names: list[str], arrays: dict, rng_key: jax.Array, values: dict, params: dict
) -> tuple[list, dict]:
    """Return what the density of all sites is computed from, and the bijections of some latents."""

    def substitute(msg: dict) -> Any:
        return params[msg["name"]] if msg["type"] == "param" else given(values, msg)

    trace = bound.call(arrays, substitute, rng_key)
    sites = [site for site in trace.values() if site["type"] == "sample"]
    read = [(s["value"], s["fn"] if is_tree(s["fn"]) else None, s["scale"]) for s in sites]
    found = {name: bijection_of(f"site {name!r}", trace[name]["fn"]) for name in names}
    return jax.tree.leaves(read), {name: x for name, x in found.items() if is_tree(x)}


def _supports(bound: Bound, names: list[str], arrays: dict) -> dict[str, Any]:
    """Compute bijections that are the same whatever the latents are."""
    function = as_partial(partial(_supports_alone, bound.without_arrays(), names))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arrays)):
        return jax.eval_shape(function, arrays)
    return jax.tree.map(lambda x: jnp.asarray(to_host(x)), run(function, arrays))


def _supports_alone(bound: Bound, names: list[str], arrays: dict) -> dict[str, Any]:
    trace = bound.call(arrays, start)
    return {name: bijection_of(f"site {name!r}", trace[name]["fn"]) for name in names}


def given(values: dict[str, Any], msg: dict) -> Any:
    """Return the value of a latent, in a scan that of the round at hand; None leaves a site alone."""
    if msg["type"] != "sample" or msg["name"] not in values:
        return None
    value, index = values[msg["name"]], msg["infer"].get("_scan_current_index")
    return value if index is None or value.ndim <= len(shape_of(msg)) else value[index]


def shape_of(msg: dict) -> tuple[int, ...]:
    """Shape of a site's value; a plate has made ``sample_shape`` a part of the distribution's own."""
    return (*msg["kwargs"].get("sample_shape", ()), *msg["fn"].shape())
