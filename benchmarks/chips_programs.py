"""One step of each sampler on three models, as a program of shapes: nothing is loaded or placed.

``build(model, contender, kernel, chains)`` returns ``build(mesh)`` as `gspmd_mcmc.plan` takes it. Log
densities, layouts and metrics are those of `benchmarks.contenders`; data are shapes alone.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from benchmarks import groups_data
from benchmarks.contenders import factorisation, grouped, likelihood, ours

S = jax.ShapeDtypeStruct
LEAPFROGS, STEP_SIZE = 20, 1e-3
IMAGES, LABELS = (60_000, 784), (60_000,)
WATCHED = (6040, 3706)
RATINGS = 1_000_208
SHAPES = {
    "mnist": {"w": (784, 10), "b": (10,)},
    "movielens": {"U": (6040, 20), "V": (3706, 20), "u": (6040,), "v": (3706,)},
    "ratings": groups_data.ratings_shapes(users=6040, films=3706),
}
# Latents of users that a contender keeps with their rows; of `ratings` the peers keep them whole.
LOCAL = {"mnist": (), "movielens": ("U", "u"), "ratings": ()}
# The least that must be read of the data: pixels and cells in bytes, labels, films and stars as
# contenders have them.
DATA_BYTES = {
    "mnist": math.prod(IMAGES) + 4 * LABELS[0],
    "movielens": math.prod(WATCHED),
    "ratings": 8 * RATINGS,
}
KERNELS = {
    "HMC": lambda target: gm.HMC(target, STEP_SIZE, LEAPFROGS),
    "NUTS": lambda target: gm.NUTS(target, STEP_SIZE),
}
Program = tuple[Any, ...]  # a function and its arguments


def build(model: str, contender: str, kernel: str, chains: int) -> Callable[[Any], Program]:
    """Return the function of a mesh that builds a contender's step."""
    name, _, form = contender.partition(":")
    makers = {"ours": _ours, "blackjax": _blackjax, "numpyro": _numpyro}
    return functools.partial(makers[name], model, form, kernel, chains)


