"""The benchmarks `chips` and `gpu`: programs of shapes, the loop of leapfrogs, command lines."""

import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hlo_texts import computation, loop, text_of

from benchmarks import chips, chips_programs, gpu, mnist_data, movielens_data
from benchmarks.data import Sizes
from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.planning.roofline import roofline
from gspmd_mcmc.planning.work import Kernel, Work
from gspmd_mcmc.targets.local import arrays
from gspmd_mcmc.views.program.hlo import read_program

MESH = make_abstract_mesh(data=8)


@pytest.mark.parametrize(
    ("model", "contender", "kernel", "chains"),
    [("mnist", "ours", "HMC", 1), ("movielens", "ours", "HMC", 2), ("movielens", "ours", "NUTS", 1),
     ("mnist", "numpyro", "HMC", 1), ("mnist", "numpyro:textbook", "HMC", 1),
     ("movielens", "numpyro", "HMC", 2), ("mnist", "ours:kernel", "HMC", 1),
     ("movielens", "ours:kernel", "HMC", 2), ("ratings", "numpyro", "HMC", 1),
     ("ratings", "numpyro:textbook", "HMC", 1)],
)  # fmt: skip
def test_a_program_of_shapes_is_a_step_of_the_model(model, contender, kernel, chains):
    if not contender.startswith("ours"):
        pytest.importorskip("numpyro")
    with jax.numpy_rank_promotion("allow"):  # what contenders write is what users write
        function, *args = chips_programs.build(model, contender, kernel, chains)(MESH)
        after = jax.eval_shape(function, *args)
    lead = (chains,) if chains > 1 else ()
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(after)]
    for name, shape in chips_programs.SHAPES[model].items():
        assert lead + shape in shapes, name
    # Rows lie over the devices: no device holds all.
    rows = {"mnist": 60_000, "movielens": 6040, "ratings": chips_programs.RATINGS}[model]
    leaves = jax.tree.leaves(args)
    given = [x for x in leaves if x.ndim and x.shape[0] == rows and x.sharding is not None]
    assert given and all(leaf.sharding.spec[0] == "data" for leaf in given)
    assert all(x.size == 1 or isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


@pytest.mark.parametrize("contender", ["ours", "ours:index"])
def test_ratings_lie_over_the_devices_and_with_them_users_by_group(contender):
    _, kernel, _, state = chips_programs.build("ratings", contender, "HMC", 1)(MESH)
    leaves = [x for x in jax.tree.leaves(kernel) if np.size(x) > 1]
    assert leaves and all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    rows = [x for x in leaves if x.size >= chips_programs.RATINGS]
    assert len(rows) >= 3 and all(x.sharding.spec[0] in ("data", ("data",)) for x in rows)
    is_laid = contender == "ours"  # then places of groups are a multiple of the devices, and more
    assert (arrays(state.position)["user"].shape[0] > 6040) is is_laid


def test_forms_that_a_model_has_not_are_no_cases():
    options = chips._options([])
    forms = {(case["model"], case["contender"]) for case in chips._cases(options)}
    assert ("ratings", "ours:index") in forms and ("mnist", "ours:kernel") in forms
    assert ("ratings", "ours:kernel") not in forms and ("mnist", "ours:index") not in forms


def test_the_leapfrog_is_the_loop_of_that_name_or_else_the_one_that_moves_most():
    small = computation("small", "ROOT %n = f32[32]{0} negate(%p)")
    large = computation("large", "%m = f32[32]{0} negate(%p)", "ROOT %n = f32[32]{0} negate(%m)")
    inner = computation("outer", "ROOT " + loop("within", "large", trips=9))

    def of(*names):
        lines = [loop(name, called) for name, called in names]
        text = text_of(*lines[:-1], "ROOT " + lines[-1], before=small + large + inner)
        return chips.leapfrog_of(read_program(text)).bytes_moved

    negated = 2 * 4 * 32
    assert of(("one", "small"), ("integrate", "large")) == 2 * negated
    assert of(("leapfrog", "small"), ("other", "large")) == negated
    # A loop in another is part of the outer one's iteration.
    assert of(("integrate", "outer"), ("one", "small")) == 9 * 2 * negated


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--models", "mnist,cifar"], "--models: 'cifar' is not one of mnist, movielens, ratings"),
     (["--contenders", "stan"], "--contenders: 'stan' is not one of ours"),
     (["--chips", "8 x TPU v9"], "--chips: on='8 x TPU v9': expected one of"),
     (["--kernels", "Gibbs"], "--kernels: 'Gibbs' is not one of HMC, NUTS")],
)  # fmt: skip
def test_a_name_that_is_not_known_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        chips.main(options)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_contender_that_the_gpu_benchmark_does_not_know_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--contenders", "ours,stan"])
    assert "--contenders: 'stan' is not one of ours, ours:kernel, numpyro" in capsys.readouterr().err


def test_a_missing_compiler_is_said_and_saved_and_fails_if_nothing_ran(tmp_path, monkeypatch, capsys):
    def without(*_, **__):
        raise ImportError("pip install 'gspmd_mcmc[tpu]' brings it\nand more")

    monkeypatch.setattr(chips, "mesh_on", without)
    out = tmp_path / "chips.json"
    options = ["--models", "mnist", "--contenders", "ours", "--kernels", "HMC", "--chips", "8 x TPU v3"]
    assert chips.main([*options, "--out", str(out)]) == 1
    saved = json.loads(out.read_text())
    assert saved["rows"] == [] and "gspmd_mcmc[tpu]" in saved["skipped"][0]["why"]
    assert "left out: pip install 'gspmd_mcmc[tpu]'" in capsys.readouterr().out


def test_simulated_files_are_read_as_the_real_ones_are(tmp_path):
    gpu.simulate(tmp_path, (32, 8), Sizes(ratings=900, users=30, movies=50))
    data = mnist_data.load(tmp_path)
    assert data.images.shape == (32, 784) and data.labels.shape == (32,)
    assert set(np.unique(data.labels)) <= set(range(10)) and 0 < (data.images > 0).mean() < 0.4
    watched = movielens_data.load(tmp_path)
    assert watched.shape == (30, 50) and watched.any(axis=0).all() and watched.any(axis=1).all()


def test_a_peer_that_ran_on_another_device_is_an_error():
    record = {"chains": 1, "errors": [], "rounds": [], "ready": {"device": "NVIDIA H100"}}
    entrant: Any = SimpleNamespace(name="numpyro", record=record)
    unknown: Any = (None, None)
    row = gpu._row("mnist", entrant, None, 100, unknown)
    assert "it ran on NVIDIA H100, not on" in row["errors"][0] and "jax[cuda12]" in row["errors"][0]


def test_a_rate_that_leaves_out_a_kernels_arithmetic_is_marked():
    def last_cells(is_counted):
        kernel = Kernel("k", "", 1000, 0, 0, (), 0, (), None, is_counted=is_counted)
        found = roofline(Work((kernel,)), "H100 80GB", data_bytes=100)
        row = chips._facts(found) | chips._arithmetic(found)
        case = {"model": "m", "chip": "H100", "devices": 1, "chains": 1, "kernel": "HMC"}
        rest = {"contender": "ours", "peak_memory_bytes": 1, "atomics_on_floats": []}
        return [list(column.cells)[0] for column in chips._table([row | case | rest]).columns][-2:]

    (counted, bound), (marked, _) = last_cells(True), last_cells(False)
    assert marked == f"< {counted}" and bound == "launches"
