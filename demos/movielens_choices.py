"""What draws recommend to the users of `movielens`, how sure that is, and how often it is right."""

import jax
import jax.numpy as jnp
import numpy as np

import gspmd_mcmc as gm

NUM_GROUPS = 10


def is_watched(cells):
    """Tell for each cell whether the user has watched the movie: its first bit."""
    return cells & 1


def is_hidden(cells):
    """Tell for each cell whether it is hidden from the likelihood: its second bit."""
    return cells >= 2


def logits(params):
    """Log odds of watching, [users, movies], of any block of users."""
    return gm.inner_products(params["U"], params["V"], params["u"], params["v"])


@jax.jit
def predict(positions, cells):
    """Predict every cell, and choose a movie for every user in every draw.

    All of it is local to a user: where users are laid out over devices, nothing is sent.

    Parameters
    ----------
    positions : dict
        Leaves [draws, ...]; those of users lie over devices as the rows of the cells do.
    cells : jax.Array
        [users, movies].

    Returns
    -------
    probabilities : jax.Array
        Of watching, averaged over draws, [users, movies].
    choices : jax.Array
        Of each draw the movie that a user most probably watches, of those not known to be watched,
        [draws, users]; -1 for a user who has watched all.
    """

    def add(total, position):
        log_odds = logits(position)
        choice = jnp.argmax(jnp.where(is_known, -jnp.inf, log_odds), axis=1)
        return total + jax.nn.sigmoid(log_odds) / num_draws, jnp.where(has_choice, choice, -1)

    num_draws = len(positions["u"])
    is_known = cells == 1  # watched, and not hidden
    has_choice = ~jnp.all(is_known, axis=1)
    return jax.lax.scan(add, jnp.zeros(cells.shape), positions)


def entropies(choices):
    """Entropy of each user's choice over draws, in nats: [draws, users] -> [users].

    0: every draw chooses the same movie; log(n): as uncertain as one of n equally probable movies.
    """
    found = np.empty(choices.shape[1])
    for user, chosen in enumerate(choices.T):
        share = np.unique(chosen, return_counts=True)[1] / len(chosen)
        found[user] = np.sum(share * -np.log(share))
    return found


def deciles(values):
    """Split users into ten groups of one size, from the least value to the greatest."""
    return np.array_split(np.argsort(values, kind="stable"), NUM_GROUPS)


def hit_rates(choices, cells, probabilities, groups):
    """Compare how often choices were right with how often the model expects it, by groups of users.

    Only choices of hidden cells count: of the others the model was told that they were not watched.

    Parameters
    ----------
    choices : numpy.ndarray
        [draws, users].
    cells, probabilities : numpy.ndarray
        [users, movies]; the probabilities are averages over draws.
    groups : list of numpy.ndarray
        Users of each group.

    Returns
    -------
    list of dict
        Of each group ``observed``, ``expected``, ``error`` (the standard error of what is observed,
        over users) and ``count`` (users with a choice that counts); None where no choice counts.
    """
    chosen = choices.T  # [users, draws]
    of_choice = np.take_along_axis(cells, chosen, axis=1)
    counts = np.count_nonzero(is_hidden(of_choice), axis=1)
    hits = np.count_nonzero(is_hidden(of_choice) & (is_watched(of_choice) == 1), axis=1)
    chance = np.take_along_axis(probabilities, chosen, axis=1)
    expected = np.sum(np.where(is_hidden(of_choice), chance, 0.0), axis=1)
    return [_ratio(hits[g], expected[g], counts[g]) for g in groups]


def _ratio(hits, expected, counts):
    total = counts.sum()
    if not total:
        return {"observed": None, "expected": None, "error": None, "count": 0}
    rate = hits.sum() / total
    return {
        "observed": float(rate),
        "expected": float(expected.sum() / total),
        "error": float(np.sqrt(np.sum((hits - rate * counts) ** 2)) / total),
        "count": int(np.sum(counts > 0)),
    }
