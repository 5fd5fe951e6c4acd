"""MovieLens 1M matrix factorisation: leapfrogs a second of one HMC program.

``python -m benchmarks movielens [--data-dir DIR] [--out FILE.json] [--quick] [--check]``. Who watched
what, 6,040 users x 3,706 movies, every entry a Bernoulli whose logit is the product of a user's and a
movie's embedding of 20 dimensions plus a bias of each; standard normal priors; 20 leapfrogs a step. A
leapfrog moves all chains, as in TFP's notebook "Distributed inference with TFP and JAX".
"""

import numpy as np

from benchmarks import campaign, movielens_data
from benchmarks.campaign import Benchmark


def main(argv: list[str]) -> int:
    """Measure, or check, the contenders; return the exit status."""
    return campaign.main(MOVIELENS, argv)


def truth(data_dir: str, chains: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return every chain's log density and gradient at the start, in float64."""
    watched = movielens_data.load(data_dir)
    start = movielens_data.start_position(watched, chains)
    each = [
        movielens_data.reference(watched, {name: leaf[i] for name, leaf in start.items()})
        for i in range(chains)
    ]
    log_density, grads = zip(*each, strict=True)
    return np.stack(log_density), {name: np.stack([grad[name] for grad in grads]) for name in start}


MOVIELENS = Benchmark(
    name="movielens",
    about=__doc__,
    folder="ml-1m",
    contenders=(
        *("ours", "ours:textbook", *campaign.PEERS, *campaign.TEXTBOOK),
        *("blackjax:streamed", "handwritten", campaign.FLOOR),
    ),
    rows=6_040,
    leapfrogs=20,
    step_size=2e-3,
    unit="leapfrogs",
    units=lambda chains: 1,
    legend="leapfrogs/s: each moves all chains. handwritten: a loop of plain JAX for this model alone. "
    "roofline: a leapfrog's three matrix products and one sigmoid an entry, nothing else.",
    chains=(2,),
    quick_chains=(2,),
    truth=truth,
)
