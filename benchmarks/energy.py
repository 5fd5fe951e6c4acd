"""The energy error of float32 trajectories at MovieLens' full size, against float64.

``python -m benchmarks energy [--data-dir DIR] [--out FILE.json] [--steps N]``. From a point that is
typical of the posterior (a few HMC steps after a start around the mode) trajectories of 20
leapfrogs are taken in float32. Of the very same two ends the Hamiltonian's difference is computed
in float64 by NumPy. Beside it: what the kernel accepts by, sums of differences of terms; the same with
terms whose products have rounded factors, as GPUs (TensorFloat-32) and TPUs (bfloat16) make them by
default, emulated; and the naive difference of two float32 log densities, each summed as one.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks import data, environment, movielens_data
from benchmarks.emulation import emulated

DEVICES, LEAPFROGS = 8, 20
ROUNDED = {"tensorfloat32": "gpu", "bfloat16": "tpu"}  # terms in the default precision of devices
COLUMNS = {
    "by_differences": "sum of differences",
    **{name: f"terms in {name}" for name in ROUNDED},
    "naive": "naive",
}


def main(argv: list[str]) -> int:
    """Print and write the errors of both differences; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks energy", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="trajectories")
    options = parser.parse_args(argv)
    with data.folder_of([data.MOVIELENS], options.data_dir) as (folder, sources):
        watched = movielens_data.load(folder)
    console = Console()
    console.print(f"Data: {sources[data.MOVIELENS]}", markup=False)
    rows = measure(watched, options.steps)
    _show(console, rows)
    environment.save(options.out, "energy", data=sources, trajectories=rows)
    return 0


def measure(watched: np.ndarray, num_steps: int) -> list[dict]:
    """Return the differences of each trajectory, in nats."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    import gspmd_mcmc as gm
    from gspmd_mcmc.kernels.integrators import PhasePoint
    from gspmd_mcmc.kernels.metrics import metric as metrics

    mesh = gm.make_mesh(data=DEVICES)
    plate = gm.Plate(user_terms, gm.place(watched, mesh, P("data")), local=("U", "u"))
    target = gm.Posterior(movie_prior, plate)
    kernel, state = warmed_up(target, watched, num_warmup=20)
    trajectory, step = jax.jit(type(kernel).trajectory), jax.jit(type(kernel).step)

    rounded = {name: jax.jit(emulated(_gain, device)) for name, device in ROUNDED.items()}

    def exact_log_density(position):
        return movielens_data.reference(watched, {n: np.asarray(x) for n, x in position.items()})[0]

    rows = []
    for i in range(num_steps):
        rng_key = jax.random.fold_in(jax.random.key(2), i)
        # The momentum that the step draws from this key.
        momentum = metrics.sample_momentum(
            jax.random.split(rng_key)[0], kernel.inverse_mass_matrix, state.position
        )
        begin = PhasePoint(state.position, momentum, state.log_density_grad)
        end, _ = trajectory(kernel, begin)
        after, info = step(kernel, rng_key, state)
        naive = np.float32(_plain(target, end.position)) - np.float32(_plain(target, begin.position))
        kinetic = _kinetic(kernel, end.momentum) - _kinetic(kernel, momentum)
        exact = kinetic - (exact_log_density(end.position) - exact_log_density(begin.position))
        rows.append(
            {
                "exact": exact,
                "by_differences": float(info.energy_error),
                **{
                    name: kinetic - float(gain(target, end.position, begin.position))
                    for name, gain in rounded.items()
                },
                "naive": float(kinetic - float(naive)),
            }
        )
        state = after
    return rows


def warmed_up(target: Any, watched: np.ndarray, num_warmup: int) -> tuple[Any, Any]:
    """Return a kernel and a chain's state that is typical of the posterior."""
    import gspmd_mcmc as gm

    start = {name: leaf[0] for name, leaf in movielens_data.start_position(watched, 1).items()}
    mode = gm.find_mode(jax.random.key(0), target, start, max_steps=150, tolerance=5.0, num_probes=16)
    draws = gm.sample(
        jax.random.key(1),
        target,
        mode.laplace_start(),
        num_chains=1,
        num_warmup=num_warmup,
        num_samples=1,
        kernel=gm.HMC(target, 0.1, LEAPFROGS, inverse_mass_matrix=mode.inverse_mass_matrix),
        warmup=gm.WindowAdaptation(adapt_mass_matrix=False),
    )
    return draws.kernel, jax.tree.map(lambda x: x[0], draws.state)


def movie_prior(params):
    """N(0, 1) of the movies, up to a constant."""
    return -0.5 * params["V"] ** 2, -0.5 * params["v"] ** 2


def user_terms(params, watched, through=lambda logits: logits):
    """Terms of users, with their N(0, 1), up to a constant; logits pass ``through`` a function."""
    import gspmd_mcmc as gm

    logits = through(gm.inner_products(params["U"], params["V"], params["u"], params["v"]))
    prior = -0.5 * jnp.sum(params["U"] ** 2, axis=1) - 0.5 * params["u"] ** 2
    return jnp.sum(gm.bernoulli_logits(logits, watched), axis=1) + prior


def _gain(target, end, begin):
    """Return the difference of two log densities, by differences of terms."""
    differences = jax.tree.map(jnp.subtract, target.terms(end), target.terms(begin))
    return sum(jnp.sum(x) for x in jax.tree.leaves(differences))


@jax.jit
def _plain(target, position):
    """Return the log density as one float32 sum of every term."""
    prior = sum(jnp.sum(x) for x in movie_prior(position))
    return prior + jnp.sum(user_terms(position, target.plates[0].data))


def _kinetic(kernel, momentum) -> float:
    metric = kernel.inverse_mass_matrix
    return sum(
        0.5 * float(np.sum(np.asarray(metric[n], np.float64) * np.asarray(p, np.float64) ** 2))
        for n, p in momentum.items()
    )


def _show(console: Console, rows: list[dict]) -> None:
    title = f"errors of the energy differences of trajectories of {LEAPFROGS} leapfrogs, nats"
    table = Table(title=title)
    for column in ("float64", *COLUMNS.values()):
        table.add_column(column, justify="right")
    for row in rows:
        errors = (row[name] - row["exact"] for name in COLUMNS)
        table.add_row(*(f"{x:.4f}" for x in (row["exact"], *errors)))
    console.print(table)
