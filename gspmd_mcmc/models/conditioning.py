"""The posterior of some parts of a joint distribution, given the others."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.functions.function import of_model
from gspmd_mcmc.models import numpyro, sharded
from gspmd_mcmc.models.joint_parts import run, trace
from gspmd_mcmc.models.row_blocks import Blocks, CannotStream, Site, rows_of_plates
from gspmd_mcmc.models.sharded import Sharded, shown, unpad
from gspmd_mcmc.placement.numbers import as_array
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.placement.place import place
from gspmd_mcmc.targets.bijections import ByModel, bijection_for, bijection_of, log_jacobian_of
from gspmd_mcmc.targets.independence import coupling_of
from gspmd_mcmc.targets.local import lay_out
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.prior_draws import cannot_draw, with_prior
from gspmd_mcmc.targets.rows import row_axes


@dataclass(frozen=True)
class _Fact:
    """What conditioning knows of a part.

    Attributes
    ----------
    value
        Shape and dtype of its value.
    rows
        Number of rows, mesh axes and mesh, if it is `Sharded`.
    latent
        Shape and dtype of the unconstrained value, of a latent.
    bijection
        Of a latent's support; None where that is all of real space, or unknown.
    """

    value: jax.ShapeDtypeStruct
    rows: tuple[int, tuple[str, ...], Mesh | None] | None
    latent: jax.ShapeDtypeStruct | None = None
    bijection: Any = None

    @property
    def plate(self) -> str | None:
        """Name of the plate that the part's rows form."""
        return None if self.rows is None else f"{'x'.join(self.rows[1])}[{self.rows[0]}]"


def condition(joint: Any, observed: dict[str, Any]) -> Posterior:
    """Observe some parts of a joint distribution (`JointDistributionSequential.condition`)."""
    observed = {
        n: x if is_padded(x) or hasattr(x, "dtype") else np.asarray(x) for n, x in observed.items()
    }
    facts = trace(joint, observed, partial(_fact, observed))
    latent = [name for name in facts if name not in observed]
    unknown = [name for name in observed if name not in facts]
    if unknown or not latent:
        what = f"there is no part {unknown[0]!r}" if unknown else "no part is left to sample"
        raise ValueError(f"condition: {what}; the parts are {list(facts)}")
    blocks = _blocks(joint, observed, facts)
    sites = tuple((name, facts[name].latent) for name in latent)
    target = tree.replace(blocks.posterior(), latents=sites)
    args = {key: blocks.args[key] for key in ("joint", "observed")}
    by_model = frozenset(n for n in latent if isinstance(facts[n].bijection, ByModel))
    if by_model:
        target = tree.replace(
            target, derived=of_model(blocks.door, partial(_constrained, by_model), args)
        )
    target = with_prior(target, Partial(_draw, args))
    for which, name in enumerate(blocks.num_rows):
        _check_rows_apart(target, which, name)
    return target


def _fact(observed: dict[str, Any], name: str, part: Any, value: jax.Array) -> _Fact:
    is_sharded = isinstance(part, Sharded)
    if is_sharded and not value.ndim:
        raise ValueError(f"part {name!r} is Sharded and not observed: give it num_rows=")
    rows = (value.shape[0], part.axes, part.mesh) if is_sharded else None
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    if name in observed:
        return _Fact(shape, rows)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"part {name!r} is discrete and not observed: HMC moves through continuous space. Sum it "
            "out of the log density, or observe it"
        )
    bijection, latent = bijection_for(name, f"part {name!r}", _plain(part), value.shape)
    return _Fact(shape, rows, jax.ShapeDtypeStruct(latent, value.dtype), bijection)


def _blocks(joint: Any, observed: dict[str, Any], facts: dict[str, _Fact]) -> Blocks:
    plates = {f.plate: f.rows for f in facts.values() if f.rows is not None and f.plate is not None}
    num_rows = {plate: rows for plate, (rows, _, _) in plates.items()}
    observed = {name: _placed(x, facts[name].rows) for name, x in sorted(observed.items())}
    of_joint = _owners(joint, plates)
    joint = _with_placed_rows(joint, [None if p is None else plates[p] for p in of_joint])
    owners = [*of_joint, *(facts[name].plate for name in observed)]
    bare = {
        p: _placed(np.arange(r[0], dtype=np.int32), r) for p, r in plates.items() if p not in owners
    }
    by_model = frozenset(n for n, f in facts.items() if isinstance(f.bijection, ByModel))
    return Blocks(
        name=type(joint).__name__,
        evaluate=partial(_evaluate, by_model),
        sites=tuple(Site(name, fact.plate, fact.latent) for name, fact in facts.items()),
        args={"joint": joint, "observed": observed, "rows": bare},
        plate_of_leaf=(*owners, *sorted(bare)),
        num_rows=num_rows,
        bijections={n: f.bijection for n, f in facts.items() if f.bijection is not None},
        door="condition",
    )


