"""The posterior of some parts of a joint distribution, given the others."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gspmd_mcmc.models import numpyro_sites, sharded
from gspmd_mcmc.models.joint_parts import run, trace
from gspmd_mcmc.models.sharded import Sharded, plain, shown, with_rows_apart
from gspmd_mcmc.models.site_model import (
    CannotStream,
    Site,
    SiteModel,
    cannot_draw,
    fitting_plates,
    must_be_continuous,
)
from gspmd_mcmc.models.supports import (
    bijection_for,
    bijection_of,
    constrained,
    is_of_numpyro,
    log_jacobian_of,
    unconstrained,
)
from gspmd_mcmc.placement.numbers import as_array
from gspmd_mcmc.placement.padding import is_padded, real_rows
from gspmd_mcmc.placement.place import place
from gspmd_mcmc.targets.bijections import ByModel
from gspmd_mcmc.targets.independence import coupling_of
from gspmd_mcmc.targets.local import lay_out
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.streaming.rows import row_axes

Rows = tuple  # number of rows, mesh axes, mesh and spec of a `Sharded` part
CURE = (
    "In a Sharded part rows stand apart: give rows that are drawn alike by num_rows=, pass arrays that "
    "have rows as arguments of the model, placed, and leave a part whose rows depend on each other out "
    "of Sharded"
)


def condition(joint: Any, observed: dict[str, Any]) -> Posterior:
    """Observe some parts of a joint distribution (`JointDistributionSequential.condition`)."""
    observed = {n: x if is_padded(x) else as_array(f"observed {n!r}", x) for n, x in observed.items()}
    facts: dict[str, tuple[Site, Rows | None]] = trace(joint, observed, partial(_fact, observed))
    unknown = [name for name in observed if name not in facts]
    if unknown or len(observed) == len(facts):
        what = f"there is no part {unknown[0]!r}" if unknown else "no part is left to sample"
        raise ValueError(f"condition: {what}; the parts are {list(facts)}")
    model = _model(joint, observed, facts)
    try:
        target = model.posterior()
    except CannotStream as error:
        raise CannotStream(error.plate, f"{error.reason.rstrip('.')}. {CURE}") from error
    for which, name in enumerate(model.num_rows):
        # A row's term may depend on how many rows its block has, say.
        coupling = coupling_of(target, which, lay_out(target, target.origin()))
        if coupling is not None:
            reason = f"{coupling}: it depends on the other rows of its block. {CURE}"
            raise CannotStream(name, reason)
    return target


def _fact(observed: dict, name: str, part: Any, value: jax.Array) -> tuple[Site, Rows | None]:
    """Return a part as a site, and the rows that it has if it is `Sharded`."""
    plate, rows = None, None
    if isinstance(part, Sharded):
        if not value.ndim:
            raise ValueError(f"part {name!r} is Sharded and not observed: give it num_rows=")
        rows = (value.shape[0], part.axes, part.mesh if any(part.spec) else None, part.spec)
        plate = f"{'x'.join(part.axes) or 'rows'}[{value.shape[0]}]"
    if name in observed:
        return Site(name, plate), rows
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise must_be_continuous(f"part {name!r} is discrete")
    distribution = plain(with_rows_apart(part, value.ndim))
    bijection, shape = bijection_for(name, f"part {name!r}", distribution, value.shape)
    return Site(name, plate, jax.ShapeDtypeStruct(shape, value.dtype), bijection), rows


def _model(joint: Any, observed: dict, facts: dict) -> "JointModel":
    """Place what has rows, and tell which arrays have the rows of which plate.

    Arrays of a joint that have rows are arguments of functions: a distribution cannot be cut to a block
    of rows from outside.
    """
    plates = {site.plate: rows for site, rows in facts.values() if site.plate is not None}
    num_rows = {name: rows[0] for name, rows in plates.items()}
    axes = {name: rows[1] for name, rows in plates.items()}
    owners: list[str | None] = []
    for x in jax.tree.leaves(joint, is_leaf=lambda x: is_padded(x) or isinstance(x, Partial)):
        fitting = fitting_plates(x, num_rows, axes) if isinstance(x, Partial) else [[]]
        owners += [fits[0] if fits else None for fits in fitting]
    leaves, treedef = jax.tree.flatten(joint, is_leaf=is_padded)
    joint = treedef.unflatten(_placed(x, plates.get(p)) for x, p in zip(leaves, owners, strict=True))
    observed = {name: _placed(x, facts[name][1]) for name, x in sorted(observed.items())}
    owners += [facts[name][0].plate for name in observed]
    # Plates without any array have the numbers of their rows.
    bare = {
        name: _placed(np.arange(rows[0], dtype=np.int32), rows)
        for name, rows in sorted(plates.items())
        if name not in owners
    }
    sites = tuple(site for site, _ in facts.values())
    return JointModel(
        name=type(joint).__name__,
        door="condition",
        args={"joint": joint, "observed": observed, "rows": bare},
        sites=sites,
        plate_of_leaf=(*owners, *bare),
        num_rows=num_rows,
        derived_names=tuple(s.name for s in sites if isinstance(s.bijection, ByModel)),
    )


def _placed(value: Any, rows: Rows | None) -> Any:
    """Place an array on the mesh of its rows, if there is one and none has it yet."""
    if rows is None or rows[2] is None or is_padded(value) or row_axes(value) is not None:
        return value if is_padded(value) else as_array("observed", value)
    return place(value, rows[2], P(*rows[3][: np.ndim(value)]))


@dataclass(frozen=True, eq=False)
class JointModel(SiteModel):
    """A joint distribution as a model of named sites."""

    def log_probs(self, values: dict, args: dict, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
        """Run the joint; `Sharded` parts have the rows of a block."""

        def visit(index: int, name: str, part: Any) -> Any:
            x = given[name]
            part = with_rows_apart(part, x.ndim)
            bijection = bijection_of(f"part {name!r}", plain(part)) if name in by_model else None
            y = constrained(bijection, x)
            if name in wanted:
                out[name] = _terms(part, y)
                if bijection is not None:
                    out[name] = out[name] + log_jacobian_of(bijection, x, y, out[name].ndim)
            return y

        given, by_model = args["observed"] | values, self.by_model
        out: dict[str, jax.Array] = {}
        run(args["joint"], visit)
        return out

    def derived(self, args: dict, params: dict) -> dict[str, jax.Array]:
        """Return the values that only the joint can constrain."""

        def visit(index: int, name: str, part: Any) -> Any:
            if name in self.derived_names:
                part = with_rows_apart(part, given[name].ndim)
                bijection = bijection_of(f"part {name!r}", plain(part))
                given[name] = out[name] = constrained(bijection, given[name])
            return given[name]

        given = {name: real_rows(x) for name, x in args["observed"].items()} | params
        out: dict[str, jax.Array] = {}
        run(args["joint"], visit)
        return out

    def draw(self, args: dict, rng_key: jax.Array) -> dict[str, jax.Array]:
        """Draw the parts that are not observed: part i from ``fold_in(rng_key, i)``."""

        def visit(index: int, name: str, part: Any) -> Any:
            if name in args["observed"]:
                return real_rows(args["observed"][name])
            try:
                y = sharded.draw_part(part, jax.random.fold_in(rng_key, index))
            except NotImplementedError as error:
                raise cannot_draw(f"part {name!r}", plain(part)) from error
            part = with_rows_apart(part, y.ndim)
            out[name] = unconstrained(f"part {name!r}", plain(part), y)
            return y

        out: dict[str, jax.Array] = {}
        run(args["joint"], visit)
        return out


def _terms(part: Any, value: jax.Array) -> jax.Array:
    distribution = plain(part)
    if is_of_numpyro(distribution):
        with jax.numpy_rank_promotion("allow"):
            terms = jnp.asarray(numpyro_sites.log_prob(distribution, value))
    else:
        terms = sharded.log_prob(distribution, value)
    if isinstance(part, Sharded) and terms.shape[:1] != value.shape[:1]:
        raise ValueError(
            f"{shown(distribution)}: expected a log probability for each of {value.shape[0]} rows, got "
            f"shape {terms.shape}; its event may span the rows"
        )
    return terms
