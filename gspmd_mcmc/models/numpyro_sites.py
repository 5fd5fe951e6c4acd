"""How a NumPyro model is run: its latents substituted, its sharded plates cut to the rows of a block.

What a model computes stays NumPyro's, under its own handlers; log probabilities are NumPyro's too,
except for those that have a cheaper exact derivative here.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.models.site_model import (
    Site,
    SiteModel,
    cannot_draw,
    must_be_continuous,
    rows_of_plates,
)
from gspmd_mcmc.models.supports import (
    bijection_for,
    bijection_of,
    constrained,
    log_jacobian_of,
    unconstrained,
)
from gspmd_mcmc.placement.numbers import as_array, check_leaves
from gspmd_mcmc.placement.padding import is_padded, unpadded
from gspmd_mcmc.targets.bijections import ByModel
from gspmd_mcmc.targets.likelihoods import bernoulli_logits, categorical_logits


def module(name: str) -> Any:
    """Import a module of NumPyro's, which need not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("numpyro is missing: pip install 'gspmd_mcmc[models]' brings it") from error


@dataclass(frozen=True, eq=False)
class Bound:
    """A model and its arguments by name, the arrays among them apart from the rest.

    Attributes
    ----------
    arrays
        Path of an argument's leaf to the array.
    lists
        Names of the arguments that are Python lists.
    """

    model: Callable
    signature: inspect.Signature
    treedef: Any
    paths: tuple[str, ...]
    constants: dict[str, Any]
    arrays: dict[str, Any]
    lists: tuple[str, ...]

    @classmethod
    def of(cls, model: Callable, args: tuple, kwargs: dict) -> "Bound":
        """Bind a model's arguments."""
        signature = inspect.signature(model)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        flat, treedef = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_padded)
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        # A NumPy scalar may be the size of a plate: like a Python number, it is none of the arrays.
        arrays = {
            k: x if is_padded(x) else as_array(f"argument {k}", x)
            for k, x in leaves.items()
            if is_padded(x) or (hasattr(x, "dtype") and not isinstance(x, np.generic))
        }
        constants = {k: x for k, x in leaves.items() if k not in arrays}
        check_leaves("argument ", constants)
        lists = tuple(name for name, x in arguments.items() if isinstance(x, list))
        return cls(model, signature, treedef, tuple(leaves), constants, arrays, lists)

    def arguments(self, arrays: dict[str, Any]) -> inspect.BoundArguments:
        """Return the model's arguments with other arrays."""
        leaves = [(self.constants | arrays)[path] for path in self.paths]
        return inspect.BoundArguments(self.signature, self.treedef.unflatten(leaves))

    def call(self, arrays: dict[str, Any], substitute: Callable, rng_key: Any = 0) -> dict[str, dict]:
        """Run the model with other arrays under a substitution; return its trace.

        What is neither substituted nor observed is drawn.
        """
        handlers, given = module("numpyro.handlers"), self.arguments(arrays)
        model = handlers.substitute(handlers.seed(self.model, rng_key), substitute_fn=substitute)
        with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
            return handlers.trace(model).get_trace(*given.args, **given.kwargs)

    def trace(self) -> dict[str, dict]:
        """Run the model in the abstract, on everything, from NumPyro's own start.

        Latents get two entries more, ``bijection`` and the shape of their ``unconstrained`` value.
        """

        def run(arrays: dict[str, Any]) -> None:
            found.update(self.call(arrays, module("numpyro.infer").init_to_uniform))
            for name, site in found.items():
                if site["type"] == "sample" and not site["is_observed"]:
                    site |= _unconstrained(name, site)

        found: dict[str, dict] = {}
        try:
            jax.eval_shape(run, unpadded(self.arrays))
        except (TypeError, AttributeError) as error:
            if not self.lists:
                raise
            raise TypeError(
                f"the model fails: {error}. Its arguments {list(self.lists)} are Python lists, which "
                "do not compute as arrays do: pass numpy.asarray(...) of them"
            ) from error
        return found


def _unconstrained(name: str, site: dict) -> dict[str, Any]:
    """Return a latent's bijection, and the shape of its unconstrained value."""
    support = site["fn"].support
    if support.is_discrete:
        raise must_be_continuous(f"site {name!r} is discrete (support {support})")
    bijection, shape = bijection_for(name, f"site {name!r}", site["fn"], _shape(site))
    if isinstance(bijection, ByModel) and "_scan_current_index" in site["infer"]:
        raise ValueError(
            f"site {name!r}: its support {support} depends on other values of a scan. Sample it on a "
            "fixed support, and scale it in the model"
        )
    return {"bijection": bijection, "unconstrained": shape}


