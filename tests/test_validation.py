"""The validation: its nine targets, its loader, its judge, and both at work on known posteriors."""

import importlib
import io
import itertools
import json
import math
import os
import re
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from scipy.special import gammaln, logsumexp
from seeds import seed, within

import benchmarks
import gspmd_mcmc as gm
from benchmarks import posteriordb
from demos.datasets import DATA_ENV, DownloadError
from validation import report, run, sections
from validation.configuration import Configuration, superchain_starts
from validation.judge import UNADJUSTED, Reference, judge, threshold
from validation.kernels import SETTINGS
from validation.posteriors import MODELS, sequence_models
from validation.posteriors.model import whole_target
from validation.posteriors.row_models import POSITIVE, flat_regression, regression
from validation.process import run_group

stats: Any = importlib.import_module("scipy.stats")  # its types hide logpdf

# The targets are the models: log densities of the constrained parameters by SciPy, Jacobians by finite
# differences of the way from position to parameters


def half(distribution, x):
    return distribution.logpdf(x) - distribution.logsf(0)


def garch(p, data):
    sd, total = data["sigma1"], 0.0
    for before, y in itertools.pairwise([None, *data["y"]]):
        if before is not None:
            sd = math.sqrt(p["alpha0"] + p["alpha1"] * (before - p["mu"]) ** 2 + p["beta1"] * sd**2)
        total += stats.norm(p["mu"], sd).logpdf(y)
    return total


def process(p, data):
    x = np.array(data["x"])
    covariance = p["alpha"] ** 2 * np.exp(-((x[:, None] - x) ** 2) / (2 * p["rho"] ** 2))
    covariance += p["sigma"] * np.eye(len(x))
    prior = stats.gamma(25, scale=1 / 4).logpdf(p["rho"]) + half(stats.norm(0, 2), p["alpha"])
    prior += half(stats.norm(0, 1), p["sigma"])
    return prior + stats.multivariate_normal(np.zeros(len(x)), covariance).logpdf(data["y"])


def mixture(p, data):
    total = stats.beta(5, 5).logpdf(p["theta"])
    weights = np.log([p["theta"], 1 - p["theta"]])
    for k in (1, 2):
        total += stats.norm(0, 2).logpdf(p[f"mu[{k}]"]) + half(stats.norm(0, 2), p[f"sigma[{k}]"])
    parts = [stats.norm(p[f"mu[{k}]"], p[f"sigma[{k}]"]).logpdf(data["y"]) for k in (1, 2)]
    return total + logsumexp(weights[:, None] + parts, axis=0).sum()


def markov(p, data):
    """Sum over all paths of states."""
    theta = np.log([[p[f"theta{j}[{k}]"] for k in (1, 2)] for j in (1, 2)])
    emission = [stats.norm(p[f"mu[{k}]"], 1).logpdf(data["y"]) for k in (1, 2)]
    paths = [
        sum(emission[state][t] for t, state in enumerate(path))
        + sum(theta[a, b] for a, b in itertools.pairwise(path))
        for path in itertools.product((0, 1), repeat=len(data["y"]))
    ]
    prior = stats.norm(3, 1).logpdf(p["mu[1]"]) + stats.norm(10, 1).logpdf(p["mu[2]"])
    return prior + logsumexp(paths)


RNG = np.random.default_rng(0)
# Those with recursions, mixtures and matrices; regressions are held against reference draws alone.
SMALL = {
    "garch-garch11": (garch, {"T": 7, "y": RNG.normal(size=7).tolist(), "sigma1": 0.5}),
    "gp_pois_regr-gp_regr": (process, {"x": [-3, -1, 0, 2, 5], "y": RNG.normal(size=5).tolist()}),
    "low_dim_gauss_mix-low_dim_gauss_mix": (mixture, {"y": RNG.normal(size=10).tolist()}),
    "hmm_example-hmm_example": (markov, {"y": RNG.normal(5, 3, size=6).tolist()}),
}
FOLLOWS = ("theta1[2]", "theta2[2]")  # one less the other entry


def small_mesh():
    """Two devices for chains and two for data, which not all numbers of rows divide into."""
    return gm.make_mesh(chains=2, data=2, devices=jax.devices()[:4])


