"""The demo of pmap's cases by placement, and that its comparison would notice a wrong program."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos import pmap_race
from demos.pmap_crossover import crossover
from demos.pmap_race import Pair, compare, pmap

# What each new program must send on 8 devices: a sum that crosses them is one all-reduce, a step of
# rule 30 talks to two neighbours, and all else is a map.
SENDS = {
    "normalise": {"all-reduce over data": 1},
    "groups": {"all-reduce over model": 1},
    "two_names": {"all-reduce over data": 1},
    "nested": {"all-reduce over data": 1, "all-reduce over model": 1},
    "kept_body": {"all-reduce over data": 1},
    "rule_30": {"collective-permute over data": 2 * 31},
    "descent": {"all-reduce over data": 1},
}
# Bytes of results: a sum, a sum, 25 maxima, a bool each way, a loss and two gradients.
BYTES = {"normalise": 4, "groups": 4, "two_names": 4 * 25, "kept_body": 4, "rule_30": 62, "descent": 12}
MAPS = {
    *("squares", "convolutions", "trees_of_axes", "out_axes", "random_matrices", "dot_products"),
    *("dots_of_columns", "uneven", "per_example_gradients", "through", "plane"),
}
REFUSED = {"uneven", "nested"}


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_quick_demo):
    folder = tmp_path_factory.mktemp("pmap")
    done = run_quick_demo("pmap_to_jit", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "summary.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def cases(results):
    return {case["case"]: case for case in results[1]["cases"]}


def test_every_case_has_the_values_of_numpy_and_of_pmap(results, cases):
    folder, summary, printed = results
    assert set(cases) == MAPS | set(SENDS)
    assert {name for name, case in cases.items() if "refused" in case} == REFUSED
    assert summary["refused_by_pmap"] == len(REFUSED)
    for name, case in cases.items():
        assert 0 <= case["error"] < 1e-6, name
        assert "pmap" in case["old"] and "pmap" not in case["new"], name
        assert name in REFUSED or case["difference"] < 1e-6, name
        assert name in REFUSED or case["ratio_low"] <= case["ratio"] <= case["ratio_high"], name
    assert "new jit(vmap(jnp.vdot))" in printed
    assert (folder / "pmap_to_jit.png").stat().st_size > 50_000


def test_only_sums_and_neighbours_are_sent(cases):
    for name, case in cases.items():
        assert case["collectives"] == SENDS.get(name, {}), name
        assert name in MAPS or name == "nested" or case["bytes_sent"] == BYTES[name], name


def test_placement_is_what_cuts(cases):
    assert cases["dot_products"]["placed"] == "P('data'), P('data')"
    assert cases["dots_of_columns"]["placed"] == "P(None, 'data'), P(None, 'data')"
    assert cases["plane"]["placed"] == "P('data'), P('model')"


def test_dot_products_are_the_tutorials(results):
    # As chapter 7's notebook prints them; a TPU rounds the normal numbers a little differently.
    printed = [0.51048726, -0.7174605, -0.20105815, -0.26437205, -1.3696793, 2.744793, 1.7936493]
    np.testing.assert_allclose(results[1]["small_dots"], [*printed, -1.1743435], atol=5e-5)


def test_many_dot_products_are_numpys(results):
    summary = results[1]
    with jax.threefry_partitionable(False):
        vectors = np.asarray(jax.random.normal(jax.random.key(42), (2 * summary["num_dots"], 3)))
    pairs = zip(vectors[:3].tolist(), vectors[summary["num_dots"] :][:3].tolist(), strict=True)
    dots = [sum(a * b for a, b in zip(one, other, strict=True)) for one, other in pairs]
    np.testing.assert_allclose(summary["first_dots"], dots, rtol=1e-12)


def test_pmap_of_dot_returns_sums_of_blocks(results):
    (pitfall,) = results[1]["pitfall"]
    assert pitfall["pmap_of_dot_shape"] == [8]
    assert pitfall["placed_shape"] == [pitfall["rows"]] == [results[1]["num_dots"]]
    assert pitfall["distance_from_sums_of_blocks"] < 1e-4
    assert pitfall["distance_from_dot_products"] < 1e-6


def test_one_device_is_timed_beside_the_others(results, cases):
    """Except where the new program names its mesh, or pmap refuses."""
    without = {name for name, case in cases.items() if "one_ms" not in case}
    assert without == REFUSED | {"kept_body"}
    rows = results[1]["crossover"]
    assert {(row["way"], row["devices"]) for row in rows} == {
        ("one device, jit(vmap)", 1),
        *((way, num) for way in ("pmap(vmap)", "placed, jit(vmap)") for num in (2, 4, 8)),
    }
    assert all(row["ms"] > 0 for row in rows)
    assert "times the time of one device for 8 rows" in " ".join(results[2].split())


@pytest.mark.parametrize(
    ("faster_from", "expected"), [((8, 32, 128), 8), ((32, 128), 32), ((8, 128), 128), ((8, 32), None)]
)
def test_a_crossover_is_where_a_way_stays_faster(faster_from, expected):
    one = [{"way": "one", "devices": 1, "rows": rows, "ms": 1.0} for rows in (8, 32, 128)]
    way = [
        {"way": "w", "devices": 4, "rows": r, "ms": 0.5 if r in faster_from else 2.0}
        for r in (8, 32, 128)
    ]
    assert crossover(one + way, "w", 4) == expected


# Negative control


def numbers():
    return (gm.place(np.arange(8, dtype=np.float32), gm.make_mesh(data=8), P("data")),)


def right():
    """Double."""
    old = pmap(lambda x: 2 * x)
    new = jax.jit(lambda x: x + x)
    return Pair(old, numbers(), new, numbers(), 2 * np.arange(8.0))


def wrong_in_one_element():
    """Double, but for the last."""
    old = pmap(lambda x: 2 * x)
    new = jax.jit(lambda x: jnp.where(x == 7, 14.001, 2 * x))
    return Pair(old, numbers(), new, numbers(), 2 * np.arange(8.0))


def not_a_number():
    """Double, but for the first."""
    old = pmap(lambda x: 2 * x)
    new = jax.jit(lambda x: x * x / x * 2)
    return Pair(old, numbers(), new, numbers(), 2 * np.arange(8.0))


def unlike_pmap():
    """Treble."""
    old = pmap(lambda x: 2 * x)
    new = jax.jit(lambda x: 3 * x)
    return Pair(old, numbers(), new, numbers(), 3 * np.arange(8.0))


def test_a_right_program_passes_and_its_lines_are_read():
    found = compare(right, 1)
    assert (found["what"], found["placed"]) == ("Double", "P('data')")
    assert (found["old"], found["new"]) == ("pmap(lambda x: 2 * x)", "jax.jit(lambda x: x + x)")
    assert (found["error"], found["difference"], found["collectives"]) == (0, 0, {})


@pytest.mark.parametrize(
    "case, why",
    [(wrong_in_one_element, "the truth"), (not_a_number, "the truth"), (unlike_pmap, "from pmap")],
)
def test_a_wrong_program_is_noticed(case, why):
    with pytest.raises(AssertionError, match=why):
        compare(case, 1)


def test_a_gather_is_counted():
    mesh = gm.make_mesh(data=8)
    x = gm.place(np.arange(16, dtype=np.float32), mesh, P("data"))
    whole = jax.sharding.NamedSharding(mesh, P())
    pair = Pair(max, (), jax.jit(lambda x: x + 1, out_shardings=whole), (x,), None)
    assert pmap_race.sent(pair) == {"collectives": {"all-gather over data": 1}, "bytes_sent": 64}
