"""Logistic regressions: MNIST's digits, and a sparse one of the size of German credit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import mnist_data
from benchmarks.ess_models.model import Budget, Form, Model, bernoulli, normal, single

# German credit with sparse weights: 1,000 rows, 24 features and a constant. The data are simulated; the
# priors are those of the Inference Gym: weights times scales, one each and one for all, Gamma(1/2, 1/2)

NUM_ROWS, NUM_FEATURES = 1000, 25


def gamma_of_log(log_x: jax.Array) -> jax.Array:
    """Log density of log x, x of Gamma(1/2, rate 1/2), up to a constant."""
    return 0.5 * log_x - 0.5 * jnp.exp(log_x)


def sparse_prior(params):
    return {
        "weight": normal(params["weight"]),
        "local": gamma_of_log(params["log_local"]),
        "scale": gamma_of_log(params["log_scale"]),
    }


def sparse_likelihood(params, rows):
    beta = params["weight"] * jnp.exp(params["log_local"] + params["log_scale"])
    return bernoulli(rows["x"] @ beta, rows["y"])


def _simulate_credit(data_dir):
    rng = np.random.default_rng(1000)
    common = rng.standard_normal((NUM_ROWS, 1))
    x = 0.8 * rng.standard_normal((NUM_ROWS, NUM_FEATURES)) + 0.6 * common
    x[:, -1] = 1.0
    beta = np.zeros(NUM_FEATURES)
    beta[[0, 3, 7, 12, -1]] = [0.8, -0.6, 0.4, -0.3, 1.0]
    y = rng.random(NUM_ROWS) < 1 / (1 + np.exp(-x @ beta))
    return single({"x": x, "y": y.astype(float)})


GERMAN_CREDIT = Model(
    name="german_credit",
    about="sparse logistic regression, 1,000 simulated rows of 25 features: 51 latents",
    load=_simulate_credit,
    shapes=lambda data: {
        "weight": data["x"].shape[1:],
        "log_local": data["x"].shape[1:],
        "log_scale": (),
    },
    log_prior=sparse_prior,
    log_likelihood=sparse_likelihood,
)

# MNIST, as in the benchmark `mnist`

SMALL_ROWS = 6000
START_RADIUS = 0.1  # within 2, logits of 784 pixels are in the tens


def digits_prior(params):
    return normal(params["w"]), normal(params["b"])


def digits_likelihood(params, rows):
    logits = (rows["image"].astype(jnp.float32) / 255) @ params["w"] + params["b"][None]
    chosen = jnp.take_along_axis(logits, rows["label"][:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def _arrange(data):
    """Return what `benchmarks.contenders.likelihood` found fastest for peers with several chains."""
    return {
        "image": data["image"] / np.float32(255),
        "hot": np.eye(mnist_data.NUM_CLASSES, dtype=np.float32)[:, data["label"]],
    }


def classes_first(params, data):
    logits = params["w"].T @ data["image"].T + params["b"][:, None]
    return (logits * data["hot"]).sum() - jax.nn.logsumexp(logits, axis=0).sum()


def digits_rotations(data):
    """Turn pixels to the principal axes of the images, classes to the mean and what differs from it."""
    pixels = data["image"].reshape(len(data["label"]), -1).astype(np.float32) / 255
    of_pixels = np.linalg.eigh((pixels.T @ pixels).astype(np.float64))[1].astype(np.float32)
    some = np.eye(mnist_data.NUM_CLASSES)
    some[:, 0] = 1
    of_classes = np.linalg.qr(some)[0].astype(np.float32)
    return {"w": (of_pixels, of_classes), "b": (of_classes,)}


def _load_digits(rows, data_dir):
    data = mnist_data.load(data_dir)
    return {"image": data.images[:rows], "label": data.labels[:rows]}


def _digits(name: str, rows: int, few: Budget, many: Budget, left_out: tuple[str, ...] = ()) -> Model:
    return Model(
        name=name,
        about=f"logistic regression of MNIST, {rows:,} rows: 7,850 latents",
        load=functools.partial(_load_digits, rows),
        shapes=lambda data: {
            "w": (data["image"].shape[1], mnist_data.NUM_CLASSES),
            "b": (mnist_data.NUM_CLASSES,),
        },
        log_prior=digits_prior,
        log_likelihood=digits_likelihood,
        peers=Form(_arrange, classes_first),
        few=few,
        many=many,
        start_radius=START_RADIUS,
        rotations=digits_rotations,
        data_set="mnist",
        left_out=left_out,
    )


# Sixteen chains: a step of 64 takes four times as long on two cores, and the tuning as many steps.
MNIST_SMALL = _digits("mnist_6000", SMALL_ROWS, Budget(4, 500, 500), Budget(16, 1000, 1000))
MNIST = _digits(
    "mnist_60000",
    60_000,
    Budget(4, 200, 200),
    Budget(16, 200, 100),
    left_out=("ours:mams", "tfp", "nutpie"),
)
