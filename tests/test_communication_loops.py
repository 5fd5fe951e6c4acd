"""Loops and branches in what `communication` reports: their names, how often they run."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from blocks import (
    X,
    collectives,
    nested,
    on_blocks,
    one_psum,
    over_rows,
    psum,
    psum_and_ring,
    scanned,
    scoped,
    until_large,
)
from jax import lax

from gspmd_mcmc import communication

BLOCKS = "tests/blocks.py"


@pytest.mark.parametrize(("loop", "trips"), [(nested, (3, 5)), (scanned, (4, 7))])
def test_runs_multiply_the_loops_further_in(loop, trips):
    report = communication(on_blocks(loop(psum_and_ring)), X)
    seen = {c.kind: c.trips for c in report.collectives}
    assert seen == {"all-reduce": trips, "collective-permute": trips}
    assert report.count("all-reduce") == 1
    assert report.runs("all-reduce") == report.runs("all-reduce", within=0) == trips[0] * trips[1]
    assert report.runs("all-reduce", within=1) == trips[1]
    assert report.runs("all-reduce", within=2) == 1
    assert report.runs("all-gather", within=1) == 0
    with pytest.raises(ValueError, match="the program has loops 2 deep; got within=3"):
        report.runs("all-reduce", within=3)


def test_loops_have_names_and_counts_by_name():
    inner = scoped("tile", lambda x: lax.fori_loop(0, 2, lambda _, a: one_psum(a), x))
    middle = scoped("leapfrog", lambda x: until_large(inner)(x))
    outer = scoped("step", lambda x: lax.fori_loop(0, 3, lambda _, a: middle(a), x))
    report = communication(on_blocks(outer), X)
    assert [str(x) for x in report.loops] == ["step x 3", "leapfrog x ?", "tile x 2"]
    assert report.runs("all-reduce", within="leapfrog") == 2
    known = report.with_trips(leapfrog=10, tile=99)
    assert known.collectives[0].trips == (3, 10, 2)  # a count that is known is kept
    assert known.runs("all-reduce") == 60
    assert known.runs("all-reduce", within="step") == 20
    assert communication(on_blocks(outer), X, trips={"leapfrog": 10}).runs("all-reduce") == 60
    with pytest.raises(ValueError, match=r"no loop 'steps'; it has \['leapfrog', 'step', 'tile'\]"):
        report.with_trips(steps=3)
    with pytest.raises(ValueError, match="no loop 'steps'"):
        report.runs("all-reduce", within="steps")


TRANSFORMS = [
    lambda loop: loop,
    jax.jit,
    lambda loop: jax.grad(lambda x: loop(x).sum()),
    jax.checkpoint,
    lambda loop: jax.grad(lambda x: jax.checkpoint(loop)(x).sum()),
    lambda loop: lambda x: jax.vmap(loop)(x[None])[0],
    lambda loop: lambda x: lax.cond(x[0, 0] > 0, loop, jnp.sin, x),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_scope_names_its_loop_through_transformations(transform):
    loop = scoped("leapfrog", lambda x: lax.fori_loop(0, 5, lambda _, a: one_psum(a), x))
    found = collectives(transform(loop))
    assert {c.kind for c in found} == {"all-reduce"}
    assert {str(loop) for c in found for loop in c.loops} == {"leapfrog x 5"}


def test_a_loop_without_a_scope_has_the_name_of_its_function():
    (found,) = collectives(nested(one_psum))
    assert [x.name for x in found.loops] == [
        "nested.<locals>.outer",
        "nested.<locals>.outer.<locals>.<lambda>",
    ]
    line = inspect.getsourcelines(nested)[1] + 4
    assert {x.source.partition(" ")[0] for x in found.loops} == {f"{BLOCKS}:{line}"}


def test_a_loop_of_unknown_length_is_known_to_be_unknown():
    report = communication(on_blocks(until_large(one_psum)), X)
    assert [c.trips for c in report.collectives] == [(None,)]
    assert report.runs("all-reduce", within=1) == 1
    with pytest.raises(ValueError, match="how often all-reduce runs is not known") as raised:
        report.runs("all-reduce")
    assert f"loop {report.loops[0].name!r} ({BLOCKS}:" in str(raised.value)
    assert report.runs("all-gather") == 0
    assert report.with_trips(**{report.loops[0].name: 9}).runs("all-reduce") == 9


def test_a_collective_in_the_test_of_a_loop_is_in_the_loop():
    def until_sum_is_large(x):
        return lax.while_loop(lambda a: psum(a[0, 0]) < 100, lambda a: a + 1, x)

    (found,) = collectives(until_sum_is_large)
    assert (found.kind, found.num_bytes, found.trips) == ("all-reduce", 4, (None,))


def test_lengths_that_differ_between_chains_show_as_a_reduction_in_every_loop_test():
    def trajectory(length, x):
        return lax.fori_loop(0, length, lambda i, a: jnp.sin(a), x)

    each = jax.vmap(trajectory, spmd_axis_name="data")
    (found,) = communication(each, over_rows(64, dtype=jnp.int32), X).collectives
    assert (found.kind, found.num_bytes, found.trips) == ("all-reduce", 1, (None,))
    shared = jax.vmap(trajectory, in_axes=(None, 0), spmd_axis_name="data")
    assert communication(shared, jnp.int32(5), X).collectives == ()


# Branches.


@pytest.mark.parametrize("sides", [(psum, jnp.sin), (jnp.sin, psum)])
def test_collectives_of_either_side_of_a_condition_are_seen(sides):
    def condition(x):
        return lax.cond(x[0, 0] > 0, *sides, x)

    assert [(c.kind, c.trips) for c in collectives(nested(condition))] == [("all-reduce", (3, 5))]
