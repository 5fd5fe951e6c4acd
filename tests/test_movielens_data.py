"""MovieLens for the demos: small files of its format, served and damaged in every way."""

import hashlib
import http.server
import io
import os
import sys
import threading
import tracemalloc
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos import movielens_data
from demos.movielens_data import MOVIELENS_MD5, Sizes, draw_synthetic, load_movielens

DATA_ENV = movielens_data.datasets.DATA_ENV
REAL = os.environ.get(DATA_ENV)

# Users and movies out of order, with gaps; movies 2 and 9 are rated by nobody.
RATINGS = b"3::10::5::978300760\n1::7::1::0\n3::1::4::0\n8::10::3::12\n1::10::2::0\n8::7::5::0\n"
MOVIES = (
    "1::Toy Story (1995)::Animation|Children's|Comedy\n2::Unseen (1990)::Drama\n"
    "7::Caf\xe9 \x85: \xc0 la mode (1993)::Comedy\n9::Unseen too (1991)::War\n10::A::B (1999)::Sci-Fi\n"
).encode("latin-1")
FILES = {"ratings.dat": RATINGS, "movies.dat": MOVIES}
SIZES = Sizes(ratings=6, users=3, movies=3)
WATCHED = [[0, 1, 1], [1, 0, 1], [0, 1, 1]]  # users 1, 3, 8; movies 1, 7, 10


def zipped(files=FILES, folder="ml-1m/"):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(folder + name, content)
    return stream.getvalue()


GOOD_ZIP = zipped()
ZIP_MD5 = hashlib.md5(GOOD_ZIP, usedforsecurity=False).hexdigest()
load_small = partial(load_movielens, md5=ZIP_MD5, sizes=SIZES)


def write_files(folder, files=FILES):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_zip(folder, content=GOOD_ZIP):
    return write_files(folder, {"ml-1m.zip": content})


def assert_is_small_movielens(data):
    assert data.name == "ml-1m"
    np.testing.assert_array_equal(data.watched, np.array(WATCHED, np.uint8), strict=True)
    assert data.titles == ["Toy Story (1995)", "Café \x85: À la mode (1993)", "A::B (1999)"]
    assert data.genres == [("Animation", "Children's", "Comedy"), ("Comedy",), ("Sci-Fi",)]


def assert_is_synthetic(data, said):
    assert data.name == "synthetic"
    assert "synthetic" in data.source and "synthetic" in said and "not MovieLens" in said
    assert (data.watched.shape, data.watched.dtype) == ((SIZES.users, SIZES.movies), np.uint8)
    assert data.titles == [f"synthetic movie {i}" for i in range(SIZES.movies)]
    assert data.genres == [()] * SIZES.movies


def files_under(folder):
    return sorted(path.name for path in folder.rglob("*"))


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep every test away from the user's own cache, data folder and proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv(DATA_ENV, raising=False)
    return tmp_path / "xdg" / "gspmd_mcmc" / "ml-1m"


@pytest.fixture
def good_mirror(tmp_path):
    return write_zip(tmp_path / "mirror").as_uri()


@pytest.fixture
def bad_mirror(tmp_path):
    return (tmp_path / "no-such-mirror").as_uri()


@pytest.fixture
def http_mirror(tmp_path):
    handler = partial(QuietHandler, directory=str(write_zip(tmp_path / "served")))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


# A folder that was asked for


@pytest.mark.parametrize("subfolder", ["", "ml-1m"])
@pytest.mark.parametrize("write", [write_files, write_zip])
def test_given_folder(tmp_path, subfolder, write, capsys):
    root = tmp_path / "data"
    write(root / subfolder)
    data = load_small(root, mirrors=())
    assert_is_small_movielens(data)
    assert str(root / subfolder) in data.source and "data_dir" in data.source
    assert capsys.readouterr().err == ""


def test_given_zip_may_hold_the_files_without_a_folder(tmp_path):
    assert_is_small_movielens(load_small(write_zip(tmp_path / "data", zipped(folder=""))))


def test_complete_subfolder_wins_over_a_stray_file_and_a_zip(tmp_path):
    write_files(tmp_path / "data" / "ml-1m")
    write_files(tmp_path / "data", {"ratings.dat": b"stray", "ml-1m.zip": b"stray"})
    assert_is_small_movielens(load_small(tmp_path / "data"))


def test_environment_variable_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(DATA_ENV, "~/data")
    write_files(tmp_path / "data")
    data = load_small(mirrors=())
    assert_is_small_movielens(data)
    assert DATA_ENV in data.source


