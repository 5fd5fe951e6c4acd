"""Draws on disk: whole, the same as in memory, open to others, and safe whatever ends the run."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics import columns, rhat
from gspmd_mcmc.sampling import run as runs
from gspmd_mcmc.sampling.reporting import Report
from gspmd_mcmc.storage import datatree, lock, zarr_store
from gspmd_mcmc.storage.saved_draws import SavedArray, nodes_of

KEY = jax.random.key(0)
STARTS = {"w": np.linspace(-1, 1, 4 * 8 * 3, dtype=np.float32).reshape(4, 8, 3), "b": [np.arange(4.0)]}
NUM_SAMPLES = 37
MESHES = {"1": {"data": 1}, "8": {"model": 8}, "2x4": {"chains": 2, "model": 4}}


def normal(x, scale):
    return jax.tree.map(lambda leaf: -0.5 * (leaf / scale) ** 2, x)


TARGET = gm.LogDensity(normal, jnp.float32(2.0))
KERNEL = gm.HMC(TARGET, 0.3, 4)


def mesh_of(name) -> Any:
    if name is None:
        return None
    sizes = MESHES[name]
    return gm.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def starts_on(name):
    if name == "1":
        return gm.per_chain(STARTS)
    mesh = mesh_of(name)
    chains = "chains" if "chains" in MESHES[name] else None
    w = gm.place(STARTS["w"], mesh, P(chains, "model"))
    return gm.per_chain({"w": w, "b": [gm.place(STARTS["b"][0], mesh, P(chains))]})


def run(to=None, mesh="1", **options):
    options = {"num_samples": NUM_SAMPLES, "num_warmup": 0, "kernel": KERNEL} | options
    options.setdefault("mesh", mesh_of(mesh))
    start = options.pop("start", None) or starts_on(mesh)
    return gm.sample(KEY, options["kernel"].target, start, to=to, progress=False, **options)


def sink(path, **options: Any):
    """A sink whose buffers hold five draws of `run`, four chains of 25 + 5 numbers or so."""
    options.setdefault("chunk_bytes", 5 * 4 * (25 * 4 + 7 * 4))
    return gm.ZarrSink(path, **options)


def assert_equal(tree, other):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), tree, other)


@pytest.fixture(scope="module")
def in_memory():
    return {name: run(mesh=name) for name in MESHES}


# Values.


@pytest.mark.parametrize(("mesh", "chunk"), [("1", 3), ("8", 64), ("2x4", None)])
def test_draws_on_disk_are_those_in_memory(tmp_path, in_memory, monkeypatch, mesh, chunk):
    """Written when buffers are full, or at every chunk: of lengths that files on disk do not fit."""
    if chunk:
        monkeypatch.setattr(runs, "next_size", lambda count, seconds: chunk)
    draws = run(sink(tmp_path / "draws", flush_seconds=0 if chunk else 30), mesh)
    for found in (draws, gm.open_draws(tmp_path / "draws")):
        assert_equal(found.position, in_memory[mesh].position)
        assert_equal(found.stats, in_memory[mesh].stats)
        assert (found.num_chains, found.num_draws) == (4, NUM_SAMPLES)
    assert_equal(draws.state.position, in_memory[mesh].state.position)
    assert draws.num_steps == in_memory[mesh].num_steps
    other = run(mesh=mesh, kernel=KERNEL.with_step_size(0.31), num_samples=NUM_SAMPLES)
    with pytest.raises(AssertionError):
        assert_equal(draws.position, other.position)


def test_an_index_reads_what_numpy_would(tmp_path, in_memory):
    saved, whole = run(sink(tmp_path / "draws")).position["w"], np.asarray(in_memory["1"].position["w"])
    mask = np.arange(NUM_SAMPLES) > 30
    for index in (
        *(np.s_[0], np.s_[:, -5:], np.s_[..., 1], np.s_[-1, 3, 2, 1], np.s_[:, 9:99:3], np.s_[:, 5:2]),
        *(np.s_[:, ::-2, [1, -3]], np.s_[:, mask], np.s_[:, :, None], np.s_[1, :, [2, 3]], np.s_[::-1]),
        np.s_[:, :, [1, 2, 7], [0, -1, 2]],
    ):
        np.testing.assert_array_equal(saved[index], whole[index])
    with pytest.raises(IndexError):
        saved[:, NUM_SAMPLES]


def test_a_summary_of_draws_on_disk_is_that_of_draws_in_memory(tmp_path, in_memory, monkeypatch):
    monkeypatch.setattr(type(in_memory["1"].kernel), "note", "This holds of all draws.")
    saved, memory = run(sink(tmp_path / "draws")).summary(), in_memory["1"].summary()
    assert str(gm.open_draws(tmp_path / "draws").summary()) == str(saved)
    assert str(saved) == str(memory) and saved.notes == ["This holds of all draws."]


def test_columns_are_read_by_slices(tmp_path, monkeypatch, in_memory):
    """Leaves too large for one device go through it a slice at a time, from disk as from memory."""
    saved = run(sink(tmp_path / "draws")).position["w"]
    memory = np.asarray(in_memory["1"].position["w"])
    monkeypatch.setattr(columns, "TEMPORARY_BYTES", 4 * NUM_SAMPLES * 4 * columns.COPIES)
    read = []

    def reading(self, index, inner=SavedArray.__getitem__):
        read.append(inner(self, index))
        return read[-1]

    monkeypatch.setattr(SavedArray, "__getitem__", reading)
    np.testing.assert_array_equal(rhat.rhat(saved), rhat.rhat(memory))
    assert max(x.size for x in read) < memory.size


def test_figures_are_drawn_of_draws_on_disk(tmp_path):
    draws = run(sink(tmp_path / "draws"))
    assert gm.plots.trace(draws, ["w[3, 2]", "b_0", "energy"])
    assert "w" in str(gm.visualize(draws))


def test_thinning_and_collect_work_as_ever(tmp_path):
    """What is collected is of any structure; bfloat16 is stored as float32."""
    options = {"thin": 3, "collect": Partial(scaled, jnp.float32(3)), "num_samples": 11}
    draws, memory = run(sink(tmp_path / "draws"), **options), run(**options)
    assert memory.position["half"].dtype == jnp.bfloat16
    assert draws.position["half"].dtype == np.float32
    expected = memory.position | {"half": memory.position["half"].astype(jnp.float32)}
    assert_equal(draws.position, expected)
    assert_equal(draws.stats, memory.stats)
    attributes = gm.open_draws(tmp_path / "draws").attributes
    assert (attributes["thin"], attributes["collect"]) == (3, "scaled")


def scaled(factor, position, info):
    half = position["w"].astype(jnp.bfloat16)
    return {
        "sum": factor * jnp.sum(position["w"]),
        "pair": (position["b"][0], info.energy),
        "half": half,
    }


def test_going_on_from_draws_on_disk_equals_one_long_run(tmp_path, in_memory):
    first = run(sink(tmp_path / "a"), num_samples=20)
    rest = gm.sample(
        KEY, TARGET, first, num_samples=17, num_warmup=0, progress=False, mesh=mesh_of("1")
    )
    np.testing.assert_array_equal(rest.position["w"], in_memory["1"].position["w"][:, 20:])
    with pytest.raises(ValueError, match="read from disk hold no kernel"):
        run(start=gm.open_draws(tmp_path / "a"), kernel=KERNEL)


# What is kept, and how.


@pytest.mark.parametrize(
    ("leaves", "kept"),
    [("w", ["w"]), (["b"], ["b_0"]), (["b_0", "w"], ["w", "b_0"]), (None, ["w", "b_0"])],
)
def test_leaves_that_are_asked_for_are_kept(tmp_path, in_memory, leaves, kept):
    draws = run(sink(tmp_path / "draws", leaves=leaves))
    names = {"w": lambda x: x["w"], "b_0": lambda x: x["b"][0]}
    for name in kept:
        for found in (draws, gm.open_draws(tmp_path / "draws")):
            np.testing.assert_array_equal(
                names[name](found.position), names[name](in_memory["1"].position)
            )
    assert {path.name for path in (tmp_path / "draws/posterior").iterdir()} == {
        *kept,
        *("chain", "draw", "zarr.json"),
    }
    assert len(jax.tree.leaves(draws.position)) == len(kept)


def test_a_name_that_a_leaf_has_stands_for_it_alone():
    assert zarr_store.chosen("leaves", ["w"], ["w", "w_scale"]) == {"w": "w"}
    assert zarr_store.chosen("leaves", ["w_"], ["w", "w_scale"]) == {"w_scale": "w_"}
    assert zarr_store.chosen("dtype", ["w", "w_"], ["w", "w_scale"]) == {"w": "w", "w_scale": "w_"}


@pytest.mark.parametrize(
    ("dtype", "found"),
    [("float16", "float16"), ({"w": "float64"}, "float64"), ({"b": "float16"}, "float32")],
)
def test_floats_are_of_the_dtype_that_is_asked_for(tmp_path, in_memory, dtype, found):
    draws = run(sink(tmp_path / "draws", dtype=dtype))
    whole = np.asarray(in_memory["1"].position["w"])
    assert draws.position["w"].dtype == found
    np.testing.assert_array_equal(draws.position["w"], whole.astype(found))
    assert draws.stats["log_density"].dtype == np.float32
    assert draws.stats["num_integration_steps"].dtype == np.int32


DRAWN = np.random.default_rng(0).normal(size=(2, 60, 8))
IS_LARGEST = np.max(DRAWN) == DRAWN
COARSE = "is too coarse for 8 numbers of y"
LARGE = "draws of y are beyond .*, and were stored as infinity"


def write_draws(path, drawn, dtype, num_writes=3):
    """Write draws over a mesh as a run does, a part at a time; return what is opened."""
    with jax.enable_x64(drawn.dtype == np.float64):
        laid = gm.place(drawn, gm.make_mesh(chains=2, model=4), P("chains", None, "model"))
        buffers = {"y": laid}, {"log_density": jnp.zeros(drawn.shape[:2])}
    to, count = gm.ZarrSink(path, dtype={"y": dtype}), drawn.shape[1] // num_writes
    try:
        to.begin(buffers, drawn.shape[1], {})
        for i in range(num_writes):
            to.write(buffers, count, i * count)
        to.flush()
        to.saved()
    finally:
        to.close()
    return gm.open_draws(path)


@pytest.mark.parametrize(
    ("drawn", "dtype", "match"),
    [
        (1000 + 0.1 * DRAWN, "float16", COARSE),
        (1e-9 * (1 + 0.1 * DRAWN), "float16", COARSE),
        (np.full(DRAWN.shape, 1e-9), "float16", COARSE),
        ((1e-9 * (1 + 0.1 * DRAWN)).astype(jnp.bfloat16), "float16", COARSE),
        (60_000 + 9_000 * DRAWN, "float16", LARGE),
        (np.where(IS_LARGEST, 1e5, DRAWN), "float16", f"1 {LARGE}"),
        (1.7e9 + DRAWN, "float32", COARSE),
        (np.where(IS_LARGEST, 1e50, DRAWN), "float32", f"1 {LARGE}"),
        (3 + DRAWN, "float16", None),
        (np.exp(DRAWN), "float16", None),
        (1e3 + DRAWN, "float32", None),
        (0 * DRAWN, "float16", None),
        (np.full(DRAWN.shape, 1 / 3), "float16", None),
        (np.where(IS_LARGEST, np.inf, DRAWN), "float16", None),
        (1e5 * DRAWN.astype(jnp.bfloat16), "float32", None),
    ],
)
def test_what_a_dtype_loses_is_told_of(tmp_path, drawn, dtype, match):
    """More than 5 % of a standard deviation, or a number's size; and what it holds is not."""
    drawn = drawn if drawn.dtype == jnp.bfloat16 or dtype == "float32" else drawn.astype(np.float32)
    if match is None:
        found = write_draws(tmp_path / "draws", drawn, dtype)
        assert "losses" not in found.attributes
    else:
        with pytest.warns(gm.SamplingWarning, match=match):
            found = write_draws(tmp_path / "draws", drawn, dtype)
        assert any(re.search(match, text) for text in found.attributes["losses"])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found.position["y"], drawn.astype(dtype))


