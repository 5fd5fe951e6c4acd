"""Models whose rows have latents of their own."""

import jax.numpy as jnp
import numpy as np

from benchmarks import posteriordb
from benchmarks.ess_models.model import Model, bernoulli, half_cauchy, normal, single

# Eight schools, not centred


def schools_prior(params):
    tau = jnp.exp(params["log_tau"])
    return normal(params["mu"], 0.0, 5.0), half_cauchy(tau, 5.0) + params["log_tau"]


def schools_likelihood(params, rows):
    effect = params["mu"] + jnp.exp(params["log_tau"]) * params["theta"]
    return normal(rows["y"], effect, rows["sigma"]) + normal(params["theta"])


def _load_schools(data_dir):
    data = posteriordb.load("eight_schools-eight_schools_noncentered", data_dir).data
    return single({name: np.asarray(data[name], float) for name in ("y", "sigma")})


EIGHT_SCHOOLS = Model(
    name="eight_schools",
    about="eight schools, not centred: 10 latents",
    load=_load_schools,
    shapes=lambda data: {"mu": (), "log_tau": (), "theta": data["y"].shape},
    log_prior=schools_prior,
    log_likelihood=schools_likelihood,
    local=("theta",),
    data_set="posteriordb",
)

# Logistic regression with an effect for each of many groups, centred: ten observations a group tell
# more of its effect than its prior does

NUM_GROUPS, GROUP_SIZE, NUM_FEATURES = 5000, 10, 5


def groups_prior(params):
    tau = jnp.exp(params["log_tau"])
    return {
        "mu": normal(params["mu"]),
        "tau": normal(tau) + params["log_tau"],
        "beta": normal(params["beta"]),
    }


def groups_likelihood(params, rows):
    logits = rows["x"] @ params["beta"] + params["effect"][:, None]
    prior = normal(params["effect"], params["mu"], jnp.exp(params["log_tau"]))
    return jnp.sum(bernoulli(logits, rows["y"]), axis=1) + prior


def simulate_groups(num_groups: int):
    """Draw groups of ten observations with five features each, from a seed that is fixed."""
    rng = np.random.default_rng(5000)
    x = rng.standard_normal((num_groups, GROUP_SIZE, NUM_FEATURES))
    effect = -0.5 + 0.8 * rng.standard_normal(num_groups)
    logits = x @ np.linspace(-1, 1, NUM_FEATURES) + effect[:, None]
    return single({"x": x, "y": (rng.random(logits.shape) < _expit(logits)).astype(float)})


def _expit(x):
    return 1 / (1 + np.exp(-x))


GROUPS = Model(
    name="groups",
    about="logistic regression, 5,000 groups of 10 observations: 5,007 latents",
    load=lambda data_dir: simulate_groups(NUM_GROUPS),
    shapes=lambda data: {
        "mu": (),
        "log_tau": (),
        "beta": (NUM_FEATURES,),
        "effect": (len(data["y"]),),
    },
    log_prior=groups_prior,
    log_likelihood=groups_likelihood,
    local=("effect",),
)

# Item response, two parameters an item: a row is a person

NUM_PEOPLE, NUM_ITEMS = 400, 50


def items_prior(params):
    return {
        "difficulty": normal(params["difficulty"]),
        "log_discrimination": normal(params["log_discrimination"], 0.0, 0.5),
    }


def items_likelihood(params, rows):
    distance = params["ability"][:, None] - params["difficulty"][None]
    logits = jnp.exp(params["log_discrimination"])[None] * distance
    return jnp.sum(bernoulli(logits, rows["y"]), axis=1) + normal(params["ability"])


def _simulate_answers(data_dir):
    rng = np.random.default_rng(500)
    ability, difficulty = rng.standard_normal(NUM_PEOPLE), rng.standard_normal(NUM_ITEMS)
    discrimination = np.exp(0.5 * rng.standard_normal(NUM_ITEMS))
    chance = _expit(discrimination * (ability[:, None] - difficulty))
    return single({"y": (rng.random(chance.shape) < chance).astype(float)})


ITEM_RESPONSE = Model(
    name="item_response",
    about="item response, 400 people and 50 items of two parameters: 500 latents",
    load=_simulate_answers,
    shapes=lambda data: {
        "ability": data["y"].shape[:1],
        "difficulty": data["y"].shape[1:],
        "log_discrimination": data["y"].shape[1:],
    },
    log_prior=items_prior,
    log_likelihood=items_likelihood,
    local=("ability",),
)
