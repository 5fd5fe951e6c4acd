"""Runs that are saved and continued: the draws are those of the run that was not interrupted."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import threading
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from models import mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import run as runs
from gspmd_mcmc.sampling.resumption import Saver
from gspmd_mcmc.sampling.run import Run
from gspmd_mcmc.storage import checkpoint
from gspmd_mcmc.storage.checkpoint import Checkpoints
from gspmd_mcmc.targets.streaming import tiling

KEY = jax.random.key(0)
SCALE = jnp.asarray([0.5, 1.0, 3.0])
START = {"a": jnp.zeros(3), "b": jnp.zeros(())}


def gaussian(x, scale):
    return {"a": -0.5 * (x["a"] / scale) ** 2, "b": -0.5 * (x["b"] - 2) ** 2}


TARGET = gm.LogDensity(gaussian, SCALE)
# MAMS and MCLMC begin with a stage of HMC, of which the first kill is.
KERNELS = {
    "NUTS, low rank": (
        gm.NUTS(TARGET, 0.5, max_tree_depth=4),
        gm.WindowAdaptation(metric=gm.LowRank(2, 8)),
    ),
    "HMC, per chain": (
        gm.HMC(TARGET, 0.1, 8, jitter=0.5),
        gm.PerChainAdaptation(gm.WindowAdaptation(metric=gm.Dense())),
    ),
    "jittered HMC, SNAPER": (gm.JitteredHMC(TARGET, 0.1, 1.0), None),
    "MAMS": (gm.MAMS(TARGET, 0.1, 1.0), None),
    "MCLMC": (gm.MCLMC(TARGET, 0.1, 1.0), None),
}
HMC = gm.HMC(TARGET, 0.1, 8, jitter=0.5)
QUICK = {"num_warmup": 40, "num_samples": 24, "progress": False}


def sample(path=None, target: Any = TARGET, start: Any = START, key: Any = KEY, **options: Any):
    """Run the script: the same one begins a run and continues it."""
    options = {"kernel": HMC} | QUICK | options
    return gm.sample(key, target, start, checkpoint=path, **options)


class Killed(Exception):
    """A run that ended between two chunks, as a kill would end it."""


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks are of 1, 7, 7, ... steps, each phase's windows apart."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "next_size", lambda count, seconds: 7)
        yield


@contextlib.contextmanager
def after_chunks(act):
    """Call ``act(saver)`` between chunks, before anything else is done."""
    after_chunk = Saver.after_chunk

    def act_first(self):
        act(self)
        after_chunk(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Saver, "after_chunk", act_first)
        yield


def is_at(run: Run, steps=math.inf, draws=math.inf) -> bool:
    """Tell whether a run has so many steps of warm-up, or draws, behind it."""
    return bool(run.done.num_warmup >= steps or run.done.num_draws >= draws)


@contextlib.contextmanager
def killed_at(is_late=False, **point):
    """Save the run when it is at a point, and kill it then, or when another chunk has ended."""
    saved = []

    def save_and_die(saver):
        if saved:
            raise Killed
        if is_at(saver.run, **point):
            saver.save()
            saver.checkpoints.finish()
            saved.append(True)
            if not is_late:
                raise Killed

    with after_chunks(save_and_die), pytest.raises(Killed):
        yield


def told_at(number, **point):
    """Send this process a signal when the run is at a point."""
    return after_chunks(lambda saver: is_at(saver.run, **point) and signal.raise_signal(number))


def assert_equal(draws, other):
    ours, theirs = ((d.position, d.stats, d.warmup, d.state) for d in (draws, other))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture(scope="module")
def whole(small_chunks):
    """The run that nothing interrupts, its draws in memory."""
    return sample()


@pytest.fixture(scope="module")
def saved(small_chunks, tmp_path_factory):
    """The folder of a run that was killed in warm-up."""
    path = tmp_path_factory.mktemp("saved") / "run"
    with killed_at(steps=15):
        sample(path)
    return path


@pytest.fixture
def killed(saved, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(saved, tmp_path / "run")


# The same draws.


@pytest.mark.parametrize("name", KERNELS)
def test_a_run_killed_three_times_makes_the_draws_of_one_that_was_not(name, tmp_path):
    """In two stages of warm-up and in sampling; the chunk after each checkpoint is made once more."""
    kernel, warmup = KERNELS[name]
    options = {"kernel": kernel, "warmup": warmup, "num_chains": 4}
    uninterrupted = sample(**options)
    for point in ({"steps": 4}, {"steps": 26}, {"draws": 8}):
        with killed_at(is_late=True, **point):
            sample(tmp_path, **options)
    assert 0 < gm.open_draws(tmp_path / "draws").num_draws < 24
    assert_equal(sample(tmp_path, **options), uninterrupted)


@pytest.mark.parametrize("part", ["moments", "step_size"])
def test_a_state_with_a_part_left_out_makes_other_draws(part, whole, tmp_path, monkeypatch):
    """What an adaptation kept outside its state would be lost like this."""
    content = Saver._content

    def without(self):
        state = self.run.state
        lost = jax.tree.map(jnp.zeros_like, getattr(state.tuning, part))
        self.run.state = dataclasses.replace(
            state, tuning=dataclasses.replace(state.tuning, **{part: lost})
        )
        return content(self)

    with monkeypatch.context() as patched:
        patched.setattr(Saver, "_content", without)
        with killed_at(steps=18):
            sample(tmp_path)
    with pytest.raises(AssertionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)
        assert_equal(sample(tmp_path), whole)


def test_a_run_killed_before_its_first_chunk_is_continued(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Run, "go", lambda *args: (_ for _ in ()).throw(Killed))
        sample(tmp_path)
    assert_equal(sample(tmp_path), whole)


def test_a_run_that_has_ended_gives_its_draws_and_continues_to_more(whole, tmp_path):
    ended = sample(tmp_path, num_samples=10)
    assert_equal(sample(tmp_path, num_samples=10), ended)
    assert_equal(sample(tmp_path), whole)
    with pytest.raises(ValueError, match="num_samples: .* has 24 draws already"):
        sample(tmp_path, num_samples=23)


def test_ctrl_c_saves_the_run(whole, tmp_path):
    stopped = pytest.warns(gm.SamplingWarning, match="stopped after 8 of 24")
    with told_at(signal.SIGINT, draws=8), stopped:
        assert sample(tmp_path).num_draws == 8
    assert_equal(sample(tmp_path), whole)


def test_sigterm_saves_the_run_and_ends_it(whole, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with (
        told_at(signal.SIGTERM, steps=18),
        pytest.raises(gm.Preempted, match="run the script again") as e,
    ):
        sample(tmp_path)
    assert str(tmp_path) in str(e.value)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_equal(sample(tmp_path), whole)


def scaled(position, info, factor):
    return {"scaled": position["a"] * factor, "rate": info.acceptance_rate}


def test_what_is_collected_and_thinned_goes_to_a_sink_of_the_users_own(tmp_path):
    options = {"collect": Partial(scaled, factor=jnp.float32(3)), "thin": 2}
    uninterrupted = sample(**options)
    options["to"] = gm.ZarrSink(tmp_path / "elsewhere", compression=0)
    with killed_at(draws=8):
        sample(tmp_path / "run", **options)
    assert_equal(sample(tmp_path / "run", **options), uninterrupted)
    found = gm.open_draws(tmp_path / "elsewhere").position["scaled"]
    np.testing.assert_array_equal(found, uninterrupted.position["scaled"])


def test_a_run_that_continues_earlier_draws_is_saved_too(whole, tmp_path):
    first = sample(num_samples=10)
    options = {"start": first, "kernel": None, "num_warmup": 0, "num_samples": 14}
    with killed_at(draws=8):
        sample(tmp_path, **options)
    tail = jax.tree.map(lambda x: x[:, 10:], whole.position)
    found = sample(tmp_path, **options).position
    jax.tree.map(np.testing.assert_array_equal, found, tail)


def test_functions_may_move_to_another_module(whole, tmp_path):
    """Nothing is imported by a name in a file: a notebook's code may move."""
    source = (
        "def gaussian(x, scale):\n"
        "    return {'a': -0.5 * (x['a'] / scale) ** 2, 'b': -0.5 * (x['b'] - 2) ** 2}\n"
    )

    def target_of(module):
        exec(source, (found := types.ModuleType(module)).__dict__)
        return gm.LogDensity(found.gaussian, SCALE)

    with killed_at(draws=8):
        target = target_of("notebook")
        sample(tmp_path, target, kernel=gm.HMC(target, 0.1, 8, jitter=0.5))
    target = target_of("module")
    found = sample(tmp_path, target, kernel=gm.HMC(target, 0.1, 8, jitter=0.5))
    jax.tree.map(np.testing.assert_array_equal, found.position, whole.position)