def _placed(value: Any, rows: tuple | None) -> Any:
    """Place an array on the mesh of its rows, if there is one and none has it yet."""
    if rows is None or rows[2] is None or is_padded(value) or row_axes(value) is not None:
        return value if is_padded(value) else as_array("observed", value)
    return place(value, rows[2], P(rows[1]))


def _with_placed_rows(joint: Any, rows: list[tuple | None]) -> Any:
    leaves, treedef = jax.tree.flatten(joint, is_leaf=is_padded)
    placed = [x if r is None else _placed(x, r) for x, r in zip(leaves, rows, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _owners(joint: Any, plates: dict[str, tuple]) -> list[str | None]:
    """Find for each array that a joint holds the plate whose rows it has: arguments of functions only.

    A distribution cannot be cut to a block of rows from outside.
    """
    num_rows = {name: rows for name, (rows, _, _) in plates.items()}
    axes = {name: over for name, (_, over, _) in plates.items()}
    owners: list[str | None] = []
    for x in jax.tree.leaves(joint, is_leaf=lambda x: is_padded(x) or isinstance(x, Partial)):
        owners += rows_of_plates(x, num_rows, axes) if isinstance(x, Partial) else [None]
    return owners


def _evaluate(
    by_model: frozenset[str], values: dict, args: dict, sizes: dict, wanted: tuple
) -> dict[str, jax.Array]:
    """Log probabilities of the wanted parts, by row of `Sharded` ones, on any block of rows.

    Values ``by_model`` come unconstrained, as their support is known only here.
    """

    def visit(index: int, name: str, part: Any) -> Any:
        x = given[name]
        bijection = bijection_of(f"part {name!r}", _plain(part)) if name in by_model else None
        y = x if bijection is None else _forward(bijection, x)
        if name in wanted:
            out[name] = _terms(part, y)
            if bijection is not None:
                out[name] = out[name] + log_jacobian_of(bijection, x, y, out[name].ndim)
        return y

    given = args["observed"] | values
    out: dict[str, jax.Array] = {}
    run(args["joint"], visit)
    return out


def _constrained(by_model: frozenset[str], args: dict, values: dict) -> dict[str, jax.Array]:
    """Return the values that only the model can constrain, for `Draws`."""

    def visit(index: int, name: str, part: Any) -> Any:
        if name in by_model:
            given[name] = out[name] = _forward(
                bijection_of(f"part {name!r}", _plain(part)), given[name]
            )
        return given[name]

    given = {name: unpad(x) for name, x in args["observed"].items()} | values
    out: dict[str, jax.Array] = {}
    run(args["joint"], visit)
    return out


def _draw(args: dict, rng_key: jax.Array) -> dict[str, jax.Array]:
    """Draw the parts that are not observed, unconstrained: part i from ``fold_in(rng_key, i)``."""

    def visit(index: int, name: str, part: Any) -> Any:
        if name in args["observed"]:
            return unpad(args["observed"][name])
        key, distribution = jax.random.fold_in(rng_key, index), _plain(part)
        try:
            y = part.draw(key) if isinstance(part, Sharded) else sharded.draw(part, key, ())
        except NotImplementedError as error:
            raise cannot_draw(f"part {name!r}", distribution) from error
        bijection = bijection_of(f"part {name!r}", distribution)
        with jax.numpy_rank_promotion("allow"):
            out[name] = y if bijection is None else jnp.asarray(bijection.inv(y))
        return y

    out: dict[str, jax.Array] = {}
    run(args["joint"], visit)
    return out


def _plain(part: Any) -> Any:
    return part.distribution if isinstance(part, Sharded) else part


def _forward(bijection: Any, x: jax.Array) -> jax.Array:
    with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
        return jnp.asarray(bijection(x))


def _terms(part: Any, value: jax.Array) -> jax.Array:
    distribution = _plain(part)
    with jax.numpy_rank_promotion("allow"):
        is_numpyro = type(distribution).__module__.startswith("numpyro.")
        cheap = numpyro.log_prob(distribution, value) if is_numpyro else None
    terms = sharded.log_prob(distribution, value) if cheap is None else cheap
    if isinstance(part, Sharded) and terms.shape[:1] != value.shape[:1]:
        raise ValueError(
            f"{shown(distribution)}: expected a log probability for each of {value.shape[0]} rows, got "
            f"shape {terms.shape}; its event may span the rows"
        )
    return terms


def _check_rows_apart(target: Posterior, which: int, name: str) -> None:
    """Raise where a row's term depends on the other rows of its block: on how many there are, say."""
    coupling = coupling_of(target, which, lay_out(target, target.origin()))
    if coupling is not None:
        raise CannotStream(name, f"{coupling}: it depends on the other rows of its block")