def test_given_folder_wins_over_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV, str(tmp_path / "missing"))
    assert_is_small_movielens(load_small(str(write_files(tmp_path / "data"))))


def test_empty_environment_variable_counts_as_unset(cache, monkeypatch):
    write_zip(cache)
    monkeypatch.setenv(DATA_ENV, "")
    assert_is_small_movielens(load_small(mirrors=()))


@pytest.mark.parametrize("by_env", [False, True])
def test_missing_folder_raises_though_mirrors_would_do(tmp_path, good_mirror, by_env, monkeypatch):
    missing = tmp_path / "missing"
    if by_env:
        monkeypatch.setenv(DATA_ENV, str(missing))
    origin = DATA_ENV if by_env else "data_dir"
    with pytest.raises(FileNotFoundError, match=f"{origin}.*missing"):
        load_small(None if by_env else missing, mirrors=[good_mirror])


def test_given_file_is_no_folder(tmp_path):
    with pytest.raises(NotADirectoryError, match=r"ml-1m\.zip"):
        load_small(write_zip(tmp_path) / "ml-1m.zip")


@pytest.mark.parametrize("by_env", [False, True])
def test_given_folder_without_the_data_raises(tmp_path, cache, good_mirror, by_env, monkeypatch):
    write_zip(cache)
    (tmp_path / "data").mkdir()
    if by_env:
        monkeypatch.setenv(DATA_ENV, str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError, match=r"data: .*missing: ratings.dat, movies.dat$"):
        load_small(None if by_env else tmp_path / "data", mirrors=[good_mirror])


def test_given_folder_with_a_file_missing_raises(tmp_path):
    write_files(tmp_path / "data" / "ml-1m", {"ratings.dat": RATINGS})
    with pytest.raises(FileNotFoundError, match=r"missing: movies.dat$"):
        load_small(tmp_path / "data")


# What is in the files


def load_with(folder, **files):
    changed = {f"{name}.dat": content for name, content in files.items()}
    return load_small(write_files(folder, FILES | changed))


@pytest.mark.parametrize(
    "changed",
    [RATINGS.replace(b"\n", b"\r\n"), RATINGS[:-1]],
    ids=["carriage returns", "no last newline"],
)
def test_ratings_may_end_their_lines_otherwise(tmp_path, changed):
    assert_is_small_movielens(load_with(tmp_path, ratings=changed))


@pytest.mark.parametrize(
    "changed",
    [MOVIES.replace(b"\n", b"\r\n"), MOVIES[:-1]],
    ids=["carriage returns", "no last newline"],
)
def test_movies_may_end_their_lines_otherwise(tmp_path, changed):
    assert_is_small_movielens(load_with(tmp_path, movies=changed))


BROKEN_RATINGS = {
    "empty": (b"", f"expected {SIZES}", "got 0 ratings"),
    "web page": (b"<html>", "line 1: expected four whole numbers", "<html>"),
    "three fields": (RATINGS.replace(b"4::0", b"4", 1), "line 3", "3::1::4'"),
    "five fields": (RATINGS.replace(b"5::978300760", b"5::9::7"), "line 1", "3::10::5::9::7"),
    "half a star": (RATINGS.replace(b"2::0", b"2.5::0"), "line 5", "1::10::2.5::0"),
    "minus": (RATINGS.replace(b"8::10", b"-8::10"), "line 4", "-8::10"),
    "single colons": (RATINGS.replace(b"::", b":"), "line 1", "3:10:5:978300760"),
    "blank line": (RATINGS.replace(b"1::7", b"\n1::7"), "line 2", "got b''"),
    "other digits": ("३::10::5::0\n".encode(), "line 1", "four whole numbers"),
    "too large": (RATINGS + b"9" * 10 + b"::1::1::0\n", "line 7", "9999999999"),
    "cut inside a line": (RATINGS[:-4], "line 6", "8::7::5"),
    "cut between lines": (RATINGS[: RATINGS.index(b"8::7")], f"expected {SIZES}", "got 5 ratings"),
    "rating 0": (RATINGS.replace(b"7::1::0", b"7::0::0"), "line 2: expected a rating from 1", "got 0"),
    "rating 6": (RATINGS.replace(b"10::3", b"10::6"), "line 4: expected a rating from 1", "got 6"),
    "a pair twice": (RATINGS + b"1::7::2::5\n", "line 7: expected one rating", "movie 7 as in line 2"),
    "a user more": (RATINGS.replace(b"8::7", b"9::7"), f"expected {SIZES}", "by 4 users"),
    "a movie more": (RATINGS.replace(b"8::7", b"8::9"), f"expected {SIZES}", "of 4 movies"),
}


