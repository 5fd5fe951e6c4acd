"""What the precision of matrix products does to acceptance, on MNIST.

``python -m benchmarks precision --data-dir DIR [--out FILE.json]``. HMC with gradients of each
precision that devices have and a Metropolis test in float32, which is what the library does; and, for
comparison, with a test whose terms are as the gradients. Products of other devices are emulated on the
CPU (`benchmarks.emulation`). All start from the same states, with the same keys and step size.
"""

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm
from benchmarks import environment, mnist_data
from benchmarks.emulation import Emulated

DEVICES = {"tensorfloat32": "gpu", "bfloat16_3x": "tpu", "bfloat16": "tpu"}
WARM_STEP_SIZE, STEP_SIZE = 3e-3, 3.3e-3
LEAPFROGS, WARM_STEPS, STEPS, CHAINS = 20, 80, 25, 4


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
    parser.add_argument("--data-dir", default=os.environ.get("GSPMD_MCMC_DATA"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    data = mnist_data.load(options.data_dir)
    arrays = gm.place(
        {"image": data.images, "label": data.labels}, gm.make_mesh(), PartitionSpec("data")
    )
    target = gm.Posterior(log_prior, gm.Plate(log_likelihood, arrays))
    results = measure(target)
    _show(results)
    environment.save(options.out, "precision", results=results)
    return 0


def measure(target: gm.Target) -> list[dict]:
    """Return acceptance rates and energy errors by the precision of gradients and of the test."""
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


def _show(results: list[dict]) -> None:
    table = Table(title=f"{LEAPFROGS} leapfrogs of {STEP_SIZE}, {STEPS} steps of {CHAINS} chains")
    for column in results[0]:
        table.add_column(column)
    for row in results:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
    Console().print(table)
