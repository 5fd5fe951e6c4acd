"""The benchmarks' data: where they are looked for, and what replaces them offline."""

import argparse
import gzip
import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import data, groups_data, mnist_data, movielens_data, posteriordb
from benchmarks.ess_models import folder_of
from demos.datasets import DATA_ENV

SIZES = data.Sizes(ratings=900, users=30, movies=50)


@pytest.fixture(autouse=True)
def _offline_and_without_data(tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setattr(data, "IMAGES", (32, 8))
    monkeypatch.setattr(data.movielens_data, "MOVIELENS_SIZES", SIZES)


def options(*arguments):
    parser = argparse.ArgumentParser()
    data.add_option(parser)
    return parser.parse_args(arguments)


def test_offline_simulated_files_of_the_same_shapes_are_read_and_named(capsys):
    with data.folder_of([data.MNIST, data.MOVIELENS], options().data_dir) as (folder, sources):
        mnist = mnist_data.load(folder)
        watched = movielens_data.load(folder)
        rated = groups_data.load(folder)
    assert mnist.images.shape == (32, 784) and set(mnist.labels) <= set(range(10))
    assert watched.shape == (30, 50) and watched.any(axis=0).all() and watched.any(axis=1).all()
    assert (rated.users, rated.films, len(rated.stars) % 8) == (30, 50, 0)
    assert np.ptp(rated.stars) > 1
    assert not Path(folder).exists()
    said = capsys.readouterr().err
    for name in (data.MNIST, data.MOVIELENS):
        assert sources[name] == f"simulated data of the shape of {name}"
        assert f"{name} is not available (" in said and f"results are not {name}'s" in said
    assert DATA_ENV in said


def test_files_in_the_cache_are_used_and_checked(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache" / "gspmd_mcmc" / "mnist"
    cache.mkdir(parents=True)
    data.simulate_images(cache, (5, 3))
    checksums = {
        path.stem: hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest()
        for path in cache.iterdir()
    }
    loader = partial(data.datasets.load_real_mnist, checksums=checksums)
    monkeypatch.setitem(data.LOADERS, data.MNIST, loader)
    with data.folder_of([data.MNIST], None) as (folder, sources):
        assert mnist_data.load(folder).images.shape == (5, 784)
    assert sources[data.MNIST] == f"MNIST from the cache {cache}"
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(data.LOADERS, data.MNIST, data.datasets.load_real_mnist)
    with data.folder_of([data.MNIST], None) as (folder, sources):
        assert sources[data.MNIST].startswith("simulated")  # the files are not the official ones


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_folder_that_was_asked_for_is_the_only_place(by, tmp_path, monkeypatch):
    if by == "environment":
        monkeypatch.setenv(DATA_ENV, str(tmp_path))
    asked = options(*(["--data-dir", str(tmp_path)] if by == "option" else []))
    with (
        pytest.raises(
            SystemExit, match=r"--data-dir or GSPMD_MCMC_DATA: .*missing: ratings.dat, movies"
        ),
        data.folder_of([data.MOVIELENS], asked.data_dir),
    ):
        pass


def test_an_error_of_the_work_itself_is_not_taken_for_missing_data(tmp_path):
    with pytest.raises(OSError, match="disk full"), data.folder_of([], str(tmp_path)):
        raise OSError("disk full")


def test_models_without_data_are_left_out_and_the_rest_is_run(capsys):
    chosen = argparse.Namespace(data_dir=None, models=("eight_schools", "german_credit", "mnist_6000"))
    with folder_of(chosen) as (folder, sources):
        assert chosen.models == ("german_credit", "mnist_6000")
        assert list(sources) == [data.MNIST] and (Path(folder) / data.MNIST).is_dir()
    assert "eight_schools is left out: posteriordb is not available" in capsys.readouterr().err
    chosen.models = ("eight_schools",)
    with pytest.raises(SystemExit, match="the data of none of them"), folder_of(chosen):
        pass


def test_a_folder_without_posteriordb_is_named(tmp_path):
    chosen = argparse.Namespace(data_dir=str(tmp_path), models=("eight_schools",))
    with pytest.raises(SystemExit, match="subfolder posteriordb"), folder_of(chosen):
        pass
    assert not posteriordb.has("eight_schools-eight_schools_noncentered", tmp_path)


def test_a_result_goes_to_a_file_and_no_url(monkeypatch, tmp_path, capsys):
    assert benchmarks_main.main(["mnist", "--out=gs://bucket/mnist.json"]) == 2
    assert "--out: expected a path on a file system, got the URL" in capsys.readouterr().err
    given = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("benchmarks.mnist.main", given.extend)
    benchmarks_main.main(["mnist", "--out", "~/mnist.json", "--quick"])
    assert given == ["--out", str(tmp_path / "mnist.json"), "--quick"]