@pytest.mark.parametrize("content, expected, got", BROKEN_RATINGS.values(), ids=BROKEN_RATINGS.keys())
def test_broken_ratings_are_refused(tmp_path, content, expected, got):
    with pytest.raises(ValueError) as error:
        load_with(tmp_path, ratings=content)
    for words in (str(tmp_path / "ratings.dat"), expected, got):
        assert words in str(error.value)


BROKEN_MOVIES = {
    "empty": (b"", "line 1: expected id::title::genres", "got ''"),
    "two fields": (MOVIES.replace(b"::Drama", b""), "line 2: expected id::title::genres", "2::Unseen"),
    "no number": (b"x" + MOVIES, "line 1: expected id::title::genres", "x1::Toy Story"),
    "a movie twice": (
        MOVIES + b"7::Again (1993)::War\n",
        "line 6: expected each movie once",
        "7 again",
    ),
    "a rated movie less": (MOVIES[: MOVIES.index(b"10::")], "expected every rated movie", "[10]"),
}


@pytest.mark.parametrize("content, expected, got", BROKEN_MOVIES.values(), ids=BROKEN_MOVIES.keys())
def test_broken_movies_are_refused(tmp_path, content, expected, got):
    with pytest.raises(ValueError) as error:
        load_with(tmp_path, movies=content)
    for words in (str(tmp_path / "movies.dat"), expected, got):
        assert words in str(error.value)


def test_sizes_are_the_official_ones_unless_given(tmp_path):
    words = (
        "expected 1000209 ratings of 3706 movies by 6040 users, got 6 ratings of 3 movies by 3 users"
    )
    with pytest.raises(ValueError, match=words):
        load_movielens(write_files(tmp_path))


AT = GOOD_ZIP.index(b"ratings.dat") + len(b"ratings.dat")
BROKEN_ZIPS = {
    "empty": (b"", "whole zip file"),
    "web page": (b"<html>", "whole zip file"),
    "cut short": (GOOD_ZIP[:-30], "whole zip file"),
    "damaged inside": (GOOD_ZIP[:AT] + bytes(9) + GOOD_ZIP[AT + 9 :], "whole zip file"),
    "other files": (zipped({"ratings.csv": RATINGS}), "missing: ratings.dat, movies.dat"),
    "other folder": (zipped(folder="ml-100k/"), "missing: ratings.dat, movies.dat"),
    "a file less": (zipped({"ratings.dat": RATINGS}), "missing: movies.dat"),
    "broken ratings": (zipped(FILES | {"ratings.dat": b"<html>"}), "ml-1m/ratings.dat, line 1"),
}


@pytest.mark.parametrize("content, words", BROKEN_ZIPS.values(), ids=BROKEN_ZIPS.keys())
def test_broken_zip_is_refused(tmp_path, content, words):
    with pytest.raises(ValueError) as error:
        load_small(write_zip(tmp_path, content))
    assert str(tmp_path / "ml-1m.zip") in str(error.value) and words in str(error.value)


# The mirrors and the cache


def test_mirror_serves_terms_are_told_and_the_cache_keeps(cache, bad_mirror, http_mirror, capsys):
    data = load_small(mirrors=[bad_mirror, http_mirror])
    assert_is_small_movielens(data)
    assert http_mirror in data.source and bad_mirror not in data.source
    assert files_under(cache) == ["ml-1m.zip"]
    said = capsys.readouterr().err
    for words in (str(cache), "Harper", "Konstan", "2015", "research", "redistributed", "commercially"):
        assert words in said
    again = load_small(mirrors=[bad_mirror])
    assert_is_small_movielens(again)
    assert str(cache) in again.source and "downloaded" not in again.source
    assert capsys.readouterr().err == ""


def test_damaged_cache_is_downloaded_again(cache, good_mirror, capsys):
    write_zip(cache, GOOD_ZIP[:-9])
    assert_is_small_movielens(load_small(mirrors=[good_mirror]))
    assert f"damaged file in the cache: {cache / 'ml-1m.zip'}" in capsys.readouterr().err
    assert_is_small_movielens(load_small(mirrors=[]))


def test_another_zip_at_a_mirror_is_refused(cache, tmp_path, good_mirror, capsys):
    other = write_zip(tmp_path / "other", zipped(folder="")).as_uri()
    assert_is_synthetic(load_small(mirrors=[other]), capsys.readouterr().err)
    assert files_under(cache) == []
    assert_is_small_movielens(load_small(mirrors=[other, good_mirror]))


