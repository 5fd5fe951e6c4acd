"""NumPyro models as targets: sharded plates streamed, constrained sites through their bijections.

The model is run under NumPyro's own handlers: its latents substituted, its sharded plates shrunk to the
rows of a block. What it computes stays NumPyro's; log probabilities are NumPyro's too, but for those
that have a cheaper exact derivative here.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd_mcmc import tree
from gspmd_mcmc.functions.function import of_model, run
from gspmd_mcmc.functions.user_functions import as_partial
from gspmd_mcmc.models.row_blocks import Blocks, CannotStream, Site, rows_of_plates, unpadded
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.numbers import as_array, check_leaves
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets import independence
from gspmd_mcmc.targets.bijections import ByModel, bijection_for, bijection_of, log_jacobian_of
from gspmd_mcmc.targets.likelihoods import bernoulli_logits, categorical_logits
from gspmd_mcmc.targets.local import cut, lay_out
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.prior_draws import cannot_draw, with_prior

DOOR = "from_numpyro"
CHECK_POINTS = 10
CHECK_TOLERANCE = 1e-3
_PLACED = (jax.Array, jax.ShapeDtypeStruct)


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
        What it is called with. Arrays with the rows of a sharded plate are placed over its mesh axis by
        `place` (`Padded` where the mesh does not divide them); the model sees blocks of their rows.
    plates
        Name of a plate to the mesh axis, or axes, that its rows lie over. Latents inside it live with
        their rows, observations inside it are streamed. A plate whose rows are coupled (a latent of one
        row is read in another, or outside of the plate) is evaluated at once, with a warning.
    check
        Whether to compare at once (None: yes): some rows of each plate in blocks of several kinds, as
        `sample` does too (``x - x.mean()`` couples rows), and log density and gradient with NumPyro's
        own, of everything at one point, which takes the memory that NumPyro takes.

    Returns
    -------
    Posterior
        Its position is a dict of the unconstrained latents, by site; a latent of a sharded plate has
        that plate's rows first. `Draws` hold constrained values and ``deterministic`` sites.
        ``target.origin()`` is a position to start around, which `sample` takes when it is given none.

    Raises
    ------
    ValueError
        If a plate is not in the model, a latent is discrete, an observation lies outside its support,
        or the target disagrees with NumPyro.
    """
    _numpyro()
    _refuse_own_keywords(model, {"plates": plates, "check": check})
    bound = _Bound.of(model, args, kwargs)
    sites = bound.trace()
    sharded = _sharded_plates(sites, plates or {}, bound.arrays)
    blocks, target = _streamed(bound, sites, sharded)
    target = _with_derived(bound, blocks, target, sites)
    names = tuple(name for name, _ in target.latents)
    target = with_prior(target, of_model(DOOR, partial(_draw, blocks.evaluate, names), bound.arrays))
    if bound.has_shapes:  # of a mesh that is not there: nothing to check with
        return target
    _check_support(bound, blocks, target)
    if check is None or check:
        _check_against_numpyro(bound, blocks, target)
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


@dataclass(frozen=True, eq=False)
class _Bound:
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
    def of(cls, model: Callable, args: tuple, kwargs: dict) -> "_Bound":
        signature = inspect.signature(model)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        flat, treedef = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_padded)
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        # A NumPy scalar may be the size of a plate: like a Python number, it is none of the arrays.
        arrays = {
            k: x if is_padded(x) or isinstance(x, _PLACED) else as_array(f"argument {k}", x)
            for k, x in leaves.items()
            if is_padded(x) or (hasattr(x, "dtype") and not isinstance(x, np.generic))
        }
        constants = {k: x for k, x in leaves.items() if k not in arrays}
        check_leaves("argument ", constants)
        lists = tuple(name for name, x in arguments.items() if isinstance(x, list))
        return cls(model, signature, treedef, tuple(leaves), constants, arrays, lists)

    @property
    def has_shapes(self) -> bool:
        """Whether some of the arrays are shapes alone."""
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self.arrays))

    def call(self, arrays: dict[str, Any], substitute: Callable, rng_key: Any = 0) -> dict[str, dict]:
        """Run the model with other arrays under a substitution; return its trace.

        What is neither substituted nor observed is drawn.
        """
        handlers = importlib.import_module("numpyro.handlers")
        leaves = [(self.constants | arrays)[path] for path in self.paths]
        bound = inspect.BoundArguments(
            self.signature,
            jax.tree.unflatten(self.treedef, leaves),  # pyright: ignore
        )
        model = handlers.substitute(handlers.seed(self.model, rng_key), substitute_fn=substitute)
        with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
            return handlers.trace(model).get_trace(*bound.args, **bound.kwargs)

    def trace(self) -> dict[str, dict]:
        """Run the model in the abstract, on everything, from NumPyro's own start.

        Latents get two entries more, ``bijection`` and the shape of their ``unconstrained`` value.
        """

        def run(arrays: dict[str, Any]) -> None:
            found.update(self.call(arrays, start))
            for name, site in found.items():
                if site["type"] == "sample" and not site["is_observed"]:
                    site |= _unconstrained(name, site)

        start = importlib.import_module("numpyro.infer").init_to_uniform
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
        raise ValueError(
            f"site {name!r} is discrete (support {support}) and not observed: HMC moves "
            "through continuous space. Sum it out of the likelihood, or observe it"
        )
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


