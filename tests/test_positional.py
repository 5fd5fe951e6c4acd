"""PositionalSharding: the lines of the tutorials that use it, and who holds which block."""

import copy
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import PositionalSharding, jax_private

TUTORIAL_ORDER = [0, 1, 2, 3, 6, 7, 4, 5]
ORDERS = [
    list(range(8)),
    list(range(8))[::-1],
    TUTORIAL_ORDER,
    [3, 0, 6, 1, 7, 2, 5, 4],
    [5, 1, 2, 0, 4, 3],
]


def devices_in(order):
    return [jax.devices()[i] for i in order]


def eight():
    return PositionalSharding(mesh_utils.create_device_mesh((8,)))


def numbers(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


# The oracle: an object array of Python sets of devices, united by loops, and data cut by np.split.


def array_of_sets(devices):
    sets = np.empty(len(devices), dtype=object)
    for i, device in enumerate(devices):
        sets[i] = {device}
    return sets


def united(sets, axes):
    """Union over some axes, which stay with length 1."""
    kept = tuple(1 if i in axes else size for i, size in enumerate(sets.shape))
    out = np.empty(kept, dtype=object)
    for index in np.ndindex(kept):
        out[index] = set()
    for index in np.ndindex(sets.shape):
        out[tuple(0 if i in axes else k for i, k in enumerate(index))] |= sets[index]
    return out


def block_of(data, shape, index):
    for axis, (cuts, k) in enumerate(zip(shape, index, strict=True)):
        data = np.split(data, cuts, axis=axis)[k]
    return data


def expected_blocks(sets, data):
    return {d: block_of(data, sets.shape, i) for i in np.ndindex(sets.shape) for d in sets[i]}


def assert_holds(array, sets, data):
    """Each device holds the block at its position, in fact and by the sharding's own map."""
    expected = expected_blocks(sets, data)
    held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    assert held.keys() == expected.keys()
    for device, block in expected.items():
        np.testing.assert_array_equal(held[device], block)
    assert_maps(array.sharding, sets, data)


def assert_maps(sharding, sets, data):
    expected = expected_blocks(sets, data)
    mapped = sharding.devices_indices_map(data.shape)
    assert mapped.keys() == expected.keys()
    for device, block in expected.items():
        np.testing.assert_array_equal(data[mapped[device]], block)


def fitting(shape):
    """Data that the shape divides, whose axes all differ."""
    return numbers(*(cuts * (2 + axis) for axis, cuts in enumerate(shape)))


def shapes_of(count, rank):
    sizes = [d for d in range(1, count + 1) if count % d == 0]
    return [s for s in itertools.product(sizes, repeat=rank) if math.prod(s) == count]


def subsets(rank):
    return [c for size in range(rank + 1) for c in itertools.combinations(range(rank), size)]


# Blocks.


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_every_shape_of_every_rank_replicated_along_any_axes(order, rank):
    flat = devices_in(order)
    for shape in shapes_of(len(order), rank):
        sharding, sets = PositionalSharding(flat).reshape(shape), array_of_sets(flat).reshape(shape)
        for axes in subsets(rank):
            replicated, expected = sharding.replicate(axes), united(sets, axes)
            assert replicated.shape == expected.shape
            assert_maps(replicated, expected, fitting(expected.shape))
            dropped = sharding.replicate(axes, keepdims=False)
            squeezed = np.squeeze(expected, axis=axes)
            assert dropped.shape == squeezed.shape
            assert_maps(dropped, squeezed, fitting(squeezed.shape))


CHAINS = {
    "T": lambda s, unite: s.reshape(4, 2).T,
    "T of three axes": lambda s, unite: s.reshape(2, 4, 1).T,
    "transpose to an order": lambda s, unite: s.reshape(2, 2, 2).transpose(1, 2, 0),
    "transpose to a tuple": lambda s, unite: s.reshape(2, 2, 2).transpose((2, 0, 1)),
    "transpose with a negative axis": lambda s, unite: s.reshape(2, 4).transpose(-1, 0),
    "columns of devices": lambda s, unite: s.reshape(4, 2).T.reshape(8),
    "regrouped": lambda s, unite: s.reshape(4, 2).T.reshape(4, 2),
    "regrouped and united": lambda s, unite: unite(s.reshape(2, 4).T.reshape(2, 4), 1),
    "united, then transposed": lambda s, unite: unite(s.reshape(2, 2, 2), 1).T,
    "united twice": lambda s, unite: unite(unite(s.reshape(2, 2, 2), 0), 2),
    "united, then reshaped": lambda s, unite: unite(s.reshape(4, 2), 0).reshape(2, 1, 1),
    "rank four": lambda s, unite: unite(s.reshape(2, 1, 2, 2).transpose(3, 1, 0, 2), 0),
    "inferred size": lambda s, unite: s.reshape(2, -1),
}


@pytest.mark.parametrize("order", ORDERS[2:4], ids=str)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_devices_hold_their_blocks_after_chains_of_changes(chain, order):
    flat = devices_in(order)
    sharding = chain(PositionalSharding(flat), lambda s, axis: s.replicate(axis))
    sets = chain(array_of_sets(flat), lambda s, axis: united(s, (axis,)))
    data = fitting(sets.shape)
    assert_holds(jax.device_put(data, sharding), sets, data)


SIX = {
    "T": lambda s: s.reshape(3, 2).T,
    "dealt out so that no mesh in this order has it": lambda s: s.reshape(3, 2).T.reshape(3, 2),
    "the same the other way": lambda s: s.reshape(2, 3).T.reshape(2, 3),
}


@pytest.mark.parametrize("chain", SIX.values(), ids=SIX)
def test_six_devices_hold_their_blocks(chain):
    flat = devices_in(ORDERS[-1])
    data = numbers(6, 12)
    sets = chain(array_of_sets(flat))
    sharding = chain(PositionalSharding(flat))
    assert_holds(jax.device_put(data, sharding), sets, data)
    assert_maps(sharding.replicate(0), united(sets, (0,)), data)
    assert_maps(sharding.named(), sets, data)


@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 2, 2)])
def test_devices_come_as_a_nested_sequence_or_an_array_of_any_rank(shape):
    grid = mesh_utils.create_device_mesh(shape)
    assert PositionalSharding(grid) == PositionalSharding(grid.tolist())
    assert PositionalSharding(grid) == PositionalSharding(grid.ravel()).reshape(shape)
    assert PositionalSharding(grid).shape == shape


