"""Tables become columns with labels, and the names of groups reach draws, stores and summaries."""

import datetime
import decimal
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import xarray as xr
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.summary import summarize
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.storage.datatree import to_datatree

FRAME = pd.DataFrame(
    {
        "station": ["b", "a", "b", "c"],
        "kind": pd.Categorical(["x", "y", "x", "x"], ["y", "x", "unused"], ordered=True),
        "other": pd.Categorical(["x", "y", "x", "x"], ["y", "x", "unused"]),
        "code": pd.Categorical([7, 5, 7, 7]),
        "y": np.array([0.5, 1.0, -2.0, 3.0], np.float32),
        "count": np.array([3, 2, 1, 0], np.int8),
        "is_wet": [True, False, True, True],
    }
)
EXPECTED = {
    "station": ([1, 0, 1, 2], ["a", "b", "c"]),
    "kind": ([1, 0, 1, 1], ["y", "x", "unused"]),
    "other": ([0, 1, 0, 0], ["x", "y"]),
    "code": ([1, 0, 1, 1], [5, 7]),
}


class OnlyInterchange:
    """A frame of a library that knows the dataframe interchange protocol alone."""

    def __init__(self, frame):
        self.frame = frame

    def __dataframe__(self, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas wants others to leave the protocol
            return self.frame.__dataframe__(**options)


class OnlyCapsules:
    """A frame of a library that knows Arrow's PyCapsule interface alone."""

    def __init__(self, frame):
        self.table = pa.table(frame)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


# What is read


@pytest.mark.parametrize(
    "door", [lambda x: x, pa.table, OnlyCapsules], ids=["pandas", "arrow", "capsule"]
)
def test_a_frame_becomes_numbers_and_indices_of_labels(door):
    table = gm.read_table(door(FRAME))
    assert list(table) == list(FRAME) and table.num_rows == 4 and len(table) == 7
    for name, (index, labels) in EXPECTED.items():
        assert table[name].dtype == np.int32
        assert (table[name].tolist(), table.labels[name].tolist()) == (index, labels)
    assert set(table.labels) == set(EXPECTED)
    for name in ("y", "count", "is_wet"):
        assert table[name].dtype == FRAME[name].dtype
        np.testing.assert_array_equal(table[name], FRAME[name])
    assert repr(table).startswith("Table(4 rows: station of 3 labels, kind of 3 labels")


def test_the_interchange_protocol_is_a_door_too():
    table = gm.read_table(OnlyInterchange(FRAME[["station", "y", "other"]]), ["y", "station"])
    assert list(table) == ["y", "station"]
    assert table["station"].tolist() == [1, 0, 1, 2] and table.labels["station"].tolist() == [*"abc"]


def test_polars_is_read_with_the_order_of_its_enums():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame(
        {
            "station": ["b", "a", "b"],
            "kind": pl.Series(["x", "y", "x"], dtype=pl.Enum(["y", "x", "unused"])),
            "other": pl.Series(["y", "x", "y"], dtype=pl.Categorical),
            "y": [0.5, 1.0, 2.0],
        }
    )
    table = gm.read_table(frame)
    assert {name: x.tolist() for name, x in table.labels.items()} == {
        "station": ["a", "b"],
        "kind": ["y", "x", "unused"],
        "other": ["x", "y"],
    }
    assert [table[name].tolist() for name in table.labels] == [[1, 0, 1], [1, 0, 1], [1, 0, 1]]
    with pytest.raises(ValueError, match=r"column 'y': 1 rows have no value, the first is row 1 "):
        gm.read_table(pl.DataFrame({"y": [0.5, float("nan")]}))


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    FRAME.to_parquet(tmp_path / "table.parquet")
    np.testing.assert_array_equal(gm.read_table("~/table.parquet", "y")["y"], FRAME["y"])


def test_parquet_is_read_from_a_file_in_many_pieces_and_from_a_folder(tmp_path):
    long = pd.concat([FRAME.assign(station=[*names]) for names in ("bacd", "zyxw", "aaab")])
    (tmp_path / "parts").mkdir()
    parquet.write_table(pa.table(long), tmp_path / "all.parquet", row_group_size=3)
    for i in range(3):
        part = pa.table(long.iloc[4 * i : 4 * i + 4])
        parquet.write_table(part, tmp_path / "parts" / f"{i}.parquet")
    whole = gm.read_table(tmp_path / "all.parquet")
    assert "__index_level_0__" in parquet.read_schema(tmp_path / "all.parquet").names
    assert list(whole) == list(FRAME)
    for source in (str(tmp_path / "all.parquet"), tmp_path / "parts"):
        table = gm.read_table(source, columns=["station", "y"])
        assert table.labels["station"].tolist() == sorted(set(long["station"]))
        np.testing.assert_array_equal(table.labels["station"][table["station"]], long["station"])
        np.testing.assert_array_equal(table["y"], long["y"])


def test_decimals_are_floats_and_a_dict_of_arrays_is_a_table():
    table = gm.read_table({"price": [decimal.Decimal("1.50")], "x": np.ones(1), "s": np.array(["a"])})
    assert table["price"].tolist() == [1.5] and table["price"].dtype == np.float64
    assert table["x"].dtype == np.float64 and table.labels["s"].tolist() == ["a"]


def test_other_rows_take_the_indices_of_the_labels_that_are_given():
    table = gm.read_table(FRAME)
    more = FRAME.iloc[[3, 0]].assign(count=[2, 0])
    found = gm.read_table(more, ["station", "count"], labels=table.labels | {"count": [2, 1, 0]})
    assert found["station"].tolist() == [2, 1] and found["count"].tolist() == [0, 2]
    assert found.labels["station"].tolist() == ["a", "b", "c"]
    assert gm.read_table(more, "station")["station"].tolist() == [1, 0]  # of its own labels
    with pytest.raises(ValueError, match=r"not among the 1 given, the first is row 1 .* with 'b'"):
        gm.read_table(more, labels={"station": ["c"]})


# Into placement


def test_a_table_goes_into_place_as_a_dict_of_its_columns_does():
    table = gm.read_table(FRAME, ["y", "station"])
    mesh = mesh_of({"data": 2})
    placed, plain = (gm.place(x, mesh, P("data")) for x in (table, dict(table)))
    assert isinstance(placed, gm.Table) and list(placed) == ["y", "station"] and not placed.labels
    jax.tree.map(np.testing.assert_array_equal, dict(placed), dict(table))
    assert jnp.asarray(placed["y"]).sharding == plain["y"].sharding
    rows = gm.Groups(table.key("station")).place_rows(table).rows
    assert set(rows) == {"y", "station"}
    plate = gm.Plate(lambda params, block: block["y"] * params, table)
    assert plate.log_likelihood_rows(jnp.ones(())).tolist() == table["y"].tolist()


def test_groups_take_a_key_with_its_name_and_the_labels_that_have_rows():
    table = gm.read_table(FRAME)
    kinds = gm.Groups(table.key("kind"))
    assert (kinds.name, kinds.labels.tolist(), kinds.sizes.tolist()) == ("kind", ["y", "x"], [1, 3])
    assert repr(kinds) == "Groups(kind, 2 groups of 1 to 3 rows)"
    counts = gm.Groups(table.key("count"), name="visits")
    assert (counts.name, counts.labels.tolist()) == ("visits", [0, 1, 2, 3])
    assert gm.Groups(FRAME["station"]).name == "station" and gm.Groups(["a"]).name == ""


def test_keys_of_another_table_go_by_their_labels_not_by_their_indices():
    groups = gm.Groups(gm.read_table(FRAME).key("station"), tile_rows=3)
    others = gm.read_table({"station": ["c", "b"], "v": [10, 20]})
    assert others["station"].tolist() == [1, 0]  # other indices than those of `groups`
    laid = groups.place_rows({"v": others["v"]}, others.key("station"))
    same = groups.place_rows({"v": others["v"]}, ["c", "b"])
    for one, two in zip(jax.tree.leaves(laid), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match="not among the 3 labels, the first is row 1 with 'd'"):
        groups.place_rows({"v": others["v"]}, gm.read_table({"s": ["c", "d"]}).key("s"))
    with pytest.raises(ValueError, match="expected labels of strings, as values are, got int64"):
        gm.Groups(["a"], labels=[1])


# What is refused


DAY = datetime.date(2020, 1, 1)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (pd.DataFrame({"y": [1.0, np.nan, np.nan]}), "column 'y': 2 rows have no value, .* row 1 "),
        (pa.table({"y": [1.0, 2.0, float("nan")]}), "column 'y': 1 rows have no value, .* row 2 "),
        (pa.table({"n": [None, 3]}), "column 'n': 1 rows have no value, .* row 0 "),
        (pd.DataFrame({"s": ["a", None]}), "column 's': 1 rows have no value, .* row 1 "),
        (
            pd.DataFrame({"c": pd.Categorical(["a", None])}),
            "column 'c': 1 rows have no value, .* row 1 ",
        ),
        (pa.table({"n": pa.nulls(2)}), "column 'n': 2 rows have no value"),
        (pd.DataFrame({"t": pd.to_datetime([DAY])}), r"column 't': .* got timestamp.*; make numbers"),
        (pa.table({"t": [DAY]}), r"column 't': expected numbers, .*got date32.*; make numbers of it"),
        (pa.table({"l": [[1, 2]]}), "column 'l': expected numbers, .* got list<.*leave it out"),
        (pd.DataFrame({"c": pd.Categorical([1.5])}), "column 'c': .* got labels of double"),
        (pd.DataFrame({"m": [1, "a"]}), "Arrow cannot read it, .*column m .* each of one type"),
        ({"a": [1, 2], "b": [1]}, "Arrow cannot read it, .* b expected length 2 but got length 1"),
        (pd.DataFrame({"y": []}), "expected a table with rows, got 0 rows"),
        (pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), "'a' is there 2 times"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_name(source, words):
    with pytest.raises(ValueError, match=words):
        gm.read_table(source)


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    table = gm.read_table(FRAME)
    with pytest.raises(ValueError, match="columns: .* 'no' is there 0 times; the source has"):
        gm.read_table(FRAME, ["y", "no"])
    with pytest.raises(TypeError, match="source: expected a path, or a frame .* got int"):
        gm.read_table(3)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="Arrow cannot read it, .*Parquet file. Read other files by"):
        gm.read_table(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="labels: column 'y' has float32; expected labels or integers"):
        gm.read_table(FRAME, labels={"y": [1]})
    with pytest.raises(ValueError, match="labels of column 'station': expected labels of strings"):
        gm.read_table(FRAME, labels={"station": [1]})
    with pytest.raises(
        ValueError, match=r"labels: column 'station': .* shape \[labels\], got int64\[\]"
    ):
        gm.read_table(FRAME, labels={"station": 1})
    with pytest.raises(ValueError, match="column 'y': expected labels or integers as the key"):
        table.key("y")
    with pytest.raises(KeyError, match="the table has"):
        table["no"]
    with pytest.raises(ValueError, match="name: expected a name other than those of chain and draw"):
        gm.Groups(table.key("station"), name="draw")
    with pytest.raises(ValueError, match="labels: expected integers or strings, got a key"):
        gm.Groups(table.key("station"), labels=table.key("station"))


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pyarrow is missing: pip install 'gspmd_mcmc\[tables\]'"):
        gm.read_table(FRAME)


