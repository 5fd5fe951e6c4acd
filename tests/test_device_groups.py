"""Groups of devices: read in all forms of XLA, named by the axes of the mesh, on paper and compiled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_texts import read
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import communication
from gspmd_mcmc.views.program.device_groups import (
    axes_of_groups,
    axes_of_pairs,
    read_groups,
    read_pairs,
)

MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}]
NAMES = ["-".join(map(str, mesh.values())) for mesh in MESHES]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=NAMES)


def listed(text):
    groups = read_groups(f"channel_id=1, replica_groups={text}, dimensions={{0}}", num_devices=8)
    return None if groups is None else groups.tolist()


# The forms.


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{{0},{1}}", [[0], [1]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,1,2},{3,4}}", None),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[8,1]<=[8]", [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh[a=2,b=4] {a}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", [[3, 0], [1, 2]]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'y'}", [[3, 1], [0, 2]]),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(0,1,2) {'x'}", None),
        ("mesh['x'=2,'y'=2] {'z'}", None),
        ("spiral[8]", None),
    ],
)
def test_groups_are_read(text, groups):
    assert listed(text) == groups


@pytest.mark.parametrize(
    ("axes", "iota"),
    [
        ("'a':(1)2", "[4,2]<=[2,4]T(1,0)"),
        ("'a':(1)4", "[2,4]<=[4,2]T(1,0)"),
        ("'a':(2)2", "[4,2]<=[2,2,2]T(0,2,1)"),
        ("'a':(2)4", "[2,4]<=[8]"),
        ("'a':(4)2", "[4,2]<=[8]"),
        ("'a':(1)2,'a':(4)2", "[2,4]<=[2,2,2]T(1,0,2)"),
        ("'a':(4)2,'a':(1)2", "[2,4]<=[2,2,2]T(1,2,0)"),
        ("'a'", "[1,8]<=[8]"),
    ],
)
def test_parts_of_an_axis_are_the_ranges_that_xla_says_they_are(axes, iota):
    """The pairs are those of XLA's own test, xla/hlo/ir/replica_group_test.cc."""
    assert listed(f"mesh['a'=8] {{{axes}}}") == listed(iota)


def test_pairs_are_read():
    texts = ("source_target_pairs={{0,1},{1,0}}", '{_x_source_target_pairs="{{0, 1}, {10,2}}"}')
    found = [read_pairs(text) for text in texts]
    assert [pairs.tolist() for pairs in found if pairs is not None] == [
        [[0, 1], [1, 0]],
        [[0, 1], [10, 2]],
    ]
    assert read_pairs("channel_id=1") is read_pairs("source_target_pairs={}") is None


# Their axes.


def groups_by_hand(mesh, over):
    """Devices that agree on all coordinates but those of some axes, found by trying each pair."""
    places = list(itertools.product(*(range(n) for n in mesh.values())))
    fixed = [i for i, name in enumerate(mesh) if name not in over]
    keys = [tuple(place[i] for i in fixed) for place in places]
    return [[d for d, key in enumerate(keys) if key == wanted] for wanted in dict.fromkeys(keys)]


def subsets(mesh):
    return [s for r in range(1, len(mesh) + 1) for s in itertools.combinations(mesh, r)]


@every_mesh
def test_groups_have_the_names_of_their_axes_in_any_order(mesh):
    rng = np.random.default_rng(0)
    for over in subsets(mesh):
        groups = rng.permuted(np.array(groups_by_hand(mesh, over)), axis=1)
        assert axes_of_groups(rng.permutation(groups), mesh) == over


