"""What the precision of matrix products does to acceptance, on MNIST and on MovieLens.

``python -m benchmarks precision [--data-dir DIR] [--out FILE.json] [--models mnist,movielens]``. HMC
with gradients of each precision that devices have and a Metropolis test in float32, which is what the
library does; and, for comparison, with a test whose terms are as the gradients. Products of other
devices are emulated on the CPU (`benchmarks.emulation`). All start from the same states, with the same
keys and step size.

On MovieLens at full size only residuals are rounded: what the kernel of `inner_product_terms` does on
TPUs, and, for comparison, what it would do if it cut them off.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm
from benchmarks import data, energy, environment, mnist_data, movielens_data
from benchmarks.emulation import Emulated

DEVICES = {"tensorfloat32": "gpu", "bfloat16_3x": "tpu", "bfloat16": "tpu"}
DATA_SETS = {"mnist": data.MNIST, "movielens": data.MOVIELENS}
MODELS = tuple(DATA_SETS)
WARM_STEP_SIZE, STEP_SIZE = 3e-3, 3.3e-3
LEAPFROGS, WARM_STEPS, STEPS, CHAINS = 20, 80, 25, 4
MOVIELENS_STEPS = 40


def log_prior(params):
    return -0.5 * params["w"] ** 2, -0.5 * params["b"] ** 2


def log_likelihood(params, batch):
    logits = batch["image"].astype(jnp.float32) @ (params["w"] / 255) + params["b"]
    return gm.categorical_logits(logits, batch["label"])


@jax.jit
def run(kernel, keys, state):
    """Take a step for each key, all chains at once."""

    def one(state, key):
        step_keys = jax.random.split(key, CHAINS)
        state, info = jax.vmap(gm.HMC.step, in_axes=(None, 0, 0))(kernel, step_keys, state)
        return state, (info.acceptance_rate, info.energy_error)

    return jax.lax.scan(one, state, keys)


def main(argv: list[str]) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks precision", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args(argv)
    results, models = {}, options.models.split(",")
    for model in models:
        if model not in MODELS:
            parser.error(f"--models: {model!r} is not one of {', '.join(MODELS)}")
    with data.folder_of([DATA_SETS[model] for model in models], options.data_dir) as (folder, sources):
        print(f"Data: {'; '.join(sources.values())}", flush=True)
        for model in models:
            results[model] = {"mnist": measure, "movielens": measure_residuals}[model](folder)
            _show(model, results[model])
    environment.save(options.out, "precision", data=sources, **results)
    return 0


def measure(data_dir: str) -> list[dict]:
    """Return acceptance rates and energy errors by the precision of gradients and of the test."""
    mnist = mnist_data.load(data_dir)
    arrays = gm.place(
        {"image": mnist.images, "label": mnist.labels}, gm.make_mesh(), PartitionSpec("data")
    )
    target = gm.Posterior(log_prior, gm.Plate(log_likelihood, arrays))
    w = jax.random.normal(jax.random.key(2), (CHAINS, 784, 10))  # weights are as large as a posterior's
    position = {"w": w, "b": jnp.zeros((CHAINS, 10))}
    init = jax.jit(jax.vmap(gm.HMC.init, in_axes=(None, 0)))
    kernel = gm.HMC(target, WARM_STEP_SIZE, LEAPFROGS)
    state, _ = run(kernel, jax.random.split(jax.random.key(0), WARM_STEPS), init(kernel, position))
    kernels = {("float32", "float32"): kernel.with_step_size(STEP_SIZE)}
    for gradients, device in DEVICES.items():
        for test in ("float32", gradients):
            on_device = Emulated(target, device, test)
            kernels[gradients, test] = gm.HMC(
                on_device, STEP_SIZE, LEAPFROGS, gradient_precision=gradients
            )
    results = []
    for (gradients, test), kernel in kernels.items():
        start = init(kernel, state.position)
        _, (rates, errors) = run(kernel, jax.random.split(jax.random.key(1), STEPS), start)
        results.append(
            {
                "gradients": gradients,
                "Metropolis test": test,
                "acceptance_rate": float(rates.mean()),
                "energy_error_median": float(np.median(np.abs(errors))),
            }
        )
    return results


# MovieLens


def _round(residuals):
    return jax.lax.reduce_precision(residuals, exponent_bits=8, mantissa_bits=7)


def _cut(residuals):
    bits = jax.lax.bitcast_convert_type(residuals, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


RESIDUALS = {"float32": lambda x: x, "rounded to bfloat16": _round, "cut to bfloat16": _cut}


def measure_residuals(data_dir: str) -> list[dict]:
    """Return acceptance rates and energy errors of one chain by what residuals are made to be."""
    watched = movielens_data.load(data_dir)
    cells = gm.place(watched, gm.make_mesh(), PartitionSpec("data"))
    targets = {name: _with_residuals(change, cells) for name, change in RESIDUALS.items()}
    warm, begin = energy.warmed_up(targets["float32"], watched, num_warmup=60)
    results = []
    for name, target in targets.items():
        metric = warm.inverse_mass_matrix
        kernel = gm.HMC(target, warm.step_size, energy.LEAPFROGS, inverse_mass_matrix=metric)
        step, state = jax.jit(gm.HMC.step), jax.jit(gm.HMC.init)(kernel, begin.position)
        rates, errors = [], []
        for key in jax.random.split(jax.random.key(5), MOVIELENS_STEPS):
            state, info = step(kernel, key, state)
            rates.append(float(info.acceptance_rate))
            errors.append(abs(float(info.energy_error)))
        results.append(
            {
                "residuals": name,
                "acceptance_rate": float(np.mean(rates)),
                "energy_error_median": float(np.median(errors)),
            }
        )
    return results


def _with_residuals(change: Callable, cells: jax.Array) -> gm.Posterior:
    """Return the posterior with derivatives of terms in their logits that are changed."""

    @jax.custom_vjp
    def through(logits):
        return logits

    through.defvjp(lambda logits: (logits, None), lambda _, residuals: (change(residuals),))
    terms = functools.partial(energy.user_terms, through=through)
    return gm.Posterior(energy.movie_prior, gm.Plate(terms, cells, local=("U", "u")))


def _show(model: str, results: list[dict]) -> None:
    table = Table(title=f"{model}, {LEAPFROGS} leapfrogs")
    for column in results[0]:
        table.add_column(column)
    for row in results:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
    Console().print(table)
