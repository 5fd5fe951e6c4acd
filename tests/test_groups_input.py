"""What `Groups` refuses, each in words of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm

KEYS = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 8))
ROWS = {"y": np.arange(320.0)}
NAN = float("nan")
WORD: Any = "data"


def groups_on(name="8", keys=KEYS, **options):
    return gm.Groups(keys, mesh_of(name), P("data"), **options)


MISSING = r"keys: 1 rows have no key, the first is row 1\. Leave these rows out"


@pytest.mark.parametrize(
    "keys",
    [
        [1, None, 2],
        ["a", NAN, "b"],
        ["a", None, "b"],
        np.array([1.0, NAN]),
        np.ma.masked_equal([1, 2], 2),
        np.array(["a", np.nan, "b"], object),
        np.ma.masked_equal([1, 2, 3], 2),
    ],
)
def test_a_missing_key_is_refused(keys):
    with pytest.raises(ValueError, match=MISSING):
        gm.Groups(keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.array([1.0, 2.0]), r"keys: expected integers or strings, got float64.*keys.astype\(int\)"),
        (["a", 1], "keys: expected integers or strings, got both"),
        (np.array(["2020-01-01"], "M8[D]"), r"got datetime64\[D\]"),
        (np.zeros((2, 2), int), r"expected one key for each row, shape \[rows\], got \(2, 2\)"),
        ([], r"expected one key for each row, shape \[rows\], got \(0,\)"),
        (3, r"got \(\)"),
    ],
)
def test_what_is_no_key_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        gm.Groups(keys)


def test_keys_of_any_kind_have_sorted_labels():
    for keys in ([3, 1, 3], ["c", "a", "c"], np.array(["c", "a", "c"], object), [True, False, True]):
        groups = gm.Groups(keys)
        assert list(groups.labels) == sorted(set(keys)) and list(groups.sizes) == [1, 2]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(41), "labels: 1 groups have no rows, the first is 40. Leave them out of labels"),
        (
            np.arange(39),
            "keys: 8 rows have a key that is not among the 39 labels, the first is .* with 39",
        ),
        ([*range(40), 7], "labels: 7 is there twice"),
        ([str(i) for i in range(40)], "keys: expected labels of int64, as values are, got strings"),
        ([*range(39), None], "labels: 1 rows have no key"),
    ],
)
def test_labels_are_those_of_the_keys(labels, message):
    with pytest.raises(ValueError, match=message):
        groups_on(labels=labels)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: gm.Groups(KEYS, None, P("data")),
            ValueError,
            "names axes of a mesh, and there is no mesh",
        ),
        (lambda: gm.Groups(KEYS, mesh_of("8"), P("rows")), ValueError, "the mesh has no axis 'rows'"),
        (lambda: gm.Groups(KEYS, WORD), TypeError, "Groups: mesh: expected a mesh"),
        (lambda: groups_on(tile_rows=0), ValueError, "tile_rows: expected an integer of at least 1"),
        (
            lambda: groups_on().place({"z": np.zeros(320)}),
            ValueError,
            r"table \['z'\]: expected shape \[40, ...\], as there are 40 groups,.* got \(320,\)",
        ),
        (
            lambda: groups_on().place_rows(ROWS | {"x": np.zeros(319)}),
            ValueError,
            r"rows \['x'\]: expected shape \[320, ...\], as there are 320 keys,.* got \(319,\)",
        ),
        (lambda: groups_on().place_rows(ROWS, KEYS[:-1]), ValueError, r"as there are 319 keys"),
        (
            lambda: groups_on().place_rows({"y": np.zeros(2)}, [1, 77]),
            ValueError,
            "keys: 1 rows have a key that is not among the 40 labels, the first is row 1 with 77",
        ),
        (
            lambda: groups_on().place_rows({"y": np.zeros(2)}, [None, 3]),
            ValueError,
            "1 rows have no key",
        ),
        (
            lambda: groups_on().place_rows({"y": np.ma.masked_equal(ROWS["y"], 3)}),
            ValueError,
            r"rows \['y'\]: the mask would be lost",
        ),
        (
            lambda: gm.Groups(KEYS).place_rows({"y": np.ma.masked_equal(ROWS["y"], 3)}),
            ValueError,
            r"rows \['y'\]: the mask would be lost",
        ),
        (
            lambda: gm.Groups(KEYS).place({"y": 1.7e9 + np.arange(40.0)}),
            ValueError,
            r"table \['y'\]: float32 cannot tell its values apart",
        ),
    ],
)
def test_what_does_not_fit_the_groups_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_group_larger_than_a_device_s_share_is_named():
    with pytest.warns(
        gm.SamplingWarning, match="group 0 has 1000 rows, and an even share of 8 devices"
    ):
        groups_on(keys=np.repeat([0, 1, 2], [1000, 1, 1])).place_rows({"y": np.zeros(1002)})


# Plates and targets.


def nothing(x, row):
    return jnp.zeros(len(row["y"]))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda rows, table: gm.Plate(nothing, rows, tile_rows=8),
            ValueError,
            r"are cut into tiles when they are placed; Groups\(..., tile_rows=8\)",
        ),
        (
            lambda rows, table: gm.Plate(nothing, {"rows": rows}),
            ValueError,
            r"data \['rows'\]: got GroupedRows\(320 rows of 40 groups\).*pass it as the plate's data",
        ),
        (lambda rows, table: gm.Plate(nothing, groups_on()), TypeError, r"takes groups.place\(table\)"),
        (
            lambda rows, table: gm.LogDensity(nothing, rows),
            ValueError,
            "only a Plate knows; use Posterior",
        ),
        (
            lambda rows, table: gm.LogDensity(nothing, table),
            ValueError,
            "only a Plate knows; use Posterior",
        ),
        (
            lambda rows, table: gm.place(rows, mesh_of("2x4"), P("data")),
            ValueError,
            r"Groups\(keys, mesh, spec\) lays them on another mesh",
        ),
        (
            lambda rows, table: gm.place({"a": table}, mesh_of("2x4")),
            ValueError,
            r"\['a'\]: got GroupTable",
        ),
    ],
)
def test_rows_of_groups_are_data_of_a_plate_alone(use, error, message):
    groups = groups_on()
    with pytest.raises(error, match=message):
        use(groups.place_rows(ROWS), groups.place())


def log_prior(x):
    return -0.5 * x["mean"] ** 2


def of_group(x, row):
    return -0.5 * (x["effect"] - x["mean"]) ** 2


def of_row(x, row):
    return -0.5 * (row["y"] - x["effect"]) ** 2


def by_data(x, row):
    return -0.5 * (row["y"] - x["effect"][row["key"]]) ** 2


def by_latent(x, row):
    index = jnp.floor(jnp.abs(3 * x["effect"])).astype(int) % len(row["y"])
    return -0.5 * (row["y"] - x["effect"][index]) ** 2


ORIGIN = {"mean": jnp.zeros(()), "effect": jnp.zeros(40)}


def posterior(of_groups, rows, likelihood=of_row):
    plates = [gm.Plate(likelihood, rows, local="effect")]
    if of_groups is not None:
        plates.insert(0, gm.Plate(of_group, of_groups, local="effect"))
    return gm.Posterior(log_prior, *plates)


def init(target, position=None):
    return gm.HMC(target, 0.1, 2).init(ORIGIN if position is None else position)


OTHER_KEYS = (
    r"local: \['effect'\] is local to plates of other rows.*groups of other keys, or in another order"
)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: groups_on(keys=np.append(KEYS[:-1], 3 if KEYS[-1] != 3 else 4)).place(), OTHER_KEYS),
        (lambda: groups_on(labels=np.arange(40)[::-1]).place(), OTHER_KEYS),
        (lambda: groups_on("2x4").place(), "They lie on different meshes; make them of one Groups"),
        (lambda: gm.Groups(KEYS).place(), "They lie on different meshes"),
        (lambda: gm.place({"z": np.zeros(40)}, mesh_of("8"), P("data")), OTHER_KEYS),
        (
            lambda: None,
            r"\['effect'\] is one for each group, and no plate of the groups gives it a prior",
        ),
    ],
)
def test_plates_of_one_latent_are_of_the_same_groups(other, message):
    with pytest.raises(ValueError, match=message):
        init(posterior(other(), groups_on().place_rows(ROWS)))


def test_a_start_has_a_value_for_each_group():
    groups = groups_on()
    target = posterior(groups.place(), groups.place_rows(ROWS))
    with pytest.raises(
        ValueError, match=r"position \['effect'\].*expected a leading axis of 40, got shape \(41,\)"
    ):
        init(target, ORIGIN | {"effect": jnp.zeros(41)})


@pytest.mark.parametrize("likelihood", [by_data, by_latent], ids=lambda f: f.__name__)
def test_an_index_into_latents_of_groups_is_refused(likelihood):
    """They are the row's own already; an index reads other rows of the tile."""
    groups = groups_on()
    target = posterior(groups.place(), groups.place_rows(ROWS | {"key": KEYS}), likelihood)
    start = ORIGIN | {"effect": jnp.linspace(-1, 1, 40)}
    with pytest.raises(
        gm.CoupledRows, match="Latents of groups are those of each row's own group already"
    ):
        gm.sample(
            jax.random.key(0),
            target,
            start,
            kernel=gm.HMC(target, 0.1, 2),
            num_samples=1,
            progress=False,
        )
