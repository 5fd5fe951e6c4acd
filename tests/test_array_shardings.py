"""The tour of arrays over 8 devices gives the tutorial's pictures and values."""

import json

import numpy as np
import pytest

# Who holds which block, as the tutorial draws it with devices in the order 0 to 7.
EACH_ROW = [[[i]] for i in range(8)]
FOUR_BY_TWO = [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
PAIRS = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
EVEN_ODD = [[[0, 2, 4, 6], [1, 3, 5, 7]]]
ALL = [[[0, 1, 2, 3, 4, 5, 6, 7]]]
PICTURES = {
    "x": [[[0]]],
    "y": FOUR_BY_TWO,
    "sin(y)": FOUR_BY_TWO,
    "reshape(8, 1)": EACH_ROW,
    "reshape(4, 2)": FOUR_BY_TWO,
    "reshape(1, 8)": [[[i] for i in range(8)]],
    "replicate(0)": EVEN_ODD,
    "replicate(1)": PAIRS,
    "T": [[[0], [2], [4], [6]], [[1], [3], [5], [7]]],
    "T.replicate(0)": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "replicate()": ALL,
    "left": PAIRS,
    "right": EVEN_ODD,
    "dot(left, right)": FOUR_BY_TWO,
    "copy": FOUR_BY_TWO,
    "permuted": [[[0], [1]], [[2], [3]], [[6], [7]], [[4], [5]]],
    "to 2×4": [[[0], [1], [2], [3]], [[4], [5], [6], [7]]],
    "to all": ALL,
}
# As the tutorial prints x + uniform(key(42)), without and with partitionable numbers.
STABLE = (
    *(0.72503686, 1.8532515, 2.983416, 3.083253, 4.0332246, 5.4782867, 6.1720605, 7.6900277),
    *(8.602836, 9.810046, 10.861367, 11.907651, 12.330483, 13.456195, 14.808557, 15.960099),
    *(16.067581, 17.739723, 18.335474, 19.46401, 20.390276, 21.116539, 22.858128, 23.223194),
)
PARTITIONABLE = (
    *(0.48870957, 1.6797972, 2.6162715, 3.561016, 4.4506445, 5.585866, 6.0748096, 7.775133),
    *(8.698959, 9.818634, 10.350306, 11.87282, 12.925881, 13.86013, 14.477554, 15.818481),
    *(16.711355, 17.586697, 18.073738, 19.777622, 20.404566, 21.119123, 22.026257, 23.63918),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_quick_demo):
    folder = tmp_path_factory.mktemp("tour")
    done = run_quick_demo("array_shardings", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "summary.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def pictures(results):
    return {picture["name"]: picture for picture in results[1]["pictures"]}


@pytest.fixture(scope="module")
def programs(results):
    return {program["program"]: program for program in results[1]["programs"]}


def test_each_array_lies_where_the_tutorial_draws_it(results, pictures):
    vector = {"x + uniform": [[[i] for i in range(8)]]}
    assert {name: picture["holders"] for name, picture in pictures.items()} == PICTURES | vector
    for name, blocks in PICTURES.items():
        held = 4e-6 * results[1]["size"] ** 2 / sum(map(len, blocks))
        assert pictures[name]["megabytes_per_device"] == held, name


def test_positions_and_names_say_the_same(pictures):
    specs = {
        "reshape(8, 1)": ([8, 1], "P(('a', 'b'), None)"),
        "reshape(4, 2)": ([4, 2], "P('a', 'b')"),
        "reshape(1, 8)": ([1, 8], "P(None, ('a', 'b'))"),
        "replicate(0)": ([1, 2], "P(None, 'b')"),
        "replicate(1)": ([4, 1], "P('a', None)"),
        "T": ([2, 4], "P('b', 'a')"),
        "T.replicate(0)": ([1, 4], "P(None, 'a')"),
        "replicate()": ([1, 1], "P()"),
    }
    for name, (shape, spec) in specs.items():
        assert (pictures[name]["shape"], pictures[name]["equivalent"]) == (shape, True)
        assert pictures[name]["spec"].replace("PartitionSpec", "P") == spec


def test_computation_follows_sharding_and_sends_nothing(programs):
    for name in ("sin(y)", "dot(left, right)", "copy", "uniform, partitionable"):
        assert programs[name]["collectives"] == [], name


def test_what_must_be_sent_is_counted(results, programs):
    num_bytes = 4 * results[1]["size"] ** 2
    whole = {"kind": "all-reduce", "bytes": num_bytes, "group": 8}
    assert programs["dot along the sum"]["collectives"] == [whole]
    assert {c["kind"] for c in programs["to all"]["collectives"]} == {"all-gather"}
    assert max(c["bytes"] for c in programs["to all"]["collectives"]) == num_bytes
    # From 4×2 to 2×4 no device needs more than its new block, and none sees the whole.
    steps = programs["to 2×4"]["collectives"]
    assert steps and all(c["bytes"] <= num_bytes / 4 for c in steps)
    kinds = {c["kind"] for c in programs["uniform, stable"]["collectives"]}
    assert "collective-permute" in kinds  # the tutorial: "Communicating? True"


def test_random_numbers_are_the_tutorials_under_any_layout(results):
    summary = results[1]
    np.testing.assert_allclose(summary["uniform_stable"], STABLE, rtol=2e-7)
    np.testing.assert_allclose(summary["uniform_partitionable"], PARTITIONABLE, rtol=2e-7)
    assert summary["layouts_with_the_same_numbers"] == summary["num_layouts"] == 8


def test_products_do_not_depend_on_the_layout(results):
    assert results[1]["dot_difference"] < 1e-5 and results[1]["sin_difference"] < 1e-6


def test_what_does_not_go_together_is_refused(results):
    errors = {found["what"]: found["error"] for found in results[1]["refused"]}
    assert set(errors) == {
        *("a matrix under reshape(8)", "8 blocks of 12 rows"),
        *("sum over other devices", "sum over another order"),
    }
    assert "[0, 1, 2, 3]" in errors["sum over other devices"]
    assert "[4, 5, 6, 7]" in errors["sum over other devices"]
    assert "[0, 1, 2, 3, 6, 7, 4, 5]" in errors["sum over another order"]
    assert "rank 2" in errors["a matrix under reshape(8)"]
    assert "(12, 4)" in errors["8 blocks of 12 rows"] and results[1]["padded_rows"] == 16


def test_everything_is_drawn(results):
    folder, _, printed = results
    assert (folder / "array_shardings.png").stat().st_size > 50_000
    assert "│ 0,2,4,6 │ 1,3,5,7 │" in printed
    assert "PositionalSharding([[{CPU 0, 2, 4, 6} {CPU 1, 3, 5, 7}]]" in printed