def _shape(msg: dict) -> tuple[int, ...]:
    """Shape of a site's value; a plate has made ``sample_shape`` a part of the distribution's own."""
    return (*msg["kwargs"].get("sample_shape", ()), *msg["fn"].shape())


def read_sites(bound: Bound, sites: dict, sharded: dict[str, tuple[int, Any]]) -> "NumpyroModel":
    """Read the sites of a trace; ``sharded`` names plates with their rows and mesh axes."""
    if any(site["type"] == "param" for site in sites.values()):
        raise ValueError("the model has numpyro.param sites; HMC samples sample sites only")
    row_axis, plate_of, found = {}, {}, []
    for name, site in ((n, s) for n, s in sites.items() if s["type"] == "sample"):
        frames = [f for f in site["cond_indep_stack"] if f.name in sharded]
        if len(frames) > 1:
            raise ValueError(
                f"site {name!r} lies in plates {[f.name for f in frames]}, which are all to be "
                "sharded; shard one of them: its rows hold the other's whole"
            )
        for frame in frames:
            row_axis[name] = len(site["fn"].batch_shape) + frame.dim
            plate_of[name] = frame.name
        latent, bijection = None, None
        if not site["is_observed"]:
            shape, bijection = list(site["unconstrained"]), site["bijection"]
            if frames:
                shape.insert(0, shape.pop(row_axis[name]))
            latent = jax.ShapeDtypeStruct(tuple(shape), site["value"].dtype)
        found.append(Site(name, plate_of.get(name), latent, bijection))
    by_model = {s.name for s in found if isinstance(s.bijection, ByModel)}
    num_rows = {name: size for name, (size, _) in sharded.items()}
    over = {name: axes for name, (_, axes) in sharded.items()}
    return NumpyroModel(
        name=getattr(bound.model, "__name__", type(bound.model).__name__),
        door="from_numpyro",
        args=bound.arrays,
        sites=tuple(found),
        plate_of_leaf=rows_of_plates(bound.arrays, num_rows, over),
        num_rows=num_rows,
        derived_names=tuple(
            n for n, s in sites.items() if s["type"] == "deterministic" or n in by_model
        ),
        # Functions of the target hold it, and take the arrays as arguments.
        bound=replace(bound, arrays={}),
        row_axis=row_axis,
        plate_of=plate_of,
    )