# Names of groups, from the table to the results


STATIONS = np.array(["Oslo", "Bergen", "Narvik", "Hamar", "Moss", "Vardø", "Bodø", "Alta", "Røros"])
ALTITUDE = np.arange(9.0) - 4


def log_prior(params):
    return -0.5 * params["mean"] ** 2


def of_station(params, row):
    return -0.5 * (params["effect"] / 10) ** 2 - 0.5 * jnp.sum(params["station"] ** 2, axis=1)


def of_visit(params, row):
    return -0.5 * ((row["y"] - params["effect"]) / 0.1) ** 2


def visits(name: str | None = "station") -> tuple[gm.Groups, gm.Posterior]:
    rng = np.random.default_rng(0)
    which = rng.permutation(np.repeat(np.arange(9), [2, 8, 8, 8, 2, 8, 2, 2, 8]))
    frame = pd.DataFrame({"station": STATIONS[which], "y": ALTITUDE[which].astype(np.float32)})
    table = gm.read_table(frame)
    key = table["station"] if name is None else table.key("station")
    groups = gm.Groups(key, mesh_of({"chains": 4, "data": 2}), P("data"), name=name)
    plates = (
        gm.Plate(of_station, groups.place(), local=("effect", "station")),
        gm.Plate(of_visit, groups.place_rows({"y": table["y"]}), local="effect"),
    )
    return groups, gm.Posterior(log_prior, *plates)