# Other meshes.

ROWS, WIDTH = 9, 2
Y = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
SIZES: dict[str, dict] = {
    "8": {"data": 8},
    "4": {"data": 4},
    "2x4": {"chains": 2, "data": 4},
    "1": {"data": 1},
}
LATENTS = {"mean": jnp.zeros(WIDTH), "z": jnp.zeros((ROWS, WIDTH))}


def prior(x):
    return -0.5 * x["mean"] ** 2


def rows_near(x, rows):
    return jnp.sum(-0.5 * (x["z"] - x["mean"][None]) ** 2 - 2 * (rows["y"] - x["z"]) ** 2, axis=1)


def rows_elsewhere(x, rows):
    return rows_near(x, rows)


def sample_hierarchy(name, path=None, y=Y, likelihood=rows_near) -> gm.Draws:
    data = gm.place({"y": y}, mesh_of(SIZES[name]), P("data"))
    target = gm.Posterior(prior, gm.Plate(likelihood, data, local="z"))
    start = LATENTS | {"z": jnp.zeros(y.shape)}
    warmup = gm.WindowAdaptation(metric=gm.LowRank(2, 8))
    return sample(path, target, start, kernel=gm.HMC(target, 0.1, 4), warmup=warmup)


@pytest.fixture(scope="module")
def saved_hierarchy(small_chunks, tmp_path_factory):
    """The folder of a run on eight devices that was killed in warm-up."""
    path = tmp_path_factory.mktemp("hierarchy") / "run"
    with killed_at(steps=10):
        sample_hierarchy("8", path)
    return path


