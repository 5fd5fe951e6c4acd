"""Meshes, placement, padding, and what a plate reads from the arrays it is given."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import mesh_of, real

import gspmd_mcmc as gm
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.placement.mesh import joined_on_chips
from gspmd_mcmc.placement.padding import padded_rows
from gspmd_mcmc.tree import Role

ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)
MESH = gm.make_mesh(chains=2, data=4)


def row_sums(params, block):
    return params * jnp.sum(block["x"], axis=1)


def sum_of_terms(plate):
    """The plate's log likelihood at one; rows that are copies must not be in it."""
    return float(jnp.sum(plate.terms(jnp.ones(()))))


class SpiedMemmap(np.memmap):
    """A memory-mapped array that records how many rows each read takes."""

    reads: list[int]

    def __getitem__(self, index):
        rows = index[0] if isinstance(index, tuple) else index
        assert isinstance(rows, slice)
        self.reads.append(len(range(*rows.indices(self.shape[0]))))
        return np.asarray(super().__getitem__(index))


def spied_memmap(path, array):
    array.tofile(path)
    spied = np.memmap(path, dtype=array.dtype, mode="r", shape=array.shape).view(SpiedMemmap)
    spied.reads = []
    return spied


# Meshes.


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"chains": 2, "data": 4}, {"chains": 2, "data": 4}),
        ({"data": 4, "chains": 2}, {"chains": 2, "data": 4}),
        ({"chains": 2, "data": -1}, {"chains": 2, "data": 4}),
        ({"chains": -1}, {"chains": 8}),
        ({"chains": 8, "data": -1}, {"chains": 8, "data": 1}),
        ({"model": 4, "data": 2}, {"data": 2, "model": 4}),
        ({"chains": 2, "data": 2, "model": 2}, {"chains": 2, "data": 2, "model": 2}),
    ],
)
def test_make_mesh_has_the_sizes_asked_for_in_one_order(sizes, shape):
    mesh = gm.make_mesh(**sizes)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.shape.items()) == list(shape.items())
    assert mesh.devices.ravel().tolist() == jax.devices()