def sample(target, **options):
    start = {"mean": jnp.zeros(()), "effect": jnp.asarray(np.zeros(9)), "station": jnp.zeros((9, 2))}
    kernel = gm.HMC(target, step_size=0.02, num_integration_steps=5)
    options = {"num_chains": 4, "num_warmup": 60, "num_samples": 40, "progress": False} | options
    return gm.sample(jax.random.key(0), target, start, kernel=kernel, **options)


@pytest.fixture(scope="module")
def run():
    groups, target = visits()
    return groups, sample(target)


def test_draws_know_the_labels_of_latents_of_groups(run):
    groups, draws = run
    assert set(draws.groups) == {"effect", "station"}
    assert draws.groups["effect"].name == "station"
    assert draws.groups["effect"].labels.tolist() == sorted(STATIONS)
    np.testing.assert_array_equal(draws.groups["effect"].sizes, groups.sizes)
    for label, altitude in zip(STATIONS, ALTITUDE, strict=True):
        index = draws.groups["effect"].labels.tolist().index(label)
        assert abs(np.mean(draws.position["effect"][:, :, index]) - altitude) < 0.4


def test_a_datatree_has_the_labels_as_a_coordinate(run):
    groups, draws = run
    tree = draws.to_datatree()
    posterior = tree["posterior"].dataset
    assert posterior["effect"].dims == ("chain", "draw", "station")
    # The leaf that has the name of the coordinate gives way.
    assert posterior["station_"].dims == ("chain", "draw", "station", "station__dim_1")
    for label, altitude in zip(STATIONS, ALTITUDE, strict=True):
        assert abs(float(posterior["effect"].sel(station=label).mean()) - altitude) < 0.4
    rows = tree["constant_data"]["station_rows"]
    assert rows.dims == ("station",) and int(rows.sel(station="Bergen")) == 8
    assert int(rows.sel(station="Oslo")) == 2 and rows.values.tolist() == groups.sizes.tolist()


