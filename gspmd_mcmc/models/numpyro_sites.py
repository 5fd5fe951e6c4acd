"""How a NumPyro model is run: its latents substituted, its sharded plates cut to the rows of a block.

What a model computes stays NumPyro's, under its own handlers; log probabilities are NumPyro's too,
except for those that have a cheaper exact derivative here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.models import indexed_plates
from gspmd_mcmc.models.numpyro_arguments import HANDLERS, Bound, module, without_validation
from gspmd_mcmc.models.numpyro_trace import given
from gspmd_mcmc.models.row_owners import owners
from gspmd_mcmc.models.site_model import (
    CannotStream,
    Site,
    SiteModel,
    Streamed,
    cannot_draw,
    fitting_plates,
)
from gspmd_mcmc.models.supports import (
    bijection_of,
    constrained,
    log_jacobian_of,
    unconstrained,
)
from gspmd_mcmc.placement.padding import unpadded
from gspmd_mcmc.targets.bijections import ByModel
from gspmd_mcmc.targets.likelihoods import bernoulli_logits, categorical_logits


def _bijection(name: str, site: dict, row_axis: int | None, plate_arrays: set[str]) -> Any:
    """Return a latent's bijection: the one computed already, unless its bounds belong to rows.

    ``row_axis`` is the axis of the rows of a latent in a sharded plate; ``plate_arrays`` are the
    arguments with the rows of such plates.
    """
    bijection, reads = site.get("bounds", (site["bijection"], set()))
    if not isinstance(bijection, ByModel):
        if row_axis is None:
            return bijection
        # Bounds with an axis for the rows are in NumPyro's order, and positions have the rows first.
        num_behind = jnp.ndim(site["value"]) - row_axis - 1
        has_rows = any(jnp.ndim(x) > num_behind for x in jax.tree.leaves(bijection))
        if not has_rows and not reads & plate_arrays:
            return bijection
        bijection = ByModel(name)
    if "_scan_current_index" in site["infer"]:
        raise ValueError(
            f"site {name!r}: its support {site['fn'].support} depends on other values of a scan. "
            "Sample it on a fixed support, and scale it in the model"
        )
    return bijection


def read_sites(bound: Bound, sites: dict, sharded: dict[str, tuple[int, Any]]) -> "NumpyroModel":
    """Read the sites of a trace; ``sharded`` names plates with their rows and mesh axes."""
    num_rows = {name: size for name, (size, _) in sharded.items()}
    over = {name: axes for name, (_, axes) in sharded.items()}
    fitting = fitting_plates(bound.arrays, num_rows, over)
    first = tuple(plates[0] if plates else None for plates in fitting)
    model = _read_sites(bound, sites, num_rows, over, first)
    found = owners(model, fitting)
    return model if found == first else _read_sites(bound, sites, num_rows, over, found)


def _read_sites(
    bound: Bound,
    sites: dict,
    num_rows: dict[str, int],
    over: dict[str, Any],
    plate_of_leaf: tuple[str | None, ...],
) -> "NumpyroModel":
    row_arrays = {n for n, p in zip(sorted(bound.arrays), plate_of_leaf, strict=True) if p is not None}
    row_axis, plate_of, found = {}, {}, []
    for name, site in ((n, s) for n, s in sites.items() if s["type"] == "sample"):
        frames = [f for f in site["cond_indep_stack"] if f.name in num_rows]
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
            shape = list(site["unconstrained"])
            bijection = _bijection(name, site, row_axis.get(name), row_arrays)
            if frames:
                shape.insert(0, shape.pop(row_axis[name]))
            latent = jax.ShapeDtypeStruct(tuple(shape), site["value"].dtype)
        found.append(Site(name, plate_of.get(name), latent, bijection, row_axis.get(name, 0)))
    by_model = {s.name for s in found if isinstance(s.bijection, ByModel)}
    return NumpyroModel(
        name=bound.name,
        door="from_numpyro",
        args=bound.arrays,
        sites=tuple(found),
        plate_of_leaf=plate_of_leaf,
        num_rows=num_rows,
        derived_names=tuple(
            n for n, s in sites.items() if s["type"] == "deterministic" or n in by_model
        ),
        bound=bound.without_arrays(),
        row_axis=row_axis,
        plate_of=plate_of,
        over=over,
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
    over
        Sharded plate to the mesh axes that it is to lie over.
    """

    bound: Bound
    row_axis: dict[str, int]
    plate_of: dict[str, str]
    over: dict[str, Any]

    def streamed(self, leaves: list, dummies: dict) -> dict[str, Streamed]:
        """Say of each plate how it is streamed; a plate may read another one by an index."""
        try:
            return indexed_plates.streamed(self, self.over, leaves, dummies)
        except CannotStream as error:
            if error.__cause__ is None:
                raise
            raise self._explained(error) from error.__cause__

    def _explained(self, error: CannotStream) -> CannotStream:
        """Name the argument of a plate's length that the model looks at, where blocks of rows fail."""
        num = self.num_rows[error.plate]
        for name, x in self.bound.looked_at.items():
            if np.ndim(x) and len(x) == num:
                return CannotStream(
                    error.plate,
                    f"the model looks at the values of its argument {name} while it is traced "
                    "(np.unique(x), int(x.max())). Compute what it needs of them before, and pass that "
                    "as an argument",
                )
        return error

    def log_probs(self, values: dict, args: dict, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
        """Run the model on blocks of rows."""
        trace = self.trace(values, args, sizes)
        with jax.numpy_rank_promotion("allow"):
            return {name: self._log_prob(name, values, trace, sizes) for name in wanted}

    def derived(self, args: dict, params: dict) -> dict[str, jax.Array]:
        """Return deterministic sites, and latents that the model constrains."""
        trace = self.trace(params, unpadded(args), {})
        return {n: jnp.asarray(trace[n]["value"]) for n in self.derived_names}

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
        trace = self.trace(params, arrays, {})
        observed = {n: s for n, s in trace.items() if s["type"] == "sample" and n not in params}
        with jax.numpy_rank_promotion("allow"):
            return {n: jnp.sum(~_is_possible(s["fn"], s["value"])) for n, s in observed.items()}

    def numpyros_log_density(self, position: dict, arrays: dict) -> jax.Array:
        """Return NumPyro's own log density, of everything at once."""
        potential_energy = module("numpyro.infer.util").potential_energy
        model, given = self.bound.opened(arrays)
        seeded = module("numpyro.handlers").seed(model, 0)
        jacobians = tuple(f"_{name}_log_det" for name in self.latents)
        promotion = jax.numpy_rank_promotion("allow")
        with HANDLERS, promotion, without_validation(), unscaled(jacobians):
            return -potential_energy(seeded, given.args, given.kwargs, self._as_numpyro(position))

    def trace(self, values: dict, arrays: dict, sizes: dict) -> dict[str, dict]:
        """Run the model with constrained values whose rows come first."""
        return self.bound.call(arrays, partial(self._substituted, self._as_numpyro(values), sizes))

    def _substituted(self, values: dict[str, Any], sizes: dict, msg: dict) -> Any:
        """Return a message's value: rows of a resized plate, a latent's value; None leaves it alone."""
        name = msg["name"]
        if msg["type"] == "plate":
            return jnp.arange(sizes[name]) if name in sizes else None
        if msg["type"] == "sample" and name in values and name in self.by_model:
            return constrained(bijection_of(f"site {name!r}", msg["fn"]), values[name])
        return given(values, msg)

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
            taken = 1.0
            if plate is not None and plate in sizes and plate in trace:  # one within a scan is no site
                taken = sizes[plate] / trace[plate]["args"][0]
            out = site["scale"] * taken * out
        if name in self.by_model:
            bijection = bijection_of(f"site {name!r}", site["fn"])
            x = self._as_numpyro({name: values[name]})[name]
            out = out + log_jacobian_of(bijection, x, site["value"], out.ndim)
        return jnp.moveaxis(out, self.row_axis[name], 0) if plate else out


def unscaled(names: tuple[str, ...]) -> Any:
    """Return a handler that takes scales and masks off some sites."""

    class Unscaled(module("numpyro.primitives").Messenger):
        def process_message(self, msg: dict) -> None:
            if msg["type"] == "sample" and msg["name"] in names:
                msg["scale"] = None
                msg["fn"] = getattr(msg["fn"], "base_dist", msg["fn"])

    return Unscaled()


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


def _is_possible(distribution: Any, value: jax.Array) -> jax.Array:
    """Tell which values lie in a distribution's support, or under a mask, wherever that is put on."""
    dist = module("numpyro.distributions")
    if isinstance(distribution, dist.MaskedDistribution):
        inside = _is_possible(distribution.base_dist, value)
        return inside | ~jnp.asarray(distribution._mask)
    if isinstance(distribution, dist.Independent):
        inside = _is_possible(distribution.base_dist, value)
        num = distribution.reinterpreted_batch_ndims
        return jnp.all(inside, axis=tuple(range(inside.ndim - num, inside.ndim)))
    if isinstance(distribution, dist.ExpandedDistribution):
        return _is_possible(distribution.base_dist, value)
    return jnp.asarray(distribution.support(value))


def _categorical(logits: jax.Array, labels: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(logits.shape[:-1], labels.shape)
    logits = jnp.broadcast_to(logits, (*shape, logits.shape[-1])).reshape(-1, logits.shape[-1])
    return categorical_logits(logits, jnp.broadcast_to(labels, shape).reshape(-1)).reshape(shape)
