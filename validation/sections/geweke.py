"""Geweke's joint distribution test of a hierarchical model with local latents.

Parameters and data are drawn from their joint law in two ways: parameters from the prior and data given
them; and by a chain that takes a step of the kernel given the data, then draws data anew given the
parameters. If the kernel leaves every posterior invariant, both have the same law. Chains start from
exact joint draws, so that a right kernel is right at once; a wrong one is given half of the steps to
drift away, and functionals are averaged over the other half. Chains are independent: the standard error
of an average is theirs, whatever the autocorrelation within a chain.

References
----------
Geweke, "Getting it right", JASA 99 (2004).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gspmd_mcmc as gm
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import PyTree
from validation.sections import sbc
from validation.sections.broken import BREAKS

NUM_CHAINS, NUM_STEPS, NUM_EXACT = 4096, 60, 1 << 17
MOST_Z, LEAST_Z_OF_BROKEN = 4.0, 6.0
LEAST_ACCEPTED = 0.5


def functionals(target: gm.Posterior, position: PyTree, y: jax.Array) -> dict[str, jax.Array]:
    """Functions of parameters and data, from a position of real rows and padded observations."""
    values = sbc.functionals(target, position, y)
    of_last = values["last effect"]
    squared = ("mean", "log scale", "last effect", "sum of log noise")
    return values | {
        **{f"{name} squared": values[name] ** 2 for name in squared},
        "mean × last effect": values["mean"] * of_last,
        "last effect × its observation": of_last * y[sbc.NUM_GROUPS - 1, 0],
        "tanh of an observation": jnp.tanh(y[0, 0]),
    }


@partial(jax.jit, static_argnames=("num",))
def draw_exactly(target: gm.Posterior, rng_key: jax.Array, num: int) -> dict[str, jax.Array]:
    """The marginal-conditional simulator: functionals [num] of independent joint draws."""

    def draw(rng_key):
        position_key, data_key = jax.random.split(rng_key)
        position = sbc.draw_position(position_key)
        return functionals(target, position, sbc.draw_observations(data_key, target, position))

    return jax.vmap(draw)(jax.random.split(rng_key, num))


@partial(jax.jit, static_argnames=("num_chains", "num_steps", "chain_axis"))
def draw_in_turn(
    kernel: Any,
    target: gm.Posterior,
    rng_key: jax.Array,
    *,
    num_chains: int,
    num_steps: int,
    chain_axis: str | None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The successive-conditional simulator.

    Returns
    -------
    averages, acceptance_rate
        Functionals averaged over the second half of each chain, [chains]; of all steps and chains, [].
    """
    start_key, steps_key = jax.random.split(rng_key)

    def over_chains(function, *args):
        return jax.vmap(function, spmd_axis_name=chain_axis)(*args)

    def start(rng_key):
        position_key, data_key = jax.random.split(rng_key)
        position = sbc.draw_position(position_key)
        y = sbc.draw_observations(data_key, target, position)
        # Laid out by the right target: a wrong one may think that pad rows are real.
        return local.lay_out(target, position), y

    def step(carry, i):
        shared_key, chains_key = jax.random.split(jax.random.fold_in(steps_key, i))
        drawn = kernel.with_jitter(shared_key, i)

        def one(rng_key, position, y):
            step_key, data_key = jax.random.split(rng_key)
            here = sbc.with_observations(drawn, y)
            state, info = type(here).step(here, step_key, here.init(position))
            real = local.cut(target, state.position)
            # Of the new parameters and the old data: of data redrawn nobody could tell that the kernel
            # does not look at them.
            values = functionals(target, real, y)
            y = sbc.draw_observations(data_key, target, real)
            return state.position, y, values, info.acceptance_rate

        positions, ys, sums, rate = carry
        keys = jax.random.split(chains_key, num_chains)
        positions, ys, values, new_rate = over_chains(one, keys, positions, ys)
        counts = i >= num_steps // 2
        sums = jax.tree.map(lambda s, v: s + jnp.where(counts, v, 0), sums, values)
        return (positions, ys, sums, rate + jnp.mean(new_rate)), None

    positions, ys = over_chains(start, jax.random.split(start_key, num_chains))
    shapes = jax.eval_shape(lambda: functionals(target, sbc.draw_position(start_key), ys[0]))
    zeros = {name: jnp.zeros(num_chains) for name in shapes}
    carry = (positions, ys, zeros, jnp.zeros(()))
    (_, _, sums, rate), _ = jax.lax.scan(step, carry, jnp.arange(num_steps))
    num_counted = num_steps - num_steps // 2
    return jax.tree.map(lambda s: s / num_counted, sums), rate / num_steps