def test_groups_without_a_name_label_the_axis_of_their_leaf():
    effect = np.zeros((1, 2, 9))
    labels = GroupLabels("", np.arange(9) * 10, np.arange(9) + 1, "")
    tree = to_datatree({"effect": effect}, {"log_density": effect[..., 0]}, {}, {"effect": labels})
    assert tree["posterior"]["effect"].dims == ("chain", "draw", "effect_dim_0")
    assert tree["posterior"]["effect_dim_0"].values.tolist() == labels.labels.tolist()
    assert tree["constant_data"]["effect_dim_0_rows"].values.tolist() == labels.sizes.tolist()
    stats = {"log_density": effect[..., 0]}
    with pytest.raises(
        ValueError, match=r"groups: expected one of \[\], .*got 'station'; Groups\(\.\.\."
    ):
        summarize({"effect": effect}, stats, labels={"effect": labels}, groups="station")


def keep_effect(position, info):
    effect = position["effect"]
    return {"kept": (effect, position["mean"]), "computed": effect * 2, "station": position["station"]}


def test_what_collect_returns_as_it_is_has_its_labels(run):
    groups, draws = run
    _, target = visits()
    kept = sample(target, collect=keep_effect)
    assert set(kept.groups) == {"kept_0", "station"}
    np.testing.assert_array_equal(kept.groups["kept_0"].labels, groups.labels)
    np.testing.assert_array_equal(kept.position["kept"][0], draws.position["effect"])
    np.testing.assert_array_equal(kept.position["station"], draws.position["station"])
    np.testing.assert_array_equal(kept.position["computed"], 2 * draws.position["effect"])
    posterior = kept.to_datatree()["posterior"]
    assert posterior["kept_0"].dims == ("chain", "draw", "station")
    assert posterior["computed"].dims == ("chain", "draw", "computed_dim_0")


