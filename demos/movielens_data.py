"""Who watched and rated what, for the demos: MovieLens 1M, or data of its shape drawn from the model.

MovieLens belongs to GroupLens and may not be redistributed, so the project does not contain it: it is
read from a folder, from the cache, or downloaded from GroupLens into the cache.
"""

import hashlib
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np

MOVIELENS_MIRRORS = ("https://files.grouplens.org/datasets/movielens/",)
MOVIELENS_MD5 = "c4d9eecfca2ab87c1945afe126590906"
MOVIELENS_TERMS = (
    "MovieLens 1M belongs to GroupLens (University of Minnesota). Use it for research, and cite F. M. "
    "Harper and J. A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 19, 2015. "
    "It may not be redistributed, nor used commercially, without their permission."
)
SYNTHETIC_DIMENSIONS = 20

_SUBFOLDER = "ml-1m"
_ZIP = "ml-1m.zip"
_RATINGS = "ratings.dat"
_MOVIES = "movies.dat"
_SYNTHETIC_SEED = 0
_BLOCK_ROWS = 256
# Fields this short fit int64 two by two. Possessive (*+): a million lines need no way back.
_RATING_LINES = re.compile(rb"(?:\d{1,9}::\d{1,9}::\d{1,9}::\d{1,18}(?:\r?\n|\Z))*+")
# Titles and genres may be empty. A catalogue without genres may lack their field, in all of its lines.
_MOVIE_LINE = re.compile(r"(\d{1,9})::(.*)::(.*)")
_MOVIE_LINE_WITHOUT_GENRES = re.compile(r"(\d{1,9})::((?:(?!::).)*)()")


class Sizes(NamedTuple):
    """How much there is: ratings, users who rated, and movies that were rated."""

    ratings: int
    users: int
    movies: int

    def __str__(self) -> str:
        return f"{self.ratings} ratings of {self.movies} movies by {self.users} users"


MOVIELENS_SIZES = Sizes(ratings=1_000_209, users=6_040, movies=3_706)


@dataclass(frozen=True, eq=False)
class Ratings:
    """Who rated what, and how.

    Attributes
    ----------
    name : str
        ``"ml-1m"`` or ``"simulated"``.
    user, film : numpy.ndarray
        Row and column of each rating, int32, shape [ratings]. Users stand by their number, rated
        movies by theirs.
    stars : numpy.ndarray
        1 to 5, as uint8, shape [ratings].
    titles, genres, source
        As in `Watched`.
    """

    name: str
    user: np.ndarray
    film: np.ndarray
    stars: np.ndarray
    titles: list[str]
    genres: list[tuple[str, ...]]
    source: str


@dataclass(frozen=True, eq=False)
class Watched:
    """Who watched what.

    Attributes
    ----------
    name : str
        ``"ml-1m"`` or ``"synthetic"``.
    watched : numpy.ndarray
        1 where a user rated a movie, else 0, as uint8, shape [users, movies]. Users stand by their
        number, rated movies by theirs.
    titles : list of str
        Title of each column; empty where the catalogue has none.
    genres : list of tuple of str
        Genres of each column; empty tuples for synthetic movies, and where the catalogue has none.
    source : str
        Where the data came from, in words.
    """

    name: str
    watched: np.ndarray
    titles: list[str]
    genres: list[tuple[str, ...]]
    source: str


def load_movielens(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MOVIELENS_MIRRORS,
    md5: str = MOVIELENS_MD5,
    sizes: Sizes | None = MOVIELENS_SIZES,
) -> Watched:
    """Load MovieLens 1M, or a synthetic matrix of its shape with a message that says so.

    A folder that was asked for, by `data_dir` or else by the environment variable
    ``GSPMD_MCMC_DATA`` (empty counts as unset), is the only place to look. With neither, the
    cache folder comes first, then the mirrors (what they send is checked and cached), then a matrix
    drawn from the model, see `draw_synthetic`.

    Parameters
    ----------
    data_dir : str or path, optional
        Folder with ``ratings.dat`` and ``movies.dat``, or with ``ml-1m.zip``, directly or in a
        subfolder ``ml-1m``.
    mirrors : sequence of str, optional
        Addresses that hold ``ml-1m.zip``, tried in order.
    md5 : str, optional
        Checksum of a zip that is downloaded or cached. Files in `data_dir` have none, as some copies
        leave out the timestamps: their structure is checked.
    sizes : Sizes, optional
        How much there must be in the files; also gives the synthetic matrix its shape. None takes
        files of any size.

    Returns
    -------
    Watched
        The matrix; `Watched.name` and `Watched.source` say which one.

    Raises
    ------
    OSError
        If a folder that was asked for, or a file in it, is missing.
    ValueError
        If a file is damaged, or is not as expected.
    """
    try:
        real = load_real_ratings(data_dir, mirrors=mirrors, md5=md5, sizes=sizes)
        return _watched(real)
    except datasets.Unavailable as error:
        return _stand_in(str(error), sizes or MOVIELENS_SIZES)


