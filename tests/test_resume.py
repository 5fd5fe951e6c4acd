"""Runs that are saved and gone on with: the draws are those of the run that was not interrupted."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gspmd_mcmc.sampling.checkpoint import Checkpoints
from gspmd_mcmc.sampling.encoding import decode, encode
from gspmd_mcmc.sampling.keeping import Keeper
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import checkpoint, chunks
from gspmd_mcmc.sampling.run import Run

KEY = jax.random.key(0)
SCALE = jnp.asarray([0.5, 1.0, 3.0])
START = {"a": jnp.zeros(3), "b": jnp.zeros(())}
ONES = jax.tree.map(jnp.ones_like, START)


def gaussian(x, scale):
    return {"a": -0.5 * (x["a"] / scale) ** 2, "b": -0.5 * (x["b"] - 2) ** 2}


TARGET = gm.LogDensity(gaussian, SCALE)
KERNELS = {
    "NUTS, low rank": lambda: {
        "kernel": gm.NUTS(TARGET, 0.5, max_tree_depth=4),
        "warmup": gm.WindowAdaptation(metric=gm.LowRank(2, 8)),
    },
    "HMC, per chain": lambda: {
        "kernel": gm.HMC(TARGET, 0.1, 8, jitter=0.5),
        "warmup": gm.PerChainAdaptation(gm.WindowAdaptation(metric=gm.Dense())),
    },
    "jittered HMC, SNAPER": lambda: {"kernel": gm.JitteredHMC(TARGET, 0.1, 1.0)},
    "MAMS": lambda: {"kernel": gm.MAMS(TARGET, 0.1, 1.0)},
    "MCLMC": lambda: {"kernel": gm.MCLMC(TARGET, 0.1, 1.0)},
}
QUICK = {"num_warmup": 40, "num_samples": 24, "progress": False}


class Killed(Exception):
    """A run that ended between two chunks, as a kill would end it."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks are of 1, 7, 7, ... steps, each phase's windows apart."""
    monkeypatch.setattr(chunks, "next_size", lambda count, seconds: 7)


@contextlib.contextmanager
def after_chunks(act):
    """Call ``act(keeper)`` between chunks, before anything else is done."""
    after_chunk = Keeper.after_chunk

    def act_first(self):
        act(self)
        after_chunk(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Keeper, "after_chunk", act_first)
        yield


def is_at(run: Run, steps=None, draws=None) -> bool:
    """Tell whether a run has so many steps of warm-up, or draws, behind it."""
    done = 0 if run.collecting is None else run.collecting.num_draws
    return run.warmup.num_done >= steps if steps else draws is not None and done >= draws


@contextlib.contextmanager
def killed_at(is_late=False, **point):
    """Save the run when it is at a point, and kill it then, or when another chunk has ended."""
    saved = []

    def save_and_die(keeper):
        if saved:
            raise Killed
        if is_at(keeper.run, **point):
            keeper.save()
            keeper.checkpoints.finish()
            saved.append(True)
            if not is_late:
                raise Killed

    with after_chunks(save_and_die), pytest.raises(Killed):
        yield


def told_at(number, **point):
    """Send this process a signal when the run is at a point."""
    return after_chunks(lambda keeper: is_at(keeper.run, **point) and signal.raise_signal(number))


def hmc(**options) -> Any:
    return {"kernel": gm.HMC(TARGET, 0.1, 8, jitter=0.5), **QUICK, **options}


def resume(path, target: Any = TARGET, **options) -> gm.Draws:
    return gm.resume(path, target, progress=False, **options)


def results(draws):
    return draws.position, draws.stats, draws.warmup


def assert_equal(draws, other):
    assert jax.tree.structure(results(draws)) == jax.tree.structure(results(other))
    jax.tree.map(np.testing.assert_array_equal, results(draws), results(other))