def far_away(position, info):
    return {"y": 1000 + 0.1 * position["w"][0, 0], "x": position["w"][0, 0]}


def test_a_summary_of_draws_tells_what_was_lost_and_so_does_a_run_that_is_continued(tmp_path):
    options: dict[str, Any] = {"checkpoint": tmp_path / "run", "collect": far_away}
    for num_samples in (30, NUM_SAMPLES):
        with pytest.warns(gm.SamplingWarning, match="too coarse for 1 numbers of y"):
            draws = run(sink(tmp_path / "draws", dtype="float16"), num_samples=num_samples, **options)
    for found in (draws, gm.open_draws(tmp_path / "draws")):
        assert len([text for text in found.summary().warnings if "coarse" in text]) == 2


def test_compression_makes_files_smaller_and_none_does_not(tmp_path):
    sizes = {}
    for level in (0, 5):
        run(gm.ZarrSink(tmp_path / str(level), compression=level))
        files = (tmp_path / str(level) / "posterior/w/c").rglob("*")
        sizes[level] = sum(path.stat().st_size for path in files if path.is_file())
    assert sizes[5] < sizes[0] and sizes[0] >= 4 * NUM_SAMPLES * 24 * 4


def test_a_damaged_chunk_is_noticed(tmp_path):
    run(gm.ZarrSink(tmp_path / "draws"))
    (chunk,) = (tmp_path / "draws/posterior/w/c").rglob("0/0/0/0")
    content = bytearray(chunk.read_bytes())
    content[40] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match="CRC-32C|Blosc error"):
        np.asarray(gm.open_draws(tmp_path / "draws").position["w"])


