"""MNIST logistic regression: full-data gradients a second of one HMC program.

``python -m benchmarks mnist [--data-dir DIR] [--out FILE.json] [--quick] [--check]``. Real MNIST,
60,000 x 784, 10 classes; standard normal priors; 20 leapfrogs a step. A gradient is one chain's
gradient over all rows: 4 chains take 4 gradients a leapfrog.
"""

import numpy as np

from benchmarks import campaign, mnist_data
from benchmarks.campaign import Benchmark


def main(argv: list[str]) -> int:
    """Measure, or check, the contenders; return the exit status."""
    return campaign.main(MNIST, argv)


def truth(data_dir: str, chains: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return every chain's log density and gradient at the start, in float64."""
    data = mnist_data.load(data_dir)
    start = mnist_data.start_position(chains)
    w, b = start["w"].reshape(chains, 784, -1), start["b"].reshape(chains, -1)
    each = [mnist_data.reference(data, w[i], b[i]) for i in range(chains)]
    log_density, w_grad, b_grad = (np.stack(part) for part in zip(*each, strict=True))
    return log_density, {"w": w_grad, "b": b_grad}


MNIST = Benchmark(
    name="mnist",
    about=__doc__,
    folder="mnist",
    contenders=(
        *("ours", "ours:leading_axis", "ours:from_numpyro", "ours:from_numpyro_floats"),
        *(*campaign.PEERS, *campaign.TEXTBOOK, campaign.FLOOR),
    ),
    rows=60_000,
    leapfrogs=20,
    step_size=1e-3,
    unit="gradients",
    units=lambda chains: chains,
    legend="gradients/s: of one chain over all rows, all chains together. roofline: the two matrix "
    "products alone, and one read of the data for all chains.",
    chains=(1, 4),
    quick_chains=(1,),
    truth=truth,
)
