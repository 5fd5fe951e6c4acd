"""Rows of groups that are read in parts, or that each process gives; see also `test_processes`."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm

RNG = np.random.default_rng(0)
KEYS = RNG.permutation(np.repeat(np.arange(96), RNG.integers(4, 9, 96)))
NUM = len(KEYS)
ROWS = {"x": RNG.normal(size=(NUM, 2)).astype(np.float32), "n": np.arange(NUM, dtype=np.int32)}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ROWS)


def groups_on(name):
    return gm.Groups(KEYS) if name is None else gm.Groups(KEYS, mesh_of(name), P("data"))


def taken(rows):
    return jax.tree.map(lambda x: x[rows], ROWS)


@pytest.mark.parametrize(("name", "num_blocks"), [(None, 1), ("8", 8), ("2x4", 4)])
def test_rows_that_are_read_lie_as_those_that_are_given(name, num_blocks):
    groups, asked = groups_on(name), []

    def reader(rows):
        asked.append(rows)
        return taken(rows)

    want = groups.place_rows(ROWS)
    read = groups.place_rows_from_reader(reader, SHAPES)
    mine = groups.local_rows()
    local = groups.place_local_rows(taken(mine))
    np.testing.assert_array_equal(mine, np.arange(NUM))  # of the only process
    for got in (read, local):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding == b.sharding and a.dtype == b.dtype
    assert len(asked) == num_blocks and all(np.all(np.diff(rows) > 0) for rows in asked)
    np.testing.assert_array_equal(np.sort(np.concatenate(asked)), np.arange(NUM))


TABLE = {"age": RNG.normal(size=96).astype(np.float32), "sites": RNG.integers(0, 5, (96, 2))}


@pytest.mark.parametrize(("name", "num_blocks"), [(None, 1), ("8", 8), ("2x4", 4)])
def test_the_groups_own_rows_lie_as_those_that_are_given(name, num_blocks):
    groups, asked = groups_on(name), []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TABLE)

    def reader(numbers):
        asked.append(numbers)
        return jax.tree.map(lambda x: x[numbers], TABLE)

    want = groups.place(TABLE)
    mine = groups.local_groups()
    np.testing.assert_array_equal(mine, np.arange(96))  # of the only process
    read, local = groups.place_from_reader(reader, shapes), groups.place_local(TABLE)
    for got in (read, local):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding == b.sharding and a.dtype == b.dtype
    assert len(asked) == num_blocks
    np.testing.assert_array_equal(np.sort(np.unique(np.concatenate(asked))), np.arange(96))


def test_rows_of_a_part_of_the_groups_are_read():
    groups, keys = groups_on("2x4"), np.repeat(np.arange(0, 96, 2), 4)
    y = np.arange(192, dtype=np.float32)
    shapes = {"y": jax.ShapeDtypeStruct((192,), np.float32)}
    read = groups.place_rows_from_reader(lambda rows: {"y": y[rows]}, shapes, keys)
    np.testing.assert_array_equal(read.rows["y"], groups.place_rows({"y": y}, keys).rows["y"])
    local = groups.place_local_rows({"y": y[groups.local_rows(keys)]}, keys)
    np.testing.assert_array_equal(local.rows["y"], read.rows["y"])


def read_as(change):
    return groups_on("8").place_rows_from_reader(lambda rows: change(taken(rows)), SHAPES)


def short(like):
    return jax.ShapeDtypeStruct((NUM - 1, *like.shape[1:]), like.dtype)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: read_as(lambda rows: rows | {"x": rows["x"][1:]}),
            r"rows \['x'\]: the reader was asked for (\d+) rows: expected shape \(\1, 2\), got",
        ),
        (lambda: read_as(lambda rows: rows["x"]), "reader: expected a tree like the shapes"),
        (
            lambda: read_as(lambda rows: rows | {"n": rows["n"].astype(np.int64) << 40}),
            r"rows \['n'\]: .*int32",
        ),
        (
            lambda: read_as(lambda rows: rows | {"x": rows["x"].astype(str)}),
            r"rows \['x'\]: expected an array of numbers, got",
        ),
        (
            lambda: groups_on("8").place_rows_from_reader(taken, jax.tree.map(short, SHAPES)),
            rf"shapes \['n'\]: expected \[{NUM}, ...\], as there are {NUM} keys",
        ),
        (
            lambda: groups_on("8").place_local_rows({"y": np.zeros(NUM - 1)}),
            rf"rows \['y'\]: expected shape \[{NUM}, ...\], the rows of this process",
        ),
        (
            lambda: gm.Groups(
                KEYS, jax.sharding.AbstractMesh((8,), ("data",)), P("data")
            ).place_rows_from_reader(taken, SHAPES),
            "a mesh of devices that are not there reads no rows; give their shapes to place or place_r",
        ),
        (
            lambda: groups_on("8").place_from_reader(
                lambda i: {"x": np.zeros(len(i))}, {"x": jax.ShapeDtypeStruct((95,), np.float32)}
            ),
            r"shapes \['x'\]: expected \[96, ...\], as there are 96 groups, one row for each, got \(95",
        ),
        (
            lambda: groups_on("8").place_local({"age": np.zeros(95)}),
            r"table \['age'\]: expected shape \[96, ...\], the rows of .*, as groups.local_groups",
        ),
    ],
)
def test_what_does_not_fit_is_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()