def z_scores(exact: dict[str, np.ndarray], averages: dict[str, np.ndarray]) -> dict[str, float]:
    """Differences of means in standard errors, which independent draws and independent chains give.

    NaN, of a chain that has run away, counts as infinite.
    """

    def z(name: str) -> float:
        a, b = (np.asarray(x[name], np.float64) for x in (averages, exact))
        error = np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
        return float(np.nan_to_num((a.mean() - b.mean()) / error, nan=np.inf))

    with np.errstate(all="ignore"):
        return {name: z(name) for name in averages}


def run(
    kernel: Any,
    target: gm.Posterior,
    rng_key: jax.Array,
    num_chains: int = NUM_CHAINS,
    num_steps: int = NUM_STEPS,
) -> tuple[dict[str, float], float]:
    """Return each functional's z, and the mean acceptance rate.

    ``kernel`` samples; ``target`` is the model that it should sample, and draws the data.
    """
    mesh = target.plates[0].rows.mesh
    exact_key, chain_key = jax.random.split(rng_key)
    averages, rate = draw_in_turn(
        kernel,
        target,
        chain_key,
        num_chains=num_chains,
        num_steps=num_steps,
        chain_axis=sbc.chain_axis_of(mesh),
    )
    return z_scores(draw_exactly(target, exact_key, NUM_EXACT), averages), float(rate)


def records(kernel_names: Iterable[str], quick: bool) -> list[dict[str, Any]]:
    """Test kernels on every mesh, and put broken ones to the same test on the last.

    Arguments are those of `sbc.records`.
    """
    rows = []
    num_chains = NUM_CHAINS // 4 if quick else NUM_CHAINS
    for name in (n for n in kernel_names if n in sbc.KERNELS):
        for mesh_name in list(sbc.MESHES)[-1:] if quick else sbc.MESHES:
            target = sbc.target_on(sbc.mesh_of(mesh_name))
            kernel = sbc.KERNELS[name](target)
            row = {"section": "geweke", "kernel": name, "mesh": mesh_name, "chains": num_chains}
            rows += [row | judged for judged in _judge(kernel, target, num_chains)]
            if mesh_name == list(sbc.MESHES)[-1]:
                rows += [row | judged for judged in _judge_broken(kernel, target, num_chains)]
            jax.clear_caches()
    return rows


def largest_z(z: dict[str, float]) -> float:
    """Return the largest of all functionals, whatever its sign."""
    return max(map(abs, z.values()))


def _judge(kernel: Any, target: gm.Posterior, num_chains: int) -> list[dict[str, Any]]:
    z, rate = run(kernel, target, jax.random.key(0), num_chains)
    worst = largest_z(z)
    what = f"largest |z| of {len(z)} functionals"
    return [
        {"what": what, "value": worst, "bound": MOST_Z, "passed": worst < MOST_Z},
        {
            "what": "acceptance rate",
            "value": rate,
            "bound": LEAST_ACCEPTED,
            "passed": rate > LEAST_ACCEPTED,
        },
    ]


def _judge_broken(kernel: Any, target: gm.Posterior, num_chains: int) -> list[dict[str, Any]]:
    rows = []
    for name, breaks in BREAKS.items():
        worst = largest_z(run(breaks(kernel), target, jax.random.key(0), num_chains)[0])
        what, bound = f"rejected: {name}, largest |z|", LEAST_Z_OF_BROKEN
        rows.append({"what": what, "value": worst, "bound": bound, "passed": worst > bound})
    return rows