def test_make_mesh_takes_some_devices():
    chosen = [jax.devices()[i] for i in (5, 1, 3)]
    assert gm.make_mesh(data=-1, devices=chosen).devices.tolist() == chosen


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"chains": -1, "data": -1}, "make_mesh(chains=-1, data=-1): only one axis can be -1"),
        ({"chains": 0, "data": -1}, "make_mesh(chains=0, data=-1): an axis has at least 1 device"),
        ({"data": -2}, "make_mesh(data=-2): an axis has at least 1 device"),
        ({"chains": 3, "data": 2}, "the axes multiply to 6, but there are 8 devices"),
        ({"chains": 3, "data": -1}, "the axes multiply to 3, but there are 8 devices"),
        ({"data": 16}, "the axes multiply to 16, but there are 8 devices"),
        ({"data": 16}, 'jax.config.update("jax_num_cpu_devices", n)'),
        ({"data": 4}, "pass devices=jax.devices()[:n]"),
        ({"chains": 2.0, "data": 4}, "chains=2.0"),
        ({"data": "8"}, "data='8'"),
    ],
)
def test_make_mesh_says_what_does_not_fit(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gm.make_mesh(**sizes)


def test_a_grid_of_devices_is_taken_as_it_is():
    grid = np.array(jax.devices()[::-1]).reshape(2, 4)
    for devices in (grid, grid.tolist()):
        mesh = gm.make_mesh(chains=2, data=-1, devices=devices)
        assert mesh.devices.tolist() == grid.tolist()


@pytest.mark.parametrize(
    ("sizes", "shape", "message"),
    [
        ({"chains": 2, "data": 4}, (4, 2), "expected shape (2, 4), got (4, 2). Reshape it"),
        ({"data": 8}, (2, 4), "expected shape (8,), got (2, 4)"),
        ({"chains": 2, "data": 4}, (8,), "expected shape (2, 4), got (8,)"),
        ({"chains": 2, "data": 2}, (2, 4), "the axes multiply to 4, but there are 8 devices"),
    ],
)
def test_a_grid_of_another_shape_than_the_mesh_is_refused(sizes, shape, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gm.make_mesh(**sizes, devices=np.array(jax.devices()).reshape(shape))


@dataclass(frozen=True)
class Chip:
    """A stand-in for a device of a TPU."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str = "TPU v4"
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"


def chips(x, y, z=1, cores=1, **facts):
    """The devices of a box of chips in the order of `jax.devices()`: x runs fastest."""
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    cored = [(place, core) for place in places for core in range(cores)]
    start = 100 * facts.get("slice_index", 0)
    return [Chip(start + n, place, core_on_chip=core, **facts) for n, (place, core) in enumerate(cored)]


def are_joined(a, b):
    return sum(abs(p - q) for p, q in zip(a.coords, b.coords, strict=True)) <= 1


@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        (chips(2, 2, cores=2, device_kind="TPU v3"), (8,)),
        (chips(2, 2, cores=2, device_kind="TPU v3"), (2, 4)),
        (chips(4, 4, device_kind="TPU v5 lite"), (16,)),
    ],
)
def test_neighbors_on_a_mesh_axis_are_neighbors_on_the_chips(devices, shape):
    """Each row of the mesh is a ring or a line of chips, which the order of ids is not."""
    grid = joined_on_chips(devices, shape)
    assert sorted(d.id for d in grid.flat) == [d.id for d in devices]
    assert all(are_joined(*pair) for row in grid.reshape(-1, shape[-1]) for pair in pairwise(row))
    if len(shape) == 1:
        assert are_joined(grid[-1], grid[0])
        assert not all(are_joined(*pair) for pair in pairwise([*devices, devices[0]]))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 4), [{0}, {1}]), ((2, 2, 2), [{0}, {1}]), ((1, 8), [{0, 1}]), ((4, 2), [{0}, {0}, {1}, {1}])],
)
def test_the_first_axes_go_over_slices(shape, rows):
    devices = chips(2, 2, slice_index=1) + chips(2, 2)
    grid = joined_on_chips(devices, shape)
    assert [{d.slice_index for d in row.flat} for row in grid] == rows
    assert [d.slice_index for d in grid.flat] == [0] * 4 + [1] * 4


def test_slices_may_go_over_two_axes():
    grid = joined_on_chips([d for i in range(4) for d in chips(2, 3, slice_index=i)], (6, 4))
    rows = [[d.slice_index for d in row] for row in grid]
    assert rows == 3 * [[0, 0, 1, 1]] + 3 * [[2, 2, 3, 3]]


def test_each_process_has_its_devices_side_by_side():
    devices = [replace(d, process_index=d.coords[2]) for d in chips(2, 2, 4)]
    grid = joined_on_chips(devices, (2, 8))
    assert [d.process_index for d in grid.flat] == sorted(4 * [0, 1, 2, 3])


@pytest.mark.parametrize("devices", [chips(2, 2, 4)[:3], chips(2, 2) + chips(2, 2, 2, slice_index=1)])
def test_chips_that_are_no_box_are_taken_as_they_come(devices):
    assert joined_on_chips(devices, (1, len(devices))).ravel().tolist() == devices


# Specs.


def test_one_spec_serves_every_leaf():
    placed = gm.place({"x": ROWS, "y": ROWS[:, 0]}, mesh_of(4), P("data"))
    assert placed["x"].sharding.spec == P("data")
    assert {s.data.shape for s in placed["x"].addressable_shards} == {(3, 2)}
    assert {s.data.shape for s in placed["y"].addressable_shards} == {(3,)}


def test_a_prefix_tree_of_specs_reaches_every_subtree():
    tree = {"rows": {"x": ROWS, "y": ROWS[:, 0]}, "whole": [ROWS, 3.0]}
    placed = gm.place(tree, mesh_of(4), {"rows": P("data"), "whole": P()})
    specs = jax.tree.map(lambda a: a.sharding.spec, placed)
    assert specs == {"rows": {"x": P("data"), "y": P("data")}, "whole": [P(), P()]}
    np.testing.assert_array_equal(placed["rows"]["x"], ROWS)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (P("data", None, None), ["['a']['x']", "(12, 2)", "'data': 4", "3 entries", "2 axes"]),
        (P("rows"), ["['a']['x']", "(12, 2)", "'data': 4", "no axis 'rows'"]),
        (P(("data", "model")), ["['a']['x']", "'data': 4", "no axis 'model'"]),
        (P(None, "data"), ["['a']['x']", "(12, 2)", "axis 1 has 2 elements", "4 devices", "leading"]),
    ],
)
def test_a_spec_that_does_not_fit_names_leaf_shape_axis_and_mesh(spec, parts):
    with pytest.raises(ValueError, match="leaf") as error:
        gm.place({"a": {"x": ROWS}}, mesh_of(4), spec)
    assert [part for part in parts if part not in str(error.value)] == []


def test_a_sharding_says_mesh_spec_and_memory():
    sharding = NamedSharding(gm.make_mesh(data=8), P("data"), memory_kind="pinned_host")
    for x in (np.ones((16, 2)), jnp.ones((16, 2))):
        assert gm.place({"x": x}, sharding)["x"].sharding == sharding
    assert gm.place(np.ones((9, 2)), sharding).values.sharding == sharding
    with pytest.raises(ValueError, match="the sharding has its spec"):
        gm.place(ROWS, sharding, P("data"))


SPECS = "specs is no prefix of the tree"
NUMBERS = r"leaf \['x'\]: expected an array of numbers"
# Of each the error, the leaf x of the tree, and the specs.
REFUSED = {
    "a scalar's axis": (r"leaf \['x'\] of shape \(\)", 1.0, P("data")),
    "a dict for an array": (SPECS, ROWS, {"x": {"z": P()}}),
    "a list for a dict": (SPECS, ROWS, [P(), P()]),
    "more keys": (SPECS, ROWS, {"x": P(), "y": P()}),
    "a name": ("PartitionSpec", ROWS, {"x": "data"}),
    "None": ("PartitionSpec", ROWS, {"x": None}),
    "a tuple": ("PartitionSpec", ROWS, {"x": ("data",)}),
    "an object": (NUMBERS, object(), None),
    "no rows": ("there are no rows to lay over 4 devices", ROWS[:0], P("data")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_placed_is_refused(what):
    match, leaf, specs = REFUSED[what]
    with pytest.raises(ValueError, match=match):
        gm.place({"x": leaf}, mesh_of(4), specs)


@pytest.mark.parametrize("mesh", [jnp.ones(3).sharding, jax.devices(), P("data"), None])
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(TypeError, match="place: expected a mesh .* a NamedSharding"):
        gm.place(ROWS, mesh)


# Padding.


def test_uneven_rows_are_padded_with_copies_of_the_last():
    placed = gm.place(ROWS[:10], mesh_of(4), P("data"))
    assert isinstance(placed, gm.Padded)
    assert (placed.num_rows, placed.num_pad) == (10, 2)
    np.testing.assert_array_equal(placed.values, np.concatenate([ROWS[:10], ROWS[[9, 9]]]))
    np.testing.assert_array_equal(placed.unpad(), ROWS[:10])


def test_a_padded_array_survives_a_round_trip_through_its_leaves():
    placed = gm.place(ROWS[:10], mesh_of(4), P("data"))
    doubled = jax.tree.map(lambda a: 2 * a, placed)
    assert isinstance(doubled, gm.Padded)
    np.testing.assert_array_equal(doubled.unpad(), 2 * ROWS[:10])
    assert "object" in repr(jax.tree.map(lambda _: object(), placed))


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_fewer_rows_than_devices_fill_whole_devices_with_copies(num_rows):
    placed = gm.place(ROWS[:num_rows], gm.make_mesh(data=8), P("data"))
    expected = np.concatenate([ROWS[:num_rows], np.repeat(ROWS[num_rows - 1 : num_rows], 16, 0)])
    np.testing.assert_array_equal(placed.values, expected[: padded_rows(num_rows, 8)])


# What can be placed.


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (np.ones(8, np.float64), jnp.float32),
        (np.ones(8, np.int64), jnp.int32),
        (np.ones(8, np.uint8), jnp.uint8),
        (np.ones(8, bool), jnp.bool_),
        (np.ones(8, np.float16), jnp.float16),
        (jnp.ones(8, jnp.bfloat16), jnp.bfloat16),
        (np.asarray(jnp.ones(8, jnp.bfloat16)), jnp.bfloat16),
        (np.ones(8, ">f4"), jnp.float32),
    ],
)
def test_dtypes_are_kept_or_made_canonical(leaf, dtype):
    placed = gm.place(leaf, gm.make_mesh(), P("data"))
    assert placed.dtype == dtype
    np.testing.assert_array_equal(placed, np.ones(8, dtype))


@pytest.mark.parametrize("spec", [P("data"), P()])
def test_a_placed_array_does_not_follow_its_source(spec):
    source = np.arange(4096, dtype=np.float32)
    placed = gm.place(source, gm.make_mesh(), spec)
    before = source.copy()
    source[:] = -1
    np.testing.assert_array_equal(placed, before)


@pytest.mark.parametrize("num_rows", [1600, 1597])
def test_a_memory_mapped_array_is_read_shard_by_shard(tmp_path, num_rows):
    rows = np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3)
    source = spied_memmap(tmp_path / "rows", rows)
    placed = gm.place(source, gm.make_mesh(), P("data"))
    assert max(source.reads) <= 200
    assert num_rows <= sum(source.reads) <= num_rows + 8
    np.testing.assert_array_equal(real(placed), rows)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_padded_array_is_placed_anew_by_its_real_rows(count):
    padded = gm.place({"x": ROWS[:10]}, mesh_of(4), P("data"))
    moved = gm.place(padded, mesh_of(count), P("data"))
    direct = gm.place({"x": ROWS[:10]}, mesh_of(count), P("data"))
    assert jax.tree.structure(moved) == jax.tree.structure(direct)
    assert sum_of_terms(gm.Plate(row_sums, moved)) == ROWS[:10].sum()


# A mesh of the user's own.


def test_an_auto_mesh_with_names_of_the_users_own_works():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    plate = gm.Plate(row_sums, gm.place({"x": ROWS[:11]}, mesh, P(("a", "b"))))
    assert plate.rows.num_blocks == 8
    assert sum_of_terms(plate) == pytest.approx(ROWS[:11].sum())


# What a plate reads.


def test_a_plate_of_arrays_that_the_user_put_there_works():
    mesh = mesh_of(4)
    plate = gm.Plate(row_sums, {"x": jax.device_put(ROWS, NamedSharding(mesh, P("data")))})
    assert (plate.rows.mesh, plate.rows.axes, plate.rows.num_blocks) == (mesh, ("data",), 4)
    assert sum_of_terms(plate) == ROWS.sum()


@pytest.mark.parametrize("rows", [ROWS, jnp.asarray(ROWS)])
def test_a_plate_of_unplaced_arrays_is_one_block(rows):
    plate = gm.Plate(row_sums, {"x": rows})
    assert (plate.rows.mesh, plate.rows.axes, plate.rows.num_blocks) == (None, (), 1)
    assert sum_of_terms(plate) == ROWS.sum()


def test_copies_carry_no_density():
    plate = gm.Plate(row_sums, gm.place({"x": ROWS[:9]}, gm.make_mesh(), P("data")))
    assert "9 rows + 7 pad over data=8" in repr(plate)
    assert sum_of_terms(plate) == ROWS[:9].sum()
    assert plate.log_likelihood_rows(jnp.ones(())).shape == (9,)


def test_a_placed_leaf_may_stand_beside_an_unplaced_one():
    placed = gm.place(ROWS, mesh_of(4), P("data"))
    plate = gm.Plate(row_sums, {"x": placed, "unplaced": ROWS})
    assert plate.rows.num_blocks == 4
    assert sum_of_terms(plate) == ROWS.sum()


ON_TWO = {"x": gm.place(ROWS, mesh_of(4), P("data")), "y": gm.place(ROWS, mesh_of(2), P("data"))}
TWO_MESHES = "['x'] and ['y'] lie on different meshes"
UNEQUAL = {
    "lengths": (
        "['x'] has 12, ['y'] has 8",
        gm.place({"x": ROWS, "y": ROWS[:8]}, mesh_of(4), P("data")),
    ),
    "pads": (
        "['x'] has 10 (+2 pad), ['y'] has 10. Lay leaves",
        gm.place({"x": ROWS[:10], "y": ROWS[:10]}, mesh_of(4), {"x": P("data"), "y": P()}),
    ),
    "axes": (
        "rows of ['x'] lie over ('data',), those of ['y'] over ('chains',)",
        gm.place({"x": ROWS[:8], "y": ROWS[:8]}, mesh_of("2x4"), {"x": P("data"), "y": P("chains")}),
    ),
    "meshes": (TWO_MESHES, ON_TWO),
    # The first leaf lies on no mesh, so it is not one of the two at odds.
    "meshes, after an unplaced leaf": (TWO_MESHES, {"unplaced": ROWS} | ON_TWO),
}


@pytest.mark.parametrize("what", UNEQUAL)
def test_leaves_of_a_plate_that_lie_differently_are_refused(what):
    match, data = UNEQUAL[what]
    with pytest.raises(ValueError, match=re.escape(match)):
        gm.Plate(row_sums, data)


# Layouts.


@pytest.fixture
def layout():
    x = gm.place(np.zeros((4, 8), np.float32), MESH, P(None, "data"))
    return read_layout(MESH, gm.LogDensity(jnp.sum), x, 4, has_chains=True)


def constraint_of(function):
    """The spec that a function of positions of four chains pins its result to."""
    (constraint,) = jax.make_jaxpr(function)(jnp.zeros((4, 8))).eqns
    return constraint.params["sharding"].spec


def test_chains_and_positions_are_pinned_to_their_axes(layout):
    of_chains = Role(has_chains=True)
    assert constraint_of(lambda x: layout.pin(x, of_chains)) == P("chains")
    assert constraint_of(layout.pin_positions) == P("chains", "data")


def test_a_map_over_chains_pins_them_to_their_axis(layout):
    """Left to the compiler, a constraint within a chain would say nothing of where the chains lie."""

    def pinned(row):
        return jax.lax.with_sharding_constraint(row, NamedSharding(MESH, P("data")))

    assert constraint_of(layout.vmap(pinned, (0,))) == P("chains", "data")