def test_a_run_moves_between_meshes(saved_hierarchy, tmp_path):
    """Nine rows have 7, 3, 0 and 7 pad rows: 8, 2x4, 1 and again 8 devices."""
    whole, path = sample_hierarchy("8"), shutil.copytree(saved_hierarchy, tmp_path / "run")
    points: Any = {"2x4": {"steps": 26}, "1": {"draws": 4}, "8": {"draws": 12}}
    for name, point in points.items():
        with killed_at(**point):
            sample_hierarchy(name, path)
    draws = sample_hierarchy("1", path)
    for name in LATENTS:
        ours, theirs = np.asarray(draws.position[name]), np.asarray(whole.position[name])
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)
    assert np.asarray(draws.stats["is_accepted"]).mean() > 0.3
    np.testing.assert_allclose(draws.warmup["step_size"], whole.warmup["step_size"], rtol=1e-3)


def sums_of_rows(x, rows):
    return -0.5 * jnp.sum((rows["x"] - x["mean"][None]) ** 2, axis=1)


def test_a_run_goes_on_with_another_number_of_cores(tmp_path, monkeypatch):
    """Two cores cut the rows of a CPU device into other tiles than one."""
    x = np.random.default_rng(0).normal(size=(600, 100)).astype(np.float32)
    tiles = []

    def run(cores, path=None):
        monkeypatch.setattr("os.cpu_count", lambda: cores)
        monkeypatch.setattr(tiling, "TILE_BYTES_A_CORE", 60_000)
        monkeypatch.setattr(tiling, "TILE_BYTES_OF_ONE_CORE", 40_000)
        jax.clear_caches()  # as in another process
        target = gm.Posterior(prior, gm.Plate(sums_of_rows, {"x": x}))
        draws = sample(
            *(path, target, {"mean": jnp.zeros(100)}), kernel=gm.HMC(target, 0.02, 4), num_warmup=0
        )
        tiles.append(jax.tree.leaves(draws.state.terms["plates"])[0].shape[2])
        return draws

    with killed_at(draws=8):
        run(2, tmp_path)
    draws, whole = run(1, tmp_path), run(2)
    assert tiles[0] != tiles[1]
    np.testing.assert_allclose(draws.position["mean"], whole.position["mean"], rtol=1e-3, atol=1e-5)