# Local latents.


def effects(x, rows):
    return -0.5 * (x["effect"] - x["mean"]) ** 2 - 0.5 * (rows["y"] - x["effect"]) ** 2


def mean_prior(x):
    return -0.5 * x["mean"] ** 2


@pytest.mark.parametrize("rows", [9, 16])
def test_local_latents_are_stored_without_their_pad(tmp_path, rows):
    """Nine rows on eight devices: two a device, the last three devices hold nothing but pad."""
    data = gm.place({"y": np.arange(float(rows), dtype=np.float32)}, gm.make_mesh(data=8), P("data"))
    target = gm.Posterior(mean_prior, gm.Plate(effects, data, local="effect"))
    start = {"effect": jnp.zeros(rows), "mean": jnp.zeros(())}
    options = {"kernel": gm.HMC(target, 0.2, 3), "num_samples": 12, "mesh": None, "start": start}
    draws, memory = run(sink(tmp_path / "draws"), **options), run(**options)
    assert draws.position["effect"].shape == (4, 12, rows)
    assert_equal(draws.position, memory.position)
    files = [path for path in (tmp_path / "draws/posterior/effect/c").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {str(i) for i in range(-(-rows // 2))}


# Opened by others.


READER = """
import sys
sys.modules["gspmd_mcmc"] = None
import xarray, arviz_base, numpy as np
tree = xarray.open_datatree(sys.argv[1], engine="zarr")
loose = xarray.open_datatree(sys.argv[1], engine="zarr", consolidated=False)
assert tree.identical(loose)
posterior = xarray.open_dataset(sys.argv[1], engine="zarr", group="posterior")
assert posterior.w.dims == ("chain", "draw", "w_dim_0", "w_dim_1"), posterior.w.dims
assert not posterior.w._in_memory
assert tree["sample_stats"].diverging.dtype == bool and "lp" in tree["sample_stats"]
assert tree.attrs["rng_key_data"] == [0, 0] and tree.attrs["mesh_axes"] == ["chains", "model"]
assert arviz_base.extract(tree, num_samples=5).sizes["sample"] == 5
np.savez(sys.argv[2], w=posterior.w, b=posterior.b_0, draw=posterior.draw, lp=tree["sample_stats"].lp)
"""


def test_xarray_and_arviz_open_it_with_nothing_of_ours(tmp_path, in_memory):
    run(sink(tmp_path / "draws"), "2x4")
    command = [sys.executable, "-W", "error", "-c", READER, tmp_path / "draws", tmp_path / "found.npz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, memory = np.load(tmp_path / "found.npz"), in_memory["2x4"]
    np.testing.assert_array_equal(found["w"], memory.position["w"])
    np.testing.assert_array_equal(found["b"], memory.position["b"][0])
    np.testing.assert_array_equal(found["lp"], memory.stats["log_density"])
    np.testing.assert_array_equal(found["draw"], np.arange(NUM_SAMPLES))


def test_a_run_can_be_watched(tmp_path, in_memory, monkeypatch):
    """Each look sees whole draws, as many in every array, and those of the finished run."""
    seen = []

    def look(*arguments, **named):
        if (tmp_path / "draws" / "zarr.json").exists():
            tree = xarray.open_datatree(tmp_path / "draws", engine="zarr").load()
            assert len({x.sizes["draw"] for x in (tree["posterior"], tree["sample_stats"])}) == 1
            seen.append(tree["posterior"].w.to_numpy())
            assert gm.open_draws(tmp_path / "draws").num_draws >= seen[-1].shape[1]

    monkeypatch.setattr(Report, "advance", look)
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 5)
    run(sink(tmp_path / "draws"))
    counts = [x.shape[1] for x in seen]
    assert counts == sorted(counts) and len(set(counts)) > 2
    for x in seen:
        np.testing.assert_array_equal(x, np.asarray(in_memory["1"].position["w"])[:, : x.shape[1]])


def test_no_draws_are_no_draws(tmp_path):
    assert run(sink(tmp_path / "draws"), num_samples=0).num_draws == 0
    assert gm.open_draws(tmp_path / "draws").position["w"].shape == (4, 0, 8, 3)
    assert xarray.open_datatree(tmp_path / "draws", engine="zarr")["posterior"].sizes["draw"] == 0


def test_names_that_no_folder_could_have_are_replaced():
    names = ["draw", "a/b", "A_B", ".x", "", "w"]
    assert datatree.disk_names(names) == ["draw_", "a_b", "A_B_", "x", "x_", "w"]


def test_large_chunks_are_read_in_pieces(tmp_path):
    """One chunk of 8 MB a device, cut along its longest axis, and what was written comes back."""
    array = jax.device_put(np.random.default_rng(0).normal(size=(1, 2, 2**20)).astype(np.float32))
    to = gm.ZarrSink(tmp_path)
    to.begin(({"x": array}, {"log_density": jnp.zeros((1, 2))}), 2, {})
    (codec,) = nodes_of(to._root)["posterior/x"]["codecs"]
    assert codec["configuration"]["chunk_shape"] == [1, 2, 2**17]
    to.write(({"x": array}, {"log_density": jnp.zeros((1, 2))}), 2)
    assert to.flush() == 2
    to.close()
    found = gm.open_draws(tmp_path).position["x"]
    np.testing.assert_array_equal(found[:, :, 5:9], array[:, :, 5:9])


@pytest.mark.parametrize(
    ("shard", "rows", "chunk"),
    [((2, 5, 3), 5, (2, 10, 3)), ((2, 5), 5, (2, 10)), ((4, 5, 10**6), 5, (4, 5, 10**6))],
)
def test_chunks_are_shards_and_small_files_are_joined(shard, rows, chunk):
    assert zarr_store.chunk_shape(shard, rows, 9, 4) == chunk


# Memory and layout.


def test_a_run_holds_two_buffers_and_writes_where_shards_lie(tmp_path, monkeypatch):
    """As many bytes of draws are on the devices with ten times the draws; without a sink they grow."""
    seen, written = [], []
    others = jax.live_arrays()  # of tests before; held, so that no array of this one has their id
    are_others = {id(x) for x in others}

    def look(*arguments, **named):
        draws = [x for x in jax.live_arrays() if x.shape[::2] == (4, 8) and id(x) not in are_others]
        rows = [x.shape[1] for x in draws if not x.is_deleted()]
        seen.append((len(rows), set(rows)))

    class Spy:
        """An array that notes what is written where."""

        def __init__(self, array, place=None):
            self.array, self.place = array, place
            self.shape, self.dtype = array.shape, array.dtype

        def __getitem__(self, place):
            return Spy(self.array, place)

        def write(self, values):
            written.append((self.shape, self.place, values.shape))
            return self.array[self.place].write(values)

    def write(array, *arguments, inner=zarr_store.write_shards):
        inner(Spy(array), *arguments)

    monkeypatch.setattr(Report, "advance", look)
    monkeypatch.setattr(zarr_store, "write_shards", write)
    run(sink(tmp_path / "draws"), "2x4", num_samples=50)
    rows = {n for _, rows in seen for n in rows}
    assert max(count for count, _ in seen) == 2 and max(rows) <= 6
    shapes = {shape for whole, _, shape in written if len(whole) == 4}
    assert all(shape[0] == 2 and shape[2] == 2 for shape in shapes)
    regions = {(r[0].start, r[2].start) for whole, r, _ in written if len(whole) == 4}
    assert regions == {(c, m) for c in (0, 2) for m in (0, 2, 4, 6)}
    seen.clear()
    run(mesh="2x4", num_samples=50)
    assert max(n for _, rows in seen for n in rows) >= 50


def test_a_sink_changes_no_program(tmp_path, monkeypatch):
    """A chunk with two buffers of two draws is the chunk of a run that keeps two draws in memory."""
    programs = []

    def lowered(*arguments, inner=runs.advance, **static):
        programs.append(inner.lower(*arguments, **static).compile().as_text())
        return inner(*arguments, **static)

    monkeypatch.setattr(runs, "advance", lowered)
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 50)
    run(gm.ZarrSink(tmp_path / "draws"), "2x4", num_samples=4)
    with_sink = programs.pop()
    run(mesh="2x4", num_samples=2)
    assert with_sink == programs.pop()


# Refusals.


def refusal(path, match, **options):
    with pytest.raises(gm.DrawsNotSaved, match=match):
        run(sink(path), **options)


def no_compute(monkeypatch):
    def fail(*arguments, **named):
        raise AssertionError("something was computed")

    monkeypatch.setattr(runs, "advance", fail)
    monkeypatch.setattr("gspmd_mcmc.sampling.sample._start", fail)


def test_paths_that_cannot_be_written_are_refused_before_compute(tmp_path, monkeypatch):
    run(sink(tmp_path / "draws"), num_samples=3)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    no_compute(monkeypatch)
    refusal(tmp_path / "draws", "holds 3 draws of another run .*another path, or remove")
    refusal(tmp_path / "foreign", "holds other files; give ZarrSink another path")
    refusal(tmp_path / "foreign/notes.txt", "is a file; give")
    refusal(Path("/proc/self/draws"), "no draws can be written there, .*may write to")
    assert sorted(path.name for path in (tmp_path / "foreign").iterdir()) == ["notes.txt"]
    assert gm.open_draws(tmp_path / "draws").num_draws == 3


URLS = ("gs://bucket/draws", "s3://bucket/draws", "file:///tmp/draws", Path("gs://bucket/draws"))


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "door",
    [
        gm.ZarrSink,
        gm.open_draws,
        gm.JSONLines,
        lambda url: run(checkpoint=url),
    ],
)
def test_a_url_is_refused_before_compute(door, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    no_compute(monkeypatch)
    with pytest.raises(ValueError, match="a path on a file system, got the URL .*(bucket|tmp)"):
        door(url)
    assert not any(tmp_path.iterdir())


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run(sink("~/draws"), num_samples=3, checkpoint=Path("~/run"), callback=gm.JSONLines("~/log"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draws", "log", "run"]
    assert gm.open_draws("~/draws").num_draws == 3
    with pytest.raises(ValueError, match="path: '~nobody-has-this-name/draws': .*absolute path"):
        sink("~nobody-has-this-name/draws")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "holds no zarr.json"),
        ("{", "cannot be read"),
        (
            '{"attributes": {}}',
            "a store of another program: its zarr.json has no 'consolidated_metadata'",
        ),
        (
            '{"attributes": {"draws_format": 99}, "consolidated_metadata": {"metadata": {}}}',
            "format 99; this version reads format 2",
        ),
    ],
)
def test_a_foreign_or_damaged_store_is_not_opened(tmp_path, content, match):
    if content is not None:
        (tmp_path / "zarr.json").write_text(content)
    with pytest.raises(ValueError, match=f"path: .*{match}"):
        gm.open_draws(tmp_path)
    if content is not None:
        refusal(tmp_path, "exists already")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"leaves": ["v"]}, "leaves: no leaf has a name that begins with 'v'; there are"),
        ({"leaves": []}, "leaves: expected one name"),
        ({"dtype": {"v": "float16"}}, "dtype: no leaf"),
        ({"dtype": "bfloat16"}, "dtype: expected one of float16"),
        ({"compression": 10}, "compression: expected a level"),
        ({"chunk_bytes": 0}, "chunk_bytes: expected"),
        ({"flush_seconds": -1}, "flush_seconds: expected"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        run(sink(tmp_path / "draws", **options))
    assert not (tmp_path / "draws").exists()


def test_collected_keys_are_refused(tmp_path):
    with pytest.raises(TypeError, match="leaf x is of dtype key"):
        run(sink(tmp_path / "draws"), collect=a_key)


def a_key(position, info):
    return jax.random.key(0)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    match = r"tensorstore is missing: pip install 'gspmd_mcmc\[storage\]' brings it"
    with pytest.raises(ImportError, match=match):
        run(sink(tmp_path / "draws"))
    assert not (tmp_path / "draws").exists()


# Two runs on one path.


def test_a_second_run_on_a_path_is_refused_while_the_first_lives(tmp_path, monkeypatch):
    def second(*arguments, **named):
        with pytest.raises(gm.DrawsNotSaved, match=f"process {os.getpid()} on host .* writes here"):
            sink(tmp_path / "draws").reserve()

    monkeypatch.setattr(Report, "advance", second)
    assert run(sink(tmp_path / "draws")).num_draws == NUM_SAMPLES
    assert not (tmp_path / "draws" / lock.NAME).exists()


@pytest.mark.parametrize("content", [{"host": socket.gethostname(), "pid": 1}, None])
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, content):
    """What it held the system has released; its file is there, or half of it."""
    (tmp_path / lock.NAME).write_text("{" if content is None else json.dumps(content))
    assert run(sink(tmp_path), num_samples=3).num_draws == 3


