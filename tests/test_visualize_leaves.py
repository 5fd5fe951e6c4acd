"""Who holds what: the layouts of leaves against JAX's own maps of indices, shards and bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import PositionalSharding, visualize
from gspmd_mcmc.views.layouts.leaf_layout import LeafLayout


def only_leaf(tree, **options) -> LeafLayout:
    (leaf,) = visualize(tree, **options).leaves
    return leaf


def owners_by_jax(sharding, shape):
    """JAX's own answer: the devices of each block."""
    found: dict = {}
    for device, index in sharding.devices_indices_map(shape).items():
        key = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        found.setdefault(key, set()).add(device.id)
    return found


def owners_by_view(leaf: LeafLayout):
    return {tuple((s.start, s.stop) for s in block.index): set(block.devices) for block in leaf.blocks}


MESHES = {
    "two_axes": ((2, 4), ("a", "b"), None),
    "cube": ((2, 2, 2), ("a", "b", "c"), None),
    "with_an_axis_of_one": ((4, 1, 2), ("a", "b", "c"), None),
    "devices_out_of_order": ((2, 4), ("a", "b"), [3, 1, 4, 0, 5, 7, 2, 6]),
}
SPECS = [
    P(), P("a"), P(None, "a"), P("a", None, "b"), P("b", "a"), P(("a", "b")), P(("b", "a"), None),
    P(None, ("a", "b")), P("c", ("b", "a")), P(("a", "c"), None, "b"), P("c", "a", None, "b"),
    P(("c", "b", "a")),
]  # fmt: skip


def named_axes(spec):
    return {
        name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,)) if name
    }


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_blocks_are_where_jax_says(name, spec):
    shape, names, order = MESHES[name]
    if not named_axes(spec) <= set(names):
        spec = P(*(None if named_axes(P(e)) - set(names) else e for e in spec))
    devices = np.array([jax.devices()[i] for i in order or range(8)]).reshape(shape)
    sharding = NamedSharding(Mesh(devices, names), spec)
    for array_shape in [(8, 16, 8, 4), (24, 8, 16, 8)]:
        leaf = only_leaf(jax.ShapeDtypeStruct(array_shape, jnp.float32, sharding=sharding))
        assert owners_by_view(leaf) == owners_by_jax(sharding, array_shape)
        assert leaf.num_shards * leaf.replication == 8
        assert leaf.num_shards == len(owners_by_jax(sharding, array_shape))


@pytest.mark.parametrize("shape", [(), (8,), (8, 16), (0, 8)])
def test_one_device_holds_the_whole(shape):
    sharding = SingleDeviceSharding(jax.devices()[3])
    leaf = only_leaf(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    assert owners_by_view(leaf) == owners_by_jax(sharding, shape)
    assert (leaf.num_shards, leaf.replication, leaf.mesh_axes, leaf.spec) == (1, 1, {}, None)


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "chains"), P("data", "chains"), P(("chains", "data"))]
)
def test_shardings_without_a_spec_are_read_by_their_indices(spec):
    mesh = gm.make_mesh(chains=2, data=4)
    # JAX has no public name for it.
    kind = getattr(pytest.importorskip("jax._src.sharding_impls"), "GSPMDSharding", None)
    if kind is None:
        pytest.skip("this JAX has no shardings without a spec")
    sharding = kind(jax.devices(), NamedSharding(mesh, spec)._to_xla_hlo_sharding(2))
    leaf = only_leaf(jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding))
    assert owners_by_view(leaf) == owners_by_jax(sharding, (8, 16))


@pytest.mark.parametrize(
    "change",
    [lambda s: s.reshape(4, 2), lambda s: s.reshape(4, 2).T, lambda s: s.reshape(2, 4).replicate(0),
     lambda s: s.reshape(4, 2).replicate(1), lambda s: s.reshape(8, 1), lambda s: s.replicate()],
)  # fmt: skip
def test_positional_shardings_are_read(change):
    sharding = change(PositionalSharding(jax.devices()))
    leaf = only_leaf(jax.device_put(np.zeros((8, 16), np.float32), sharding))
    assert owners_by_view(leaf) == owners_by_jax(sharding, (8, 16))
    assert leaf.label == f"Positional{sharding.shape}"
    assert only_leaf(sharding).num_shards == leaf.num_shards