def test_one_device():
    one = PositionalSharding(jax.devices()[3])
    assert (one.shape, one.ndim, one.reshape(1, 1).shape) == ((), 0, (1, 1))
    y = jax.device_put(numbers(3, 5), one.reshape(1, 1))
    assert y.devices() == {jax.devices()[3]}
    assert one.is_fully_replicated


def test_a_missing_leading_axis_of_one_set_is_no_obstacle():
    """The tutorial lays its biases of rank 1 out by a sharding of shape (1, 2)."""
    bias = numbers(6)
    halves = eight().reshape(4, 2).replicate(0)
    sets = united(array_of_sets(jax.devices()).reshape(4, 2), (0,))[0]
    placed = jax.device_put(bias, halves)
    assert_holds(placed, sets, bias)
    assert_holds(placed * 2, sets, bias * 2)
    assert_holds(jax.jit(lambda b: b + 1, out_shardings=halves)(bias), sets, bias + 1)
    assert_holds(jax.jit(lambda b: jax.lax.with_sharding_constraint(b, halves))(bias), sets, bias)
    assert_maps(halves.named(ndim=1), sets, bias)


# Names.


def test_every_layout_of_eight_devices_is_on_one_mesh():
    """JAX refuses a program with a callback whose arguments are on two meshes."""
    s = eight()
    layouts = [s.reshape(shape) for rank in (1, 2, 3) for shape in shapes_of(8, rank)]
    layouts += [s.reshape(4, 2).T, s.reshape(4, 2).replicate(0), s.replicate(), s.reshape(2, 4).T]
    assert {layout.mesh for layout in layouts} == {s.mesh}

    def doubled(a, b):
        twice = jax.ShapeDtypeStruct(a.shape, a.dtype)
        return jax.pure_callback(lambda v: 2 * np.asarray(v), twice, a) @ b

    x = numbers(8, 8)
    a, b = jax.device_put((x, x), (eight().replicate(), eight().reshape(4, 2).replicate(0)))
    np.testing.assert_array_equal(jax.jit(doubled)(a, b), 2 * x @ x)


