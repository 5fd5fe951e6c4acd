"""What a leapfrog sends and holds; `sample` draws the same on every mesh, whatever the chunks.

That the steps of every kernel are the same on every mesh is in test_kernel_contract.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import MESHES, OTHER_KINDS, check_close, counting_rows, mesh_of, normal, row_spec

import gspmd_mcmc as gm
from gspmd_mcmc import communication, tree
from gspmd_mcmc.sampling import run as runs

NUM_ROWS, NUM_PIXELS, NUM_CLASSES = 1501, 49, 10

# A multinomial regression on images


def log_likelihood(x, rows):
    pixels = rows["image"].astype(x["w"].dtype) / 255
    logits = pixels @ x["w"].T + x["b"][None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), rows["label"][:, None], 1)[:, 0]


def images(num_rows=NUM_ROWS, num_pixels=NUM_PIXELS):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (num_rows, num_pixels), dtype=np.uint8)
    label = rng.integers(0, NUM_CLASSES, num_rows, dtype=np.int32)
    return {"image": image, "label": label}


def regression(sizes, data=None, **options):
    data = gm.place(images() if data is None else data, mesh_of(sizes), row_spec(sizes))
    return gm.Posterior(normal, gm.Plate(log_likelihood, data, **options))


def start(num_pixels=NUM_PIXELS):
    """Weights [classes, pixels] and intercepts, of the default float."""
    rng = np.random.default_rng(1)
    shapes = {"w": (NUM_CLASSES, num_pixels), "b": (NUM_CLASSES,)}
    return {name: jnp.asarray(0.1 * rng.normal(size=shape)) for name, shape in shapes.items()}


# A likelihood that is undefined at zero, where padding is at work

POSITIVE = {
    "size": np.random.default_rng(2).gamma(2.0, size=23),
    "value": np.random.default_rng(3).normal(size=23),
}


def log_log_likelihood(x, rows):
    """Regress on the log of a positive size."""
    return -((rows["value"] - x["slope"] * jnp.log(rows["size"]) - x["level"]) ** 2) / 2


def allometry(sizes, pad_with_zeros=False):
    data = gm.place(POSITIVE, mesh_of(sizes), P("data"))
    if pad_with_zeros:
        data = jax.tree.map(zero_pad, data, is_leaf=lambda node: isinstance(node, gm.Padded))
    return gm.Posterior(normal, gm.Plate(log_log_likelihood, data))


def zero_pad(padded):
    is_real = jnp.arange(padded.values.shape[0]) < padded.num_rows
    return gm.Padded(jnp.where(is_real, padded.values, 0), padded.num_rows)


def exact_allometry_grad(x):
    log_size = np.log(POSITIVE["size"])
    residual = POSITIVE["value"] - x["slope"] * log_size - x["level"]
    return {"slope": residual @ log_size - x["slope"], "level": residual.sum() - x["level"]}


def check_grad(target):
    x = {"slope": jnp.float32(0.4), "level": jnp.float32(-0.2)}
    expected = exact_allometry_grad(jax.tree.map(float, x))
    for got in (target.grad(x), target.terms_and_grad(x)[1]):
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("name", ["1", "7", "8"])
def test_padding_makes_no_nan(name):
    check_grad(allometry(MESHES[name]))


def test_padding_with_zeros_would_make_nan():
    with pytest.raises(AssertionError, match="nan"):
        check_grad(allometry(MESHES["7"], pad_with_zeros=True))


def test_counting_pad_rows_is_rejected():
    with pytest.raises(AssertionError, match="Not equal"):
        check_grad(counting_rows(allometry(MESHES["7"])))


# `sample`: neither the mesh nor the chunks change its draws


def sample(name, num_warmup):
    """Four chains, whose steps are large enough for some to be rejected."""
    target = allometry(MESHES[name])
    position = jax.tree.map(jnp.asarray, {"slope": 0.0, "level": 0.0})
    metric = jax.tree.map(jnp.asarray, {"slope": 0.09, "level": 0.06})
    draws = gm.sample(
        jax.random.key(5),
        target,
        position,
        mesh=mesh_of(MESHES[name]),
        kernel=gm.HMC(target, 0.8, 3, metric, jitter=0.5),
        num_chains=4,
        num_warmup=num_warmup,
        num_samples=20,
        progress=False,
    )
    return jax.tree.map(np.asarray, (draws.position, draws.stats, draws.kernel.step_size))


@pytest.mark.filterwarnings("ignore::gspmd_mcmc.SamplingWarning")
def test_sample_warms_up_and_draws_the_same_on_every_mesh():
    with jax.enable_x64(True):
        expected, expected_stats, expected_step_size = sample("1", num_warmup=100)
        got, stats, step_size = sample("2x4", num_warmup=100)
    assert 0.5 < np.mean(expected_stats["is_accepted"]) < 1
    np.testing.assert_allclose(step_size, expected_step_size, rtol=1e-9)
    for stat in ("is_accepted", "num_integration_steps"):
        np.testing.assert_array_equal(stats[stat], expected_stats[stat])
    check_close(got, expected, 1e-9)


def check_chunks_do_not_matter(monkeypatch, num_warmup):
    """Cut warm-up and sampling into chunks of 1 step, of 7, and of all."""
    draws = []
    for size in (1, 7, 1000):
        monkeypatch.setattr(runs, "next_size", lambda count, seconds, size=size: size)
        with jax.enable_x64(True):
            draws.append(sample("2x4", num_warmup)[0]["slope"])
    assert np.all(np.ptp(draws[-1], axis=1) > 0.1), "the chains do not move"
    for other in draws[:-1]:
        np.testing.assert_array_equal(other, draws[-1])


@pytest.mark.filterwarnings("ignore::gspmd_mcmc.SamplingWarning")
def test_sample_draws_the_same_whatever_the_chunks(monkeypatch):
    """To the bit: chunks of all sizes have the same program."""
    check_chunks_do_not_matter(monkeypatch, num_warmup=100)


@pytest.mark.filterwarnings("ignore::gspmd_mcmc.SamplingWarning")
def test_steps_that_are_numbered_from_their_chunk_are_rejected(monkeypatch):
    right = runs.advance

    def numbered_from_the_chunk(run, *rest):
        counters = tree.replace(run.counters, num_steps=jnp.zeros_like(run.counters.num_steps))
        return right(tree.replace(run, counters=counters), *rest)

    monkeypatch.setattr(runs, "advance", numbered_from_the_chunk)
    with pytest.raises(AssertionError, match="not equal"):
        check_chunks_do_not_matter(monkeypatch, num_warmup=0)


# What a step sends

step = jax.jit(gm.HMC.step)
init = jax.jit(gm.HMC.init)


def communication_of_one_chain(target, position=None):
    kernel = gm.HMC(target, 0.01, 10)
    state = init(kernel, start() if position is None else position)
    return communication(step, kernel, jax.random.key(0), state)


def check_one_all_reduce_a_leapfrog(found):
    assert found.runs("all-reduce", within="leapfrog") == 1, "all-reduces a leapfrog"
    assert found.count("all-reduce") <= 3, "all-reduces of the step"
    assert {kind: found.count(kind) for kind in OTHER_KINDS} == dict.fromkeys(OTHER_KINDS, 0)


def test_a_leapfrog_costs_one_all_reduce():
    target = regression(MESHES["data and model"], tile_rows=50)
    check_one_all_reduce_a_leapfrog(communication_of_one_chain(target))


def test_two_plates_cost_one_all_reduce():
    one, other = regression(MESHES["8"], tile_rows=50), regression(MESHES["8"], tile_rows=60)
    both = gm.Posterior(normal, *one.plates, *other.plates)
    check_one_all_reduce_a_leapfrog(communication_of_one_chain(both))


def tile_by_tile(x, tiles):
    """Sum each tile over the devices before the next one is read."""

    def add(total, rows):
        return total + jnp.sum(log_likelihood(x, rows)), None

    return jax.lax.scan(add, tree.total(normal(x)), tiles)[0]


def test_a_target_that_reduces_in_each_tile_is_rejected():
    tiles = jax.tree.map(lambda a: a[:1488].reshape(6, 248, *a.shape[1:]), images())
    placed = gm.place(tiles, mesh_of(MESHES["8"]), P(None, "data"))
    found = communication_of_one_chain(gm.LogDensity(tile_by_tile, placed))
    assert found.runs("all-reduce", within="leapfrog") >= 6
    with pytest.raises(AssertionError, match="all-reduces a leapfrog"):
        check_one_all_reduce_a_leapfrog(found)


# What a program holds

LARGE = {"image": np.zeros((120_000, 784), np.uint8), "label": np.zeros(120_000, np.int32)}
LARGE_BYTES = sum(leaf.nbytes for leaf in LARGE.values())


def check_holds_little(target):
    found = communication_of_one_chain(target, start(784))
    assert found.largest_constant_bytes < 1000, "a large constant"
    assert found.temporary_bytes < LARGE_BYTES / 10, "large temporaries"


def test_a_step_holds_nothing_near_the_size_of_the_data():
    check_holds_little(regression(MESHES["8"], LARGE))


def all_at_once(x, rows):
    return normal(x), log_likelihood(x, rows)


def test_a_target_that_makes_all_intermediates_at_once_is_rejected():
    data = gm.place(LARGE, mesh_of(MESHES["1"]), P("data"))
    with pytest.raises(AssertionError, match="large temporaries"):
        check_holds_little(gm.LogDensity(all_at_once, data))


def test_data_that_a_target_closes_over_is_seen_as_a_constant():
    data = jax.tree.map(jnp.asarray, images(4000, 784))
    target = gm.LogDensity(lambda x: (normal(x), log_likelihood(x, data)))
    with pytest.raises(AssertionError, match="a large constant"):
        check_holds_little(target)


def test_a_program_may_close_over_a_kernel_with_little_data():
    kernel = gm.HMC(allometry(MESHES["8"]), 0.01, 10)
    state = kernel.init({"slope": jnp.float32(0), "level": jnp.float32(0)})
    jax.jit(kernel.step)(jax.random.key(0), state)
