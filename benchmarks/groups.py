"""Rows in groups of unlike size: leapfrogs a second of one HMC program, and its temporaries.

``python -m benchmarks groups [--data-dir DIR] [--models ratings,effect] [--out FILE.json] [--quick]
[--check]``. Two models of MovieLens 1M's ratings, in groups of 20 to 2,314 rows of a user. `effect`: a
random effect of each of 6,040 users and a slope. `ratings`: a bias and 8 factors of each user and of
each film. N(0, 1) priors, a Gaussian likelihood, 20 leapfrogs a step. `ours` lays groups with their
rows (`gm.Groups`); `ours:index` has the same kernel on `effect[group]`; the peers have their best form,
rows sorted by group and sums over sorted segments, and with ``:textbook`` plain indexing.
"""

from functools import partial

import numpy as np

from benchmarks import campaign, groups_data
from benchmarks.campaign import Benchmark

PEERS = ("numpyro", "blackjax")


def main(argv: list[str]) -> int:
    """Measure, or check, the contenders of each model; return the exit status."""
    models, argv = _option(argv, "--models", ",".join(MODELS))
    out, argv = _option(argv, "--out", "")
    status = 0
    for name in models.split(","):
        if name not in MODELS:
            raise SystemExit(f"--models: {name!r} is not one of {', '.join(MODELS)}")
        own = ["--out", out.removesuffix(".json") + f".{name}.json"] if out else []
        status |= campaign.main(MODELS[name], [*argv, *own])
    return status


def _option(argv: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """Return an option's value, and the arguments without it."""
    if name not in argv:
        return default, argv
    place = argv.index(name)
    return argv[place + 1], argv[:place] + argv[place + 2 :]


def truth(start, reference, data_dir: str, chains: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return every chain's log density and gradient at the start, in float64."""
    rated = groups_data.load(data_dir)
    position = start(rated, chains)
    if chains == 1:
        position = {name: leaf[None] for name, leaf in position.items()}
    each = [reference(rated, {n: leaf[i] for n, leaf in position.items()}) for i in range(chains)]
    log_density, grads = zip(*each, strict=True)
    return np.stack(log_density), {name: np.stack([grad[name] for grad in grads]) for name in position}


def _benchmark(name: str, start, reference) -> Benchmark:
    return Benchmark(
        name=f"groups_{name}",
        about=__doc__,
        folder="ml-1m",
        contenders=("ours", "ours:index", *PEERS, *(f"{peer}:textbook" for peer in PEERS)),
        rows=1_000_208,
        leapfrogs=20,
        step_size=1e-4,
        unit="leapfrogs",
        units=lambda chains: 1,
        legend="leapfrogs/s: each moves all chains. ours:index: our kernel, with users' latents whole "
        "and read by an index.",
        chains=(1,),
        quick_chains=(1,),
        truth=partial(truth, start, reference),
    )


MODELS = {
    "effect": _benchmark("effect", groups_data.effect_start, groups_data.effect_reference),
    "ratings": _benchmark("ratings", groups_data.ratings_start, groups_data.ratings_reference),
}
