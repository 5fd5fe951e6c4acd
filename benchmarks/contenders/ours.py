"""This package: images stay uint8, rows are streamed, the kernel is an argument of the program.

Its likelihoods are written as the README's are. Other forms, by name: ``ours:leading_axis`` is that of
the peers (`likelihood.batched_rows`), ``ours:from_numpyro`` NumPyro's model of the same, and
``ours:from_numpyro_floats`` that of images scaled ahead, as NumPyro has them; ``ours:textbook`` is the
peers' own expression of a factorisation; ``ours:kernel`` has gradients that are kernels on chips.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jax.sharding import PartitionSpec

import gspmd_mcmc as gm
from benchmarks import mnist_data
from benchmarks.contenders import factorisation
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import replicate

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
        evaluate=lambda: (state.log_density, state.log_density_grad),
        devices=task.devices,
    )