def _substituted(evaluate: "_Evaluate", values: dict[str, Any], sizes: dict, msg: dict) -> Any:
    """Return a message's value: rows of a resized plate, a latent's value; None leaves it alone."""
    name = msg["name"]
    if msg["type"] == "plate":
        return jnp.arange(sizes[name]) if name in sizes else None
    if msg["type"] != "sample" or name not in values:
        return None
    if name in evaluate.by_model:
        with jax.numpy_rank_promotion("allow"):
            return bijection_of(f"site {name!r}", msg["fn"])(values[name])
    value, index = values[name], msg["infer"].get("_scan_current_index")
    return value if index is None or value.ndim <= len(_shape(msg)) else value[index]


@dataclass(frozen=True, eq=False)
class _Evaluate:
    """The model as `Blocks` evaluate it.

    Attributes
    ----------
    row_axis
        Site to the axis that the rows of its sharded plate are in NumPyro's shapes.
    plate_of
        Site to its sharded plate.
    by_model
        Latents that come unconstrained, as their support depends on other values.
    """

    bound: _Bound
    row_axis: dict[str, int]
    plate_of: dict[str, str]
    by_model: tuple[str, ...]

    def __call__(self, values: dict, arrays: dict, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
        trace = self.trace(values, arrays, sizes)
        with jax.numpy_rank_promotion("allow"):
            return {name: self._log_prob(name, values, trace, sizes) for name in wanted}

    def trace(self, values: dict, arrays: dict, sizes: dict) -> dict[str, dict]:
        """Run the model with constrained values whose rows come first."""
        return self.bound.call(arrays, partial(_substituted, self, self.as_numpyro(values), sizes))

    def as_numpyro(self, values: dict) -> dict[str, jax.Array]:
        """Move the rows from the first axis to where NumPyro has them."""
        axes = self.row_axis
        return {
            name: jnp.moveaxis(x, 0, axes[name]) if name in axes else x for name, x in values.items()
        }

    def rows_first(self, values: dict) -> dict[str, jax.Array]:
        """Undo `as_numpyro`."""
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
            x = self.as_numpyro({name: values[name]})[name]
            out = out + log_jacobian_of(bijection, x, site["value"], out.ndim)
        return jnp.moveaxis(out, self.row_axis[name], 0) if plate else out


def log_prob(distribution: Any, value: jax.Array) -> jax.Array:
    """Log probability under a NumPyro distribution, with a cheap exact derivative where we have one."""
    dist = importlib.import_module("numpyro.distributions")
    kind = type(distribution)
    if kind is dist.Independent:
        inner = log_prob(distribution.base_dist, value)
        axes = tuple(range(inner.ndim - distribution.reinterpreted_batch_ndims, inner.ndim))
        return jnp.sum(inner, axis=axes)
    if kind is dist.ExpandedDistribution and distribution.base_dist.event_dim == distribution.event_dim:
        inner = log_prob(distribution.base_dist, value)
        return jnp.broadcast_to(inner, jnp.broadcast_shapes(distribution.batch_shape, inner.shape))
    if kind is dist.MaskedDistribution and _is_cheap(distribution.base_dist, dist):
        inner = log_prob(distribution.base_dist, value)
        return jnp.where(distribution._mask, inner, 0.0)
    if kind is dist.BernoulliLogits:
        return bernoulli_logits(jnp.asarray(distribution.logits), jnp.asarray(value))
    if kind is dist.CategoricalLogits:
        return _categorical(jnp.asarray(distribution.logits), jnp.asarray(value))
    return distribution.log_prob(value)


def _is_cheap(distribution: Any, dist: Any) -> bool:
    inner = getattr(distribution, "base_dist", distribution)
    return type(inner) in (dist.BernoulliLogits, dist.CategoricalLogits)


def _categorical(logits: jax.Array, labels: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(logits.shape[:-1], labels.shape)
    logits = jnp.broadcast_to(logits, (*shape, logits.shape[-1]))
    flat = categorical_logits(
        logits.reshape(-1, logits.shape[-1]), jnp.broadcast_to(labels, shape).reshape(-1)
    )
    return flat.reshape(shape)


def _sharded_plates(sites: dict, plates: dict[str, Any], arrays: dict) -> dict[str, tuple[int, Any]]:
    """Return name to rows and mesh axes of the plates that are to be sharded."""
    of_model = {name: site["args"] for name, site in sites.items() if site["type"] == "plate"}
    axes = {a for x in arrays.values() for a in _mesh_axes(x)}
    for name, (size, subsample) in of_model.items():
        if subsample not in (None, size):
            raise ValueError(
                f"plates: {name!r} draws {subsample} of its {size} rows; HMC needs all of them"
            )
    for name, over in plates.items():
        if name not in of_model:
            raise ValueError(f"plates: the model has no plate {name!r}; it has {sorted(of_model)}")
        unknown = set((over,) if isinstance(over, str) else over) - axes
        if axes and unknown:
            raise ValueError(
                f"plates: {name!r} is to lie over {over!r}, but the arguments lie on a mesh with axes "
                f"{sorted(axes)}"
            )
    return {name: (of_model[name][0], over) for name, over in plates.items()}


def _mesh_axes(leaf: Any) -> tuple[str, ...]:
    sharding = getattr(leaf.values if is_padded(leaf) else leaf, "sharding", None)
    return tuple(sharding.mesh.axis_names) if isinstance(sharding, NamedSharding) else ()


def _streamed(bound: _Bound, sites: dict, sharded: dict) -> tuple[Blocks, Posterior]:
    """Stream all the plates that can be; say which cannot, and why."""
    while True:
        blocks = _blocks(bound, sites, sharded)
        try:
            return blocks, blocks.posterior()
        except CannotStream as error:
            warnings.warn(f"{error}. It is evaluated at once", stacklevel=5)
            sharded = {name: x for name, x in sharded.items() if name != error.plate}


def _blocks(bound: _Bound, sites: dict, sharded: dict) -> Blocks:
    num_rows = {name: size for name, (size, _) in sharded.items()}
    sampled = {name: site for name, site in sites.items() if site["type"] == "sample"}
    if any(site["type"] == "param" for site in sites.values()):
        raise ValueError("the model has numpyro.param sites; HMC samples sample sites only")
    frames = {name: _frame(name, site, sharded) for name, site in sampled.items()}
    row_axis = {
        name: len(sampled[name]["fn"].batch_shape) + frame.dim
        for name, frame in frames.items()
        if frame is not None
    }
    plate_of = {name: frame.name for name, frame in frames.items() if frame is not None}
    bijections = {n: s["bijection"] for n, s in sampled.items() if not s["is_observed"]}
    by_model = tuple(n for n, b in bijections.items() if isinstance(b, ByModel))
    facts = tuple(
        Site(n, plate_of.get(n), _latent(s, row_axis.get(n)) if n in bijections else None)
        for n, s in sampled.items()
    )
    over = {name: axes for name, (_, axes) in sharded.items()}
    return Blocks(
        name=getattr(bound.model, "__name__", type(bound.model).__name__),
        # Functions of the target hold it, and take the arrays as arguments.
        evaluate=_Evaluate(replace(bound, arrays={}), row_axis, plate_of, by_model),
        sites=facts,
        args=bound.arrays,
        plate_of_leaf=rows_of_plates(bound.arrays, num_rows, over),
        num_rows=num_rows,
        bijections=bijections,
        door=DOOR,
    )


def _frame(name: str, site: dict, sharded: dict) -> Any:
    """Return the frame of the sharded plate that a site lies in, or None."""
    frames = [f for f in site["cond_indep_stack"] if f.name in sharded]
    if len(frames) > 1:
        raise ValueError(
            f"site {name!r} lies in plates {[f.name for f in frames]}, which are all to be sharded; "
            "shard one of them: its rows hold the other's whole"
        )
    return frames[0] if frames else None


def _latent(site: dict, row_axis: int | None) -> jax.ShapeDtypeStruct:
    """Shape of a latent's unconstrained value, its rows first."""
    shape = list(site["unconstrained"])
    if row_axis is not None:
        shape.insert(0, shape.pop(row_axis))
    return jax.ShapeDtypeStruct(tuple(shape), site["value"].dtype)


def _with_derived(bound: _Bound, blocks: Blocks, target: Posterior, sites: dict) -> Posterior:
    """Add what `Draws` keep besides the latents, and the shapes of those."""
    latents = tuple((s.name, s.latent) for s in blocks.sites if s.latent is not None)
    by_model = blocks.evaluate.by_model
    names = tuple(n for n, s in sites.items() if s["type"] == "deterministic" or n in by_model)
    derived = of_model(DOOR, partial(_derived, blocks.evaluate, names), bound.arrays)
    return tree.replace(target, latents=latents, derived=derived if names else None)


def _derived(evaluate: Any, names: tuple, arrays: dict, params: dict) -> dict[str, jax.Array]:
    trace = evaluate.trace(params, unpadded(arrays), {})
    return evaluate.rows_first({name: jnp.asarray(trace[name]["value"]) for name in names})


def _draw(evaluate: Any, names: tuple, arrays: dict, rng_key: jax.Array) -> dict[str, jax.Array]:
    """Draw the latents from their prior: unconstrained values, rows first."""

    def look(msg: dict) -> None:
        if msg["type"] == "sample":
            looked_at.append(msg)

    looked_at: list[dict] = []
    try:
        trace = evaluate.bound.call(unpadded(arrays), look, rng_key)
    except NotImplementedError as error:
        raise cannot_draw(f"site {looked_at[-1]['name']!r}", looked_at[-1]["fn"]) from error
    drawn = {}
    for name in names:
        bijection = bijection_of(f"site {name!r}", trace[name]["fn"])
        with jax.numpy_rank_promotion("allow"):
            drawn[name] = jnp.asarray(bijection.inv(trace[name]["value"]))
    return evaluate.rows_first(drawn)


def _check_support(bound: _Bound, blocks: Blocks, target: Posterior) -> None:
    """Raise where an observation lies outside its distribution's support."""
    position = lay_out(target, target.origin())
    inside = run(
        as_partial(partial(_inside, blocks.evaluate)), unpadded(bound.arrays), target, position
    )
    for name, count in inside.items():
        if int(count):
            raise ValueError(
                f"site {name!r}: {int(count)} of its observations lie outside the support of its "
                "distribution, where the density is 0"
            )


def _inside(evaluate: Any, arrays: dict, target: Posterior, position: dict) -> dict[str, jax.Array]:
    """Count each observed site's values outside the support."""
    params = cut(target, target.params(position))
    trace = evaluate.trace(params, arrays, {})
    observed = {n: s for n, s in trace.items() if s["type"] == "sample" and n not in params}
    with jax.numpy_rank_promotion("allow"):
        return {name: _num_outside(s["fn"], s["value"]) for name, s in observed.items()}


def _num_outside(distribution: Any, value: jax.Array) -> jax.Array:
    mask = getattr(distribution, "_mask", True)
    is_inside = jnp.asarray(distribution.support(value))
    return jnp.sum(~is_inside & jnp.asarray(mask))


def _check_against_numpyro(bound: _Bound, blocks: Blocks, target: Posterior) -> None:
    """Compare log density and gradient with NumPyro's at a point, everything at once."""
    arrays = unpadded(bound.arrays)
    origin = target.origin()
    independence.check_rows(target, lay_out(target, origin))
    theirs = as_partial(partial(_theirs, blocks.evaluate))
    for i in range(CHECK_POINTS):
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


def _theirs(evaluate: Any, position: dict, arrays: dict) -> jax.Array:
    """Return NumPyro's own log density, of everything at once."""
    potential_energy = importlib.import_module("numpyro.infer.util").potential_energy
    bound = evaluate.bound
    leaves = [(bound.constants | arrays)[path] for path in bound.paths]
    given = inspect.BoundArguments(bound.signature, jax.tree.unflatten(bound.treedef, leaves))
    with jax.numpy_rank_promotion("allow"):
        params = evaluate.as_numpyro(position)
        seeded = importlib.import_module("numpyro.handlers").seed(bound.model, 0)
        return -potential_energy(seeded, given.args, given.kwargs, params)


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


def _numpyro() -> Any:
    try:
        return importlib.import_module("numpyro")
    except ImportError as error:
        raise ImportError("numpyro is missing: pip install 'gspmd_mcmc[models]' brings it") from error
