"""The model that one process and several sample, for `test_processes` and its workers."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import run as runs

NUM_ROWS = 21  # On 8, 4 or 2 devices some hold pad.
# A run in chunks of so many steps, of which one process does not see the end.
CHUNK = 20
LONG = {"num_warmup": 20, "num_samples": 400}


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.ones(3) + rng.normal(size=NUM_ROWS)).astype(np.float32)}


def log_prior(params):
    return -0.5 * params["slope"] ** 2, -0.5 * params["spread"] ** 2


def log_likelihood(params, batch):
    mean = batch["x"] @ params["slope"] + params["effect"]
    prior = -0.5 * (params["effect"] - params["spread"]) ** 2
    return -0.5 * (batch["y"] - mean) ** 2 + prior


def start(rng_key):
    keys = jax.random.split(rng_key, 3)
    return {
        "slope": jax.random.normal(keys[0], (3,)),
        "spread": jax.random.normal(keys[1]),
        "effect": jax.random.normal(keys[2], (NUM_ROWS,)),
    }


def target_of(data):
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, data, local="effect"))


def sampled(mesh, kind: type = gm.NUTS, **settings):
    target = target_of(rows() if mesh is None else gm.place(rows(), mesh, P("data")))
    given = {"num_chains": 2, "num_warmup": 8, "num_samples": 6, "progress": False} | settings
    kernel = gm.NUTS(target, 0.1, max_tree_depth=2) if kind is gm.NUTS else gm.HMC(target, 0.1, 4)
    adaptation = gm.WindowAdaptation(metric=gm.Diagonal())
    return gm.sample(
        jax.random.key(3), target, start, mesh=mesh, kernel=kernel, warmup=adaptation, **given
    )


def long_run(mesh, **settings):
    """Sample as `sampled` does, in chunks of `CHUNK` steps."""
    before, runs.next_size = runs.next_size, lambda count, seconds: CHUNK
    try:
        return sampled(mesh, gm.HMC, **LONG | settings)
    finally:
        runs.next_size = before


NUM_GROUPS = 7
GROUP = np.random.default_rng(1).permutation(np.repeat(np.arange(NUM_GROUPS), 3))


AGE = np.linspace(-1.0, 1.0, NUM_GROUPS).astype(np.float32)


def prior_of_group(params, group):
    return -0.5 * (params["effect"] - params["spread"] * group["age"]) ** 2


def of_row_of_group(params, row):
    return -0.5 * (row["y"] - row["x"] @ params["slope"] - params["effect"]) ** 2


def sampled_by_group(mesh, place):
    """Sample a latent for each group; ``place(groups)`` lays its age and its rows."""
    groups = gm.Groups(GROUP, mesh, P("data"))
    table, placed = place(groups)
    target = gm.Posterior(
        log_prior,
        gm.Plate(prior_of_group, table, local="effect"),
        gm.Plate(of_row_of_group, placed, local="effect"),
    )
    draws = gm.sample(
        jax.random.key(8),
        target,
        {"slope": np.ones(3), "spread": 0.5, "effect": np.arange(NUM_GROUPS) / 4},
        mesh=mesh,
        kernel=gm.HMC(target, 0.1, 4),
        **{"num_chains": 2, "num_warmup": 0, "num_samples": 6, "progress": False},
    )
    position = {name: np.asarray(x) for name, x in gm.to_host(draws.position).items()}
    return position | {"effect": position["effect"][:, :, :NUM_GROUPS]}


def values_of(draws):
    """Return what two runs are compared by, whole, by name; every process has to call this."""
    position = dict(gm.to_host(draws.position))
    position["effect"] = np.asarray(position["effect"])[:, :, :NUM_ROWS]
    summary = draws.summary()
    rhat = {f"rhat_{k}": np.asarray(gm.to_host(x)) for k, x in summary.rhat.items()}
    rhat["rhat_effect"] = rhat["rhat_effect"][:NUM_ROWS]
    stats = {k: np.asarray(draws.stats[k]) for k in ("log_density", "acceptance_rate")}
    return position | rhat | stats | {"step_size": draws.warmup["step_size"]}


def further(mesh, draws):
    """Go on from draws, look at some, climb to the mode, and sample a NumPyro model of the same rows.

    Every process has to call this; what it returns is whole on each.
    """
    short = {"num_chains": 2, "num_warmup": 0, "num_samples": 6, "progress": False}
    target = draws.kernel.target
    more = gm.sample(jax.random.key(4), target, draws, **short)
    assert len(gm.plots.trace(more).axes) > 4
    shown = gm.plots.datatree(more).posterior
    mode = gm.find_mode(jax.random.key(5), target, start(jax.random.key(6)), num_probes=8)
    assert mode.is_converged
    of_numpyro = gm.from_numpyro(numpyro_model, gm.place(rows(), mesh, P("data")), plates=PLATES)
    theirs = gm.sample(jax.random.key(7), of_numpyro, kernel=gm.HMC(of_numpyro, 0.1, 4), **short)
    found = {"more": more.position["slope"], "numpyro": theirs.position["slope"]}
    found |= {"mode": mode.position["slope"], "curvature": mode.curvature["slope"]}
    return gm.to_host(found) | {f"shown {name}": x.values for name, x in shown.items()}


PLATES = {"rows": "data"}


def numpyro_model(data):
    import numpyro  # by the runs that need it
    import numpyro.distributions as dist

    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", NUM_ROWS):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(data["x"] @ slope + effect, 1), obs=data["y"])
