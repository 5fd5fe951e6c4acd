"""Rows of groups: latents live with their rows, in an order that nobody sees, on every mesh alike."""

import os
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import check_close
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.groups.tiles import Chunks, Tiles, laid_order, lay_chunks
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.run_state import advance_chains as advance
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.targets import local
from gspmd_mcmc.views.communication import communication
from gspmd_mcmc.views.program.hlo import KINDS

KEY = jax.random.key(seed(0))
CHAINS = 4
# That a device waits for the one with the largest group; that there is little data.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Groups"),
    pytest.mark.filterwarnings("ignore:small data"),
]
MESHES = ("1", "2", "4", "7", "8", "2x4", "4x2")


def mesh_of(name):
    return None if name == "none" else models.mesh_of(name)


def groups_of(keys, name, **options):
    return gm.Groups(keys, mesh_of(name), None if name == "none" else P("data"), **options)


# Patients, in an order of the user's; their visits, and a table of laboratory values of some of them.


def log_prior(x):
    return -0.5 * x["mean"] ** 2, -0.5 * x["log_sd"] ** 2, -0.5 * x["slope"] ** 2


def of_patient(x, row):
    centre = x["mean"] + 0.1 * row["age"]
    z = (x["effect"] - centre[:, None]) * jnp.exp(-x["log_sd"])
    return -0.5 * jnp.sum(z**2, axis=1) - 2 * x["log_sd"] - 0.5 * x["level"] ** 2


def of_visit(x, row):
    centre = x["effect"][:, 0] + row["dose"] * (x["slope"] + x["effect"][:, 1])
    return -0.5 * (row["y"] - centre) ** 2 + jnp.sin(x["level"] * row["dose"])


def of_laboratory(x, row):
    return -0.5 * (row["value"] - jnp.tanh(x["level"]) * x["slope"]) ** 2


GROUPS = 61
RAGGED = np.geomspace(1, 10_000, GROUPS).astype(int)
FEW_SIZES = np.repeat([2, 20], [25, 16])  # so that programs compile quickly