def test_the_lock_of_a_process_on_another_host_is_not(tmp_path):
    (tmp_path / lock.NAME).write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    refusal(tmp_path, "process 7 on host elsewhere writes here")


# Runs that end badly.


class Killed(BaseException):
    pass


def assert_whole(path, memory, num_draws):
    """Whoever opens the store sees the first draws of the run in memory, and no others."""
    found = gm.open_draws(path)
    first = jax.tree.map(lambda x: np.asarray(x)[:, :num_draws], (memory.position, memory.stats))
    assert_equal((found.position, found.stats), first)
    tree = xarray.open_datatree(path, engine="zarr").load()
    assert tree["posterior"].sizes["draw"] == tree["sample_stats"].sizes["draw"] == num_draws


@pytest.mark.parametrize("when", ["before the commit", "amid the arrays' own documents"])
def test_what_was_not_committed_is_not_seen(tmp_path, in_memory, monkeypatch, when):
    """The third commit never comes: two buffers of draws count, whatever else is on disk."""
    commits = []

    def replace(path, document, inner=zarr_store.replace_file):
        is_root = path == tmp_path / "draws/zarr.json"
        is_late = len(commits) == 3
        if is_late and (is_root or when == "before the commit"):
            raise Killed
        inner(path, document)
        if is_root:
            commits.append(document["attributes"]["num_draws"])

    monkeypatch.setattr(zarr_store, "replace_file", replace)
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 5)
    with pytest.raises((Killed, gm.DrawsNotSaved)):
        run(sink(tmp_path / "draws"))
    assert commits[0] == 0 and commits[-1] > 0
    assert_whole(tmp_path / "draws", in_memory["1"], commits[-1])