def test_the_checksum_is_the_official_one_unless_given(good_mirror, capsys):
    load_movielens(mirrors=[good_mirror], sizes=SIZES)
    assert f"expected content with md5 {MOVIELENS_MD5}" in capsys.readouterr().err


def test_a_zip_with_the_right_checksum_and_other_content_raises(good_mirror):
    with pytest.raises(ValueError, match="expected 1000209 ratings"):
        load_movielens(mirrors=[good_mirror], md5=ZIP_MD5)


# The synthetic matrix in its place


def test_synthetic_matrix_stands_in_and_says_so(bad_mirror, capsys):
    data = load_small(mirrors=[bad_mirror])
    said = capsys.readouterr().err
    assert_is_synthetic(data, said)
    assert bad_mirror in said and bad_mirror in data.source


def test_unwritable_cache_gives_a_synthetic_matrix_and_the_reason(
    tmp_path, good_mirror, monkeypatch, capsys
):
    (tmp_path / "occupied").write_text("a file where the cache folder would go")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert_is_synthetic(load_small(mirrors=[good_mirror]), said := capsys.readouterr().err)
    assert "occupied" in said


def test_synthetic_matrix_has_the_shape_of_the_real_one_unless_told(capsys):
    data = load_movielens(mirrors=[])
    assert data.watched.shape == (6040, 3706) and len(data.titles) == len(data.genres) == 3706
    assert data.titles[17] == "synthetic movie 17"
    assert "not MovieLens" in capsys.readouterr().err


def features(watched):
    """Share of ones, its spread over users and over movies, and the largest singular values."""
    spreads = [watched.mean(axis=axis, dtype=float).var() for axis in (0, 1)]
    return [watched.mean(), *spreads, *np.linalg.svd(watched - 0.5, compute_uv=False)[:24]]


def test_synthetic_matrix_is_drawn_from_the_model():
    """Of the model written out plainly, with other numbers: 20 dimensions and two biases."""
    num_users, num_movies = 900, 700
    watched = draw_synthetic(num_users, num_movies)
    assert (watched.max(), watched.dtype) == (1, np.uint8)
    rng = np.random.default_rng(5)
    users, movies = rng.normal(size=(num_users, 20)), rng.normal(size=(num_movies, 20))
    biases = rng.normal(size=(num_users, 1)) + rng.normal(size=(1, num_movies))
    plain = rng.random(watched.shape) < 1 / (1 + np.exp(-(users @ movies.T + biases)))
    np.testing.assert_allclose(features(watched), features(plain), rtol=0.2)
    no_bias = rng.random(watched.shape) < 1 / (1 + np.exp(-(users @ movies.T)))
    one_less = rng.random(watched.shape) < 1 / (1 + np.exp(-(users[:, 1:] @ movies[:, 1:].T + biases)))
    for other in (no_bias, one_less):
        assert not np.allclose(features(watched), features(other), rtol=0.2)


def test_the_same_seed_gives_the_same_matrix():
    np.testing.assert_array_equal(draw_synthetic(300, 40), draw_synthetic(300, 40))
    assert np.any(draw_synthetic(300, 40) != draw_synthetic(300, 40, seed=1))


def test_no_float_array_is_as_large_as_the_matrix():
    tracemalloc.start()
    draw_synthetic(4096, 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 1024 * 3  # bytes: the matrix itself is one a cell, float32 would be four


# The real thing, where there is one


def holds_movielens(folder):
    places = [folder / part / name for part in ("", "ml-1m") for name in ("ratings.dat", "ml-1m.zip")]
    return any(place.is_file() for place in places)


@pytest.mark.skipif(
    not REAL or not holds_movielens(Path(REAL).expanduser()), reason=f"{DATA_ENV} names no MovieLens 1M"
)
def test_real_data():
    data = load_movielens(REAL)
    assert (data.watched.shape, data.watched.sum()) == ((6040, 3706), 1_000_209)
    by_user, by_movie = (data.watched.sum(axis=axis, dtype=int) for axis in (1, 0))
    assert (by_user.min(), by_user.max()) == (20, 2314)
    assert data.titles[0] == "Toy Story (1995)"
    assert data.titles[by_movie.argmax()] == "American Beauty (1999)"
    assert {genre for genres in data.genres for genre in genres} >= {"Film-Noir", "Children's"}