@dataclass(frozen=True, eq=False)
class NumpyroModel(SiteModel):
    """A NumPyro model as one of named sites.

    Attributes
    ----------
    row_axis
        Site to the axis that the rows of its sharded plate are in NumPyro's shapes.
    plate_of
        Site to its sharded plate.
    """

    bound: Bound
    row_axis: dict[str, int]
    plate_of: dict[str, str]

    def log_probs(self, values: dict, args: dict, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
        """Run the model on blocks of rows."""
        trace = self.trace(values, args, sizes)
        with jax.numpy_rank_promotion("allow"):
            return {name: self._log_prob(name, values, trace, sizes) for name in wanted}

    def derived(self, args: dict, params: dict) -> dict[str, jax.Array]:
        """Return deterministic sites, and latents that the model constrains."""
        trace = self.trace(params, unpadded(args), {})
        return self._rows_first({n: jnp.asarray(trace[n]["value"]) for n in self.derived_names})

    def draw(self, args: dict, rng_key: jax.Array) -> dict[str, jax.Array]:
        """Draw the latents from their prior."""

        def look(msg: dict) -> None:
            if msg["type"] == "sample":
                looked_at.append(msg)

        looked_at: list[dict] = []
        try:
            trace = self.bound.call(unpadded(args), look, rng_key)
        except NotImplementedError as error:
            raise cannot_draw(f"site {looked_at[-1]['name']!r}", looked_at[-1]["fn"]) from error
        sites = {name: trace[name] for name in self.latents}
        return self._rows_first(
            {n: unconstrained(f"site {n!r}", s["fn"], s["value"]) for n, s in sites.items()}
        )

    def num_outside(self, params: dict, arrays: dict) -> dict[str, jax.Array]:
        """Count each observed site's values outside the support."""

        def count(site: dict) -> jax.Array:
            mask = getattr(site["fn"], "_mask", True)
            return jnp.sum(~jnp.asarray(site["fn"].support(site["value"])) & jnp.asarray(mask))

        trace = self.trace(params, arrays, {})
        observed = {n: s for n, s in trace.items() if s["type"] == "sample" and n not in params}
        with jax.numpy_rank_promotion("allow"):
            return {name: count(site) for name, site in observed.items()}

    def numpyros_log_density(self, position: dict, arrays: dict) -> jax.Array:
        """Return NumPyro's own log density, of everything at once."""
        potential_energy = module("numpyro.infer.util").potential_energy
        given = self.bound.arguments(arrays)
        with jax.numpy_rank_promotion("allow"):
            seeded = module("numpyro.handlers").seed(self.bound.model, 0)
            return -potential_energy(seeded, given.args, given.kwargs, self._as_numpyro(position))

    def trace(self, values: dict, arrays: dict, sizes: dict) -> dict[str, dict]:
        """Run the model with constrained values whose rows come first."""
        return self.bound.call(arrays, partial(self._substituted, self._as_numpyro(values), sizes))

    def _substituted(self, values: dict[str, Any], sizes: dict, msg: dict) -> Any:
        """Return a message's value: rows of a resized plate, a latent's value; None leaves it alone."""
        name = msg["name"]
        if msg["type"] == "plate":
            return jnp.arange(sizes[name]) if name in sizes else None
        if msg["type"] != "sample" or name not in values:
            return None
        if name in self.by_model:
            return constrained(bijection_of(f"site {name!r}", msg["fn"]), values[name])
        value, index = values[name], msg["infer"].get("_scan_current_index")
        return value if index is None or value.ndim <= len(_shape(msg)) else value[index]

    def _as_numpyro(self, values: dict) -> dict[str, jax.Array]:
        """Move the rows from the first axis to where NumPyro has them."""
        axes = self.row_axis
        return {n: jnp.moveaxis(x, 0, axes[n]) if n in axes else x for n, x in values.items()}

    def _rows_first(self, values: dict) -> dict[str, jax.Array]:
        axes = self.row_axis
        return {n: jnp.moveaxis(x, axes[n], 0) if n in axes else x for n, x in values.items()}

    def _log_prob(self, name: str, values: dict, trace: dict[str, dict], sizes: dict) -> jax.Array:
        site, plate = trace[name], self.plate_of.get(name)
        out = log_prob(site["fn"], site["value"])
        if site["scale"] is not None:
            # A plate of a fixed size takes a block for a subsample, and scales it up.
            taken = sizes[plate] / trace[plate]["args"][0] if plate and plate in sizes else 1.0
            out = site["scale"] * taken * out
        if name in self.by_model:
            bijection = bijection_of(f"site {name!r}", site["fn"])
            x = self._as_numpyro({name: values[name]})[name]
            out = out + log_jacobian_of(bijection, x, site["value"], out.ndim)
        return jnp.moveaxis(out, self.row_axis[name], 0) if plate else out


def log_prob(distribution: Any, value: jax.Array) -> jax.Array:
    """Log probability under a NumPyro distribution, with a cheap exact derivative where we have one."""
    dist = module("numpyro.distributions")
    kind = type(distribution)
    if kind is dist.BernoulliLogits:
        return bernoulli_logits(jnp.asarray(distribution.logits), jnp.asarray(value))
    if kind is dist.CategoricalLogits:
        return _categorical(jnp.asarray(distribution.logits), jnp.asarray(value))
    base: Any = getattr(distribution, "base_dist", None)
    if kind is dist.Independent:
        inner = log_prob(base, value)
        axes = tuple(range(inner.ndim - distribution.reinterpreted_batch_ndims, inner.ndim))
        return jnp.sum(inner, axis=axes)
    if kind is dist.ExpandedDistribution and base.event_dim == distribution.event_dim:
        inner = log_prob(base, value)
        return jnp.broadcast_to(inner, jnp.broadcast_shapes(distribution.batch_shape, inner.shape))
    innermost = getattr(base, "base_dist", base)
    is_cheap = type(innermost) in (dist.BernoulliLogits, dist.CategoricalLogits)
    if kind is dist.MaskedDistribution and is_cheap:
        return jnp.where(distribution._mask, log_prob(base, value), 0.0)
    return distribution.log_prob(value)


def _categorical(logits: jax.Array, labels: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(logits.shape[:-1], labels.shape)
    logits = jnp.broadcast_to(logits, (*shape, logits.shape[-1])).reshape(-1, logits.shape[-1])
    return categorical_logits(logits, jnp.broadcast_to(labels, shape).reshape(-1)).reshape(shape)