@pytest.mark.parametrize(
    ("change", "sizes", "spec"),
    [
        (lambda s: s, {"a": 8}, P("a")),
        (lambda s: s.reshape(8, 1), {"a": 8}, P("a", None)),
        (lambda s: s.reshape(4, 2), {"a": 4, "b": 2}, P("a", "b")),
        (lambda s: s.reshape(4, 2).T, {"a": 4, "b": 2}, P("b", "a")),
        (lambda s: s.reshape(4, 2).replicate(1), {"a": 4, "b": 2}, P("a", None)),
        (lambda s: s.reshape(4, 2).replicate(0), {"a": 4, "b": 2}, P(None, "b")),
        (lambda s: s.reshape(4, 2).T.reshape(8), {"a": 4, "b": 2}, P(("b", "a"))),
        (lambda s: s.reshape(4, 2).replicate(), {"a": 8}, P()),
    ],
)
def test_named_has_one_mesh_axis_for_each_positional_axis_and_for_the_copies(change, sizes, spec):
    named = change(eight()).named()
    assert type(named) is NamedSharding
    assert isinstance(named.mesh, Mesh)
    assert (dict(named.mesh.shape), named.spec) == (sizes, spec)
    assert named.mesh.devices.ravel().tolist() == jax.devices()
    ndim = change(eight()).ndim
    assert change(eight()).is_equivalent_to(named, ndim)
    assert named.is_equivalent_to(change(eight()), ndim)


def test_named_refuses_a_rank_that_does_not_fit():
    assert eight().replicate().named(ndim=3).spec == P()
    with pytest.raises(ValueError, match=r"shape \(4, 2\) fits arrays of rank 2.*has rank 1"):
        eight().reshape(4, 2).named(ndim=1)


def test_memory_kind_is_kept_by_every_change():
    host = PositionalSharding(jax.devices(), memory_kind="pinned_host")
    for s in (host, host.reshape(4, 2), host.reshape(4, 2).T, host.replicate(), host.named()):
        assert s.memory_kind == "pinned_host"
    moved = eight().reshape(4, 2).replicate(1).with_memory_kind("pinned_host")
    assert moved == host.reshape(4, 2).replicate(1)
    assert "memory_kind=pinned_host" in repr(moved)
    x = numbers(8, 8)
    assert jax.device_put(x, moved).sharding.memory_kind == "pinned_host"


# Equality, hash, repr.


def test_equal_shardings_have_equal_hashes():
    s = eight()
    equal = [
        (s, PositionalSharding(jax.devices())),
        (s.reshape(4, 2).T.T, s.reshape(4, 2)),
        (s.reshape(4, 2).replicate(0).reshape(2, 1).T, s.reshape(4, 2).replicate(0)),
    ]
    for a, b in equal:
        assert a is not b
        assert a == b
        assert hash(a) == hash(b)
    assert copy.copy(s.reshape(4, 2).replicate(1)) == s.reshape(4, 2).replicate(1)


def test_different_shardings_differ():
    s = eight()
    different = [
        s,
        s.reshape(4, 2),
        s.reshape(2, 4),
        s.reshape(4, 2).T,
        s.reshape(4, 2).replicate(0),
        s.reshape(4, 2).replicate(1),
        s.replicate(),
        s.reshape(4, 2).replicate(),
        s.with_memory_kind("pinned_host"),
        s.named(),
        NamedSharding(s.mesh, s.spec),
        PositionalSharding(jax.devices()[:4]),
        PositionalSharding(devices_in(TUTORIAL_ORDER)),
    ]
    for a, b in itertools.combinations(different, 2):
        assert a != b
        assert b != a
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (
            lambda s: s.reshape(2, 4),
            "[[{CPU 0} {CPU 1} {CPU 2} {CPU 3}]\n [{CPU 4} {CPU 5} {CPU 6} {CPU 7}]]",
        ),
        (lambda s: s.reshape(4, 2).replicate(0), "[[{CPU 0, 2, 4, 6} {CPU 1, 3, 5, 7}]]"),
        (lambda s: s.reshape(4, 2).T.replicate(0), "[[{CPU 0, 1} {CPU 2, 3} {CPU 4, 5} {CPU 6, 7}]]"),
        (lambda s: s.replicate(keepdims=False), "{CPU 0, 1, 2, 3, 4, 5, 6, 7}"),
        (lambda s: PositionalSharding(devices_in([1, 7, 4])), "[{CPU 1} {CPU 7} {CPU 4}]"),
    ],
)
def test_repr_is_the_array_of_device_sets(sharding, text):
    sharding = sharding(eight())
    indent = " " * len("PositionalSharding(")
    text = text.replace("\n", "\n" + indent)
    assert repr(sharding) == str(sharding) == f"PositionalSharding({text}, shape={sharding.shape})"