@jax.jit
def constrained(target, position):
    return target.params(position)


@jax.jit
def total_and_grad(target, position):
    terms, grad = target.terms_and_grad(position)
    return sum(jnp.sum(x) for x in jax.tree.leaves(terms)), grad


def parameters_at(model, target, position):
    """Constrained values by name, as draws would have them."""
    values = constrained(target, position) if isinstance(target, gm.Posterior) else position
    draws = jax.tree.map(lambda x: np.asarray(x)[None, None], values)
    return {name: float(x[0, 0]) for name, x in model.parameters(draws).items()}


def log_jacobian(model, target, unravel, flat, step=1e-5):
    def free(u):
        found = parameters_at(model, target, unravel(u))
        return np.array([x for name, x in found.items() if name not in FOLLOWS])

    offsets = step * np.eye(len(flat))
    columns = [(free(flat + e) - free(flat - e)) / (2 * step) for e in offsets]
    return np.linalg.slogdet(np.stack(columns, axis=1))[1]


def check_density(model, target, truth, data):
    flat, unravel = ravel_pytree(model.initial_position(data, np.float64))
    for u in np.random.default_rng(1).uniform(-1.5, 1.5, (3, len(flat))):
        total, grad = total_and_grad(target, unravel(u))
        expected = truth(parameters_at(model, target, unravel(u)), data)
        expected += log_jacobian(model, target, unravel, u)
        np.testing.assert_allclose(total, expected, rtol=1e-7, atol=1e-6)
        slopes = [
            (total_and_grad(target, unravel(u + e))[0] - total_and_grad(target, unravel(u - e))[0])
            / 2e-5
            for e in 1e-5 * np.eye(len(flat))
        ]
        np.testing.assert_allclose(ravel_pytree(grad)[0], slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_a_target_is_its_model_on_a_mesh(name):
    truth, data = SMALL[name]
    with jax.enable_x64(True):
        target = MODELS[name].target(data, small_mesh(), np.float64)
        check_density(MODELS[name], target, truth, data)


def garch_of_a_uniform_beta1(x, columns):
    """beta1 ~ Uniform(0, 1 - alpha1), which is not flat on the triangle."""
    terms = sequence_models.garch(x, columns)
    return {**terms, "wrong": -jax.nn.log_sigmoid(-x["logit_alpha1"])}


def test_a_wrong_jacobian_is_seen():
    truth, data = SMALL["garch-garch11"]
    with jax.enable_x64(True), pytest.raises(AssertionError, match="Not equal to tolerance"):
        model = MODELS["garch-garch11"]
        columns = {n: np.asarray(x) for n, x in model.columns(data).items()}
        check_density(model, whole_target(garch_of_a_uniform_beta1, columns, None), truth, data)


@pytest.mark.parametrize("name", SMALL)
def test_a_target_has_the_precision_asked_for(name):
    model, (_, data) = MODELS[name], SMALL[name]
    terms, grad = jax.eval_shape(
        lambda t, x: t.terms_and_grad(x), model.target(data), model.initial_position(data)
    )
    assert {x.dtype for x in jax.tree.leaves((terms, grad))} == {np.dtype(np.float32)}


# The loader


def zipped(content, member="x.json"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(member, content if isinstance(content, bytes) else json.dumps(content))
    return out.getvalue()


DATA, CHAINS = {"N": 2, "y": [1.5, 2]}, [{"mu": [1, 2, 3], "tau[1]": [4, 5, 6]}] * 2
NAME = "data_set-some_model"


def write_posterior(folder, data=DATA, chains=CHAINS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.data.json.zip").write_bytes(zipped(data))
    (folder / f"{NAME}.draws.json.zip").write_bytes(zipped(chains))
    return folder


def write_repository(root, chains=CHAINS):
    for path, content in (
        ("data/data/data_set", DATA),
        (f"reference_posteriors/draws/draws/{NAME}", chains),
    ):
        file = root / f"{path}.json.zip"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(zipped(content))
    return root.as_uri()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gspmd_mcmc" / "posteriordb"


def assert_is_small(recorded):
    assert recorded.data == DATA and list(recorded.draws) == ["mu", "tau[1]"]
    assert recorded.draws["mu"].shape == (2, 3) and recorded.draws["mu"].dtype == np.float64
    assert recorded.draws["tau[1]"].tolist() == [[4, 5, 6]] * 2


@pytest.mark.parametrize("subfolder", ["", "posteriordb"])
def test_a_folder_given_or_named_by_the_environment(tmp_path, cache, monkeypatch, subfolder):
    folder = write_posterior(tmp_path / "given" / subfolder)
    recorded = posteriordb.load(NAME, tmp_path / "given", repository="none:")
    assert_is_small(recorded)
    assert str(folder) in recorded.source and posteriordb.has(NAME, tmp_path / "given")
    monkeypatch.setenv(DATA_ENV, str(tmp_path / "given"))
    assert_is_small(posteriordb.load(NAME, repository="none:"))


def test_a_damaged_cache_is_filled_anew_and_damage_never_kept(tmp_path, cache, capsys):
    write_posterior(cache)
    (cache / f"{NAME}.draws.json.zip").write_bytes(b"PK damaged")
    damaged = write_repository(tmp_path / "damaged", chains=[{"mu": [1, math.nan]}] * 2)
    with pytest.raises(DownloadError, match="mu: expected finite draws"):
        posteriordb.load(NAME, repository=damaged)
    assert (cache / f"{NAME}.draws.json.zip").read_bytes() == b"PK damaged"
    assert_is_small(posteriordb.load(NAME, repository=write_repository(tmp_path / "repository")))
    assert "damaged file in the cache" in capsys.readouterr().err


BAD = {
    "expected a list of chains": {"mu": [1]},
    "two chains or more": CHAINS[:1],
    "of the same parameters": [{"mu": [1]}, {"tau": [1]}],
    "equally many draws": [{"mu": [1, 2]}, {"mu": [1]}],
    "expected a zip file of JSON": b"{not json",
}


@pytest.mark.parametrize(("message", "chains"), BAD.items())
def test_reference_draws_that_are_none_are_refused(tmp_path, message, chains):
    with pytest.raises(ValueError, match=message):
        posteriordb.load(NAME, write_posterior(tmp_path, chains=chains))


# The judge

LIMIT = threshold(num_parameters=77)


def normal_draws(number=0, chains=8, draws=500, mean=0.0, sd=1.0):
    rng = np.random.default_rng(number)
    x = mean + sd * rng.standard_normal((2, chains, draws))
    return {"a": 100 + 3 * x[0], "b": 1e-3 * x[1]}


REFERENCE = Reference.from_draws(normal_draws(number=1))


def test_right_draws_pass():
    verdict = judge(normal_draws(), REFERENCE, LIMIT)
    assert verdict.failures == [] and verdict.worst_z < 4 and verdict.rhat < 1.01
    known = Reference.exact({"a": 100.0, "b": 0.0}, {"a": 9.0, "b": 1e-6})
    assert judge(normal_draws(), known, LIMIT).failures == []


def test_the_threshold_is_bonferronis():
    assert stats.norm.sf(LIMIT) * 2 * 154 == pytest.approx(1e-3)


WRONG = {
    "mean of a: off by": normal_draws(mean=0.2),
    "variance of b: off by": normal_draws(sd=1.15),
    "R-hat of a": {n: x + (np.arange(8) == 0)[:, None] * x.std() for n, x in normal_draws().items()},
    "mean of b: off by nan": {n: np.where(n == "b", np.nan, x) for n, x in normal_draws().items()},
}


@pytest.mark.parametrize(("message", "draws"), WRONG.items())
def test_wrong_draws_are_rejected(message, draws):
    failures = judge(draws, REFERENCE, LIMIT).failures
    assert any(failure.startswith(message) for failure in failures), failures


def test_a_bias_within_the_bounds_of_unadjusted_kernels_passes():
    assert judge(normal_draws(mean=0.05), REFERENCE, LIMIT, bounds=UNADJUSTED).failures == []
    for worse in (normal_draws(mean=0.3), normal_draws(sd=1.3)):
        assert judge(worse, REFERENCE, LIMIT, bounds=UNADJUSTED).failures


def test_superchains_that_stay_apart_are_rejected():
    """Chains of one start agree with each other; only nested R-hat tells that superchains do not."""
    assert judge(normal_draws(), REFERENCE, LIMIT, num_superchains=4).failures == []
    apart = {n: x + x.std() * np.repeat([1, -1, 1, -1], 2)[:, None] for n, x in normal_draws().items()}
    failures = judge(apart, REFERENCE, 1e9, num_superchains=4).failures
    assert any(failure.startswith("nested R-hat of a") for failure in failures), failures


@pytest.mark.statistical
def test_z_of_antithetic_chains_has_unit_spread():
    """Of x and of its square alike, which an error by the effective size of x itself would not have."""
    rng, rho, num = np.random.default_rng(seed(0)), -0.4, 100
    x = np.empty((4, 400, num))
    x[:, 0] = rng.standard_normal((4, num))
    for t in range(1, 400):
        x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * rng.standard_normal((4, num))
    draws = {str(i): x[..., i] for i in range(num)}
    known = Reference.exact(dict.fromkeys(draws, 0.0), dict.fromkeys(draws, 1.0))
    moments = np.array(list(judge(draws, known, LIMIT).moments.values()))
    for z in (moments[:, 0] / moments[:, 1], (moments[:, 2] - 1) / moments[:, 3]):
        within(abs(np.log(z.std())), np.log(1.25), "log of the spread")
        within(abs(z.mean()), 4 / math.sqrt(num), "the mean")


# The table


def test_superchains_share_their_starts():
    model, (_, data) = MODELS["garch-garch11"], SMALL["garch-garch11"]
    starts = superchain_starts(model.target(data), model.initial_position(data), 8, 4)
    for leaf in jax.tree.leaves(starts):
        assert leaf.shape[0] == 8 and len(np.unique(leaf)) == 4
        np.testing.assert_array_equal(leaf[::2], leaf[1::2])


def rows_of(**changes):
    row = Configuration("nes1980-nes", "NUTS", "1", 4, "float32", 1, 1)
    verdict = judge(normal_draws(), REFERENCE, LIMIT)
    work = {"leapfrogs": 10, "warmup_leapfrogs": 20, "divergences": 0, "seconds": 1.0}
    return {**asdict(row), **asdict(verdict), **work, **changes}


def document_of(rows=(), tests=()):
    where = {"cpu": "", "cores": 2, "python": "3", "commit": "", "modified": False}
    of_rows = {"num_parameters": 77, "largest_z": LIMIT, "rows": rows, "tests": tests}
    return {"environment": where, "saved": "", **of_rows}


def test_the_table_has_a_row_for_what_fails_and_for_what_is_not_run():
    of_mams = asdict(Configuration("arK-arK", "MAMS", "2x4", 64, "float32", 1, 1))
    rows = [
        rows_of(),
        rows_of(dtype="float64"),
        rows_of(kernel="HMC", failures=["R-hat of a: 1.2"]),
        of_mams | {"kernel": "HMC", "error": "died"},
        of_mams | {"kernel": "NUTS", "not_run": "the time limit"},
    ]
    text = report.markdown(document_of(rows))
    assert "2 passes, 2 fails, 1 not run" in text
    assert "- nes1980-nes, HMC, mesh 1, 4 chains, float32: R-hat of a: 1.2" in text
    assert "- arK-arK, HMC, mesh 2x4, 64 chains, float32: died" in text
    assert "| NUTS | 2x4 | 64 | float32 | not run |" in text
    assert "| nes1980-nes | NUTS | 1 | 4 | 0.00 |" in text, "float32 and float64 of equal draws"
    found = [report.outcome(row) for row in rows]
    assert found == ["passes", "passes", "fails", "fails", "not run"]


def selected(*argv):
    return list(run.configurations(run._selection(run._parse(list(argv)))))


def test_every_kernel_mesh_and_number_of_chains_is_in_the_table():
    rows = selected()
    settings = {(r.kernel, r.mesh, r.chains) for r in rows if r.posterior == "arK-arK"}
    assert {("default", m, c) for m in ("1", "2x4") for c in (4, 64)} < settings
    assert {("SNAPER", m, 64) for m in ("1", "2x4")} < settings
    assert {kernel for kernel, _, _ in settings} == set(SETTINGS)
    assert {r.posterior for r in rows} == set(MODELS)
    doubles = {(r.posterior, r.kernel, r.mesh, r.chains) for r in rows if r.dtype == "float64"}
    assert doubles == {(name, "default", "1", 4) for name in MODELS}
    assert len(set(map(str, rows))) == len(rows)
    assert ("NUTS", 4) not in {(r.kernel, r.chains) for r in rows}, "default, a second time"


def test_every_kernel_is_in_every_other_section():
    jobs = {(job.section, job.kernel) for job in sections.jobs(run.SECTIONS, None, is_quick=False)}
    assert {("sbc", name) for name in ("HMC", "NUTS", "JitteredHMC", "MAMS")} < jobs
    assert {("geweke", name) for name in ("HMC", "NUTS", "JitteredHMC", "MAMS")} < jobs
    assert {kernel for section, kernel in jobs if section == "shapes"} == set(SETTINGS) - {"default"}
    assert {job.section for job in sections.jobs(["shapes"], None, is_quick=True)} == {"shapes"}
    assert selected("--sections", "sbc") == []
    assert run._parse(["--chains", "4"]).sections == ("posteriors",)


def test_a_process_that_dies_is_a_failed_row_and_what_is_left_without_time_is_not_run(tmp_path):
    kept = []
    row = Configuration(NAME, "NUTS", "1", 4, "float32", 10, 10)
    task = {"largest_z": LIMIT, "data_dir": str(tmp_path)}
    run_group(
        [row, row], task, lambda row, record: kept.append(record), print, may_start=lambda: not kept
    )
    assert kept[0]["error"].startswith("died (exit 1): ")
    assert "expected the files of" in kept[0]["error"]
    assert kept[1:] == [{"not_run": "the time limit came first"}]


def earlier(out, *argv):
    return run._earlier(run._parse(["--out", str(out), *argv]))


def test_going_on_keeps_results_and_not_rows_without_any(tmp_path):
    out = tmp_path / "rows.json"
    tests = [{"section": "sbc", "kernel": "HMC", "is_quick": False, "passed": False}]
    out.write_text(json.dumps({"rows": [rows_of(), rows_of(error="died")], "tests": tests}))
    found = earlier(out, "--resume")
    assert len(found["rows"]) == 1
    jobs = list(sections.jobs(["sbc"], ["HMC", "NUTS"], is_quick=False))
    assert [run._is_done(job, found["tests"]) for job in jobs] == [True, False]
    assert earlier(out) == {"num_planned": 0, "rows": [], "tests": []}


# Posteriors that are known, sampled on a mesh and judged

NUM_ROWS = 15


def log_prior(power, params):
    return -power * jnp.log(params["sigma"])


def regression_data():
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(NUM_ROWS), rng.normal(size=(NUM_ROWS, 2))])
    return {"x": x, "y": x @ [1.0, -2.0, 0.5] + 1.5 * rng.normal(size=NUM_ROWS)}


def regression_truth(x, y):
    """With flat priors: sigma^2 is inverse gamma, coefficients given it normal about least squares."""
    beta, (residuals,), *_ = np.linalg.lstsq(x, y)
    shape, scale = (len(y) - x.shape[1] - 1) / 2, residuals / 2
    of_square = scale / (shape - 1)
    of_sigma = math.sqrt(scale) * math.exp(gammaln(shape - 0.5) - gammaln(shape))
    spread = of_square * np.diagonal(np.linalg.inv(x.T @ x))
    names = [*(f"beta[{i + 1}]" for i in range(len(beta))), "sigma"]
    variances = [*spread, of_square - of_sigma**2]
    return Reference.exact(
        {name: float(x) for name, x in zip(names, [*beta, of_sigma], strict=True)},
        {name: float(x) for name, x in zip(names, variances, strict=True)},
    )


def nuts_draws(model, target, position, num_warmup=200, num_samples=1200):
    options = {"kernel": gm.NUTS(target, 0.1), "num_warmup": num_warmup, "num_samples": num_samples}
    with warnings.catch_warnings():
        # Of a divergence in thousands: draws are judged by what is known.
        warnings.simplefilter("ignore", gm.SamplingWarning)
        draws = gm.sample(jax.random.key(seed(0)), target, position, progress=False, **options)
    return model.parameters(draws.position)


@pytest.mark.statistical
def test_a_regression_with_a_known_posterior():
    """Right on a mesh; with the Jacobian of sigma > 0 taken off, the same program is rejected."""
    data = regression_data()
    model = flat_regression("known", lambda data: data)
    placed = gm.place(jax.tree.map(np.float32, data), small_mesh(), P("data"))
    reference = regression_truth(**data)
    limit = threshold(len(reference.names))

    def verdict(power):
        prior = Partial(log_prior, jnp.float32(power))
        target = gm.Posterior(prior, gm.Plate(regression, placed), bijections={"sigma": POSITIVE})
        draws = nuts_draws(model, target, model.initial_position(data), 150, 1200)
        return judge(draws, reference, limit)

    right = verdict(0.0)
    within(right.worst_z, limit, "standard errors off")
    within(right.rhat - 1, 0.01, "R-hat beyond 1")
    assert right.failures == []
    broken = verdict(1.0)
    assert any(f.startswith("mean of sigma") for f in broken.failures), broken
    assert broken.rhat < 1.01, "converged, to what it should not have"


SCHOOLS = {"y": [28, 8, -3, 7, -1, 1, 18, 12], "sigma": [15, 10, 16, 11, 9, 11, 10, 18]}


def schools_by_quadrature(y, sigma):
    """Moments of mu and tau on a grid, the schools integrated out by hand."""
    mu, tau = np.linspace(-25, 35, 401)[:, None], np.exp(np.linspace(-9, 6, 1501))[None]
    log_weight = stats.norm(0, 5).logpdf(mu) + half(stats.cauchy(0, 5), tau) + np.log(tau)
    for effect, sd in zip(y, sigma, strict=True):
        log_weight = log_weight + stats.norm(mu, np.hypot(sd, tau)).logpdf(effect)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    means = {"mu": np.sum(weight * mu), "tau": np.sum(weight * tau)}
    variances = {n: np.sum(weight * (x - means[n]) ** 2) for n, x in (("mu", mu), ("tau", tau))}
    return Reference.exact(means, variances)


@pytest.mark.statistical
def test_eight_schools_against_quadrature():
    """And not those of schools that did better by ten points."""
    model = MODELS["eight_schools-eight_schools_noncentered"]
    draws = nuts_draws(model, model.target(SCHOOLS), model.initial_position(SCHOOLS), 300, 1500)
    draws, limit = {name: draws[name] for name in ("mu", "tau")}, threshold(2)
    within(judge(draws, schools_by_quadrature(**SCHOOLS), limit).worst_z, limit, "standard errors off")
    other = SCHOOLS | {"y": [y + 10 for y in SCHOOLS["y"]]}
    assert judge(draws, schools_by_quadrature(**other), limit).failures


REAL = (
    "kidiq_with_mom_work-kidscore_interaction_z",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "garch-garch11",
)


@pytest.mark.parametrize("name", REAL)
def test_real_posteriors(name):
    folder = os.environ.get(DATA_ENV, "")
    if not folder or not posteriordb.has(name, folder):
        pytest.skip(f"{DATA_ENV} holds no posteriordb")
    model, recorded = MODELS[name], posteriordb.load(name)
    target = model.target(recorded.data)
    draws = nuts_draws(model, target, model.initial_position(recorded.data))
    assert judge(draws, Reference.from_draws(recorded.draws), LIMIT).failures == []


def test_benchmarks_do_not_import_the_validation():
    """The validation uses what benchmarks share, never the other way around."""
    files = list(Path(benchmarks.__path__[0]).rglob("*.py"))
    assert len(files) > 30
    imports = re.compile(r"^\s*(from|import) validation\b", re.MULTILINE)
    assert [str(path) for path in files if imports.search(path.read_text())] == []
    assert imports.search("def f():\n    from validation import run\n")
