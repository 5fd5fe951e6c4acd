"""The benchmark of groups: all forms of a model are the same density, that of the float64 reference."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

from benchmarks import groups
from benchmarks.contenders import grouped, ours
from benchmarks.contenders.placing import row_mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write ratings of 70 films by 30 users, as MovieLens does: 1 to 59 a user, not a multiple of 8."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lines = [
        f"{user + 1}::{film + 1}::{rng.integers(1, 6)}::0"
        for user in range(30)
        for film in rng.choice(70, 1 + 2 * user, replace=False)
    ]
    (folder / "ml-1m").mkdir()
    (folder / "ml-1m" / "ratings.dat").write_text("\n".join(rng.permutation(lines)) + "\n")
    movies = "".join(f"{film + 1}::film {film}::\n" for film in range(70))
    (folder / "ml-1m" / "movies.dat").write_text(movies)
    return folder


def task(folder, form, model):
    own = {"benchmark": f"groups_{model}", "form": form, "data_dir": str(folder)}
    return SimpleNamespace(devices=8, chains=1, leapfrogs=2, units=2, step_size=1e-3, **own)


def check(found, grads, truth):
    log_density, expected = truth
    np.testing.assert_allclose(found, log_density[0], rtol=1e-5)
    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad[0], rtol=1e-4, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("model", groups.MODELS)
@pytest.mark.parametrize("form", [None, "index"])
def test_ours(folder, form, model):
    with jax.numpy_rank_promotion("allow"):  # what contenders write is what users write
        program = getattr(ours, f"groups_{model}")(task(folder, form, model))
        found = program.check()
    check(found["log_density"], found["grads"], groups.MODELS[model].truth(str(folder), 1))


@pytest.mark.parametrize("model", groups.MODELS)
@pytest.mark.parametrize("form", [None, "textbook"])
def test_peers_likelihoods(folder, form, model):
    def log_density(params, rows):
        prior = sum(norm.logpdf(leaf).sum() for leaf in jax.tree.leaves(params))
        return prior + log_likelihood(params, rows)

    log_likelihood = grouped.log_likelihood(task(folder, form, model), model)
    rows, position = grouped.load(task(folder, form, model), model, row_mesh(8))
    with jax.numpy_rank_promotion("allow"):
        found, grads = jax.jit(jax.value_and_grad(log_density))(position, rows)
    check(found, jax.tree.map(jnp.asarray, grads), groups.MODELS[model].truth(str(folder), 1))
