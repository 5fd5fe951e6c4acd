"""An index whose order is found when rows are placed: gradients, tiles, meshes, and what is refused."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import check_close, mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.groups.groups import Groups
from gspmd_mcmc.groups.lookup_index import rows_by_entry
from gspmd_mcmc.groups.tiles import Tiles
from gspmd_mcmc.targets import local, lookup
from gspmd_mcmc.targets.streaming.slots import ChunkSlots, GroupSlots

USERS, FILMS, TAGS = 40, 70, 3
RNG = np.random.default_rng(0)
USER = RNG.permutation(np.repeat(np.arange(USERS), RNG.integers(1, 60, USERS)))
NUM = len(USER)
FILM = np.minimum(RNG.geometric(0.06, NUM) - 1, FILMS - 2).astype(np.int32)  # the last film has no row
TAG = RNG.integers(0, TAGS, NUM).astype(np.uint8)
STARS = RNG.normal(size=NUM)
# That devices wait for the one with the largest group.
pytestmark = pytest.mark.filterwarnings("ignore:Groups")


@pytest.fixture
def as_on_a_chip(monkeypatch):
    """CPUs leave rows as they come; here they are put in order, as for a GPU or a TPU."""
    monkeypatch.setattr(Groups, "_platform", lambda self: "tpu")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def columns(film=FILM, tag=TAG):
    return {"film": gm.LookupIndex(film, FILMS), "tag": gm.LookupIndex(tag, TAGS), "stars": STARS}


def log_prior(x):
    return -0.5 * x["film"] ** 2, -0.5 * x["tag"] ** 2


def of_user(x, row):
    return -0.5 * jnp.sum(x["user"] ** 2, axis=1)


def of_rating(x, row):
    film, tag = gm.lookup(x["film"], row["film"]), gm.lookup(x["tag"], row["tag"])
    return -0.5 * (row["stars"] - jnp.sum(x["user"] * film, axis=1) - jnp.sin(tag)) ** 2


def target_on(name, rows=None, tile_rows=200):
    mesh = None if name == "none" else mesh_of(name)
    users = gm.Groups(USER, mesh, None if mesh is None else P("data"), tile_rows=tile_rows)
    rated = gm.Plate(of_rating, users.place_rows(columns() if rows is None else rows), local="user")
    return gm.Posterior(log_prior, gm.Plate(of_user, users.place(), local="user"), rated)


def start():
    rng = np.random.default_rng(1)
    shapes = {"user": (USERS, 3), "film": (FILMS, 3), "tag": (TAGS,)}
    return {name: jnp.asarray(0.5 * rng.normal(size=shape)) for name, shape in shapes.items()}


def dense(x, film=FILM, tag=TAG):
    fitted = jnp.sum(x["user"][USER] * x["film"][film], axis=1) + jnp.sin(x["tag"][tag])
    return tree.total((*log_prior(x), of_user(x, None), -0.5 * (STARS - fitted) ** 2))


def seen(target, position):
    terms, grad = target.terms_and_grad(local.lay_out(target, position))
    return local.cut(target, grad) | {"log density": tree.total(terms)}


def expected(position, **index):
    value, grad = jax.value_and_grad(lambda x: dense(x, **index))(position)
    return grad | {"log density": value}


def slots_of(target) -> GroupSlots:
    slots = target.plates[1].slots
    assert isinstance(slots, GroupSlots)
    return slots


def by_entry(target) -> tuple:
    return slots_of(target).by_entry


@pytest.mark.parametrize("name", ["none", "1", "7", "8", "2x4"])
def test_density_and_gradient_are_those_of_an_index(name, as_on_a_chip, x64):
    target = target_on(name)
    assert all(found is not None for found in by_entry(target))
    if name == "none":
        assert slots_of(target).tiles.count > 1
    check_close(jax.jit(seen)(target, start()), expected(start()), 1e-12)


def test_rows_in_the_order_of_another_index_are_found(as_on_a_chip, x64):
    """The negative control: an order that belongs to other rows than the values."""
    film = FILM.copy()
    first, second = np.flatnonzero(FILM == 0)[0], np.flatnonzero(FILM == 1)[0]
    film[[first, second]] = 1, 0
    right, wrong = target_on("8"), target_on("8", columns(film))
    swapped = tree.replace(
        right.plates[1], slots=tree.replace(right.plates[1].slots, by_entry=by_entry(wrong))
    )
    with pytest.raises(AssertionError, match="differs by"):
        target = tree.replace(right, plates=(right.plates[0], swapped))
        check_close(jax.jit(seen)(target, start()), expected(start()), 1e-12)
    check_close(jax.jit(seen)(wrong, start()), expected(start(), film=film), 1e-12)


def test_chains_and_second_derivatives(as_on_a_chip, x64):
    target = target_on("none")
    chains = jax.tree.map(lambda x: jnp.stack([x, 1 - 2 * x]), start())
    got = jax.jit(jax.vmap(seen, in_axes=(None, 0)))(target, chains)
    check_close(got, jax.vmap(expected)(chains), 1e-12)
    order = by_entry(target)[0].of_tile(jnp.zeros((), jnp.int32))
    order = jax.tree.map(lambda x: x[0], order)
    num = slots_of(target).tiles.rows
    index = target.plates[1].data["film"].index[:num]

    def curved(table, known):
        at: Any = lookup._lookup(table, index, order, True) if known else table[index]
        # A pad row, which is a copy, is in no order: a tile gives it no weight.
        weight = slots_of(target).is_real[:num, None]
        return jnp.sum(weight * jnp.sin(at) * jnp.arange(1.0, 4.0)[None])

    table = start()["film"]
    pushed = [
        {"film": jax.jvp(jax.grad(partial(curved, known=known)), (table,), (table,))[1]}
        for known in (True, False)
    ]
    check_close(pushed[0], pushed[1], 1e-12)


def test_an_index_that_was_checked_is_not_checked_again():
    """On CPUs, or as `place` places it, its rows have no order; a plain index is masked by NaN."""
    index, table = gm.LookupIndex(FILM, FILMS), start()["film"]

    def terms(table, index):
        return jnp.sum(jnp.sin(gm.lookup(table, index)))

    plain, checked = (str(jax.make_jaxpr(terms)(table, x)) for x in (jnp.asarray(FILM), index))
    assert "nan" in plain and "nan" not in checked

    def curved(table, index):
        return jax.jvp(jax.grad(partial(terms, index=index)), (table,), (table,))[1]

    for of in (terms, jax.grad(terms), curved):
        np.testing.assert_array_equal(of(table, jnp.asarray(FILM)), of(table, index))


@pytest.mark.parametrize("num_pad", [0, 5])
def test_rows_of_all_entries_are_summed_and_their_copies_are_not(num_pad, x64):
    """Entries of one row to hundreds, in two blocks of two tiles; the last row of each is real."""
    rng = np.random.default_rng(3)
    index = np.repeat(np.arange(40), np.geomspace(1, 400, 40).astype(int))
    index = rng.permutation(index)[: len(index) // 4 * 4]
    is_real = np.arange(len(index)) >= num_pad
    tiles = Tiles(2, 1, ((len(index) // 4, 1),))
    order = rows_by_entry(index, is_real, 45, tiles, 2)
    grad = rng.normal(size=(len(index), 3))
    for block, tile in np.ndindex(2, 2):
        at = slice((2 * block + tile) * tiles.rows, (2 * block + tile + 1) * tiles.rows)
        here = jax.tree.map(
            lambda x, block=block: jnp.asarray(x[block]), order.of_tile(jnp.int32(tile))
        )
        expected = np.zeros((45, 3))
        np.add.at(expected, index[at], grad[at] * is_real[at, None])
        found = lookup._sums_of_entries(jnp.asarray(grad[at]), here)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_order_of_rows_sends_one_all_reduce(as_on_a_chip):
    target, position = target_on("8"), jax.tree.map(lambda x: x.astype(jnp.float32), start())
    position = local.lay_out(target, position)
    report = gm.communication(lambda t, x: t.grad(x), target, position)
    assert [c.kind for c in report.collectives] == ["all-reduce"]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("spec", "a_row"), [(P("model"), 4), (P(None, "model"), 1)])
def test_a_table_may_lie_over_another_axis(spec, a_row, is_known, request):
    """By entries, whose four numbers are sent to each row; or by columns, whose product is summed."""
    if is_known:
        request.getfixturevalue("as_on_a_chip")
    mesh = mesh_of({"data": 4, "model": 2})
    users = gm.Groups(USER, mesh, P("data"))
    rows = users.place_rows({"film": gm.LookupIndex(FILM, FILMS), "stars": STARS.astype(np.float32)})

    def of_row(x, row):
        return (
            -0.5 * (row["stars"] - jnp.sum(x["user"] * gm.lookup(x["film"], row["film"]), axis=1)) ** 2
        )

    def whole(x):
        fitted = jnp.sum(x["user"][USER] * x["film"][FILM], axis=1)
        return -0.5 * sum(
            jnp.sum(z**2) for z in (x["film"], x["user"], STARS.astype(np.float32) - fitted)
        )

    plates = gm.Plate(of_user, users.place(), local="user"), gm.Plate(of_row, rows, local="user")
    target = gm.Posterior(lambda x: -0.5 * x["film"] ** 2, *plates)
    rng = np.random.default_rng(2)
    position = {
        n: rng.normal(size=(k, 4)).astype(np.float32) for n, k in (("user", USERS), ("film", FILMS))
    }
    grad = jax.grad(whole)(jax.tree.map(jnp.asarray, position))
    film = jax.device_put(position["film"], NamedSharding(mesh, spec))
    position = local.lay_out(target, jax.tree.map(jnp.asarray, position) | {"film": film})
    got = target.grad(position)
    assert got["film"].sharding.is_equivalent_to(film.sharding, 2)
    check_close(local.cut(target, got), grad, 1e-5)
    report = gm.communication(lambda t, x: t.grad(x), target, position)
    num_rows = target.plates[1].rows_of_tile(position)
    sent = {(c.kind, c.axes, c.num_bytes) for c in report.collectives}
    assert sent == {
        ("all-reduce", ("model",), 4 * a_row * num_rows),
        ("all-reduce", ("data",), 4 * 4 * FILMS // 2),
    }


@pytest.mark.parametrize("name", ["none", "8"])
def test_where_no_order_is_known_the_index_is_used(name, x64):
    """On a CPU; and on a chip, of rows that are read in parts."""
    target = target_on(name)
    assert isinstance(target.plates[1].slots, ChunkSlots)
    check_close(jax.jit(seen)(target, start()), expected(start()), 1e-12)


def test_rows_that_are_read_in_parts_or_placed_without_groups(as_on_a_chip, x64):
    users = gm.Groups(USER, mesh_of("8"), P("data"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), columns())
    read = users.place_rows_from_reader(lambda rows: jax.tree.map(lambda x: x[rows], columns()), shapes)
    plates = gm.Plate(of_user, users.place(), local="user"), gm.Plate(of_rating, read, local="user")
    target = gm.Posterior(log_prior, *plates)
    check_close(jax.jit(seen)(target, start()), expected(start()), 1e-12)
    placed = gm.place({"tag": gm.LookupIndex(TAG, TAGS), "stars": STARS}, mesh_of("8"), P("data"))

    def of_row(x, row):
        return -0.5 * (row["stars"] - gm.lookup(x["tag"], row["tag"])) ** 2

    rows = gm.Posterior(lambda x: -0.5 * x["tag"] ** 2, gm.Plate(of_row, placed))
    tags = {"tag": start()["tag"]}
    plain = jax.grad(lambda t: -0.5 * jnp.sum(t**2) - 0.5 * jnp.sum((STARS - t[TAG]) ** 2))(tags["tag"])
    check_close(rows.grad(tags), {"tag": plain}, 1e-12)


def test_groups_themselves_may_look_up_what_they_share(as_on_a_chip, x64):
    """Patients in hospitals: the index is a column of the table of groups."""
    ward, users = np.arange(USERS) % 3, gm.Groups(USER, mesh_of("8"), P("data"))

    def of_user(x, row):
        return -0.5 * (x["user"] - gm.lookup(x["ward"], row["ward"])) ** 2

    def of_row(x, row):
        return -0.5 * (row["stars"] - x["user"]) ** 2

    def dense(x):
        of_users = -0.5 * (x["user"] - x["ward"][ward]) ** 2
        return tree.total((-0.5 * x["ward"] ** 2, of_users, -0.5 * (STARS - x["user"][USER]) ** 2))

    table = users.place({"ward": gm.LookupIndex(ward, 3)})
    rows = gm.Plate(of_row, users.place_rows({"stars": STARS}), local="user")
    target = gm.Posterior(lambda x: -0.5 * x["ward"] ** 2, gm.Plate(of_user, table, local="user"), rows)
    position = {"user": jnp.asarray(RNG.normal(size=USERS)), "ward": jnp.asarray(RNG.normal(size=3))}
    value, grad = jax.value_and_grad(dense)(position)
    check_close(jax.jit(seen)(target, position), grad | {"log density": value}, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_transposes_every_bit(dtype, x64):
    """As a TPU brings gathered rows into columns; numbers of all sizes, and columns that are none."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-30, 30, (1000, 9))
    rows = jnp.asarray(rng.choice([-1, 0, 1], (1000, 9)) * sizes, dtype)
    np.testing.assert_array_equal(lookup._columns_by_product(rows), rows.T)


