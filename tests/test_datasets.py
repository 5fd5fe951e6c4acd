"""The demos' data: small MNIST and MovieLens files, served, cached, and damaged in every way."""

import gzip
import hashlib
import http.server
import io
import os
import socket
import struct
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos import movielens_data
from demos.movielens_data import MOVIELENS_MD5, Sizes, load_movielens

datasets = movielens_data.datasets
fetch, load_mnist, read_idx = datasets.fetch, datasets.load_mnist, datasets.read_idx
DATA_ENV, DownloadError = datasets.DATA_ENV, datasets.DownloadError
REAL = os.environ.get(DATA_ENV)


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def write_all(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


# MNIST: five images and three

TRAIN_IMAGES, TEST_LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
RNG = np.random.default_rng(7)
ARRAYS = {
    TRAIN_IMAGES: RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.array([3, 1, 4, 1, 9], np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    TEST_LABELS: np.array([2, 7, 0], np.uint8),
}


def to_idx(array):
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


CONTENTS = {name: to_idx(array) for name, array in ARRAYS.items()}
CHECKSUMS = {name: md5(content) for name, content in CONTENTS.items()}
GOOD = CONTENTS[TRAIN_IMAGES]
PACKED = gzip.compress(GOOD)
load_images = partial(load_mnist, checksums=CHECKSUMS)


def write_images(folder, gzipped=True, dotted=False):
    written = {}
    for name, content in CONTENTS.items():
        stem = name.replace("-idx", ".idx") if dotted else name
        written |= {f"{stem}.gz": gzip.compress(content)} if gzipped else {stem: content}
    return write_all(folder, written)


def assert_is_mnist(data):
    assert (data.name, data.scale, data.num_classes, data.shape) == ("mnist", 255, 10, (28, 28))
    for part, official in (("train", "train"), ("test", "t10k")):
        images, labels = getattr(data, f"{part}_images"), getattr(data, f"{part}_labels")
        pixels = ARRAYS[f"{official}-images-idx3-ubyte"].reshape(-1, 784)
        np.testing.assert_array_equal(images, pixels)
        np.testing.assert_array_equal(labels, ARRAYS[f"{official}-labels-idx1-ubyte"])
        assert (images.dtype, labels.dtype) == (np.uint8, np.int32)


def assert_is_digits(data, said):
    assert (data.name, data.scale, data.num_classes, data.shape) == ("digits", 16, 10, (8, 8))
    assert "digits" in data.source and "digits" in said and "not MNIST" in said
    assert (data.train_images.shape, data.test_images.shape) == ((1437, 64), (360, 64))
    assert (data.train_images.dtype, data.test_labels.dtype) == (np.uint8, np.int32)
    assert data.train_images.max() == data.scale


# MovieLens: users and movies out of order, with gaps; movies 2 and 9 are rated by nobody

RATINGS = b"3::10::5::978300760\n1::7::1::0\n3::1::4::0\n8::10::3::12\n1::10::2::0\n8::7::5::0\n"
MOVIES = (
    "1::Toy Story (1995)::Animation|Children's|Comedy\n2::Unseen (1990)::Drama\n"
    "7::Caf\xe9 \x85: \xc0 la mode (1993)::Comedy\n9::Unseen too (1991)::War\n10::A::B (1999)::Sci-Fi\n"
).encode("latin-1")
TABLES = {"ratings.dat": RATINGS, "movies.dat": MOVIES}
SIZES = Sizes(ratings=6, users=3, movies=3)
WATCHED = [[0, 1, 1], [1, 0, 1], [0, 1, 1]]  # users 1, 3, 8; movies 1, 7, 10


def zipped(files=TABLES, folder="ml-1m/"):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(folder + name, content)
    return stream.getvalue()


GOOD_ZIP = zipped()
load_ratings = partial(load_movielens, md5=md5(GOOD_ZIP), sizes=SIZES)


def write_tables(folder, files=TABLES):
    return write_all(folder, files)


def write_zip(folder, content=GOOD_ZIP):
    return write_all(folder, {"ml-1m.zip": content})


def assert_is_movielens(data):
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


# What both do with folders, mirrors and caches


class Kind(NamedTuple):
    """A data set: its loader, how its files are written, and what it and its stand-in are."""

    load: Callable[..., Any]
    write: Callable[[Path], Path]
    assert_is_real: Callable[[Any], None]
    assert_is_stand_in: Callable[[Any, str], None]
    folder: str  # of the cache, and below a folder that is given
    files: list[str]  # of a mirror; the first is damaged
    lacks: str  # what an error says of an empty folder


KINDS = {
    "mnist": Kind(
        *(load_images, write_images, assert_is_mnist, assert_is_digits, "mnist"),
        files=[f"{name}.gz" for name in CONTENTS],
        lacks=f"{TRAIN_IMAGES}.*{TEST_LABELS}$",
    ),
    "movielens": Kind(
        *(load_ratings, write_zip, assert_is_movielens, assert_is_synthetic, "ml-1m"),
        files=["ml-1m.zip"],
        lacks="ratings.dat, movies.dat$",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Keep every test away from the user's own cache, data folder and proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv(DATA_ENV, raising=False)
    return tmp_path / "xdg" / "gspmd_mcmc"


def files_under(folder):
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture
def bad_mirror(tmp_path):
    return (tmp_path / "no-such-mirror").as_uri()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def http_mirror(tmp_path):
    """A server of the files in the folder ``served``."""
    handler = partial(QuietHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


PLAIN = partial(write_images, gzipped=False)
FORMS = [
    *(("mnist", write) for write in (write_images, PLAIN)),
    *(("mnist", partial(write, dotted=True)) for write in (write_images, PLAIN)),
    *(("movielens", write) for write in (write_tables, write_zip)),
    ("movielens", partial(write_zip, content=zipped(folder=""))),
]


@pytest.mark.parametrize("is_below", [False, True])
@pytest.mark.parametrize(("kind", "write"), FORMS, indirect=["kind"])
def test_given_folder(tmp_path, kind, write, is_below, capsys):
    folder = write(tmp_path / "data" / (kind.folder if is_below else ""))
    data = kind.load(tmp_path / "data", mirrors=())
    kind.assert_is_real(data)
    assert str(folder) in data.source and "data_dir" in data.source
    assert capsys.readouterr().err == ""


def test_environment_variable_names_a_folder_and_a_given_one_wins(tmp_path, kind, monkeypatch):
    kind.write(tmp_path / "data")
    monkeypatch.setenv(DATA_ENV, "~/data")
    data = kind.load(mirrors=())
    kind.assert_is_real(data)
    assert DATA_ENV in data.source
    monkeypatch.setenv(DATA_ENV, str(tmp_path / "missing"))
    kind.assert_is_real(kind.load("~/data"))


@pytest.mark.parametrize("by_env", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_without_the_data_raises_though_cache_and_mirror_have_it(
    tmp_path, caches, kind, by_env, is_there, monkeypatch
):
    kind.write(caches / kind.folder)
    mirror, folder = kind.write(tmp_path / "mirror").as_uri(), tmp_path / "given"
    if is_there:
        folder.mkdir()
    if by_env:
        monkeypatch.setenv(DATA_ENV, str(folder))
    origin = DATA_ENV if by_env else "data_dir"
    says = f"given: .*missing: {kind.lacks}" if is_there else f"{origin}.*given"
    with pytest.raises(FileNotFoundError, match=says):
        kind.load(None if by_env else folder, mirrors=[mirror])


def test_given_file_is_no_folder(tmp_path, kind):
    path = kind.write(tmp_path / "data") / kind.files[0]
    with pytest.raises(NotADirectoryError, match=kind.files[0]):
        kind.load(path)


@pytest.mark.parametrize(
    ("kind", "write", "left_out"),
    [("mnist", write_images, f"{TEST_LABELS}.gz"), ("movielens", write_tables, "movies.dat")],
    indirect=["kind"],
)
def test_given_folder_with_a_file_missing_raises(tmp_path, kind, write, left_out):
    (write(tmp_path / "data" / kind.folder) / left_out).unlink()
    with pytest.raises(FileNotFoundError, match=f"missing: {left_out.removesuffix('.gz')}$"):
        kind.load(tmp_path / "data")


def test_second_mirror_serves_and_the_cache_keeps(
    tmp_path, caches, kind, bad_mirror, http_mirror, capsys
):
    kind.write(tmp_path / "served")
    data = kind.load(mirrors=[bad_mirror, http_mirror])
    kind.assert_is_real(data)
    assert http_mirror in data.source and bad_mirror not in data.source
    assert files_under(caches / kind.folder) == sorted(kind.files)
    said = capsys.readouterr().err
    terms = ("Harper", "Konstan", "2015", "research", "redistributed", "commercially")
    for words in ("mirrors", str(caches), *(terms if kind.folder == "ml-1m" else ())):
        assert words in said
    again = kind.load(mirrors=[bad_mirror])
    kind.assert_is_real(again)
    assert str(caches / kind.folder) in again.source and "downloaded" not in again.source
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "write"),
    [("mnist", write_images), ("mnist", PLAIN), ("movielens", write_zip)],
    indirect=["kind"],
)
def test_damaged_cache_is_downloaded_again(tmp_path, caches, kind, write, capsys):
    mirror = kind.write(tmp_path / "mirror").as_uri()
    write(caches / kind.folder)
    damaged = next((caches / kind.folder).glob(f"{kind.files[0].removesuffix('.gz')}*"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    kind.assert_is_real(kind.load(mirrors=[mirror]))
    assert f"damaged file in the cache: {damaged}" in capsys.readouterr().err
    kind.assert_is_real(kind.load(mirrors=[]))


CORRUPT = {
    "web page": ("mnist", b"<html>please log in</html>"),
    "other pixels": ("mnist", gzip.compress(GOOD[:-1] + b"x")),
    "cut short": ("mnist", PACKED[:-9]),
    "another zip": ("movielens", zipped(folder="")),
}


@pytest.mark.parametrize(("kind", "content"), CORRUPT.values(), ids=CORRUPT, indirect=["kind"])
def test_corrupt_mirror_is_refused(tmp_path, caches, kind, content, capsys):
    good = kind.write(tmp_path / "mirror").as_uri()
    corrupt = kind.write(tmp_path / "corrupt")
    (corrupt / kind.files[0]).write_bytes(content)
    kind.assert_is_stand_in(kind.load(mirrors=[corrupt.as_uri()]), capsys.readouterr().err)
    assert files_under(caches / kind.folder) == []
    kind.assert_is_real(kind.load(mirrors=[corrupt.as_uri(), good]))


def test_without_a_mirror_another_data_set_stands_in_and_says_so(kind, bad_mirror, capsys):
    data = kind.load(mirrors=[bad_mirror])
    said = capsys.readouterr().err
    kind.assert_is_stand_in(data, said)
    assert bad_mirror in said and bad_mirror in data.source


# Downloading one file


def test_fetch_says_what_each_mirror_did(tmp_path, bad_mirror, http_mirror):
    (tmp_path / "served").mkdir()
    with pytest.raises(DownloadError) as error:
        fetch("absent.gz", tmp_path / "into", [bad_mirror, http_mirror, "nonsense"], "0" * 32)
    for words in (f"{bad_mirror}/absent.gz", "404", "unknown url type"):
        assert words in str(error.value)
    assert not (tmp_path / "into").exists()


def test_fetch_does_not_wait_for_a_mute_mirror(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mirror = f"http://127.0.0.1:{mute.getsockname()[1]}"
        # Without a timeout the test would hang; a closed mirror makes it fail instead.
        end = threading.Timer(2.0, mute.close)
        end.start()
        with pytest.raises(DownloadError, match="timed out"):
            fetch("file", tmp_path, [mirror], "0" * 32, timeout=0.05)
        end.cancel()


# What is in the files of MNIST


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("shape", [(258,), (2, 3), (2, 3, 5), (0, 3)])
def test_read_idx_gives_back_what_was_written(tmp_path, pack, shape):
    """258 is 1 and 2 in bytes, of which the larger comes first."""
    array = RNG.integers(0, 256, shape, dtype=np.uint8)
    path = write_all(tmp_path, {"file": pack(to_idx(array))}) / "file"
    read = read_idx(path, rank=len(shape))
    np.testing.assert_array_equal(read, array, strict=True)
    assert read.flags.writeable


GZIP = "expected a whole gzip stream"
BROKEN_IDX = {
    "empty": (b"", "expected an IDX file", "an empty file"),
    "wrong magic": (b"\x01" + GOOD[1:], "expected an IDX file", "01 00 08 03"),
    "other type": (b"\0\0\x0d" + GOOD[3:], "expected type 0x08", "got 0x0d"),
    "rank 0": (b"\0\0\x08\0\x05", "expected rank 1 or more", "got 0"),
    "half a header": (GOOD[:10], "expected a header of 16 bytes", "got 10"),
    "truncated": (GOOD[:-1], "expected 3920 bytes of data", "got 3919"),
    "trailing": (GOOD + b"x", "expected 3920 bytes of data", "got 3921"),
    "wrong dimension": (GOOD[:7] + b"\x06" + GOOD[8:], "expected 4704 bytes", "got 3920"),
    "truncated gzip": (PACKED[:-9], GZIP, "ended"),
    "corrupt gzip": (PACKED[:10] + b"\xff" * 20 + PACKED[30:], GZIP, "invalid block type"),
    "trailing after gzip": (PACKED + b"x", GZIP, "Not a gzipped file"),
}


@pytest.mark.parametrize(("content", "expected", "got"), BROKEN_IDX.values(), ids=BROKEN_IDX)
def test_read_idx_refuses_a_broken_file(tmp_path, content, expected, got):
    path = write_all(tmp_path, {"file": content}) / "file"
    with pytest.raises(ValueError) as error:
        read_idx(path)
    for words in (str(path), expected, got):
        assert words in str(error.value)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_wrong_checksum_raises(tmp_path, name):
    changed = CONTENTS[name][:-1] + bytes([CONTENTS[name][-1] ^ 1])
    write_all(write_images(tmp_path, gzipped=False), {name: changed})
    with pytest.raises(ValueError, match=f"{name}.*{CHECKSUMS[name]}.*{md5(changed)}"):
        load_images(tmp_path)


def test_checksums_and_sizes_are_the_official_ones_unless_given(tmp_path, capsys):
    with pytest.raises(ValueError, match="md5 6bbc9ace898e44ae57da46a324031adb"):
        load_mnist(write_images(tmp_path / "mnist"))
    words = (
        "expected 1000209 ratings of 3706 movies by 6040 users, got 6 ratings of 3 movies by 3 users"
    )
    with pytest.raises(ValueError, match=words):
        load_movielens(write_tables(tmp_path / "tables"))
    mirror = write_zip(tmp_path / "zip").as_uri()
    load_movielens(mirrors=[mirror], sizes=SIZES)
    assert f"expected content with md5 {MOVIELENS_MD5}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected 1000209 ratings"):
        load_movielens(mirrors=[mirror], md5=md5(GOOD_ZIP))


def test_missing_scikit_learn_says_what_to_install(bad_mirror, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "gspmd_mcmc\[demos\]"') as error:
        load_images(mirrors=[bad_mirror])
    assert bad_mirror in str(error.value)


# What is in the files of MovieLens


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("change", [lambda x: x.replace(b"\n", b"\r\n"), lambda x: x[:-1]])
def test_lines_may_end_otherwise(tmp_path, name, change):
    """With carriage returns, or with no newline at the end."""
    assert_is_movielens(load_ratings(write_tables(tmp_path, TABLES | {name: change(TABLES[name])})))


FIELDS = [line.split(b"::") for line in MOVIES.replace(b"A::B", b"A B").splitlines()]
CATALOGUES = {
    "no titles": (b"\n".join(b"::".join([i, b"", genres]) for i, _, genres in FIELDS), False, True),
    "no genres": (b"\n".join(b"::".join([i, title, b""]) for i, title, _ in FIELDS), True, False),
    "no field": (b"\n".join(b"::".join([i, title]) for i, title, _ in FIELDS), True, False),
    "neither": (b"\n".join(b"::".join([i, b"", b""]) for i, _, _ in FIELDS), False, False),
}


@pytest.mark.parametrize(("content", "titles", "genres"), CATALOGUES.values(), ids=CATALOGUES)
def test_a_catalogue_may_lack_titles_or_genres(tmp_path, content, titles, genres):
    data = load_ratings(write_tables(tmp_path, TABLES | {"movies.dat": content}))
    np.testing.assert_array_equal(data.watched, WATCHED)
    assert [len(x) > 0 for x in data.titles] == [titles] * SIZES.movies
    assert [len(x) > 0 for x in data.genres] == [genres] * SIZES.movies


def test_files_of_any_size_are_read_if_asked(tmp_path):
    ratings = RATINGS + b"9::10::4::0\n"
    folder = write_tables(tmp_path, TABLES | {"ratings.dat": ratings})
    assert load_ratings(folder, sizes=None).watched.shape == (4, 3)
    with pytest.raises(ValueError, match="expected 6 ratings"):
        load_ratings(folder)


NUMBERS, LINE = "expected four whole numbers", "expected id::title::genres"
BROKEN_TABLES = [
    ("ratings.dat", b"", f"expected {SIZES}", "got 0 ratings"),
    ("ratings.dat", b"<html>", f"line 1: {NUMBERS}", "<html>"),
    ("ratings.dat", RATINGS.replace(b"2::0", b"2.5::0"), f"line 5: {NUMBERS}", "1::10::2.5::0"),
    ("ratings.dat", RATINGS.replace(b"8::10", b"-8::10"), f"line 4: {NUMBERS}", "-8::10"),
    ("ratings.dat", "३::10::5::0\n".encode(), f"line 1: {NUMBERS}", "10::5::0"),
    ("ratings.dat", RATINGS + b"9" * 10 + b"::1::1::0\n", f"line 7: {NUMBERS}", "9999999999"),
    ("ratings.dat", RATINGS[: RATINGS.index(b"8::7")], f"expected {SIZES}", "got 5 ratings"),
    ("ratings.dat", RATINGS.replace(b"7::1::0", b"7::0::0"), "line 2: expected a rating", "got 0"),
    ("ratings.dat", RATINGS + b"1::7::2::5\n", "line 7: expected one", "movie 7 as in line 2"),
    ("ratings.dat", RATINGS.replace(b"8::7", b"9::7"), f"expected {SIZES}", "by 4 users"),
    ("movies.dat", b"", f"line 1: {LINE}", "got ''"),
    ("movies.dat", MOVIES.replace(b"::Drama", b""), f"line 2: {LINE}", "2::Unseen"),
    ("movies.dat", MOVIES + b"7::Again (1993)::War\n", "line 6: expected each movie once", "7 again"),
    ("movies.dat", MOVIES[: MOVIES.index(b"10::")], "expected every rated movie", "[10]"),
]


@pytest.mark.parametrize(("name", "content", "expected", "got"), BROKEN_TABLES)
def test_a_broken_table_is_refused(tmp_path, name, content, expected, got):
    with pytest.raises(ValueError) as error:
        load_ratings(write_tables(tmp_path, TABLES | {name: content}))
    for words in (str(tmp_path / name), expected, got):
        assert words in str(error.value)


AT = GOOD_ZIP.index(b"ratings.dat") + len(b"ratings.dat")
BROKEN_ZIPS = {
    "cut short": (GOOD_ZIP[:-30], "whole zip file"),
    "damaged inside": (GOOD_ZIP[:AT] + bytes(9) + GOOD_ZIP[AT + 9 :], "whole zip file"),
    "other folder": (zipped(folder="ml-100k/"), "missing: ratings.dat, movies.dat"),
    "a file less": (zipped({"ratings.dat": RATINGS}), "missing: movies.dat"),
    "broken ratings": (zipped(TABLES | {"ratings.dat": b"<html>"}), "ml-1m/ratings.dat, line 1"),
}


@pytest.mark.parametrize(("content", "words"), BROKEN_ZIPS.values(), ids=BROKEN_ZIPS)
def test_a_broken_zip_is_refused(tmp_path, content, words):
    with pytest.raises(ValueError) as error:
        load_ratings(write_zip(tmp_path, content))
    assert str(tmp_path / "ml-1m.zip") in str(error.value) and words in str(error.value)


# The synthetic matrix


def test_synthetic_matrix_has_the_shape_of_the_real_one_unless_told(capsys):
    data = load_movielens(mirrors=[])
    assert data.watched.shape == (6040, 3706) and len(data.titles) == len(data.genres) == 3706
    assert "not MovieLens" in capsys.readouterr().err


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
