"""The network of `neural_network.py`: functions, layouts, and scores of predictions.

Only `weight_specs` names a mesh axis: the network is written for one device.

References
----------
He, Zhang, Ren and Sun, "Delving deep into rectifiers", ICCV (2015): the scale of weights.
Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML (2017): reliability
diagrams and the expected calibration error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

Layers = list[dict[str, jax.Array]]
COLORS = ("#D55E00", "#0072B2", "#009E73")


def weight_variance(fan_in: int) -> float:
    """Prior variance of a weight: with relu, activations then keep their scale (He et al.)."""
    return 2.0 / fan_in


def init_params(rng_key: jax.Array, sizes: Sequence[int]) -> Layers:
    """Draw weights [fan_in, fan_out] and biases [fan_out] of each layer from their prior."""
    keys = jax.random.split(rng_key, len(sizes) - 1)
    return [_init_layer(key, *fans) for key, *fans in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def _init_layer(rng_key: jax.Array, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
    key_w, key_b = jax.random.split(rng_key)
    weights = jax.random.normal(key_w, (fan_in, fan_out)) * jnp.sqrt(weight_variance(fan_in))
    return {"w": weights, "b": jax.random.normal(key_b, (fan_out,))}


def prior_variances(params: Layers) -> Layers:
    """Return the variance of each weight and bias under the prior, shaped like them."""
    return [
        {
            "w": jnp.full_like(layer["w"], weight_variance(len(layer["w"]))),
            "b": jnp.ones_like(layer["b"]),
        }
        for layer in params
    ]


def logits(params: Layers, inputs: jax.Array) -> jax.Array:
    """Return unnormalized log probabilities, [rows, inputs] -> [rows, classes]."""
    *hidden, last = params
    for layer in hidden:
        inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"][None])
    return inputs @ last["w"] + last["b"][None]


def probabilities(params: Layers, inputs: jax.Array) -> jax.Array:
    """Return class probabilities, [rows, classes]."""
    return jax.nn.softmax(logits(params, inputs))


def log_likelihood(params: Layers, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the log probability of each row's label, [rows]."""
    return gm.categorical_logits(logits(params, batch["image"]), batch["label"])


def log_prior(params: Layers) -> Layers:
    """Return independent normal log densities, element by element, up to a constant."""
    return jax.tree.map(lambda x, v: -0.5 * x**2 / v, params, prior_variances(params))


def log_density(params: Layers, batch: dict[str, jax.Array]) -> tuple[Layers, jax.Array]:
    """Return the summands of the posterior: one an element of the weights, and one a row."""
    return log_prior(params), log_likelihood(params, batch)


def loss(params: Layers, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean negative log likelihood of a batch, in nats a row."""
    return -jnp.mean(log_likelihood(params, batch))


def weight_specs(num_layers: int) -> list[dict[str, P]]:
    """Lay the inner layers over "model", by columns and by rows in turn; the outer two are replicated.

    After a layer that is cut by columns each device has its own activations, which is what the rows of
    the next layer need: one sum over "model" serves two layers.
    """
    turns = [{"w": P(None, "model"), "b": P("model")}, {"w": P("model", None), "b": P()}]
    whole = {"w": P(), "b": P()}
    return [whole, *(turns[i % 2] for i in range(num_layers - 2)), whole]


def lies_like(params: Layers, other: Layers) -> bool:
    """Tell whether every leaf is laid out as the other's."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def largest_difference(params: Any, other: Any) -> float:
    """Return norm(a - b) / norm(b) of the leaf where it is largest."""
    ratios = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), params, other)
    return float(max(jax.tree.leaves(ratios)))


def shapes_on(mesh: Mesh, shapes: Any, specs: Any) -> Any:
    """Return what `gm.place` would return, as shapes with shardings; a spec for each leaf."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows, a number for each bin of confidence.

    Attributes
    ----------
    counts
        Predictions in the bin, [bins].
    confidence, accuracy
        Their mean confidence, and the share of them that is right, [bins]; NaN in an empty bin.
    """

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def ece(self) -> float:
        """The expected calibration error: |accuracy - confidence|, averaged over predictions."""
        gaps = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(self.counts * gaps) / self.counts.sum())