@pytest.fixture(scope="module")
def whole():
    """The run that nothing interrupts, its draws in memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "next_size", lambda count, seconds: 7)
        return gm.sample(KEY, TARGET, START, **hmc())


@pytest.fixture
def killed(tmp_path):
    """The folder of a run that was killed in warm-up."""
    with killed_at(steps=15):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    return tmp_path / "run"


# The same draws.


@pytest.mark.parametrize("name", KERNELS)
def test_a_run_killed_twice_makes_the_draws_of_one_that_was_not(name, tmp_path):
    """Killed in warm-up and in sampling; the chunk after each checkpoint is lost and made once more."""
    options = KERNELS[name]() | QUICK | {"num_chains": 4}
    uninterrupted = gm.sample(KEY, TARGET, START, **options)
    with killed_at(steps=18, is_late=True):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **options)
    with killed_at(draws=8, is_late=True):
        resume(tmp_path / "run")
    assert 0 < gm.open_draws(tmp_path / "run" / "draws").num_draws < 24
    assert_equal(resume(tmp_path / "run"), uninterrupted)


@pytest.mark.parametrize("part", ["moments", "step_size"])
def test_a_state_with_a_part_left_out_makes_other_draws(part, whole, tmp_path, monkeypatch):
    """What an adaptation kept outside its state would be lost like this."""
    state = Run.state

    def without(self):
        arrays, counts = state(self)
        if arrays["adaptation"] is not None:
            lost = jax.tree.map(jnp.zeros_like, getattr(arrays["adaptation"], part))
            arrays["adaptation"] = dataclasses.replace(arrays["adaptation"], **{part: lost})
        return arrays, counts

    monkeypatch.setattr(Run, "state", without)
    with killed_at(steps=18):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    with pytest.raises(AssertionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)
        assert_equal(resume(tmp_path / "run"), whole)


def test_a_run_killed_before_its_first_chunk_is_gone_on_with(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Run, "go", lambda *args: (_ for _ in ()).throw(Killed))
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    assert_equal(resume(tmp_path / "run"), whole)


def test_a_run_that_has_ended_gives_its_draws_and_goes_on_to_more(whole, tmp_path):
    path = tmp_path / "run"
    ended = gm.sample(KEY, TARGET, START, checkpoint=path, **hmc(num_samples=10))
    again = resume(path)
    assert_equal(again, ended)
    assert again.num_steps == 50
    more = resume(path, num_samples=24)
    assert_equal(more, whole)
    jax.tree.map(np.testing.assert_array_equal, more.state, whole.state)
    with pytest.raises(ValueError, match="num_samples: the run has 24 draws already"):
        resume(path, num_samples=23)


def test_ctrl_c_saves_the_run(whole, tmp_path):
    stopped = pytest.warns(gm.SamplingWarning, match="stopped after 8 of 24")
    with told_at(signal.SIGINT, draws=8), stopped:
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    assert_equal(resume(tmp_path / "run"), whole)


def scaled(position, info, factor):
    return {"scaled": position["a"] * factor, "rate": info.acceptance_rate}


def test_what_is_collected_and_thinned_goes_on_into_a_sink_of_the_users_own(tmp_path):
    options = hmc(collect=Partial(scaled, factor=jnp.float32(3)), thin=2)
    uninterrupted = gm.sample(KEY, TARGET, START, **options)
    sink = gm.ZarrSink(tmp_path / "elsewhere", compression=0)
    with killed_at(draws=8):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", to=sink, **options)
    draws = resume(tmp_path / "run")
    assert_equal(draws, uninterrupted)
    np.testing.assert_array_equal(
        gm.open_draws(tmp_path / "elsewhere").position["scaled"], uninterrupted.position["scaled"]
    )


def test_a_run_that_went_on_from_draws_is_saved_too(whole, tmp_path):
    first = gm.sample(KEY, TARGET, START, **hmc(num_samples=10))
    second = {"num_warmup": 0, "num_samples": 14, "progress": False}
    with killed_at(draws=8):
        gm.sample(KEY, TARGET, first, checkpoint=tmp_path / "run", **second)
    tail = jax.tree.map(lambda x: x[:, 10:], whole.position)
    jax.tree.map(np.testing.assert_array_equal, resume(tmp_path / "run").position, tail)


# Other meshes.

ROWS, WIDTH = 9, 2
Y = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
MESHES = {"8": {"data": 8}, "4": {"data": 4}, "2x4": {"chains": 2, "data": 4}, "1": {"data": 1}}


def prior(x):
    return -0.5 * x["mean"] ** 2


def rows_near(x, rows):
    return jnp.sum(-0.5 * (x["z"] - x["mean"][None]) ** 2 - 2 * (rows["y"] - x["z"]) ** 2, axis=1)


def rows_elsewhere(x, rows):
    return rows_near(x, rows)


def hierarchy(name, y=Y, likelihood=rows_near):
    sizes = MESHES[name]
    mesh = gm.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return gm.Posterior(prior, gm.Plate(likelihood, gm.place({"y": y}, mesh, P("data")), local="z"))


LATENTS = {"mean": jnp.zeros(WIDTH), "z": jnp.zeros((ROWS, WIDTH))}


def of_hierarchy(target, **options):
    warmup = gm.WindowAdaptation(metric=gm.LowRank(2, 8))
    return {"kernel": gm.HMC(target, 0.1, 4), "warmup": warmup, **QUICK, **options}


def test_a_run_moves_between_meshes(tmp_path):
    """Nine rows have 7, 3, 3, 0 and 7 pad rows: 8, 4, 2x4, 1 and again 8 devices."""
    target = hierarchy("8")
    whole = gm.sample(KEY, target, LATENTS, **of_hierarchy(target))
    path = tmp_path / "run"
    with killed_at(steps=10):
        gm.sample(KEY, target, LATENTS, checkpoint=path, **of_hierarchy(target))
    points: Any = {"4": {"steps": 22}, "2x4": {"steps": 34}, "1": {"draws": 4}, "8": {"draws": 12}}
    for name, point in points.items():
        with killed_at(**point):
            resume(path, hierarchy(name))
    draws = resume(path, hierarchy("1"))
    for name in LATENTS:
        ours, theirs = np.asarray(draws.position[name]), np.asarray(whole.position[name])
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)
    assert np.asarray(draws.stats["is_accepted"]).mean() > 0.3
    np.testing.assert_allclose(draws.warmup["step_size"], whole.warmup["step_size"], rtol=1e-3)


# Refusals.


def test_another_model_is_refused_with_what_differs(tmp_path):
    path, target = tmp_path / "run", hierarchy("4")
    with killed_at(steps=1):
        gm.sample(KEY, target, LATENTS, checkpoint=path, **of_hierarchy(target))
    longer = np.concatenate([Y, Y[:1]])
    with pytest.raises(ValueError, match=r"data\['y'\]: saved float32\[9, 2\], given float32\[10, 2\]"):
        resume(path, hierarchy("1", longer))
    with pytest.raises(ValueError, match="saved rows_near, given rows_elsewhere"):
        resume(path, hierarchy("4", likelihood=rows_elsewhere))
    with pytest.raises(ValueError, match="target: saved Posterior, given LogDensity"):
        resume(path, TARGET)


@pytest.mark.parametrize("name", ["4", "1"])
def test_other_data_of_the_same_shapes_are_refused_on_every_mesh(name, tmp_path):
    """Else draws of two posteriors are mixed: here nine rows, one of which is another."""
    path, target = tmp_path / "run", hierarchy("4")
    with killed_at(steps=10):
        gm.sample(KEY, target, LATENTS, checkpoint=path, **of_hierarchy(target))
    other = np.array(Y)
    other[3] += 0.5
    with pytest.raises(ValueError, match=r"the terms \['plates'\]\[0\] of its log density add up to"):
        resume(path, hierarchy(name, other))


def test_another_bound_value_is_refused_and_costs_the_run_nothing(killed, whole):
    with pytest.raises(ValueError, match=r"the terms \['a'\] of its log density add up to"):
        resume(killed, gm.LogDensity(gaussian, 1.02 * SCALE))
    assert_equal(resume(killed), whole)


def test_draws_whose_data_have_changed_are_not_gone_on_from():
    scale = np.array(SCALE)
    target = gm.LogDensity(gaussian, scale)
    options = {"kernel": gm.HMC(target, 0.1, 8), "num_warmup": 0, "progress": False}
    draws = gm.sample(KEY, target, START, num_samples=5, **options)
    more = {"num_warmup": 0, "num_samples": 5, "progress": False}
    assert gm.sample(KEY, target, draws, **more).num_draws == 5
    scale[1] = 2
    with pytest.raises(ValueError, match="initial_position: these draws cannot be continued: the"):
        gm.sample(KEY, target, draws, **more)


def test_a_folder_that_holds_a_run_takes_no_other(killed):
    with pytest.raises(gm.CheckpointNotSaved, match="holds a run already; go on with it by"):
        gm.sample(KEY, TARGET, START, checkpoint=killed, **hmc())


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Run, "go", lambda *args: pytest.fail("the run began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(gm.CheckpointNotSaved, match="Not a directory"):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "file" / "run", **hmc())


def test_two_runs_in_one_folder_are_refused(killed):
    first = Checkpoints(killed)
    with pytest.raises(gm.CheckpointNotSaved, match="process .* writes here"):
        resume(killed)
    first.close()
    resume(killed)


def test_a_run_with_a_function_that_cannot_be_imported_again_is_refused(tmp_path):
    with pytest.raises(gm.CheckpointNotSaved, match="a function or class at module level"):
        gm.sample(
            KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc(collect=lambda x, info: x["a"])
        )


@pytest.mark.parametrize("every", [-1, float("nan"), "1 min"])
def test_every_is_a_number_of_seconds(every, tmp_path):
    with pytest.raises(ValueError, match="every: expected a number of seconds, got"):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", every=every, **hmc())


def test_a_run_that_another_version_has_saved_is_refused_and_left_as_it_is(killed, whole, monkeypatch):
    saved = checkpoint.FORMAT
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", saved + 1)
        with pytest.raises(ValueError, match=f"has format {saved}, .* reads format {saved + 1}"):
            resume(killed)
    assert not (killed / checkpoint.DAMAGED).exists()
    assert_equal(resume(killed), whole)


def test_there_is_nothing_to_resume_where_nothing_was_saved(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        resume(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        resume(tmp_path)


# Damage.


def test_what_a_killed_writer_left_in_the_store_does_no_harm(whole, tmp_path):
    """TensorStore's files on the way, longer than what is written to them next."""
    with killed_at(draws=8):
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    written = [p for p in (tmp_path / "run" / "draws").rglob("c/**/*") if p.is_file()]
    assert written
    for path in written:
        path.with_name(f"{path.name}.__lock").write_bytes(bytes(100_000))
    assert_equal(resume(tmp_path / "run"), whole)