def load_ratings(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MOVIELENS_MIRRORS,
    md5: str = MOVIELENS_MD5,
    sizes: Sizes | None = MOVIELENS_SIZES,
) -> Ratings:
    """Load the ratings of MovieLens 1M, or simulated ones with a message that says so.

    Parameters, errors and where files are looked for are those of `load_movielens`; without files the
    ratings are those of `simulate_ratings`.
    """
    try:
        return load_real_ratings(data_dir, mirrors=mirrors, md5=md5, sizes=sizes)
    except datasets.Unavailable as error:
        datasets.announce(f"MovieLens 1M is not available ({error}).")
        datasets.announce(
            "Using simulated ratings of its shape instead, so the results are not MovieLens'. "
            f"{datasets.DATA_ENV} can name a folder that holds {_ZIP}."
        )
        return simulate_ratings(sizes or MOVIELENS_SIZES)


def simulate_ratings(sizes: Sizes = MOVIELENS_SIZES, seed: int = _SYNTHETIC_SEED) -> Ratings:
    """Simulate ratings from a factor model, of as many users, movies and ratings as MovieLens 1M has.

    Users rate from 20 movies to more than a thousand, popular ones more often. Stars are
    3.6 + b_user + b_film + U·V + noise, rounded, with standard deviations 0.4, 0.6, 0.4 (of the product
    of five factors) and 0.85.

    Parameters
    ----------
    sizes : Sizes, optional
        How many ratings (up to rounding), users and movies.
    seed : int, optional
        The same seed gives the same ratings.
    """
    rng = np.random.default_rng(seed)
    least = min(20, sizes.movies)
    wanted = rng.lognormal(0, 1.2, sizes.users)
    wanted = least + wanted / wanted.sum() * max(sizes.ratings - least * sizes.users, 0)
    wanted = np.minimum(wanted.astype(int), sizes.movies * 2 // 3)
    popular = rng.normal(0, 1.5, sizes.movies)
    users, films = [], []
    for user, number in enumerate(np.maximum(wanted, least)):
        # The largest of Gumbel variables around log weights are a draw without replacement.
        order = np.argpartition(-(popular + rng.gumbel(size=sizes.movies)), number - 1)
        films.append(np.sort(order[:number]))
        users.append(np.full(number, user))
    user, film = (np.concatenate(parts).astype(np.int32) for parts in (users, films))
    columns = (sizes.users, 5), (sizes.movies, 5)
    of_users, of_films = (rng.normal(0, np.sqrt(0.4 / np.sqrt(5)), shape) for shape in columns)
    location = 3.6 + rng.normal(0, 0.4, sizes.users)[user] + rng.normal(0, 0.6, sizes.movies)[film]
    location += np.einsum("rk,rk->r", of_users[user], of_films[film])
    stars = np.clip(np.round(rng.normal(location, 0.85)), 1, 5).astype(np.uint8)
    titles = [f"simulated movie {i}" for i in range(sizes.movies)]
    source = "ratings simulated from a factor model in place of MovieLens 1M"
    return Ratings("simulated", user, film, stars, titles, [()] * sizes.movies, source)


def draw_synthetic(num_users: int, num_movies: int, seed: int = _SYNTHETIC_SEED) -> np.ndarray:
    """Draw a watch matrix from the model that the demo fits.

    U, V ~ N(0, 1) of 20 columns, biases u, v ~ N(0, 1), W_ij ~ Bernoulli(sigmoid(U_i·V_j + u_i + v_j)).

    Parameters
    ----------
    num_users, num_movies : int
        Shape of the matrix.
    seed : int, optional
        The same seed gives the same matrix.

    Returns
    -------
    numpy.ndarray
        Zeros and ones as uint8, shape [num_users, num_movies].
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    users, movies = normal(num_users, SYNTHETIC_DIMENSIONS), normal(num_movies, SYNTHETIC_DIMENSIONS)
    user_bias, movie_bias = normal(num_users, 1), normal(1, num_movies)
    watched = np.empty((num_users, num_movies), np.uint8)
    # In blocks, so that no float array is as large as the matrix.
    for start in range(0, num_users, _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        logits = users[block] @ movies.T + user_bias[block] + movie_bias
        # sigmoid(x) = (1 + tanh(x / 2)) / 2, which cannot overflow.
        watched[block] = 2 * rng.random(logits.shape, dtype=np.float32) < 1 + np.tanh(logits / 2)
    return watched


def load_real_ratings(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MOVIELENS_MIRRORS,
    md5: str = MOVIELENS_MD5,
    sizes: Sizes | None = MOVIELENS_SIZES,
) -> Ratings:
    """Load the ratings, or raise `datasets.Unavailable`; all else is as in `load_movielens`."""
    if data_dir is not None:
        return _load_given(Path(data_dir).expanduser(), "data_dir", sizes)
    if from_env := os.environ.get(datasets.DATA_ENV):
        return _load_given(Path(from_env).expanduser(), datasets.DATA_ENV, sizes)
    try:
        return _load_cached(datasets.cache_folder(_SUBFOLDER), mirrors, md5, sizes)
    except OSError as error:
        raise datasets.Unavailable(str(error)) from error


def _watched(ratings: Ratings) -> Watched:
    shape = int(ratings.user.max()) + 1, int(ratings.film.max()) + 1
    watched = np.zeros(shape, np.uint8)
    watched[ratings.user, ratings.film] = 1
    return Watched(ratings.name, watched, ratings.titles, ratings.genres, ratings.source)


def _load_given(root: Path, origin: str, sizes: Sizes | None) -> Ratings:
    if not root.is_dir():
        error = NotADirectoryError if root.exists() else FileNotFoundError
        raise error(f"{origin}: expected a folder with MovieLens 1M, {root} is none")
    places = (root, root / _SUBFOLDER)
    for place in places:
        if not _missing(place):
            return _read_place(place, sizes, f"MovieLens 1M from the folder {place} ({origin})")
    for path in (place / _ZIP for place in places):
        if path.is_file():
            return _read_zip(path, sizes, f"MovieLens 1M from the file {path} ({origin})")
    missing = min((_missing(place) for place in places), key=len)
    raise FileNotFoundError(
        f"{root}: expected {_RATINGS} and {_MOVIES} of MovieLens 1M, or {_ZIP}, here or in a subfolder "
        f"{_SUBFOLDER}; missing: {', '.join(missing)}"
    )


def _load_cached(folder: Path, mirrors: Sequence[str], md5: str, sizes: Sizes | None) -> Ratings:
    path = folder / _ZIP
    source = f"MovieLens 1M from the cache {path}"
    if not _is_cached(path, md5):
        datasets.announce(f"Asking the mirrors for MovieLens 1M (6 MB), to keep it in {folder}")
        datasets.announce(MOVIELENS_TERMS)
        source += f", downloaded from {datasets.fetch(_ZIP, folder, mirrors, md5)}"
    return _read_zip(path, sizes, source)


def _is_cached(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != md5:
        datasets.announce(
            f"Set aside a damaged file in the cache: {path}: expected md5 {md5}, got {found}"
        )
    return found == md5


def _stand_in(reason: str, sizes: Sizes) -> Watched:
    datasets.announce(f"MovieLens 1M is not available ({reason}).")
    datasets.announce(
        "Using a synthetic matrix of its shape instead, drawn from the model, so the results are not "
        f"MovieLens'. {datasets.DATA_ENV} can name a folder that holds {_ZIP}."
    )
    return Watched(
        name="synthetic",
        watched=draw_synthetic(sizes.users, sizes.movies),
        titles=[f"synthetic movie {i}" for i in range(sizes.movies)],
        genres=[()] * sizes.movies,
        source=f"a synthetic matrix drawn from the model in place of MovieLens 1M ({reason})",
    )


def _missing(place: Path | zipfile.Path) -> list[str]:
    return [name for name in (_RATINGS, _MOVIES) if not (place / name).is_file()]


def _read_zip(path: Path, sizes: Sizes | None, source: str) -> Ratings:
    try:
        with zipfile.ZipFile(path) as archive:
            top = zipfile.Path(archive)
            place = top if not _missing(top) else top / _SUBFOLDER
            if missing := _missing(place):
                raise ValueError(f"{path}: expected MovieLens 1M, missing: {', '.join(missing)}")
            return _read_place(place, sizes, source)
    # RuntimeError: how zipfile refuses encrypted files and compression that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{path}: expected a whole zip file, got: {error}") from error


def _read_place(place: Path | zipfile.Path, sizes: Sizes | None, source: str) -> Ratings:
    movies_path, ratings_path = place / _MOVIES, place / _RATINGS
    movies = _parse_movies(movies_path.read_bytes(), str(movies_path))
    ratings = _parse_ratings(ratings_path.read_bytes(), str(ratings_path))
    user_ids, rows = np.unique(ratings[:, 0], return_inverse=True)
    movie_ids, columns = np.unique(ratings[:, 1], return_inverse=True)
    got = Sizes(len(ratings), len(user_ids), len(movie_ids))
    if sizes is not None and got != sizes:
        raise ValueError(f"{ratings_path}: expected {sizes}, got {got}")
    if unknown := [int(i) for i in movie_ids if i not in movies]:
        raise ValueError(f"{movies_path}: expected every rated movie, got none of {unknown[:5]}")
    return Ratings(
        name="ml-1m",
        user=rows.astype(np.int32),
        film=columns.astype(np.int32),
        stars=ratings[:, 2].astype(np.uint8),
        titles=[movies[i][0] for i in movie_ids],
        genres=[movies[i][1] for i in movie_ids],
        source=source,
    )


def _parse_ratings(content: bytes, path: str) -> np.ndarray:
    """Read lines ``user::movie::rating::timestamp`` into int64, shape [ratings, 4]."""
    lines = _RATING_LINES.match(content)
    end = lines.end() if lines else 0
    if end != len(content):
        number = content.count(b"\n", 0, end) + 1
        line = content[end : end + 80].split(b"\n")[0]
        raise ValueError(f"{path}, line {number}: expected four whole numbers between ::, got {line!r}")
    # One call for a million lines, which are known to be whole numbers by now.
    text = content.replace(b"::", b" ").decode("ascii")
    ratings = np.fromstring(text, np.int64, sep=" ").reshape(-1, 4)
    wrong = np.flatnonzero((ratings[:, 2] < 1) | (ratings[:, 2] > 5))
    if len(wrong):
        got = ratings[wrong[0], 2]
        raise ValueError(f"{path}, line {wrong[0] + 1}: expected a rating from 1 to 5, got {got}")
    _check_pairs(ratings, path)
    return ratings


def _check_pairs(ratings: np.ndarray, path: str) -> None:
    pairs = ratings[:, 0] * 1_000_000_000 + ratings[:, 1]
    order = np.argsort(pairs, kind="stable")
    again = np.flatnonzero(np.diff(pairs[order]) == 0)
    if len(again):
        first, second = order[again[0]] + 1, order[again[0] + 1] + 1
        user, movie = ratings[first - 1, :2]
        raise ValueError(
            f"{path}, line {second}: expected one rating of a movie by a user, got user {user} and "
            f"movie {movie} as in line {first}"
        )


def _parse_movies(content: bytes, path: str) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Read lines ``movie::title::genre|genre`` into titles and genres by movie.

    Either may be empty, and a catalogue whose first line has no genres' field has none in any.
    """
    movies = {}
    # Not splitlines(), which would also cut at bytes that are letters or blanks of latin-1.
    lines = content.decode("latin-1").removesuffix("\n").split("\n")
    is_bare = _MOVIE_LINE_WITHOUT_GENRES.fullmatch(lines[0].removesuffix("\r"))
    pattern, form = _MOVIE_LINE, "id::title::genres"
    if is_bare:
        pattern, form = _MOVIE_LINE_WITHOUT_GENRES, "id::title, as in line 1"
    for number, line in enumerate(lines, start=1):
        fields = pattern.fullmatch(line.removesuffix("\r"))
        if fields is None:
            raise ValueError(f"{path}, line {number}: expected {form}, got {line[:80]!r}")
        movie = int(fields[1])
        if movie in movies:
            raise ValueError(f"{path}, line {number}: expected each movie once, got {movie} again")
        movies[movie] = fields[2].strip(), tuple(filter(None, fields[3].split("|")))
    return movies
