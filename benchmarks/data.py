"""Where the data of the benchmarks come from: where the demos' do, or else they are simulated.

A folder that ``--data-dir`` or GSPMD_MCMC_DATA names is the only place to look. With neither, the
demos' loaders look into the cache, and ask the mirrors. If that fails, simulated files of the same
shapes replace the data, and a line on the standard error stream reports it.
"""

import argparse
import gzip
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# The demos import one another as scripts of one folder do.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demos"))

from demos import movielens_data  # noqa: E402
from demos.movielens_data import Sizes  # noqa: E402

datasets = movielens_data.datasets

MNIST, MOVIELENS = "mnist", "ml-1m"
LOADERS = {MNIST: datasets.load_real_mnist, MOVIELENS: movielens_data.load_real_ratings}
IMAGES = (60_000, 10_000)  # to train on, and to test


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--data-dir``."""
    text = "folder with the data; by default the cache, a download, or simulated data"
    parser.add_argument("--data-dir", default=os.environ.get(datasets.DATA_ENV) or None, help=text)


@contextmanager
def folder_of(names: Collection[str], asked: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a folder that has the data sets ``names``, and where each came from, in words.

    Each is there in a subfolder of its name, with the official names of files, or directly. The program
    ends with the loader's message if a folder that was asked for does not hold the data.
    """
    if asked is not None:
        folder = Path(asked).expanduser().resolve()
        try:
            sources = {name: LOADERS[name](folder).source for name in names}
        except (OSError, ValueError) as error:
            raise SystemExit(f"--data-dir or {datasets.DATA_ENV}: {error}") from error
        yield str(folder), sources
        return
    with tempfile.TemporaryDirectory() as scratch:
        sources = {name: _found_or_simulated(name, Path(scratch) / name) for name in names}
        yield scratch, sources


def _found_or_simulated(name: str, place: Path) -> str:
    try:
        source = LOADERS[name]().source
    except datasets.Unavailable as error:
        datasets.announce(
            f"{name} is not available ({error}). Simulated data of its shape replace it, so results "
            f"are not {name}'s. --data-dir or {datasets.DATA_ENV} can name a folder that holds {name}."
        )
        place.mkdir()
        if name == MNIST:
            simulate_images(place, IMAGES)
        else:
            simulate_ratings(place, movielens_data.MOVIELENS_SIZES)
        return f"simulated data of the shape of {name}"
    place.symlink_to(datasets.cache_folder(name))
    return source


def simulate_images(folder: Path, counts: tuple[int, int]) -> None:
    """Write the four files of MNIST with random pixels and labels, of so many images."""
    rng = np.random.default_rng(0)
    for part, count in zip(("train", "t10k"), counts, strict=True):
        shape = (count, 28, 28)
        pixels = rng.integers(0, 256, shape, np.uint8) * (rng.random(shape, np.float32) < 0.2)
        labels = rng.integers(0, 10, count, np.uint8)
        for kind, array in (("images-idx3", pixels.astype(np.uint8)), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
            content = gzip.compress(head + array.tobytes(), compresslevel=1)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)


def simulate_ratings(folder: Path, sizes: Sizes) -> None:
    """Write files of MovieLens with the demos' simulated ratings; every film has one at least."""
    rated = movielens_data.simulate_ratings(sizes)
    unrated = np.setdiff1d(np.arange(sizes.movies), rated.film)
    user = np.concatenate([unrated % sizes.users, rated.user])
    film = np.concatenate([unrated, rated.film])
    stars = np.concatenate([np.full(len(unrated), 3), rated.stars])
    rows = zip((user + 1).tolist(), (film + 1).tolist(), stars.tolist(), strict=True)
    (folder / "ratings.dat").write_text("".join(f"{u}::{f}::{s}::0\n" for u, f, s in rows))
    titles = (f"{i + 1}::{title}::\n" for i, title in enumerate(rated.titles))
    (folder / "movies.dat").write_text("".join(titles))