def placed_tree():
    mesh = gm.make_mesh(chains=2, data=4)
    rng = np.random.default_rng(0)
    return {
        "x": jax.device_put(
            rng.normal(size=(16, 3)).astype(np.float32), NamedSharding(mesh, P("data"))
        ),
        "w": jax.device_put(np.ones((2, 8), np.int8), NamedSharding(mesh, P("chains", "data"))),
        "b": jax.device_put(np.ones(5, np.float32), NamedSharding(mesh, P())),
        "key": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("data"))),
        "one": jax.device_put(np.ones((3, 3), np.float32), jax.devices()[5]),
        "half": jax.device_put(jnp.ones((4, 4), jnp.bfloat16), NamedSharding(mesh, P(None, "chains"))),
        "empty": jax.device_put(np.ones((0, 4), np.float32), NamedSharding(mesh, P("data"))),
    }


def test_bytes_are_those_of_the_shards():
    tree = placed_tree()
    expected = dict.fromkeys(range(8), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            expected[shard.device.id] += shard.data.nbytes
    totals = visualize(tree).totals
    assert {number: count for (_, number), count in totals.by_device.items()} == expected
    assert totals.per_device == max(expected.values())
    assert (totals.on_host, totals.num_unknown) == (0, 0)
    for leaf, array in zip(visualize(tree).leaves, jax.tree.leaves(tree), strict=True):
        assert leaf.bytes_per_device == array.addressable_shards[0].data.nbytes
        assert leaf.block_shape == array.sharding.shard_shape(array.shape)


@pytest.mark.parametrize(
    ("rows", "sizes", "padding"), [(10, [2] * 5 + [0] * 3, 6), (17, [3] * 5 + [2, 0, 0], 7)]
)
def test_uneven_rows_are_cut_as_xla_cuts_them(rows, sizes, padding):
    """Blocks of ceil(rows / 8), the last ones short or empty; the sizes by hand."""
    mesh = gm.make_mesh(chains=2, data=4)
    sharding = NamedSharding(mesh, P(("chains", "data")))
    leaf = only_leaf(jax.ShapeDtypeStruct((rows, 2), jnp.float32, sharding=sharding))
    assert [b.index[0].stop - b.index[0].start for b in leaf.blocks] == sizes
    assert [b.devices for b in leaf.blocks] == [(i,) for i in range(8)]
    assert leaf.bytes_per_device == max(sizes) * 2 * 4
    assert leaf.bytes_by_position().tolist() == [8 * size for size in sizes]
    assert f"pad it by {padding} to {rows + padding}" in leaf.notes[0]


def test_padded_rows_are_known():
    data = gm.place({"x": np.ones((10, 3), np.float32)}, gm.make_mesh(data=8), P("data"))
    (leaf,) = visualize(data).leaves
    assert (leaf.path, leaf.shape, leaf.num_rows) == ("['x']", (16, 3), 10)
    assert leaf.notes == ("10 rows + 6 pad (copies of the last real row)",)


def zero_terms(params, block):
    return jnp.zeros(len(block["x"]))


def test_a_plate_tells_of_its_padding():
    data = gm.place({"x": np.ones((10, 3), np.float32)}, gm.make_mesh(data=8), P("data"))
    target = gm.Posterior(lambda params: 0.0, gm.Plate(zero_terms, data))
    kernel = gm.HMC(target, step_size=0.1, num_integration_steps=2)
    leaves = {leaf.path: leaf for leaf in visualize(kernel).leaves}
    assert leaves[".target.plates[0].data['x']"].num_rows == 10
    assert leaves[".step_size"].num_rows is None
    assert len(leaves) == len(jax.tree.leaves(kernel))


def test_draws_are_opened():
    kernel = gm.NUTS(gm.LogDensity(jnp.sum), 1.0)
    draws = gm.Draws({"w": placed_tree()["x"]}, {}, {}, kernel, {"step": np.int32(3)}, 0)
    assert [leaf.path for leaf in visualize(draws).leaves] == ["['position']['w']", "['state']['step']"]
    assert visualize([draws]).leaves[0].path == "[0]['position']['w']"


def test_host_arrays_and_numbers():
    view = visualize({"a": np.zeros((3, 2)), "b": 1.5, "c": np.float32(2), "d": True})
    assert [leaf.memory for leaf in view.leaves] == ["host"] * 4
    assert [leaf.bytes_per_device for leaf in view.leaves] == [0] * 4
    assert view.totals.on_host == 48 + 8 + 4 + 1
    assert view.totals.by_device == {}
    assert all(leaf.blocks == () and leaf.num_shards == 0 for leaf in view.leaves)


def test_a_leaf_has_the_facts_of_its_row_and_a_deleted_one_says_so():
    tree = placed_tree()
    leaf = visualize(tree)["['w']"].leaves[0]
    assert (leaf.shape, leaf.dtype, leaf.spec) == ((2, 8), np.int8, P("chains", "data"))
    assert leaf.mesh_axes == {"chains": 2, "data": 4}
    assert (leaf.num_shards, leaf.replication, leaf.bytes_per_device) == (8, 1, 2)
    assert repr(leaf) == "LeafLayout(['w']: i8[2,8], P(chains=2, data=4), 8 blocks x 1)"
    tree["x"].delete()
    leaf = visualize(tree)["['x']"].leaves[0]
    assert leaf.memory == "deleted" and leaf.bytes_per_device == 0
    assert "donated" in leaf.notes[0]
    assert leaf.spec == P("data")


def seen_inside(x):
    views = []
    jax.jit(lambda x: (views.append(visualize({"x": x})), x)[1])(x)
    return views[0].leaves[0]


def test_tracers_have_no_layout_but_on_an_explicit_mesh():
    leaf = seen_inside(placed_tree()["x"])
    assert (leaf.label, leaf.memory, leaf.grid) == ("traced", "nowhere", None)
    assert "outside jit" in leaf.notes[0]
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    leaf = seen_inside(jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(mesh, P("b", "a"))))
    assert leaf.spec == P("b", "a")
    assert leaf.blocks[1].devices == (4,)  # rows 0:2 and the second half of columns: b=0, a=1