# What is refused.


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "at least one device"),
        (np.empty((0, 2), dtype=object), "at least one device"),
        ([0, 1], "nested sequence of jax devices"),
        ("CPU", "nested sequence of jax devices"),
        ([[0], [1, 2]], "nested sequence of jax devices"),
        ([jax.devices()[:2], jax.devices()[2:3]], "rows of one length"),
        (devices_in([0, 1, 0]), "listed twice"),
    ],
)
def test_what_is_no_array_of_different_devices_is_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        PositionalSharding(devices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.reshape(3, 3), r"reshape\(3, 3\): cannot reshape.*8 device sets, shape \(4, 2\)"),
        (lambda s: s.transpose(0, 2), r"transpose\(0, 2\):.*shape \(4, 2\)"),
        (lambda s: s.transpose(0), r"transpose\(0,\):.*shape \(4, 2\)"),
        (lambda s: s.replicate(2), r"replicate\(axis=2, keepdims=True\): axis 2 is out of bounds"),
    ],
)
def test_changes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(eight().reshape(4, 2))


PLACERS = {
    "device_put": jax.device_put,
    "constraint": lambda x, s: jax.jit(lambda v: jax.lax.with_sharding_constraint(v, s))(x),
    "in_shardings": lambda x, s: jax.jit(lambda v: v, in_shardings=s)(x),
    "out_shardings": lambda x, s: jax.jit(lambda v: v, out_shardings=s)(x),
    "callback": lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]),
}


@pytest.mark.parametrize("place", PLACERS.values(), ids=PLACERS)
@pytest.mark.parametrize(
    ("shape", "cuts", "message"),
    [
        ((8,), (4, 2), r"shape \(4, 2\) fits arrays of rank 2, but this one has rank 1. Call sharding"),
        ((8, 8, 8), (4, 2), r"shape \(4, 2\) fits arrays of rank 2, but this one has rank 3"),
        ((6, 8), (4, 2), r"4 blocks do not divide axis 0 of an array of shape \(6, 8\).*\(4, 2\)"),
        ((8, 7), (1, 8), r"8 blocks do not divide axis 1 of an array of shape \(8, 7\).*pad the array"),
    ],
)
def test_shapes_that_are_not_congruent_are_refused(place, shape, cuts, message):
    with pytest.raises(ValueError, match=message):
        place(numbers(*shape), eight().reshape(cuts))


# How it goes into JAX.


def test_jax_calls_that_take_a_sharding():
    s = eight().reshape(4, 2)
    x = numbers(8, 8)
    sets = array_of_sets(jax.devices()).reshape(4, 2)
    for place in PLACERS.values():
        assert_holds(place(x, s), sets, x)
    reversed_order = PositionalSharding(jax.devices()[::-1]).reshape(2, 4)
    for other in (s.T.reshape(8, 1), reversed_order):
        assert_holds(jax.device_put(jax.device_put(x, other), s), sets, x)
    assert_holds(jax.lax.with_sharding_constraint(jnp.asarray(x), s), sets, x)
    assert_holds(jnp.zeros((8, 8), device=s), sets, 0 * x)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_constraint_under_vmap_leaves_the_mapped_axis_whole(axis):
    s = eight().reshape(4, 2)
    x = numbers(3, 8, 8)
    constrained = jax.jit(
        jax.vmap(lambda v: jax.lax.with_sharding_constraint(v, s), in_axes=axis, out_axes=axis)
    )
    y = constrained(np.moveaxis(x, 0, axis))
    sets = np.expand_dims(array_of_sets(jax.devices()).reshape(4, 2), axis)
    assert_holds(y, sets, np.moveaxis(x, 0, axis))


def test_outputs_of_computations_have_names_on_the_same_mesh(monkeypatch):
    """JAX finds names by an entry of ours in a registry; without it values and layouts are right."""
    y, z = (jax.device_put(numbers(8, 8), eight().reshape(4, 2).replicate(a)) for a in (1, 0))
    w = jnp.dot(y, z)
    assert isinstance(w.sharding, NamedSharding)
    assert w.sharding.mesh == eight().mesh
    assert w.sharding.is_equivalent_to(eight().reshape(4, 2), 2)
    assert jnp.sin(y).sharding == y.sharding
    monkeypatch.delitem(jax_private.found("out_sharding_handlers"), PositionalSharding)
    w = jax.jit(lambda a, b: jnp.dot(a, b))(y, z)
    assert not isinstance(w.sharding, NamedSharding)
    assert_holds(w, array_of_sets(jax.devices()).reshape(4, 2), numbers(8, 8) @ numbers(8, 8))


