"""MNIST for the benchmark: the training set, the common start, and a float64 reference."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data import datasets

NUM_CLASSES = 10
START_SCALE = 0.01


@dataclass(frozen=True)
class Mnist:
    """The training set."""

    images: np.ndarray  # [60000, 784] uint8
    labels: np.ndarray  # [60000] int32


def load(data_dir: str | Path) -> Mnist:
    """Load the training set from a folder of `benchmarks.data.folder_of`, simulated or real."""
    data = datasets.load_mnist(data_dir, checksums=None)
    return Mnist(data.train_images, data.train_labels)


def start_position(chains: int) -> dict[str, np.ndarray]:
    """Return the start that all contenders share; one chain has no chain axis."""
    rng = np.random.default_rng(0)
    lead = (chains,) if chains > 1 else ()
    shapes = {"w": (*lead, 784, NUM_CLASSES), "b": (*lead, NUM_CLASSES)}
    return {
        name: (START_SCALE * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def reference(data: Mnist, w: np.ndarray, b: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the log density at one position and its gradients in w and b, in float64."""
    w, b = w.astype(np.float64), b.astype(np.float64)
    parameters = np.concatenate([w.ravel(), b])
    total = -0.5 * (parameters**2).sum() - 0.5 * parameters.size * np.log(2 * np.pi)
    w_grad, b_grad = -w, -b
    for rows in np.array_split(np.arange(len(data.labels)), 20):
        images, labels = data.images[rows] / 255.0, data.labels[rows]
        logits = images @ w + b
        logits -= logits.max(axis=1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        residuals = np.eye(NUM_CLASSES)[labels] - np.exp(log_probs)
        total += log_probs[np.arange(len(rows)), labels].sum()
        w_grad = w_grad + images.T @ residuals
        b_grad = b_grad + residuals.sum(axis=0)
    return float(total), w_grad, b_grad