def test_a_sharding_alone():
    assert only_leaf(NamedSharding(gm.make_mesh(data=8), P("data")), shape=16).shape == (16,)
    sharding = NamedSharding(gm.make_mesh(chains=2, data=4), P("data", "chains"))
    assert only_leaf(sharding).shape is None and only_leaf(sharding).num_shards == 8
    leaf = only_leaf(sharding, shape=(8, 16))
    assert owners_by_view(leaf) == owners_by_jax(sharding, (8, 16))
    assert "JAX will refuse it" in only_leaf(sharding, shape=(8,)).notes[0]
    assert visualize(sharding).totals.num_unknown == 0  # it is no array that a total should count


def test_other_memories_are_not_counted():
    sharding = NamedSharding(gm.make_mesh(data=8), P("data"), memory_kind="pinned_host")
    view = visualize([jax.device_put(np.zeros(8, np.float32), sharding)])
    assert view.leaves[0].memory == "pinned_host"
    assert view.totals.by_device == {}
    assert "not counted" in view.leaves[0].notes[0]


def test_large_leaves_that_are_whole_everywhere_are_told():
    mesh = AbstractMesh((8,), ("data",))

    def notes(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return only_leaf(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)).notes

    assert "whole on every device" in notes((1000, 250), P())[0]
    assert notes((1000, 249), P()) == ()
    assert notes((1000, 250), P("data")) == ()


def test_partial_sums_are_told():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P(None, unreduced=frozenset({"a"})))
    leaf = only_leaf(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    assert "partial sums" in leaf.notes[0]


def test_a_path_picks_a_leaf_or_a_subtree():
    view = visualize({"a": {"x": 1, "y": 2}, "b": 3})
    assert [leaf.path for leaf in view["['a']['y']"].leaves] == ["['a']['y']"]
    assert len(view["['a']"].leaves) == 2
    with pytest.raises(KeyError, match=r"\['c'\].*expected the path.*\['b'\]"):
        view["['c']"]