def test_a_store_has_the_labels_and_keeps_them_as_a_run_goes_on(tmp_path, run):
    groups, draws = run
    _, target = visits()
    for count in (20, 40):
        sink = gm.ZarrSink(tmp_path / "draws")
        saved = sample(target, to=sink, checkpoint=tmp_path / "run", num_samples=count)
    opened = gm.open_draws(tmp_path / "draws")
    for found in (saved, opened):
        assert {name: x.name for name, x in found.groups.items()} == dict.fromkeys(
            draws.groups, "station"
        )
        np.testing.assert_array_equal(found.groups["effect"].labels, groups.labels)
        np.testing.assert_array_equal(found.groups["effect"].sizes, groups.sizes)
        np.testing.assert_array_equal(found.position["effect"][...], draws.position["effect"])
    tree = xr.open_datatree(tmp_path / "draws", engine="zarr")
    by_name = tree["posterior"].dataset["effect"].sel(station="Bergen")
    index = groups.labels.tolist().index("Bergen")
    np.testing.assert_array_equal(by_name, draws.position["effect"][:, :, index])
    assert tree["posterior"]["station_"].dims[2] == "station"
    assert int(tree["constant_data"].dataset["station_rows"].sel(station="Bergen")) == 8
    assert set(opened.stats) == set(draws.stats)
    assert opened.summary(groups="station").rows[0].values["rows"] in groups.sizes


def test_a_store_of_groups_without_a_name_and_of_some_leaves(tmp_path):
    groups, target = visits(name=None)
    sink = gm.ZarrSink(tmp_path / "draws", leaves="effect")
    sample(target, to=sink, num_warmup=0, num_samples=2)
    found = gm.open_draws(tmp_path / "draws").groups
    assert list(found) == ["effect"] and found["effect"].name == ""
    assert found["effect"].labels.tolist() == groups.labels.tolist()  # integers
    assert found["effect"].labels.dtype.kind == "i"


def test_labels_are_known_by_their_digest_and_name_alone():
    one, two, other = (jax.tree.structure(visits(name)[1]) for name in ("station", "station", "place"))
    assert one == two and hash(one) == hash(two) and one != other


def test_two_groups_of_one_name_are_refused():
    few, many = (gm.Groups(keys, name="station") for keys in (["a", "b"], ["a", "b", "c"]))
    plates = [gm.Plate(of_station, x.place(), local=f"effect_{len(x)}") for x in (few, many)]
    with pytest.raises(ValueError, match="two Groups have the name 'station'"):
        gm.Posterior(log_prior, *plates)
    gm.Posterior(log_prior, plates[0], gm.Plate(of_visit, few.place_rows({"y": np.ones(2)})))


# Summaries by name

LABELS = GroupLabels("station", STATIONS, np.arange(9) + 1, "")