def test_it_serves_our_own_placement_and_plates():
    """`Plate` reads the mesh and the spec of its data, and a positional sharding has both."""

    def likelihood(params, block):
        return params * jnp.sum(block["x"], axis=1) + block["y"]

    x, y = numbers(16, 3), numbers(16)
    rows = eight()
    placed = jax.device_put({"x": x, "y": y}, {"x": rows.reshape(8, 1), "y": rows})
    ours = gm.place({"x": x, "y": y}, rows.mesh, rows.spec)
    assert ours["y"].sharding.is_equivalent_to(rows, 1)
    for data in (placed, ours):
        total = jnp.sum(gm.Plate(likelihood, data).terms(jnp.ones(())))
        np.testing.assert_allclose(total, x.sum() + y.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "data", "cuts"),
    [((4, 2), (8, 6), (4, 2)), ((1, 8), (16,), (8,)), ((2, 1, 4), (4, 3, 8), (2, 1, 4))],
)
def test_place_takes_it_and_lays_out_what_device_put_does(shape, data, cuts):
    sharding, x = eight().reshape(shape), numbers(*data)
    placed = gm.place({"x": x}, sharding)["x"]
    assert_holds(placed, array_of_sets(jax.devices()).reshape(cuts), x)
    assert placed.sharding.is_equivalent_to(jax.device_put(x, sharding).sharding, x.ndim)
    assert placed.sharding.mesh == sharding.mesh


def test_place_gives_copies_of_any_rank_and_pads_rows_by_it():
    copied = gm.place({"a": np.ones(3), "b": np.ones((2, 2)), "c": 1.0}, eight().replicate())
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(copied))
    padded = gm.place(numbers(9, 2), eight().reshape(4, 2))
    assert isinstance(padded, gm.Padded) and (padded.num_rows, padded.values.shape) == (9, (12, 2))
    again = gm.place(padded, eight().reshape(8, 1))
    assert (again.num_rows, again.values.shape) == (9, (16, 2))


def test_place_refuses_a_rank_that_it_does_not_fit_and_names_the_leaf():
    with pytest.raises(ValueError, match=r"leaf \['b'\]: a PositionalSharding of shape \(4, 2\) fits"):
        gm.place({"a": np.ones((4, 2)), "b": np.ones(8)}, eight().reshape(4, 2))


# "Distributed arrays and automatic parallelization": its networks. What it shows before them is in the
# demo of its arrays (test_array_shardings).


def test_arrays_in_another_order_of_devices_do_not_mix_and_uncommitted_ones_do():
    x = numbers(8, 8)
    y = jax.device_put(x, eight().reshape(4, 2))
    z = jax.device_put(x, PositionalSharding(devices_in(TUTORIAL_ORDER)).reshape(4, 2))
    assert_holds(z, array_of_sets(devices_in(TUTORIAL_ORDER)).reshape(4, 2), x)
    with pytest.raises(ValueError, match="Received incompatible devices for jitted computation"):
        _ = y + z
    np.testing.assert_array_equal(y + jnp.ones_like(y), x + 1)


def loss(params, batch):
    (W1, b1), (W2, b2) = params
    inputs, targets = batch
    outputs = jnp.maximum(inputs @ W1 + b1, 0) @ W2 + b2
    return jnp.mean(jnp.sum((outputs - targets) ** 2, axis=-1))


def test_tutorial_network_with_data_and_model_parallelism():
    """Its layers, that add biases by broadcasting: values and layouts, before a step and after it."""
    rng = np.random.default_rng(0)
    shapes = [((12, 16), (16,)), ((16, 16), (16,))]
    params = [tuple(rng.normal(size=s).astype(np.float32) for s in layer) for layer in shapes]
    batch = [rng.normal(size=(32, n)).astype(np.float32) for n in (12, 16)]
    grid = eight().reshape(4, 2)
    columns = grid.replicate(0)
    layouts = [(columns, columns), (columns.T, grid.replicate())]
    halves = united(array_of_sets(jax.devices()).reshape(4, 2), (0,))
    with jax.numpy_rank_promotion("allow"):
        gradient = jax.jit(jax.value_and_grad(loss))
        expected = gradient(params, batch)
        placed = jax.device_put(params, layouts)
        found = gradient(placed, jax.device_put(batch, grid.replicate(1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    stepped = jax.tree.map(lambda x, dx: x - 1e-5 * dx, placed, found[1])
    for (W1, b1), (W2, _) in (placed, stepped):
        assert_holds(W1, halves, np.asarray(W1))
        assert_holds(b1, halves[0], np.asarray(b1))
        assert_holds(W2, halves.T, np.asarray(W2))