def _laid(mesh: Any, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
    return S(shape, dtype, sharding=NamedSharding(mesh, spec))


def _position(model: str, mesh: Any, chains: int, *, always_chains: bool = False) -> dict[str, Any]:
    """Return the latents' shapes, with an axis of chains where there are several."""
    lead = (chains,) if chains > 1 or always_chains else ()
    found = {}
    for name, shape in SHAPES[model].items():
        local = ("data",) if name in LOCAL[model] else ()
        found[name] = _laid(mesh, lead + shape, jnp.float32, P(*(None,) * len(lead), *local))
    return found


def _keys(chains: int, *, is_batch: bool) -> Any:
    make = (lambda: jax.random.split(jax.random.key(0), chains)) if is_batch else None
    return jax.eval_shape(make or (lambda: jax.random.key(0)))


def _like_latents(model: str, mesh: Any, tree: Any, chain_axes: int) -> Any:
    """Lay what a sampler keeps of users with the users, the rest whole: state, gradient, momenta."""
    users = WATCHED[0]

    def lay(leaf):
        axis = leaf.ndim > chain_axes and leaf.shape[chain_axes] == users and model == "movielens"
        spec = P(*(None,) * chain_axes, "data") if axis else P()
        return S(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(lay, tree)


# Ours


def _ours(model: str, form: str, kernel: str, chains: int, mesh: Any) -> Program:
    if model == "mnist":
        data = {"image": S(IMAGES, jnp.uint8), "label": S(LABELS, jnp.int32)}
        plate = gm.Plate(ours.row_likelihood(form), gm.place(data, mesh, P("data")))
        target = gm.Posterior(ours.log_prior, plate)
    elif model == "ratings":
        target = ours.groups_target(model, _like_ratings(), form, mesh)
    else:
        cells = gm.place(S(WATCHED, jnp.uint8), mesh, P("data"))
        plate = gm.Plate(ours.user_likelihood(form), cells, local=("U", "u"))
        target = gm.Posterior(ours.movie_log_prior, plate)
    made = KERNELS[kernel](target)
    init, step = type(made).init, type(made).step
    keys = _keys(chains, is_batch=chains > 1)
    if chains > 1:
        init, step = jax.vmap(init, (None, 0)), jax.vmap(step, (None, 0, 0))
    states = jax.eval_shape(init, made, _position(model, mesh, chains))
    return step, made, keys, states


@functools.cache
def _like_ratings() -> groups_data.Rated:
    """Return ratings of users and films that are drawn: as many, and as unequal, as MovieLens 1M's."""
    rng = np.random.default_rng(0)
    users, films = SHAPES["ratings"]["user"][0], SHAPES["ratings"]["film"][0]
    sizes = np.clip(rng.lognormal(4.6, 1.05, users), 20, 2314)
    user = np.sort(rng.choice(users, RATINGS, p=sizes / sizes.sum()))
    popularity = rng.lognormal(0, 1.9, films)
    film = rng.choice(films, RATINGS, p=popularity / popularity.sum())
    film[:films], user[:users] = np.arange(films), np.arange(users)  # each has one
    stars = np.zeros(RATINGS, np.float32)
    columns = (x.astype(np.int32) for x in (user, film))
    return groups_data.Rated(*columns, stars=stars, mean_of_film=stars)


# The peers


def _peers_data(model: str, form: str, chains: int, mesh: Any) -> tuple[Callable, tuple]:
    """Return the log likelihood of one chain's parameters and data, as the peers have it, and the data.

    Images are float32 and scaled ahead; what is not the textbook's form is what was fastest on a CPU.
    """
    is_textbook = form == "textbook"
    if model == "movielens":
        task = SimpleNamespace(form=form or None)
        watched = _laid(mesh, WATCHED, jnp.uint8, P("data"))
        return factorisation.log_likelihood(task, blocks=mesh.size), (watched,)
    if model == "ratings":
        dtypes = {"user": jnp.int32, "film": jnp.int32, "stars": jnp.float32}
        rows = {name: _laid(mesh, (RATINGS,), dtype, P("data")) for name, dtype in dtypes.items()}
        return grouped.log_likelihood(SimpleNamespace(form=form or None), model), (rows,)
    images = _laid(mesh, IMAGES, jnp.float32, P("data"))
    labels = _laid(mesh, LABELS, jnp.int32, P("data"))
    if chains == 1 or is_textbook:
        is_batched = mesh.size == 1 and not is_textbook
        of_rows = likelihood.batched_rows if is_batched else likelihood.rows_first
        return (lambda params, *data: of_rows(params["w"], params["b"], *data)), (images, labels)
    hot = _laid(mesh, (10, LABELS[0]), jnp.float32, P(None, "data"))
    first = likelihood.classes_first
    return (lambda params, *data: first(params["w"], params["b"], *data)), (images, hot)


def _blackjax(model: str, form: str, kernel: str, chains: int, mesh: Any) -> Program:
    import blackjax  # pyright: ignore[reportMissingImports]

    from benchmarks.contenders import blackjax as contender

    log_likelihood, data = _peers_data(model, form, chains, mesh)

    def algorithm(data):
        return blackjax.hmc(
            lambda params: contender._log_prior(params) + log_likelihood(params, *data),
            step_size=STEP_SIZE,
            inverse_mass_matrix=metric,
            num_integration_steps=LEAPFROGS,
        )

    # The textbook's metric is one vector of all latents, the other one is by leaves (no gathers).
    metric = jnp.ones(sum(math.prod(shape) for shape in SHAPES[model].values()))
    if model == "movielens" and form != "textbook":
        unused = contender._unused
        metric = contender.Metric(
            contender._normal_like, contender._kinetic_energy, check_turning=unused, scale=unused
        )
    is_batch = chains > 1 or model == "movielens"

    def init(position, *data):
        start = algorithm(data).init
        return (jax.vmap(start) if is_batch else start)(position)

    def step(keys, state, *data):
        one = algorithm(data).step
        state, info = (jax.vmap(one) if is_batch else one)(keys, state)
        return state, info.acceptance_rate

    position = _position(model, mesh, chains, always_chains=is_batch)
    states = _like_latents(model, mesh, jax.eval_shape(init, position, *data), int(is_batch))
    return step, _keys(chains, is_batch=is_batch), states, *data


def _numpyro(model: str, form: str, kernel: str, chains: int, mesh: Any) -> Program:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMC

    from benchmarks.contenders import numpyro as contender

    log_likelihood, data = _peers_data(model, form, chains, mesh)

    def written(*data):
        params = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
            for name, shape in SHAPES[model].items()
        }
        numpyro.factor("data", log_likelihood(params, *data))

    is_textbook = model == "mnist" and form == "textbook"
    # A metric of each site keeps momenta with their latents; one vector would be gathered.
    metric = {(name,): np.ones(math.prod(shape), np.float32) for name, shape in SHAPES[model].items()}
    sampler = HMC(
        contender.mnist_model if is_textbook else written,
        step_size=STEP_SIZE,
        num_steps=LEAPFROGS,
        trajectory_length=None,  # pyright: ignore[reportArgumentType]
        adapt_step_size=False,
        adapt_mass_matrix=False,
        inverse_mass_matrix=metric if model == "movielens" and form != "textbook" else None,
    )
    is_batch = chains > 1
    position = _position(model, mesh, chains)

    def init(keys, position, *data):
        return sampler.init(keys, 0, position, data, {})

    def step(state, *data):
        return sampler.sample(state, data, {})

    states = jax.eval_shape(init, _keys(chains, is_batch=is_batch), position, *data)
    return step, _like_latents(model, mesh, states, int(is_batch)), *data