def reliability(predicted: np.ndarray, labels: np.ndarray, num_bins: int = 15) -> Reliability:
    """Bin predictions by their confidence, the probability of the class that they name.

    Parameters
    ----------
    predicted
        Class probabilities, [rows, classes].
    labels
        The true classes, [rows].
    num_bins
        Bins of equal width; bin m holds confidences in ((m - 1) / num_bins, m / num_bins].
    """
    confidence = predicted.max(axis=1)
    is_right = predicted.argmax(axis=1) == labels
    inner_edges = np.linspace(0, 1, num_bins + 1)[1:-1]
    bins = np.digitize(confidence, inner_edges, right=True)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(bins, weights=values, minlength=num_bins)

    counts = total(np.ones(len(labels)))
    with np.errstate(invalid="ignore"):
        return Reliability(counts, total(confidence) / counts, total(is_right) / counts)


def log_scores(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the log probability that was given to each row's label, in nats, [rows]."""
    return np.log(np.maximum(predicted[np.arange(len(labels)), labels], np.finfo(np.float32).tiny))


def scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return accuracy, mean log score, ECE, and mean confidence of class probabilities."""
    return {
        "accuracy": float(np.mean(predicted.argmax(axis=1) == labels)),
        "log_score": float(log_scores(predicted, labels).mean()),
        "ece": reliability(predicted, labels).ece,
        "mean_confidence": float(predicted.max(axis=1).mean()),
    }


def gain(predicted: np.ndarray, other: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the mean gain in log score and in accuracy over another prediction of the same rows.

    Each comes with its standard error, of paired differences over rows.
    """
    log_score = log_scores(predicted, labels) - log_scores(other, labels)
    is_right, was_right = (p.argmax(axis=1) == labels for p in (predicted, other))
    found = {}
    for name, values in (("log_score", log_score), ("accuracy", is_right * 1.0 - was_right)):
        found[f"{name}_gain"] = float(values.mean())
        found[f"{name}_se"] = float(values.std(ddof=1) / np.sqrt(len(values)))
    return found


def plot_reliability(axis: Any, predicted: dict[str, np.ndarray], labels: np.ndarray) -> None:
    """Draw accuracy over confidence: on the diagonal a prediction is as sure as it is right."""
    axis.plot([0, 1], [0, 1], color="0.6", lw=1)
    for (name, p), color in zip(predicted.items(), COLORS, strict=True):
        found = reliability(p, labels)
        axis.plot(found.confidence, found.accuracy, color=color, lw=1)
        size = 4 + 300 * found.counts / found.counts.sum()
        label = f"{name}: ECE {found.ece:.3f}"
        axis.scatter(found.confidence, found.accuracy, s=size, color=color, label=label)
    axis.set(title="reliability (area: share of images)", xlabel="confidence", ylabel="accuracy")
    axis.legend(loc="upper left", fontsize=8)


def plot_running_score(
    axis: Any, drawn: list[np.ndarray], singles: dict[str, np.ndarray], labels: np.ndarray
) -> None:
    """Draw the log score of the average of the first n draws, and those of single networks."""
    numbers = np.arange(1, len(drawn) + 1)
    running = np.cumsum(drawn, axis=0) / numbers[:, None, None]
    values = [log_scores(p, labels).mean() for p in running]
    alone = [log_scores(p, labels).mean() for p in drawn]
    axis.plot(numbers, values, color=COLORS[2], label="HMC, the first n draws")
    axis.scatter(numbers, alone, s=6, color="0.5", label="draw n alone")
    for (name, p), color in zip(singles.items(), COLORS[:2], strict=True):
        axis.axhline(log_scores(p, labels).mean(), color=color, ls="--", label=name)
    axis.set(title="log score on the test images", xlabel="n")
    axis.legend(loc="center right", bbox_to_anchor=(1, 0.7), fontsize=8)