NOT_WHOLE: Any = 70.0
BAD = [
    (lambda: gm.LookupIndex(FILM * 1.0, FILMS), TypeError, "expected one integer per row, shape [row"),
    (lambda: gm.LookupIndex(FILM[:, None], FILMS), TypeError, f"got int32[{NUM}, 1]"),
    (
        lambda: gm.LookupIndex([0, 3, 1, 9], 3),
        ValueError,
        "2 rows have others, the first is row 1 with 3",
    ),
    (lambda: gm.LookupIndex(jnp.array([0, -1]), 3), ValueError, "from 0 to 2; 1 rows have others"),
    (lambda: gm.LookupIndex(FILM, 0), ValueError, "entries: expected an integer of at least 1, got 0"),
    (lambda: gm.LookupIndex(FILM, NOT_WHOLE), ValueError, "entries: expected an integer of at least 1"),
    (lambda: jax.jit(lambda i: gm.LookupIndex(i, 3))(FILM), TypeError, "Make it outside of jit"),
    (
        lambda: gm.lookup(jnp.zeros((FILMS + 1, 3)), gm.LookupIndex(FILM, FILMS)),
        ValueError,
        f"lookup: table: expected {FILMS} entries, as LookupIndex({NUM} rows, {FILMS} entries) has, "
        f"got shape [{FILMS + 1}, 3]",
    ),
    (
        lambda: target_on("8", columns(np.ma.masked_equal(FILM, 3))),
        ValueError,
        "rows ['film'].index: the mask would be lost",
    ),
    (
        lambda: target_on("8", columns() | {"film": gm.LookupIndex(FILM[:-1], FILMS)}),
        ValueError,
        "rows ['film'].index: expected shape",
    ),
]


@pytest.mark.parametrize(("make", "error", "text"), BAD)
def test_what_is_no_index_of_the_rows_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_a_tree_of_anything_can_be_made_of_it():
    """JAX puts objects in the leaves of a pytree; and it is no error to show one."""
    shown = jax.tree.map(lambda _: object(), gm.LookupIndex(FILM, FILMS))
    assert repr(shown) == f"LookupIndex({FILMS} entries)"
    assert [f.name for f in dataclasses.fields(shown)] == ["index", "entries", "order"]
