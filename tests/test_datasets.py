import gzip
import hashlib
import http.server
import io
import socket
import struct
import sys
import threading
from email.message import Message
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

from demos import datasets
from demos.datasets import DATA_ENV, DownloadError, fetch, load_mnist, read_idx

TRAIN_IMAGES = "train-images-idx3-ubyte"
RNG = np.random.default_rng(7)
ARRAYS = {
    TRAIN_IMAGES: RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.array([3, 1, 4, 1, 9], np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.array([2, 7, 0], np.uint8),
}


def to_idx(array):
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


CONTENTS = {name: to_idx(array) for name, array in ARRAYS.items()}
CHECKSUMS = {name: md5(content) for name, content in CONTENTS.items()}
GOOD = CONTENTS[TRAIN_IMAGES]

load_small = partial(load_mnist, checksums=CHECKSUMS)


def write_files(folder, gzipped=True, dotted=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        stem = name.replace("-idx", ".idx") if dotted else name
        end, data = (".gz", gzip.compress(content)) if gzipped else ("", content)
        (folder / f"{stem}{end}").write_bytes(data)
    return folder


def assert_is_small_mnist(data):
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
    return tmp_path / "xdg" / "gspmd_mcmc" / "mnist"


@pytest.fixture
def good_mirror(tmp_path):
    return write_files(tmp_path / "mirror").as_uri()


@pytest.fixture
def bad_mirror(tmp_path):
    return (tmp_path / "no-such-mirror").as_uri()


@pytest.fixture
def http_mirror(tmp_path):
    folder = write_files(tmp_path / "served")
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# Reading one file


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 5), (0, 3)])
def test_read_idx_gives_back_what_was_written(tmp_path, pack, shape):
    array = RNG.integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(pack(to_idx(array)))
    read = read_idx(path, rank=len(shape))
    np.testing.assert_array_equal(read, array, strict=True)
    assert read.flags.writeable


def test_read_idx_reads_dimensions_as_big_endian(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 1, 2]) + bytes(258))
    assert read_idx(path).shape == (258,)


PACKED = gzip.compress(GOOD)
BROKEN = {
    "empty": (b"", "expected an IDX file", "an empty file"),
    "wrong magic": (b"\x01" + GOOD[1:], "expected an IDX file", "01 00 08 03"),
    "three bytes": (GOOD[:3], "expected an IDX file", "00 00 08"),
    "web page": (b"<html>", "expected an IDX file", "3c 68 74 6d"),
    "other type": (b"\0\0\x0d" + GOOD[3:], "expected type 0x08", "got 0x0d"),
    "rank 0": (b"\0\0\x08\0\x05", "expected rank 1 or more", "got 0"),
    "half a header": (GOOD[:10], "expected a header of 16 bytes", "got 10"),
    "truncated": (GOOD[:-1], "expected 3920 bytes of data", "got 3919"),
    "trailing": (GOOD + b"x", "expected 3920 bytes of data", "got 3921"),
    "wrong dimension": (GOOD[:7] + b"\x06" + GOOD[8:], "expected 4704 bytes", "got 3920"),
    "truncated inside gzip": (gzip.compress(GOOD[:-1]), "expected 3920 bytes", "got 3919"),
    "truncated gzip": (PACKED[:-9], "expected a whole gzip stream", "ended"),
    "only the gzip magic": (PACKED[:2], "expected a whole gzip stream", "ended"),
    "wrong gzip checksum": (
        PACKED[:-8] + bytes(4) + PACKED[-4:],
        "expected a whole gzip stream",
        "CRC check failed",
    ),
    "corrupt gzip stream": (
        PACKED[:10] + b"\xff" * 20 + PACKED[30:],
        "expected a whole gzip stream",
        "invalid block type",
    ),
    "trailing after gzip": (PACKED + b"x", "expected a whole gzip stream", "Not a gzipped file"),
}


@pytest.mark.parametrize("content, expected, got", BROKEN.values(), ids=BROKEN.keys())
def test_read_idx_refuses_a_broken_file(tmp_path, content, expected, got):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_idx(path)
    for words in (str(path), expected, got):
        assert words in str(error.value)