@cache
def ward(sizes=tuple(RAGGED)):
    """Tables: names of patients, their ages, and rows with the number of each one's patient."""
    rng, num = np.random.default_rng(0), len(sizes)
    patient = rng.permutation(np.repeat(rng.permutation(num), sizes))
    names = np.array([f"patient {i}" for i in rng.permutation(num)])
    some = rng.integers(0, (num + 1) // 2, 3 * num)
    visits = {n: rng.normal(size=len(patient)) for n in ("dose", "y")}
    return names, rng.normal(size=num), (patient, visits), (some, {"value": rng.normal(size=len(some))})


def hospital(name, tables=None, tile_rows=None, as_numbers=False):
    names, age, (patient, visits), (some, laboratory) = tables or ward()
    names = np.argsort(np.argsort(names)) * 7 - 3 if as_numbers else names
    patients = groups_of(names[patient], name, labels=names, tile_rows=tile_rows)
    return gm.Posterior(
        log_prior,
        gm.Plate(of_patient, patients.place({"age": age}), local=("effect", "level")),
        gm.Plate(of_visit, patients.place_rows(visits), local=("effect", "level")),
        gm.Plate(of_laboratory, patients.place_rows(laboratory, names[some]), local="level"),
    )


def by_index(x, tables):
    """The log density with effects that are looked up, all rows at once."""
    _, age, (patient, visits), (some, laboratory) = tables
    rows = x | {n: x[n][patient] for n in ("effect", "level")}
    return tree.total(
        (
            log_prior(x),
            of_patient(x, {"age": age}),
            of_visit(rows, visits),
            of_laboratory(x | {"level": x["level"][some]}, laboratory),
        )
    )


def start(num_groups=GROUPS, chains=()):
    """Position, leaves [*chains, ...], of the default float."""
    rng = np.random.default_rng(1)
    shapes = {"effect": (num_groups, 2), "level": (num_groups,), "mean": (), "log_sd": (), "slope": ()}
    return {n: jnp.asarray(0.3 * rng.normal(size=(*chains, *s))) for n, s in shapes.items()}


def as_arrays(tables):
    return jax.tree.map(jnp.asarray, tables[1:])


@jax.jit
def evaluate(target, position):
    """Log density and gradient as a user sees them, by one pass; and by a pass for each."""
    laid = local.lay_out(target, position)
    terms, grad = target.terms_and_grad(laid)
    apart = tree.total(target.terms(laid)), local.cut(target, target.grad(laid))
    return (tree.total(terms), local.cut(target, grad)), apart


def check_density(target, tables, tolerance, num_groups=GROUPS):
    position = start(num_groups)
    dense = jax.jit(jax.value_and_grad(lambda x, rest: by_index(x, (None, *rest))))
    value, expected = dense(position, as_arrays(tables))
    for got_value, got in evaluate(target, position):
        check_close(got | {"log density": got_value}, expected | {"log density": value}, tolerance)


@pytest.mark.parametrize(
    ("name", "tile_rows", "is_double"),
    [
        ("none", None, True),
        ("7", None, True),
        ("8", 1500, True),
        ("2x4", 3000, True),
        ("8", 1500, False),
    ],
)
def test_density_and_gradient_are_those_of_looked_up_effects(name, tile_rows, is_double):
    """Of 61 patients with 1 to 10,000 visits, named by strings or by numbers."""
    with jax.enable_x64(is_double):
        target = hospital(name, tile_rows=tile_rows, as_numbers=name == "7")
        check_density(target, ward(), 1e-12 if is_double else 1e-5)


def test_light_rows_have_few_widths_on_a_gpu_and_heavy_ones_little_pad(monkeypatch):
    """A width is a kernel there. The shapes of tiles change no density."""
    patient = ward()[2][0]
    heavy = {"x": jax.ShapeDtypeStruct((len(patient), 20_000), np.float32)}
    monkeypatch.setattr(gm.Groups, "_platform", lambda self: "tpu")
    on_a_tpu = gm.Groups(patient, tile_rows=1500).place_rows(heavy).tiles
    monkeypatch.setattr(gm.Groups, "_platform", lambda self: "gpu")
    groups = gm.Groups(patient, tile_rows=1500)
    light = groups.place_rows({"y": ward()[2][1]["y"]}).tiles
    assert isinstance(light, Tiles) and isinstance(on_a_tpu, Tiles)
    assert groups.place_rows(heavy).tiles == on_a_tpu
    assert len(light.widths) < len(on_a_tpu.widths) / 2
    assert light.count * light.rows > on_a_tpu.count * on_a_tpu.rows
    # And as chips do it, latents are spread by slices, and the compiler cuts blocks over devices.
    monkeypatch.setattr("gspmd_mcmc.targets.streaming.rows.platform_of", lambda array, mesh: "gpu")
    with jax.enable_x64(True):
        check_density(hospital("8"), ward(), 1e-12)


@pytest.mark.parametrize("num_groups", [1, 9])
def test_fewer_groups_than_devices_leave_some_empty(num_groups):
    """As many, and one more: pads of places lie at the end, on devices of their own."""
    rng = np.random.default_rng(num_groups)
    names, patient = np.arange(num_groups), rng.permutation(np.arange(50 * num_groups) % num_groups)
    of_rows = {n: rng.normal(size=len(patient)) for n in ("dose", "y")}
    tables = names, rng.normal(size=num_groups), (patient, of_rows), (names[:1], {"value": np.ones(1)})
    with jax.enable_x64(True):
        check_density(hospital("8", tables), tables, 1e-12, num_groups)


@pytest.mark.parametrize(
    ("cores", "devices", "of_groups", "plain"),
    [(1, 1, 32, 23), (2, 1, 1, 1), (64, 1, 1, 1), (2, 2, 12, 12), (8, 2, 1, 1)],
)
def test_tiles_of_a_cpu_device_of_one_core_are_small(monkeypatch, cores, devices, of_groups, plain):
    """2**18 rows of one number each, in groups, whose tiles are of whole chunks, and plain."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    keys = np.repeat(np.arange(2048), 128)
    mesh = gm.make_mesh(data=devices, devices=jax.devices()[:devices])
    groups = gm.Groups(keys, mesh, P("data"))
    plate = gm.Plate(of_row, groups.place_rows({"y": np.zeros(len(keys), np.float32)}), local="theta")
    position = {"mu": jnp.zeros(()), "theta": jnp.zeros(2048 + devices)}
    assert plate.rows.block_rows / plate.rows_of_tile(position) == of_groups
    rows = gm.Plate(of_row, gm.place({"y": np.zeros(len(keys), np.float32)}, mesh, P("data")))
    position["theta"] = jnp.zeros(())
    assert -(-rows.rows.block_rows // rows.rows_of_tile(position)) == plain


@pytest.mark.parametrize(("cores", "devices", "at_once"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (8, 2, 2)])
def test_a_cpu_device_of_several_cores_has_two_tiles_in_hand(monkeypatch, cores, devices, at_once):
    """And then an even number of tiles: none is left over, which would be compiled apart."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("gspmd_mcmc.targets.streaming.tiling.TILE_BYTES_A_CORE", 1 << 14)
    mesh = gm.make_mesh(data=devices, devices=jax.devices()[:devices])
    keys = np.repeat(np.arange(100), 128)
    y = {"y": np.zeros(len(keys), np.float32)}
    rows = gm.Groups(keys, mesh, P("data")).place_rows(y), gm.place(y, mesh, P("data"))
    for data, local_to in zip(rows, ("theta", ()), strict=True):
        plate = gm.Plate(of_row, data, local=local_to)
        position = {"theta": jnp.zeros(100 if local_to else ())}
        loops = [
            eqn.params
            for eqn in jax.make_jaxpr(plate.grad)(local.lay_out(plate, position)).jaxpr.eqns
            if eqn.primitive is jax.lax.scan_p
        ]
        assert [loop["unroll"] for loop in loops] == [at_once]
        assert loops[0]["length"] > 2 and loops[0]["length"] % at_once == 0


def test_a_block_without_rows_tells_nothing_where_its_latents_are_undefined():
    """Only group 0 has rows; the square root is NaN for the latents of all others."""
    rows = {"lower": np.zeros(5, np.float32)}
    groups = gm.Groups(np.zeros(5, int), mesh_of("8"), P("data"), labels=np.arange(9), allow_empty=True)

    def of_row(x, row):
        return -jnp.sqrt(x["theta"] - row["lower"])

    plate = gm.Plate(of_row, groups.place_rows(rows), local="theta")
    target = gm.Posterior(
        None, gm.Plate(lambda x, row: -x["theta"], groups.place(), local="theta"), plate
    )
    position = {"theta": jnp.full(9, -5.0).at[0].set(4.0)}
    grad = local.cut(target, target.grad(local.lay_out(target, position)))
    np.testing.assert_allclose(grad["theta"], [-1 - 5 / 4, *[-1.0] * 8])


SIZES_AND_CHUNK = (
    ([3, 0, 1, 4], 1),
    ([24, 7, 0, 15, 40, 33], 8),
    ([48, 47, 0, 16, 112, 79], 16),
    ([96, 95, 0, 32, 224, 159], 32),
    ([0, 0, 0, 640], 64),
    ([64, 64, 64, 255_000], 64),  # 3,988 chunks
)


def test_chunks_hold_each_row_once_and_a_group_s_rows_together():
    rng = np.random.default_rng(0)
    for sizes, chunk in SIZES_AND_CHUNK:
        place = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
        for num_blocks in (1, 2):
            block_groups = len(sizes) // num_blocks
            laid = lay_chunks(place, num_blocks, block_groups)
            chunks = laid.tiles
            assert isinstance(chunks, Chunks) and chunks.rows == chunk
            needed = (-(-np.asarray(sizes) // chunk)).reshape(num_blocks, -1).sum(axis=1).max()
            assert needed <= chunks.count <= 1.01 * needed
            assert len(laid.row) == num_blocks * chunks.count * chunk
            np.testing.assert_array_equal(laid.row[laid.place_of_row], np.arange(len(place)))
            assert laid.is_real.sum() == len(place) == len(set(laid.place_of_row.tolist()))
            group = laid.slot_group + block_groups * np.arange(num_blocks)[:, None]
            group = np.repeat(group.ravel(), chunk)
            is_own = (group == place[laid.row]) | (np.asarray(sizes)[group] == 0)
            assert is_own.all() and (group == place[laid.row])[laid.is_real].all()
            assert chunks.has_bare_block is not all(
                sum(sizes[i : i + block_groups]) for i in range(0, len(sizes), block_groups)
            )


def test_many_chunks_are_a_number_that_tiles_divide():
    for num, count in ((90, 90), (250, 250), (1001, 1008), (4095, 4096)):
        place = np.repeat(np.arange(2), [64, 64 * num - 64])
        assert lay_chunks(place, 1, 2).tiles == Chunks(count, 64, False)


@pytest.mark.parametrize(("num_groups", "overlaps"), [(7, True), (8, False)])
def test_rows_that_two_tiles_hold_count_once(num_groups, overlaps):
    """Of 7 groups, 4 a tile, the second tile has one of the first. Sums of small integers are exact."""
    key, rng = np.repeat(np.arange(num_groups), 64), np.random.default_rng(0)
    groups = gm.Groups(key, tile_rows=256)
    y, theta = rng.integers(-3, 4, (2, len(key))).astype(np.float32)
    plate = gm.Plate(of_row, groups.place_rows({"y": y}), local="theta")
    prior = gm.Plate(lambda x, row: -x["theta"], groups.place(), local="theta")
    target, theta = gm.Posterior(None, prior, plate), theta[:num_groups]
    position = local.lay_out(target, {"theta": theta})
    assert plate.rows_of_tile(position) == 256
    assert bool(plate.rows.block_rows % 256) == overlaps
    terms, grad = target.terms_and_grad(position)
    residual = (y - theta[key]).reshape(num_groups, -1)
    assert tree.total(terms) == -0.125 * (residual**2).sum() - theta.sum()
    grad = local.cut(target, grad)["theta"]
    np.testing.assert_array_equal(grad, 0.25 * residual.sum(axis=1) - 1)


def small():
    return ward(tuple(FEW_SIZES))


SMALL = len(FEW_SIZES)


def test_several_tiles_and_rows_of_a_wrong_group_which_are_rejected():
    tables = names, age, (patient, visits), rest = ward((20,) * SMALL)
    wrong = patient.copy()
    wrong[[5, 6]] = patient[[6, 5]]
    assert patient[5] != patient[6]
    with jax.enable_x64(True):
        target = hospital("2", tables, tile_rows=100)
        rated = target.plates[1]
        assert rated.rows.block_rows > rated.rows_of_tile(start(SMALL))
        check_density(target, tables, 1e-12, SMALL)
        target = hospital("2", (names, age, (wrong, visits), rest), tile_rows=100)
        with pytest.raises(AssertionError, match="differs by"):
            check_density(target, tables, 1e-12, SMALL)


# A model of few lines, so that its programs compile quickly, whose posterior has a formula:
# mu ~ N(0, 1), theta of a group ~ N(mu, 1), y of a row ~ N(theta, 2²).

SIZES = np.repeat([1, 5, 50], [13, 12, 12])
KEYS = np.random.default_rng(2).permutation(np.repeat(np.arange(37) * 3, SIZES))
Y = np.random.default_rng(3).normal(0.5 + np.sin(KEYS), 2.0).astype(np.float32)


def mu_prior(x):
    return -0.5 * x["mu"] ** 2


def of_group(x, row):
    return -0.5 * (x["theta"] - x["mu"]) ** 2


def of_row(x, row):
    return -0.125 * (row["y"] - x["theta"]) ** 2


def normal_groups(name, keys=KEYS, y=Y):
    groups = groups_of(keys, name)
    rows = gm.Plate(of_row, groups.place_rows({"y": y}), local="theta")
    return gm.Posterior(mu_prior, gm.Plate(of_group, groups.place(), local="theta"), rows)


# The same chain on every mesh.


def chains_on(name, target, position, kernel):
    """Return the layout of the chains, and a kernel's states there."""
    layout = read_layout(mesh_of(name), target, position, CHAINS, has_chains=True)
    return layout, init_chains(kernel, position, layout=layout)


@partial(jax.jit, static_argnames="layout")
def run(kernel, states, *, layout):
    """Six steps of all chains, as a user sees them."""

    def one(states, i):
        return advance(kernel, KEY, i, states, layout)

    after, infos = jax.lax.scan(one, states, jnp.arange(6))
    return jax.vmap(partial(local.cut, kernel.target))(after.position), infos


def metric_of_groups():
    """Variances that differ from group to group, in the user's order."""
    return {"mu": jnp.asarray(0.05), "theta": jnp.linspace(0.02, 0.3, 37)}


KERNELS = {
    "HMC": lambda target: gm.HMC(target, 0.5, 3, metric_of_groups()),
    "NUTS": lambda target: gm.NUTS(target, 0.5, metric_of_groups(), max_tree_depth=3),
    "MAMS": lambda target: gm.MAMS(target, 0.5, 1.5, metric_of_groups()),
}


@cache
def chain(name, kernel, is_double):
    with jax.enable_x64(is_double):
        kernel = KERNELS[kernel](normal_groups(name))
        rng = np.random.default_rng(4)
        shapes = {"mu": (CHAINS,), "theta": (CHAINS, 37)}
        position = {n: jnp.asarray(0.3 * rng.normal(size=shape)) for n, shape in shapes.items()}
        layout, states = chains_on(name, kernel.target, position, kernel)
        return jax.tree.map(np.asarray, run(kernel, states, layout=layout))


CASES = [("HMC", mesh, True) for mesh in MESHES[1:]] + [("HMC", "2x4", False)]
CASES += [("NUTS", "8", True), ("MAMS", "2x4", True)]


@pytest.mark.parametrize(("kernel", "mesh", "is_double"), CASES)
def test_the_chain_is_the_same_on_every_mesh(kernel, mesh, is_double):
    (expected, expected_infos), (got, infos) = (chain(m, kernel, is_double) for m in ("1", mesh))
    assert np.mean(infos.is_accepted) > 0.5
    np.testing.assert_array_equal(infos.is_accepted, expected_infos.is_accepted)
    check_close(got, expected, 1e-9 if is_double else 1e-4)


# Where things lie, and what a leapfrog sends.


def movielens_sizes():
    """Ratings of each user: the real ones where the data are, else like them."""
    path = Path(os.environ.get("GSPMD_MCMC_DATA", "none")) / "ml-1m" / "ratings.dat"
    if path.exists():
        users = re.findall(rb"^(\d+)::", path.read_bytes(), re.MULTILINE)
        return np.bincount(np.array(users, np.int64))[1:]
    return np.clip(np.random.default_rng(0).lognormal(4.55, 1.05, 6040), 20, 2314).astype(int)


def test_devices_have_nearly_the_same_number_of_rows():
    """Of 6,040 users who rated 20 to 2,314 films."""
    sizes = movielens_sizes()
    laid = sizes[laid_order(sizes)]
    assert sorted(laid) == sorted(sizes)
    for num_blocks in range(2, 9):
        block = len(sizes) // num_blocks + 1
        rows = [laid[i * block : (i + 1) * block].sum() for i in range(num_blocks)]
        assert np.abs(np.array(rows) / np.mean(rows) - 1).max() < 0.05, num_blocks


def without_laboratory(name):
    target = hospital(name, small())
    return gm.Posterior(log_prior, *target.plates[:2])


def variances():
    own = jnp.linspace(0.02, 0.3, SMALL)
    shared = {"mean": jnp.asarray(0.05), "log_sd": jnp.asarray(0.02), "slope": jnp.asarray(0.01)}
    return {"effect": jnp.stack([own, own[::-1]], axis=1), "level": own} | shared


def shard_shapes(x):
    return {s.data.shape for s in x.addressable_shards}


@jax.jit
def momentum_and_step(kernel, rng_key, state):
    momentum = metrics.sample_momentum(rng_key, kernel.inverse_mass_matrix, state.position)
    return local.zero_pad(kernel.target, momentum), kernel.step(rng_key, state)[0]


def test_each_device_holds_its_own_groups_and_their_rows():
    target = without_laboratory("8")
    kernel = gm.HMC(target, 0.1, 2, variances())
    state = jax.jit(gm.HMC.init)(kernel, start(SMALL))
    momentum, after = momentum_and_step(kernel, KEY, state)
    held = [state.position, state.log_density_grad, kernel.inverse_mass_matrix, momentum]
    for x in [*held, after.position, after.log_density_grad]:
        assert [shard_shapes(x[n].values) for n in ("effect", "level")] == [{(6, 2)}, {(6,)}]
    is_zero = np.all(np.asarray(momentum["effect"].values) == 0, axis=1)
    np.testing.assert_array_equal(is_zero, np.arange(48) >= SMALL)
    (rows,) = {len(s.data) for s in target.plates[1].data["y"].addressable_shards}
    assert 8 * rows == target.plates[1].rows.num_padded


def communication_of(name, target, position):
    kernel = gm.HMC(target, 0.1, 5)
    layout, states = chains_on(name, target, position, kernel)
    return communication(jax.jit(partial(advance, layout=layout)), kernel, KEY, jnp.int32(0), states)


def check_sends_shared_gradients_only(found):
    """Of a slope, a mean and a scale, whatever the number of groups."""
    assert {k: found.count(k) for k in KINDS if k != "all-reduce"} == dict.fromkeys(KINDS[1:], 0)
    assert found.runs("all-reduce", within="leapfrog") == 1
    num_chains = CHAINS // found.mesh.get("chains", 1)
    assert sum(c.num_bytes for c in found.collectives if c.loops) == num_chains * 3 * 4, "bytes"


@pytest.mark.parametrize("name", ["8", "2x4"])
def test_a_leapfrog_sends_the_gradients_of_shared_latents_alone(name):
    target = without_laboratory(name)
    check_sends_shared_gradients_only(communication_of(name, target, start(SMALL, (CHAINS,))))


def looked_up(x, row):
    return of_visit(x | {n: x[n][row["patient"]] for n in ("effect", "level")}, row)


def test_effects_that_are_shared_and_looked_up_are_sent_whole():
    _, _, (patient, visits), _ = small()
    rows = gm.place(visits | {"patient": patient.astype(np.int32)}, models.mesh_of("8"), P("data"))
    target = gm.Posterior(models.normal, gm.Plate(looked_up, rows))
    with pytest.raises(AssertionError, match="bytes"):
        check_sends_shared_gradients_only(communication_of("8", target, start(SMALL, (CHAINS,))))


# Draws of the posterior with a formula.


def posterior_moments():
    """Means and variances, by the precision of all latents together."""
    count, total = np.bincount(KEYS)[::3], np.bincount(KEYS, Y.astype(np.float64))[::3]
    precision = np.diag(np.append(1 + count / 4, 1 + len(count)))
    precision[-1, :-1] = precision[:-1, -1] = -1
    covariance = np.linalg.inv(precision)
    mean, variance = covariance @ np.append(total / 4, 0), np.diag(covariance)
    return {"theta": mean[:-1], "mu": mean[-1]}, {"theta": variance[:-1], "mu": variance[-1]}


def origin():
    return {"mu": jnp.zeros(()), "theta": jnp.zeros(37)}


@cache
def draws_of(is_wrong):
    """Of the groups, or of rows that two groups have taken from each other."""
    keys = KEYS.copy()
    if is_wrong:
        first, last = (np.flatnonzero(keys == key)[:15] for key in (36 * 3, 35 * 3))
        keys[first], keys[last] = 35 * 3, 36 * 3
    target = normal_groups("8", keys)
    options = {"num_warmup": 150, "num_samples": 750, "progress": False}
    return gm.sample(KEY, target, origin(), kernel=gm.HMC(target, 0.1, 4, jitter=0.5), **options)


def check_posterior(draws):
    """Over 76 scores a bound of 5 is crossed by chance in under one run of ten thousand."""
    mean, variance = posterior_moments()
    for name in mean:
        centred = np.asarray(draws.position[name], np.float64) - mean[name]
        worst = max(models.moments_in_mcse(centred, np.sqrt(variance[name])))
        within(worst, 5, f"standard errors off in {name}")


@pytest.mark.statistical
def test_draws_have_the_posterior_s_means_and_variances():
    check_posterior(draws_of(False))


@pytest.mark.statistical
def test_draws_of_rows_in_wrong_groups_are_rejected():
    with pytest.raises(AssertionError, match="standard errors off in theta"):
        check_posterior(draws_of(True))


@pytest.mark.statistical
def test_nuts_draws_the_posterior_from_default_starts_without_a_divergence():
    target = normal_groups("2")
    options = {"num_warmup": 150, "num_samples": 750, "num_chains": 2, "progress": False}
    draws = gm.sample(KEY, target, origin(), kernel=gm.NUTS(target, 0.1), **options)
    assert not np.any(draws.stats["is_divergent"])
    check_posterior(draws)