# Refusals.


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "1",
            {"y": np.concatenate([Y, Y[:1]])},
            r"\['y'\]: saved float32\[9, 2\], given float32\[10, 2\]",
        ),
        ("8", {"likelihood": rows_elsewhere}, "saved rows_near, given rows_elsewhere"),
        # Other data of the same shapes: else draws of two posteriors are mixed.
        ("8", {"y": Y + np.eye(ROWS, WIDTH, -3)}, r"the terms \['plates'\]\[0\] of its log density"),
        ("1", {"y": Y + np.eye(ROWS, WIDTH, -3)}, r"the terms \['plates'\]\[0\] of its log density"),
    ],
)
def test_another_model_is_refused_with_what_differs(name, options, match, saved_hierarchy, tmp_path):
    with pytest.raises(ValueError, match=match):
        sample_hierarchy(name, shutil.copytree(saved_hierarchy, tmp_path / "run"), **options)


def first_leaf(position, info):
    return position["a"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key": jax.random.key(1)}, r"rng_key: saved .*\[0, 0\], given .*\[0, 1\]"),
        ({"num_warmup": 41}, "num_warmup: saved 40, given 41"),
        ({"thin": 2}, "thin: saved 1, given 2"),
        ({"num_chains": 5}, "num_chains: saved 4, given 5"),
        ({"kernel": gm.NUTS(TARGET, 0.1)}, "kernel: saved HMC, given NUTS"),
        (
            {"kernel": HMC.with_num_integration_steps(9)},
            r"kernel.num_integration_steps: saved .* 8, given .* 9",
        ),
        ({"warmup": gm.WindowAdaptation(metric=gm.Diagonal())}, "warmup.metric: saved .*Dense"),
        ({"target_acceptance_rate": 0.9}, r"warmup.target_acceptance_rate: saved 0.8, given 0.9"),
        ({"collect": first_leaf}, "collect: saved keep_position, given first_leaf"),
        # A value that the target's function is bound to: its shapes are the same.
        ({"target": gm.LogDensity(gaussian, 1.02 * SCALE)}, r"the terms \['a'\] of its log density"),
    ],
)
def test_another_key_or_other_settings_are_refused_and_named(options, match, killed, whole):
    if "target" in options:
        options = options | {"kernel": gm.HMC(options["target"], 0.1, 8, jitter=0.5)}
    with pytest.raises(ValueError, match=match):
        sample(killed, **options)
    if "target" in options:
        assert_equal(sample(killed), whole)