def test_a_full_disk_ends_the_run_soon_and_keeps_what_is_there(tmp_path, in_memory, monkeypatch):
    chunks_run = []
    monkeypatch.setattr(Report, "advance", lambda *arguments, **named: chunks_run.append(1))
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 5)

    def write(array, buffer, start, count, first, inner=zarr_store.write_shards):
        if first >= 10:
            raise OSError(28, "No space left on device")
        inner(array, buffer, start, count, first)

    monkeypatch.setattr(zarr_store, "write_shards", write)
    with pytest.raises(
        gm.DrawsNotSaved, match="No space left .* draws of each chain are safe"
    ) as error:
        run(sink(tmp_path / "draws"), num_samples=500)
    assert 0 < error.value.num_saved <= 10 and len(chunks_run) < 10
    assert_whole(tmp_path / "draws", in_memory["1"], error.value.num_saved)
    assert not (tmp_path / "draws" / lock.NAME).exists()


def test_an_interrupt_of_the_run_keeps_what_was_given(tmp_path, in_memory, monkeypatch):
    def interrupted(*arguments, **named):
        if threading.current_thread() is threading.main_thread() and len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(1)

    seen: list = []
    monkeypatch.setattr(Report, "advance", interrupted)
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 5)
    with pytest.warns(gm.SamplingWarning, match="stopped after 25 of 37 draws"):
        run(sink(tmp_path / "draws"))
    num_draws = gm.open_draws(tmp_path / "draws").num_draws
    assert num_draws == 25
    assert_whole(tmp_path / "draws", in_memory["1"], num_draws)


