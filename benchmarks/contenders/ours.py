"""This package: images stay uint8, rows are streamed, the kernel is an argument of the program.

Its likelihoods are written as the README's are. Other forms, by name: ``ours:leading_axis`` is that of
the peers (`likelihood.batched_rows`), ``ours:from_numpyro`` NumPyro's model of the same, and
``ours:from_numpyro_floats`` that of images scaled ahead, as NumPyro has them; ``ours:textbook`` is the
peers' own expression of a factorisation; ``ours:kernel`` has gradients that are kernels on chips;
``ours:index`` reads groups' latents by an index, from leaves that are whole on every device.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jax.sharding import PartitionSpec

import gspmd_mcmc as gm
from benchmarks import groups_data, mnist_data
from benchmarks.contenders import factorisation, grouped
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import replicate
from gspmd_mcmc.targets.local import cut

DISTRIBUTIONS = ("gspmd_mcmc",)


def log_prior(params):
    return norm.logpdf(params["w"]), norm.logpdf(params["b"])


def log_likelihood(params, batch):
    logits = (batch["image"] / 255) @ params["w"] + params["b"]
    return gm.categorical_logits(logits, batch["label"])


def leading_axis(params, batch):
    logits = (batch["image"].astype(jnp.float32) @ (params["w"] / 255)[None])[0] + params["b"]
    return gm.categorical_logits(logits, batch["label"])


def log_likelihood_in_a_kernel(params, batch):
    return gm.categorical_linear(batch["image"], params["w"] / 255, params["b"], batch["label"])


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = gm.make_mesh(data=task.devices)
    target = _mnist_target(task.form, mnist_data.load(task.data_dir), mesh)
    kernel = gm.HMC(target, step_size=task.step_size, num_integration_steps=task.leapfrogs)
    position = replicate(mesh, mnist_data.start_position(task.chains))
    return _program(kernel, position, mesh, task)


def _mnist_target(form: str | None, data: mnist_data.Mnist, mesh) -> gm.Posterior:
    are_floats = form == "from_numpyro_floats"
    images = data.images / np.float32(255) if are_floats else data.images
    placed = gm.place({"image": images, "label": data.labels}, mesh, PartitionSpec("data"))
    if form in ("from_numpyro", "from_numpyro_floats"):
        from benchmarks.contenders.numpyro import ROWS, mnist_model  # the others do without NumPyro

        white = 1 if are_floats else 255
        args = (placed["image"], placed["label"], white)
        return gm.from_numpyro(mnist_model, *args, plates={ROWS: "data"})
    return gm.Posterior(log_prior, gm.Plate(row_likelihood(form), placed))


def row_likelihood(form: str | None):
    """Return the likelihood of MNIST's rows in a form."""
    forms = {"leading_axis": leading_axis, "kernel": log_likelihood_in_a_kernel}
    return forms.get(form or "", log_likelihood)


def movie_log_prior(params):
    return norm.logpdf(params["V"]), norm.logpdf(params["v"])


def user_log_density(params, block):
    logits = gm.inner_products(params["U"], params["V"], params["u"], params["v"])
    return jnp.sum(gm.bernoulli_logits(logits, block), axis=1) + _user_log_prior(params)


def textbook_user_log_density(params, block):
    return factorisation.textbook_rows(params, block) + _user_log_prior(params)


def user_log_density_in_kernels(params, block):
    factors = params["U"], params["V"], params["u"], params["v"]
    return gm.inner_product_terms(gm.bernoulli_logits, block, *factors) + _user_log_prior(params)


def user_likelihood(form: str | None):
    """Return the log density of users in a form."""
    forms = {"textbook": textbook_user_log_density, "kernel": user_log_density_in_kernels}
    return forms.get(form or "", user_log_density)


def _user_log_prior(params):
    return jnp.sum(norm.logpdf(params["U"]), axis=1) + norm.logpdf(params["u"])


def movielens(task) -> HmcProgram:
    """Matrix factorisation; a user's latents lie with the user's row."""
    mesh = gm.make_mesh(data=task.devices)
    watched, position = factorisation.load(task, mesh)
    plate = gm.Plate(user_likelihood(task.form), watched, local=("U", "u"))
    kernel = gm.HMC(
        gm.Posterior(movie_log_prior, plate),
        step_size=task.step_size,
        num_integration_steps=task.leapfrogs,
    )
    return _program(kernel, position, mesh, task)