def test_draws_are_continued_with_the_data_that_the_target_was_made_with():
    """A target has its own copy of NumPy data, so that a later write changes nothing."""
    scale = np.array(SCALE)
    target = gm.LogDensity(gaussian, scale)
    options = {"num_warmup": 0, "num_samples": 5}
    draws = sample(None, target, kernel=gm.HMC(target, 0.1, 8), **options)
    before = sample(None, target, draws, kernel=None, **options)
    scale[1] = 2
    assert_equal(sample(None, target, draws, kernel=None, **options), before)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Run, "go", lambda *args: pytest.fail("the run began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(gm.CheckpointNotSaved, match="Not a directory"):
        sample(tmp_path / "file" / "run")


def test_two_runs_in_one_folder_are_refused(killed, whole):
    first = Checkpoints(killed)
    with pytest.raises(gm.CheckpointNotSaved, match="process .* writes here"):
        sample(killed)
    first.close()
    assert_equal(sample(killed), whole)


def in_threads(count, act):
    """Call ``act(i)`` in as many threads at the same time; return what each returned or raised."""
    begin = threading.Barrier(count)
    found: list[Any] = [None] * count

    def run(i):
        begin.wait()
        try:
            found[i] = act(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_runs_in_threads_are_saved_and_continued_each_in_its_folder(tmp_path):
    """A checkpoint after each chunk, so that the saves of all runs meet."""

    def run(i, num_samples=24, **options):
        options |= {"key": jax.random.key(i), "num_samples": num_samples}
        return sample(tmp_path / str(i), every=0, **options)

    whole = [sample(key=jax.random.key(i)) for i in range(3)]
    for draws in in_threads(3, partial(run, num_samples=10)):
        assert draws.num_draws == 10
    for draws, expected in zip(in_threads(3, run), whole, strict=True):
        assert_equal(draws, expected)


def test_of_two_threads_with_one_folder_one_is_refused(whole, tmp_path):
    found = in_threads(2, lambda i: sample(tmp_path))
    (error,) = (x for x in found if isinstance(x, Exception))
    (draws,) = (x for x in found if isinstance(x, gm.Draws))
    assert_equal(draws, whole)
    assert isinstance(error, gm.CheckpointNotSaved)
    assert re.search("(another run|process .*) writes here. Give another path", str(error))


@pytest.mark.parametrize("every", [-1, float("nan"), "1 min"])
def test_every_is_a_number_of_seconds(every, tmp_path):
    with pytest.raises(ValueError, match="every: expected a number of seconds, got"):
        sample(tmp_path, every=every)


def test_a_checkpoint_of_another_format_is_refused_and_left_as_it_is(killed, monkeypatch):
    saved = checkpoint.FORMAT
    monkeypatch.setattr(checkpoint, "FORMAT", saved + 1)
    with pytest.raises(ValueError, match=f"has format {saved}, .* reads format {saved + 1}"):
        sample(killed)
    assert not (killed / checkpoint.DAMAGED).exists()


# Damage.


def test_what_a_killed_writer_left_in_the_store_does_no_harm(whole, tmp_path):
    """TensorStore's files on the way, longer than what is written to them next."""
    with killed_at(draws=8):
        sample(tmp_path)
    written = [p for p in (tmp_path / "draws").rglob("c/**/*") if p.is_file()]
    assert written
    for path in written:
        path.with_name(f"{path.name}.__lock").write_bytes(bytes(100_000))
    assert_equal(sample(tmp_path), whole)


def newest(path: Path) -> Path:
    return max((path / "steps").iterdir(), key=lambda p: int(p.name))


def flip_a_byte(folder: Path):
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose_the_sums(folder: Path):
    (folder.parent.parent / "checksums" / f"{folder.name}.json").unlink()


def change_the_document(folder: Path):
    lose_the_sums(folder)
    file = folder / "document" / "metadata"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"num_draws": 1}))


def lose_the_arrays(folder: Path):
    lose_the_sums(folder)
    shutil.rmtree(folder / "arrays")


@pytest.mark.parametrize("harm", [flip_a_byte, change_the_document, lose_the_arrays])
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(harm, killed, whole):
    number = newest(killed).name
    harm(newest(killed))
    with pytest.warns(gm.SamplingWarning, match=f"checkpoint {number} .* is damaged"):
        draws = sample(killed)
    assert_equal(draws, whole)
    assert (killed / "damaged" / number).is_dir()


def test_where_all_checkpoints_are_damaged_an_error_says_so(killed):
    for folder in (killed / "steps").iterdir():
        flip_a_byte(folder)
    with pytest.raises(ValueError, match="checkpoint: none .* can be read") as caught:
        sample(killed)
    assert str(caught.value).count("are not what was written") == 2


def test_a_checkpoint_that_cannot_be_written_costs_a_warning_and_no_draws(whole, tmp_path, monkeypatch):
    save, numbers = Checkpoints.save, itertools.count(1)

    def fail_after_the_first(self, *content):
        if next(numbers) > 1:
            raise OSError(28, "No space left on device")
        save(self, *content)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fail_after_the_first)
        with pytest.warns(gm.SamplingWarning, match="No space left on device") as caught:
            draws = sample(tmp_path, every=0)
    assert len(caught) == 1
    assert_equal(draws, whole)
    assert_equal(sample(tmp_path), whole)


def test_the_newest_two_checkpoints_are_kept(tmp_path):
    sample(tmp_path, every=0)
    names = {p.name for p in (tmp_path / "steps").iterdir()}
    assert len(names) == 2
    assert {p.stem for p in (tmp_path / "checksums").iterdir()} == names