def newest(path: Path) -> Path:
    return max((path / "steps").iterdir(), key=lambda p: int(p.name))


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_byte(folder: Path):
    file = largest_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def change_the_document(folder: Path):
    file = folder / "document" / "metadata"
    document = json.loads(file.read_text())
    document["counts"]["warmup"]["num_steps"] += 1
    file.write_text(json.dumps(document))
    (folder.parent.parent / "checksums" / f"{folder.name}.json").unlink()


def lose_the_arrays(folder: Path):
    (folder.parent.parent / "checksums" / f"{folder.name}.json").unlink()
    shutil.rmtree(folder / "arrays")


@pytest.mark.parametrize("harm", [flip_a_byte, change_the_document, lose_the_arrays])
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(harm, killed, whole):
    number = newest(killed).name
    harm(newest(killed))
    with pytest.warns(gm.SamplingWarning, match=f"checkpoint {number} .* is damaged"):
        draws = resume(killed)
    assert_equal(draws, whole)
    assert (killed / "damaged" / number).is_dir()


def test_where_all_checkpoints_are_damaged_an_error_says_so(killed):
    for folder in (killed / "steps").iterdir():
        flip_a_byte(folder)
    with pytest.raises(ValueError, match="no checkpoint .* can be read") as caught:
        resume(killed)
    assert str(caught.value).count("are not what was written") == 2


