"""What the inputs' precision in matrix products does to acceptance, on MNIST.

``python -m benchmarks precision --data-dir DIR [--out FILE.json]``. TPUs multiply float32 in bfloat16
by default, recent NVIDIA GPUs in TensorFloat-32; sums are float32 in both. Here the inputs of every
product, forward and backward, are rounded as there, on the CPU. All precisions start from the same
states, with the same keys.
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

# Explicit mantissa bits of the inputs.
MANTISSA = {"float32": 23, "tensorfloat32": 10, "bfloat16": 7}
STEP_SIZES = (1.0e-3, 2.0e-3)
LEAPFROGS, WARM_STEPS, STEPS, CHAINS = 20, 60, 25, 4


def rounded_dot(mantissa: int):
    """Return a product that rounds its inputs, forward and backward, as such hardware does."""

    @jax.custom_vjp
    def dot(x, w):
        return _round(x, mantissa) @ _round(w, mantissa)

    def backward(saved, g):
        x, w = (_round(a, mantissa) for a in saved)
        g = _round(g, mantissa)
        return g @ w.T, (g.T @ x).T

    dot.defvjp(lambda x, w: (dot(x, w), (x, w)), backward)
    return dot


def _round(x, mantissa: int):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa)


def log_prior(params):
    return -0.5 * params["w"] ** 2, -0.5 * params["b"] ** 2


def log_likelihood_at(mantissa: int):
    """Return the log likelihood whose products round their inputs."""
    dot = rounded_dot(mantissa)

    def log_likelihood(params, batch):
        logits = dot(batch["image"].astype(jnp.float32), params["w"] / 255)
        return gm.categorical_logits(logits + params["b"], batch["label"])

    return log_likelihood


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
    mesh = gm.make_mesh()
    arrays = gm.place({"image": data.images, "label": data.labels}, mesh, PartitionSpec("data"))
    position = {"w": jnp.zeros((CHAINS, 784, 10)), "b": jnp.zeros((CHAINS, 10))}

    def kernel(mantissa, step_size):
        plate = gm.Plate(log_likelihood_at(mantissa), arrays)
        return gm.HMC(gm.Posterior(log_prior, plate), step_size, LEAPFROGS)

    results = []
    exact = kernel(MANTISSA["float32"], STEP_SIZES[0])
    state = jax.vmap(gm.HMC.init, in_axes=(None, 0))(exact, position)
    state, _ = run(exact, jax.random.split(jax.random.key(0), WARM_STEPS), state)
    for step_size in STEP_SIZES:
        for name, mantissa in MANTISSA.items():
            at = kernel(mantissa, step_size)
            start = jax.jit(jax.vmap(gm.HMC.init, in_axes=(None, 0)))(at, state.position)
            _, (rates, errors) = run(at, jax.random.split(jax.random.key(1), STEPS), start)
            results.append(
                {
                    "inputs": name,
                    "step_size": step_size,
                    "acceptance_rate": float(rates.mean()),
                    "energy_error_median": float(np.median(np.abs(errors))),
                }
            )
    _show(results)
    environment.save(options.out, "precision", results=results)
    return 0


def _show(results: list[dict]) -> None:
    table = Table(title=f"{LEAPFROGS} leapfrogs, {STEPS} steps of {CHAINS} chains")
    for column in results[0]:
        table.add_column(column)
    for row in results:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
    Console().print(table)
