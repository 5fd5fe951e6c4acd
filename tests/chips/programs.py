"""The reference notebook's two models at full size, as programs of shapes on a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

S = jax.ShapeDtypeStruct
ROWS, PIXELS, DIGITS = 60_000, 784, 10
USERS, FILMS, DIMENSIONS = 6040, 3706, 20


def mnist_prior(params):
    return -0.5 * params["w"] ** 2, -0.5 * params["b"] ** 2


def mnist_likelihood(params, batch):
    logits = batch["image"].astype(jnp.float32) @ (params["w"] / 255.0) + params["b"][None]
    return gm.categorical_logits(logits, batch["label"])


def mnist_in_a_kernel(params, batch):
    return gm.categorical_linear(batch["image"], params["w"] / 255, params["b"], batch["label"])


def mnist(mesh, likelihood=mnist_likelihood):
    data = {"image": S((ROWS, PIXELS), jnp.uint8), "label": S((ROWS,), jnp.int32)}
    plate = gm.Plate(likelihood, gm.place(data, mesh, P("data")))
    position = {"w": S((PIXELS, DIGITS), jnp.float32), "b": S((DIGITS,), jnp.float32)}
    return gm.Posterior(mnist_prior, plate), position


def movielens_prior(params):
    return -0.5 * params["V"] ** 2, -0.5 * params["v"] ** 2


def movielens_likelihood(params, watched):
    logits = gm.inner_products(params["U"], params["V"], params["u"], params["v"])
    own = -0.5 * (jnp.sum(params["U"] ** 2, axis=1) + params["u"] ** 2)
    return jnp.sum(gm.bernoulli_logits(logits, watched), axis=1) + own


def movielens_in_kernels(params, watched):
    own = -0.5 * (jnp.sum(params["U"] ** 2, axis=1) + params["u"] ** 2)
    factors = params["U"], params["V"], params["u"], params["v"]
    return gm.inner_product_terms(gm.bernoulli_logits, watched, *factors) + own


def movielens(mesh, likelihood=movielens_likelihood):
    watched = gm.place(S((USERS, FILMS), jnp.uint8), mesh, P("data"))
    plate = gm.Plate(likelihood, watched, local=("U", "u"))
    shapes = {"U": (USERS, DIMENSIONS), "u": (USERS,), "V": (FILMS, DIMENSIONS), "v": (FILMS,)}
    position = {name: S(shape, jnp.float32) for name, shape in shapes.items()}
    return gm.Posterior(movielens_prior, plate), position


MODELS = {
    "mnist": mnist,
    "movielens": movielens,
    "mnist in a kernel": functools.partial(mnist, likelihood=mnist_in_a_kernel),
    "movielens in kernels": functools.partial(movielens, likelihood=movielens_in_kernels),
}
KERNELS = {
    "HMC": lambda target: gm.HMC(target, 0.01, 100),
    "JitteredHMC": lambda target: gm.JitteredHMC(target, 0.01, 1.0),
    "NUTS": lambda target: gm.NUTS(target, 0.01),
    "MAMS": lambda target: gm.MAMS(target, 0.01, 1.0),
    "MCLMC": lambda target: gm.MCLMC(target, 0.01, 1.0),
}


def step(model, kernel, mesh, num_chains=2):
    """One step of a kernel, of several chains, which lie over the mesh's axis of them if it has one."""
    target, position = model(mesh)
    kernel = KERNELS[kernel](target)
    kind = type(kernel)
    over: dict[str, Any] = {"spmd_axis_name": "chains"} if "chains" in mesh.shape else {}
    spec = P("chains") if over else P()
    shapes = jax.tree.map(lambda x: S((num_chains, *x.shape), x.dtype), position)
    init = jax.vmap(kind.init, in_axes=(None, 0), **over)
    states = jax.eval_shape(init, kernel, gm.place(shapes, mesh, spec))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_chains))
    return jax.vmap(kind.step, (None, 0, 0), **over), kernel, gm.place(keys, mesh, spec), states


def build(model, kernel, num_chains=2):
    """Return ``build(mesh)`` for `plan`."""
    return functools.partial(step, MODELS[model], kernel, num_chains=num_chains)