# Ends that are told.


def test_sigterm_saves_the_run_and_ends_it(whole, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with told_at(signal.SIGTERM, steps=18), pytest.raises(gm.Preempted, match="resume") as caught:
        gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", **hmc())
    assert str(tmp_path / "run") in str(caught.value)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_equal(resume(tmp_path / "run"), whole)


def test_a_checkpoint_that_cannot_be_written_costs_a_warning_and_no_draws(whole, tmp_path, monkeypatch):
    save, numbers = Checkpoints.save, itertools.count(1)

    def fail_after_the_first(self, *content):
        if next(numbers) > 1:
            raise OSError(28, "No space left on device")
        save(self, *content)

    monkeypatch.setattr(Checkpoints, "save", fail_after_the_first)
    with pytest.warns(gm.SamplingWarning, match="No space left on device") as caught:
        draws = gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", every=0, **hmc())
    assert len(caught) == 1
    assert_equal(draws, whole)
    monkeypatch.undo()
    monkeypatch.setattr(chunks, "next_size", lambda count, seconds: 7)
    assert_equal(resume(tmp_path / "run"), whole)


# What is written.


def test_settings_and_states_survive_the_way_through_json():
    tree = {
        "kernel": gm.NUTS(TARGET, 0.25, max_tree_depth=3).with_inverse_mass_matrix(ONES),
        "warmup": gm.SNAPERAdaptation(metric=gm.LowRank(3)),
        "collect": Partial(scaled, factor=jnp.arange(3)),
        "list": [("tuple", 1), None, True, 0.1, float("inf"), "text", gm.HMC],
    }
    document, arrays = encode(tree)
    again = decode(json.loads(json.dumps(document)), arrays)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(
        a is b or a == b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True)
    )


def test_the_newest_two_checkpoints_are_kept(tmp_path):
    gm.sample(KEY, TARGET, START, checkpoint=tmp_path / "run", every=0, **hmc())
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2
    sums = {p.stem for p in (tmp_path / "run" / "checksums").iterdir()}
    assert sums == {p.name for p in (tmp_path / "run" / "steps").iterdir()}