def log_normal_prior(params):
    return jax.tree.map(norm.logpdf, params)


def user_prior(params, user):
    return norm.logpdf(params["user"]).sum(axis=1) + norm.logpdf(params["user_bias"])


def effect_prior(params, user):
    return norm.logpdf(params["effect"])


def effect_terms(params, row):
    location = params["effect"] + params["slope"] * row["mean_of_film"]
    return norm.logpdf(row["stars"], location, groups_data.NOISE)


def effect_terms_by_index(params, row):
    return effect_terms(params | {"effect": params["effect"][row["user"]]}, row)


def rating_terms(params, row):
    film, film_bias = (gm.lookup(params[n], row["film"]) for n in ("film", "film_bias"))
    location = params["user_bias"] + film_bias + jnp.sum(params["user"] * film, axis=1)
    return norm.logpdf(row["stars"], location, groups_data.NOISE)


def rating_terms_by_index(params, row):
    of_user = {name: params[name][row["user"]] for name in ("user", "user_bias")}
    return rating_terms(params | of_user, row)


# For each model with groups: the users' latents, their prior, terms of rows, and these by an index.
GROUPED = {
    "effect": ("effect", effect_prior, effect_terms, effect_terms_by_index),
    "ratings": (("user", "user_bias"), user_prior, rating_terms, rating_terms_by_index),
}


def groups_effect(task) -> HmcProgram:
    """A random effect of each user."""
    return _groups(task, "effect")


def groups_ratings(task) -> HmcProgram:
    """Biases and factors of users and films."""
    return _groups(task, "ratings")


def _groups(task, model: str) -> HmcProgram:
    mesh = gm.make_mesh(data=task.devices)
    rated = groups_data.load(task.data_dir)
    target = groups_target(model, rated, task.form, mesh)
    kernel = gm.HMC(target, step_size=task.step_size, num_integration_steps=task.leapfrogs)
    return _program(kernel, replicate(mesh, grouped.STARTS[model](rated, task.chains)), mesh, task)


def groups_target(model: str, rated: groups_data.Rated, form: str | None, mesh) -> gm.Posterior:
    """Return a model of ratings: users with their rows, or whole and read by an index."""
    local, prior, terms, terms_by_index = GROUPED[model]
    columns = {name: getattr(rated, name) for name in grouped.COLUMNS[model]}
    if "film" in columns:
        columns["film"] = gm.LookupIndex(rated.film, rated.films)
    if form == "index":
        rows = gm.place(columns, mesh, PartitionSpec("data"))
        return gm.Posterior(log_normal_prior, gm.Plate(terms_by_index, rows))
    groups = gm.Groups(columns.pop("user"), mesh, PartitionSpec("data"))
    plates = (
        gm.Plate(prior, groups.place(), local=local),
        gm.Plate(terms, groups.place_rows(columns), local=local),
    )
    return gm.Posterior(log_normal_prior, *plates)


def _program(kernel, position, mesh, task) -> HmcProgram:
    init, step = type(kernel).init, type(kernel).step
    if task.chains > 1:
        init = jax.vmap(init, in_axes=(None, 0))
        step = jax.vmap(step, in_axes=(None, 0, 0))

    def transition(carry, kernel):
        rng_key, state, _ = carry
        rng_key, step_key = jax.random.split(rng_key)
        if task.chains > 1:
            step_key = jax.random.split(step_key, task.chains)
        state, info = step(kernel, step_key, state)
        return rng_key, state, info.acceptance_rate

    state = jax.jit(init)(kernel, position)
    rest = replicate(mesh, (jax.random.key(1), jnp.zeros_like(state.log_density)))
    carry = (rest[0], state, rest[1])
    return HmcProgram(
        transition=jax.jit(transition, out_shardings=jax.tree.map(lambda x: x.sharding, carry)),
        carry=carry,
        data=(kernel,),
        units=task.units,
        acceptance=lambda carry: carry[2],
        evaluate=lambda: (state.log_density, _seen(kernel.target, state.log_density_grad, task)),
        devices=task.devices,
    )


def _seen(target, grads, task):
    """Give gradients the user's order of groups, and cut pads off."""
    return jax.vmap(cut, in_axes=(None, 0))(target, grads) if task.chains > 1 else cut(target, grads)