# Continuing a store, as checkpoints do.


def begun(path, draws, num_draws, first_draw=0, key=0):
    """Begin a store as a run does whose buffers hold so many draws; return the sink and the buffers."""
    held = (draws.position, draws.stats)
    buffers = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:, :num_draws]), held)
    to = gm.ZarrSink(path)
    try:
        to.begin(buffers, NUM_SAMPLES, {"rng_key_data": [0, key]}, first_draw=first_draw)
    except gm.DrawsNotSaved:
        to.close()
        raise
    return to, buffers


def test_a_store_of_another_run_is_not_continued(tmp_path, in_memory):
    draws = in_memory["1"]
    to, buffers = begun(tmp_path / "d", draws, 5)
    to.write(buffers, 5)
    to.close()
    other, fewer = (
        gm.Draws(position, draws.stats, {}, KERNEL, 0, 0)
        for position in (
            draws.position | {"w": draws.position["w"][..., :2]},
            {"w": STARTS["w"][:, :5]},
        )
    )
    for arguments, match in (
        ({"draws": draws, "first_draw": 6}, "has 5 draws; the run continues from 6"),
        ({"draws": other, "first_draw": 5}, "posterior/w has shape .* in the store and .* in this run"),
        ({"draws": fewer, "first_draw": 5}, "only the store has posterior/b_0"),
        ({"draws": draws, "first_draw": 5, "key": 1}, "rng_key_data is"),
    ):
        with pytest.raises(gm.DrawsNotSaved, match=match):
            begun(tmp_path / "d", num_draws=5, **arguments)
    assert gm.open_draws(tmp_path / "d").num_draws == 5
    with pytest.raises(gm.DrawsNotSaved, match="there is no store of them"):
        begun(tmp_path / "new", draws, 5, first_draw=5)