def test_read_idx_refuses_another_rank(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(GOOD)
    with pytest.raises(ValueError, match="expected rank 1, got 3"):
        read_idx(path, rank=1)


# A folder that was asked for


@pytest.mark.parametrize("subfolder", ["", "mnist"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("gzipped", [False, True])
def test_given_folder(tmp_path, subfolder, dotted, gzipped, capsys):
    root = tmp_path / "data"
    write_files(root / subfolder, gzipped, dotted)
    data = load_small(root, mirrors=())
    assert_is_small_mnist(data)
    assert str(root / subfolder) in data.source
    assert capsys.readouterr().err == ""


def test_given_folder_may_be_a_string_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(tmp_path / "data")
    assert_is_small_mnist(load_small("~/data"))
    monkeypatch.setenv(DATA_ENV, "~/data")
    assert_is_small_mnist(load_small(mirrors=()))


def test_unpacked_content_under_a_gz_name_is_read(tmp_path):
    folder = write_files(tmp_path / "data")
    (folder / f"{TRAIN_IMAGES}.gz").write_bytes(GOOD)
    assert_is_small_mnist(load_small(folder))


def test_complete_subfolder_wins_over_stray_files(tmp_path):
    write_files(tmp_path / "data" / "mnist")
    (tmp_path / "data" / TRAIN_IMAGES).write_bytes(b"stray")
    assert_is_small_mnist(load_small(tmp_path / "data"))


def test_environment_variable_names_the_folder(tmp_path, monkeypatch):
    write_files(tmp_path / "data")
    monkeypatch.setenv(DATA_ENV, str(tmp_path / "data"))
    data = load_small(mirrors=())
    assert_is_small_mnist(data)
    assert DATA_ENV in data.source


def test_given_folder_wins_over_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV, str(tmp_path / "missing"))
    assert_is_small_mnist(load_small(write_files(tmp_path / "data")))


def test_empty_environment_variable_counts_as_unset(cache, monkeypatch):
    write_files(cache)
    monkeypatch.setenv(DATA_ENV, "")
    assert_is_small_mnist(load_small(mirrors=()))


@pytest.mark.parametrize("by_env", [False, True])
def test_missing_folder_raises_though_mirrors_would_do(tmp_path, good_mirror, by_env, monkeypatch):
    missing = tmp_path / "missing"
    if by_env:
        monkeypatch.setenv(DATA_ENV, str(missing))
    origin = DATA_ENV if by_env else "data_dir"
    with pytest.raises(FileNotFoundError, match=f"{origin}.*missing"):
        load_small(None if by_env else missing, mirrors=[good_mirror])


def test_given_file_is_no_folder(tmp_path):
    path = tmp_path / TRAIN_IMAGES
    path.write_bytes(GOOD)
    with pytest.raises(NotADirectoryError, match=TRAIN_IMAGES):
        load_small(path)


def test_given_folder_with_a_file_missing_raises(tmp_path, good_mirror):
    folder = write_files(tmp_path / "data")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="missing: t10k-labels-idx1-ubyte$"):
        load_small(folder, mirrors=[good_mirror])


@pytest.mark.parametrize("name", CONTENTS)
def test_given_folder_with_a_wrong_checksum_raises(tmp_path, good_mirror, name):
    folder = write_files(tmp_path / "data", gzipped=False)
    changed = CONTENTS[name][:-1] + bytes([CONTENTS[name][-1] ^ 1])
    (folder / name).write_bytes(changed)
    with pytest.raises(ValueError, match=f"{name}.*{CHECKSUMS[name]}.*{md5(changed)}"):
        load_small(folder, mirrors=[good_mirror])


def test_checksums_are_the_official_ones_unless_given(tmp_path):
    folder = write_files(tmp_path / "data")
    with pytest.raises(ValueError, match="md5 6bbc9ace898e44ae57da46a324031adb"):
        load_mnist(folder)


def test_given_folder_with_a_broken_gzip_raises(tmp_path):
    folder = write_files(tmp_path / "data")
    (folder / f"{TRAIN_IMAGES}.gz").write_bytes(PACKED[:-9])
    with pytest.raises(ValueError, match=f"{TRAIN_IMAGES}.*gzip"):
        load_small(folder)


def test_images_must_be_images(tmp_path):
    folder = write_files(tmp_path / "data", gzipped=False)
    labels = CONTENTS["train-labels-idx1-ubyte"]
    (folder / TRAIN_IMAGES).write_bytes(labels)
    with pytest.raises(ValueError, match=f"{TRAIN_IMAGES}: expected rank 3, got 1"):
        load_mnist(folder, checksums={**CHECKSUMS, TRAIN_IMAGES: md5(labels)})


def test_labels_must_match_images(tmp_path):
    folder = write_files(tmp_path / "data", gzipped=False)
    name = "t10k-labels-idx1-ubyte"
    content = to_idx(np.zeros(4, np.uint8))
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: expected 3 labels, got 4"):
        load_mnist(folder, checksums={**CHECKSUMS, name: md5(content)})


# The mirrors and the cache


def test_second_mirror_serves_and_the_cache_keeps(cache, bad_mirror, http_mirror):
    data = load_small(mirrors=[bad_mirror, http_mirror])
    assert_is_small_mnist(data)
    assert http_mirror in data.source and bad_mirror not in data.source
    assert files_under(cache) == sorted(f"{name}.gz" for name in CONTENTS)


def test_second_call_needs_no_mirror(cache, good_mirror, bad_mirror, capsys):
    load_small(mirrors=[good_mirror])
    assert "mirrors" in capsys.readouterr().err
    data = load_small(mirrors=[bad_mirror])
    assert_is_small_mnist(data)
    assert str(cache) in data.source and "downloaded" not in data.source
    assert capsys.readouterr().err == ""


def test_only_what_the_cache_lacks_is_downloaded(cache, tmp_path):
    write_files(cache)
    (cache / f"{TRAIN_IMAGES}.gz").unlink()
    mirror = tmp_path / "one-file"
    mirror.mkdir()
    (mirror / f"{TRAIN_IMAGES}.gz").write_bytes(PACKED)
    assert_is_small_mnist(load_small(mirrors=[mirror.as_uri()]))


@pytest.mark.parametrize("gzipped", [False, True])
def test_damaged_cache_is_downloaded_again(cache, good_mirror, gzipped, capsys):
    write_files(cache, gzipped)
    damaged = next(cache.glob(f"{TRAIN_IMAGES}*"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert_is_small_mnist(load_small(mirrors=[good_mirror]))
    assert f"damaged file in the cache: {damaged}" in capsys.readouterr().err
    assert_is_small_mnist(load_small(mirrors=[]))


@pytest.mark.parametrize(
    "content",
    [b"<html>please log in</html>", gzip.compress(GOOD[:-1] + b"x"), PACKED[:-9]],
    ids=["web page", "other pixels", "cut short"],
)
def test_corrupt_mirror_is_refused(cache, tmp_path, good_mirror, content, capsys):
    corrupt = write_files(tmp_path / "corrupt")
    (corrupt / f"{TRAIN_IMAGES}.gz").write_bytes(content)
    data = load_small(mirrors=[corrupt.as_uri()])
    assert_is_digits(data, capsys.readouterr().err)
    assert files_under(cache) == []
    assert_is_small_mnist(load_small(mirrors=[corrupt.as_uri(), good_mirror]))


def test_download_leaves_a_file_already_there_until_it_has_a_better_one(cache, tmp_path):
    write_files(cache)
    corrupt = write_files(tmp_path / "corrupt")
    (corrupt / f"{TRAIN_IMAGES}.gz").write_bytes(b"junk")
    with pytest.raises(DownloadError):
        fetch(f"{TRAIN_IMAGES}.gz", cache, [corrupt.as_uri()], CHECKSUMS[TRAIN_IMAGES])
    assert_is_small_mnist(load_small(mirrors=[]))


def test_fetch_checks_a_file_that_is_not_gzipped(tmp_path, good_mirror):
    (tmp_path / "mirror" / "ratings.zip").write_bytes(b"PK ratings")
    into = tmp_path / "new" / "folder"
    with pytest.raises(DownloadError, match="ratings.zip.*md5"):
        fetch("ratings.zip", into, [good_mirror], md5(b"other"))
    assert fetch("ratings.zip", into, [good_mirror], md5(b"PK ratings")) == good_mirror
    assert (into / "ratings.zip").read_bytes() == b"PK ratings"


def test_fetch_says_what_each_mirror_did(tmp_path, bad_mirror, http_mirror):
    with pytest.raises(DownloadError) as error:
        fetch("absent.gz", tmp_path / "into", [bad_mirror, http_mirror, "nonsense"], "0" * 32)
    for words in (f"{bad_mirror}/absent.gz", "404", "unknown url type"):
        assert words in str(error.value)
    assert not (tmp_path / "into").exists()


def test_fetch_closes_the_answer_of_a_mirror_that_refuses(tmp_path, monkeypatch):
    def refuse(url, timeout):
        raise error

    answer = io.BytesIO(b"go away")
    # Held here, so that only a call to close it closes it.
    error = HTTPError("http://mirror/file", 403, "Forbidden", Message(), answer)
    monkeypatch.setattr(datasets, "urlopen", refuse)
    with pytest.raises(DownloadError, match="403"):
        fetch("file", tmp_path, ["http://mirror"], "0" * 32)
    assert answer.closed


def test_fetch_does_not_wait_for_a_mute_mirror(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mirror = f"http://127.0.0.1:{mute.getsockname()[1]}"
        # Without a timeout the test would hang; a closed mirror makes it fail instead.
        end = threading.Timer(2.0, mute.close)
        end.start()
        with pytest.raises(DownloadError, match="timed out"):
            fetch("file", tmp_path, [mirror], "0" * 32, timeout=0.05)
        end.cancel()


def test_cache_folder_ignores_a_relative_xdg_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / ".cache" / "gspmd_mcmc" / "mnist"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert datasets.cache_folder("mnist") == home
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.cache_folder("mnist") == home


# The digits in place of MNIST


def test_digits_stand_in_and_say_so(bad_mirror, capsys):
    data = load_small(mirrors=[bad_mirror])
    said = capsys.readouterr().err
    assert_is_digits(data, said)
    assert bad_mirror in said and bad_mirror in data.source
    assert (data.train_images.shape, data.test_images.shape) == ((1437, 64), (360, 64))
    assert (data.train_images.dtype, data.test_labels.dtype) == (np.uint8, np.int32)
    assert data.train_images.max() == data.scale


def test_digits_split_keeps_every_row_and_is_always_the_same():
    from sklearn.datasets import load_digits

    once, again = load_small(mirrors=[]), load_small(mirrors=[])
    np.testing.assert_array_equal(once.test_images, again.test_images)
    images = np.concatenate([once.train_images, once.test_images])
    labels = np.concatenate([once.train_labels, once.test_labels])
    expected = [np.asarray(part) for part in load_digits(return_X_y=True)]
    rows = np.column_stack([images, labels]).tolist()
    assert sorted(rows) == sorted(np.column_stack(expected).tolist())
    assert set(once.test_labels) == set(range(10))


def test_unwritable_cache_gives_digits_and_the_reason(tmp_path, good_mirror, monkeypatch, capsys):
    (tmp_path / "occupied").write_text("a file where the cache folder would go")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert_is_digits(load_small(mirrors=[good_mirror]), said := capsys.readouterr().err)
    assert "occupied" in said


def test_unreadable_cache_gives_digits_and_the_reason(cache, monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(f"may not read {path}")

    write_files(cache)
    # By hand, since root may read any file.
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert_is_digits(load_small(mirrors=[]), said := capsys.readouterr().err)
    assert f"may not read {cache}" in said


def test_missing_scikit_learn_says_what_to_install(bad_mirror, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "gspmd_mcmc\[demos\]"') as error:
        load_small(mirrors=[bad_mirror])
    assert bad_mirror in str(error.value)