@pytest.mark.parametrize(
    ("groups", "mesh", "axes"),
    [
        ([[0, 1], [2, 3], [4, 5], [6, 7]], {"a": 2, "b": 4}, ()),
        ([[0, 1, 2, 3]], {"a": 2, "b": 4}, ()),
        ([[0, 5], [1, 4], [2, 7], [3, 6]], {"a": 2, "b": 4}, ()),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], {"a": 8, "b": 1}, ("a",)),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], {"b": 1, "a": 8}, ("a",)),
        ([[0], [1], [2], [3], [4], [5], [6], [7]], {"a": 8, "b": 1}, ("b",)),
    ],
)
def test_groups_that_are_no_axes_have_no_name_and_axes_of_one_device_do_not_count(groups, mesh, axes):
    assert axes_of_groups(np.array(groups), mesh) == axes


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ([(0, 1), (1, 2), (2, 3), (3, 0)], ("b",)),
        ([(0, 4), (5, 1)], ("a",)),
        ([(0, 5)], ("a", "b")),
        ([(0, 1), (1, 5)], ("a", "b")),
        ([(3, 3)], ()),
        ([(0, 9)], ()),
    ],
)
def test_pairs_have_the_names_of_the_axes_they_cross(pairs, axes):
    assert axes_of_pairs(np.array(pairs), {"a": 2, "b": 4}) == axes


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("b",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("a",), 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("a",), 2),
        ("{}", ("a", "b"), 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", (), 2),
        ("{{0,1,2},{3,4,5,6,7}}", (), 0),
        ("spiral[8]", (), 0),
    ],
)
def test_a_report_has_the_axes_whatever_the_form(groups, axes, size):
    report = read(f"ROOT %ar = f32[32]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add")
    (found,) = report.collectives
    assert (found.axes, found.group_size) == (axes, size)
    unnamed = f"groups of {size}" if size else "groups not read"
    assert found.where == (" x ".join(axes) or unnamed)
    assert f" over {found.where}" in str(found)


# Compiled.


def make_mesh(mesh, order=range(8)):
    devices = np.array(jax.devices())[list(order)].reshape(tuple(mesh.values()))
    return jax.sharding.Mesh(devices, tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def shape(mesh, *dims, spec):
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))


SHUFFLED = (3, 1, 4, 0, 5, 7, 2, 6)
every_order = pytest.mark.parametrize("order", [range(8), SHUFFLED], ids=["", "shuffled"])


@every_mesh
@every_order
def test_axes_of_collectives_that_the_program_names(mesh, order):
    """Over each axis, each two, and all; each with a number of elements of its own."""
    laid = make_mesh(mesh, order)

    def sums(x):
        return [lax.psum(x[:n] * n, over) for n, over in enumerate(subsets(mesh), 1)]

    program = jax.shard_map(sums, mesh=laid, in_specs=P(tuple(mesh)), out_specs=P(), check_vma=False)
    report = communication(program, shape(laid, 8 * 16, spec=P(tuple(mesh))))
    seen = {c.num_bytes: (c.axes, c.group_size) for c in report.collectives}
    sizes = {over: int(np.prod([mesh[name] for name in over])) for over in subsets(mesh)}
    assert seen == {4 * n: (over, sizes[over]) for n, over in enumerate(subsets(mesh), 1)}


@every_mesh
@every_order
def test_axes_of_reductions_that_the_compiler_puts_in(mesh, order):
    laid = make_mesh(mesh, order)
    arrays = [shape(laid, 16, n, spec=P(over)) for n, over in enumerate(subsets(mesh), 1)]
    report = communication(lambda *xs: [jnp.sum(x, axis=0) for x in xs], *arrays)
    seen = {c.num_bytes: (c.kind, c.axes) for c in report.collectives}
    assert seen == {4 * n: ("all-reduce", over) for n, over in enumerate(subsets(mesh), 1)}


@every_order
def test_axes_of_a_permutation(order):
    laid = make_mesh({"a": 2, "b": 4}, order)

    def shift(x):
        return lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]), lax.ppermute(
            x, "a", [(0, 1)]
        )

    program = jax.shard_map(shift, mesh=laid, in_specs=P("a", "b"), out_specs=P("a", "b"))
    report = communication(program, shape(laid, 8, 8, spec=P("a", "b")))
    assert sorted((c.kind, c.axes, c.group_size) for c in report.collectives) == [
        ("collective-permute", ("a",), 2),
        ("collective-permute", ("b",), 4),
    ]