@pytest.fixture(scope="module")
def drawn():
    """White draws; a chain of Narvik's effect is elsewhere, Moss's second slope hardly moves."""
    noise = np.random.default_rng(1).normal(size=(4, 400, 9, 3)).astype(np.float32)
    noise[0, :, 2, 0] += 3
    noise[:, :, 4, 2] = np.cumsum(noise[:, :, 4, 2], axis=1) / 40
    return {"effect": noise[..., 0], "mu": noise[:, :, 0, 0], "slope": noise[..., 1:]}


def summary_of(position, **options):
    stats = {"log_density": np.asarray(position["mu"])}
    labels = {"effect": LABELS, "slope": LABELS}
    return summarize(position, stats, labels=labels, **options)


def test_the_worst_groups_stand_first_by_name(drawn):
    plain, found = summary_of(drawn), summary_of(drawn, groups="station", max_rows=3)
    assert found.groups == "station" and found.num_left_out == 6
    by_name = {row.name.split(":")[0]: row for row in found.rows}
    worst = sorted(["Moss", "Narvik"], key=lambda x: -by_name[x].values["rhat"])
    assert [row.name.split(":")[0] for row in found.rows[:2]] == worst
    assert by_name["Narvik"].name == "Narvik: effect" and by_name["Moss"].name == "Moss: slope[:, 1]"
    assert by_name["Narvik"].values["rows"] == 3 and by_name["Moss"].values["rows"] == 5
    for key in ("mean", "rhat"):
        assert by_name["Narvik"].values[key] == plain["effect"][key][2]
        assert by_name["Moss"].values[key] == plain["slope"][key][4, 1]
    all_groups = summary_of(drawn, groups="station").rows[:-1]
    assert sorted(row.name.split(":")[0] for row in all_groups) == sorted(STATIONS)
    for row in all_groups:
        i = STATIONS.tolist().index(row.name.split(":")[0])
        of_all = {
            key: [plain["effect"][key][i], *plain["slope"][key][i]]
            for key in row.values
            if key != "rows"
        }
        assert row.values["ess_bulk"] == min(of_all["ess_bulk"])
        assert row.values["ess_tail"] == min(of_all["ess_tail"])
        assert row.values["rhat"] == max(of_all["rhat"]) and row.size == 3
    # What is judged is the same, and numbers go by the name of their group.
    assert found.warnings == plain.warnings and found.rows[-1].name == "log_density"
    assert any("effect[station=Narvik] (" in text for text in plain.warnings)
    assert plain.worst().name in ("effect[station=Narvik]", "slope[station=Moss, 1]")


def test_a_table_of_groups_shows_their_rows(drawn):
    lines = str(summary_of(drawn, groups="station", max_rows=2)).splitlines()
    assert lines[0] == "4 chains x 400 draws, the worst groups first"
    assert lines[2].split()[:3] == ["station", "rows", "mean"]
    narvik = next(line for line in lines if line.startswith("Narvik: effect of 3 "))
    assert narvik.split()[4] == "3"
    assert "... 7 more groups of station, none worse" in lines
    assert any("the worst R-hat of a group" in line for line in lines)


def test_one_number_a_group_has_the_label_alone_and_pad_is_no_group(drawn):
    padded = {
        name: np.concatenate([x, x[:, :, -1:]], axis=2) for name, x in drawn.items() if x.ndim > 2
    }
    found = summarize(
        {"effect": padded["effect"]},
        {"log_density": drawn["mu"]},
        labels={"effect": LABELS},
        groups="station",
    )
    assert [row.name for row in found.rows[:1]] == ["Narvik"] and len(found.rows) == 9 + 1
    assert found.num_left_out == 0


def test_a_large_leaf_names_its_worst_group(drawn, monkeypatch):
    monkeypatch.setattr("gspmd_mcmc.diagnostics.summary.SMALL_LEAF", 5)
    found = summary_of({name: drawn[name] for name in ("effect", "mu")})
    assert found.worst().name == "effect[station=Narvik]"


def test_groups_that_nothing_is_of_are_refused_by_the_summary(drawn):
    with pytest.raises(ValueError, match=r"groups: expected one of \['station'\], .* got 'user'"):
        summary_of(drawn, groups="user")
