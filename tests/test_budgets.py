"""Budgets: each holds at its exact value and fails below, naming what exceeds it and its line."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from blocks import over_rows
from hlo_texts import ADD, GROUPS, REDUCE, computation, loop, read
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.views.program.hlo import KINDS
from gspmd_mcmc.views.program.report import Argument

MESH = gm.make_mesh()
BODY = computation(
    "body",
    "%p2 = f32[32]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    REDUCE,
)
ALL_KINDS = [
    f"%ar = f32[32]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add",
    f"%ag = f32[128]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}",
    f"%rs = f32[8]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add",
    f"%aa = f32[32]{{0}} all-to-all(%p), {GROUPS}, dimensions={{0}}",
    f"%ra = f32[32]{{0}} ragged-all-to-all(%p, %p, %i, %i, %i, %i), {GROUPS}",
    "%cp = f32[32]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
    f"%cb = f32[32]{{0}} collective-broadcast(%p), {GROUPS}",
    "%s = (f32[32]{0}, u32[], token[]) send(%p, %token), channel_id=1",
    "%r = (f32[32]{0}, u32[], token[]) recv(%token), channel_id=1",
]


def in_loops(trips):
    """An all-reduce and a permutation, in a loop of 5 leapfrogs in one of so many steps."""
    before = ADD + BODY + computation("outer", "ROOT " + loop("leapfrog", "body", 5))
    return read("ROOT " + loop("step", "outer", trips), before=before)


# Collectives.


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_holds_at_its_number_and_fails_below(kind):
    report = read(*ALL_KINDS)
    name = kind.replace("-", "_")
    assert report.check(**{name: 1}) is report
    with pytest.raises(gm.BudgetExceeded, match=f"{name}: at most 0, found 1\n    {kind} ") as raised:
        report.check(**{name: 0})
    assert str(raised.value).count("\n") == 2  # the head, the budget, the offender


def test_collectives_of_all_kinds_count_together_and_a_violation_is_an_assertion():
    report = read(*ALL_KINDS)
    report.check(collectives=9)
    with pytest.raises(AssertionError, match="collectives: at most 8, found 9") as raised:
        report.check(collectives=8)
    assert all(kind in str(raised.value) for kind in KINDS)


def test_collectives_are_counted_as_often_as_they_run():
    report = in_loops(3)
    for within, runs in ((None, 15), ("step", 5), ("leapfrog", 1), (1, 5), (2, 1)):
        report.check(within=within, all_reduce=runs, collective_permute=runs, collectives=2 * runs)
        report.check(within=within, sent_bytes=2 * 128 * runs)
        with pytest.raises(gm.BudgetExceeded, match=f"all_reduce: at most {runs - 1}, found {runs}"):
            report.check(within=within, all_reduce=runs - 1)
        with pytest.raises(gm.BudgetExceeded, match="sent_bytes"):
            report.check(within=within, sent_bytes=2 * 128 * runs - 1)


def test_a_violation_names_the_loops_and_where_it_counts():
    with pytest.raises(gm.BudgetExceeded) as raised:
        in_loops(3).check(within="leapfrog", all_reduce=0)
    assert str(raised.value).splitlines() == [
        "not within budget (collectives of one iteration of 'leapfrog')",
        "  all_reduce: at most 0, found 1",
        "    all-reduce f32[32] (128 bytes) over b, in step x 3 > leapfrog x 5",
    ]


def test_all_violations_are_told_at_once():
    with pytest.raises(gm.BudgetExceeded) as raised:
        read(*ALL_KINDS, "%u = f32[32]{0} teleport(%p)").check(all_reduce=0, all_gather=0, send=1)
    message = str(raised.value)
    assert all(
        part in message for part in ("all_reduce: ", "all_gather: ", "unknown: ", "teleport(%p)")
    )
    assert "send: " not in message


# Loops whose trip count nobody knows.


def test_where_none_is_allowed_trip_counts_do_not_matter():
    report = in_loops(None)
    report.check(all_gather=0)
    with pytest.raises(gm.BudgetExceeded, match="all_reduce: at most 0, found 1"):
        report.check(all_reduce=0)
    with pytest.raises(gm.BudgetExceeded, match="sent_bytes: at most 0, found 256 B"):
        report.check(sent_bytes=0)


@pytest.mark.parametrize("budget", ["all_reduce", "sent_bytes", "collectives"])
def test_where_some_are_allowed_the_trip_counts_are_asked_for(budget):
    report = in_loops(None)
    with pytest.raises(ValueError, match=r"with_trips\(step=\.\.\.\), or count within='step'"):
        report.check(**{budget: 10})
    report.check(within="step", all_reduce=5)
    report.with_trips(step=2).check(all_reduce=10)


# A budget of what is not there must not hold.


@pytest.mark.parametrize("budgets", [{"all_reduce": 1}, {"constant_bytes": 1e6}, {}])
def test_a_loop_that_does_not_exist_is_an_error_that_names_those_there_are(budgets):
    with pytest.raises(ValueError, match=r"no loop 'leapforg'; it has \['leapfrog', 'step'\]"):
        in_loops(3).check(within="leapforg", **budgets)


def test_a_loop_without_collectives_is_there_all_the_same():
    quiet = computation("body", "ROOT %n = f32[32]{0} negate(%p)")
    report = read("ROOT " + loop("leapfrog", "body", 5), before=ADD + quiet)
    report.check(within="leapfrog", all_reduce=0)
    assert report.runs("all-reduce", within="leapfrog") == 0
    assert report.loops == ()


@pytest.mark.parametrize("within", [3, -1])
def test_a_depth_without_loops_is_an_error(within):
    with pytest.raises(ValueError, match=f"loops 2 deep; got within={within}"):
        in_loops(3).check(within=within, all_reduce=1)


def test_an_unknown_budget_is_an_error_that_names_those_there_are():
    with pytest.raises(TypeError, match="no budget is called 'all_reduces'; there are") as raised:
        read(*ALL_KINDS).check(all_reduces=1)
    names = [kind.replace("-", "_") for kind in KINDS]
    names += ["collectives", "sent_bytes", "constant_bytes", "whole_bytes"]
    names += ["argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes"]
    assert all(f" {name}" in str(raised.value) for name in names)


def test_an_unknown_kind_is_an_error_that_names_those_there_are():
    with pytest.raises(ValueError, match="one of all-reduce, .*; got 'all_reduce'"):
        read(*ALL_KINDS).runs("all_reduce")
    with pytest.raises(ValueError, match="got 'reduce'"):
        read(*ALL_KINDS).count("reduce")


# Memory.


WHOLE = Argument("[0]['x']", (300, 100), "float32", P(), 120_000, 120_000)
LAID = Argument("[1]['y']", (80, 100), "float32", P("data"), 32_000, 4_000)


@pytest.fixture
def held():
    report = read("%c = f32[500,100]{1,0} constant({...})", "%d = s8[7]{0} constant({...})")
    sizes = {"argument_bytes": 124_000, "output_bytes": 50, "temporary_bytes": 7_000, "alias_bytes": 40}
    return dataclasses.replace(report, arguments=(WHOLE, LAID), **sizes)


@pytest.mark.parametrize(
    ("name", "exact", "offenders"),
    [
        ("constant_bytes", 200_007, ["constant f32[500,100], 200 kB", "constant s8[7], 7 B"]),
        ("argument_bytes", 124_000, [str(WHOLE), str(LAID)]),
        ("output_bytes", 50, []),
        ("temporary_bytes", 7_000, []),
        (
            "peak_bytes",
            124_000 + 50 - 40 + 7_000 + 200_007,
            ["constant f32[500,100], 200 kB", str(WHOLE), str(LAID), "constant s8[7], 7 B"],
        ),
        ("whole_bytes", 200_000, ["constant f32[500,100], 200 kB"]),
    ],
)
def test_memory_holds_at_its_bytes_and_fails_below(held, name, exact, offenders):
    held.check(**{name: exact})
    with pytest.raises(gm.BudgetExceeded) as raised:
        held.check(**{name: exact - 1})
    _, budget, *found = str(raised.value).splitlines()
    assert budget.startswith(f"  {name}: at most ")
    assert [line.strip() for line in found] == offenders


def test_what_is_whole_is_an_argument_or_a_constant_larger_than_allowed(held):
    with pytest.raises(gm.BudgetExceeded) as raised:
        held.check(whole_bytes=100_000)
    assert str(WHOLE) in str(raised.value)
    assert str(LAID) not in str(raised.value)


def test_on_one_device_everything_is_whole_and_that_is_no_violation(held):
    dataclasses.replace(held, num_devices=1).check(whole_bytes=0)


# A program.


def reduced_twice(x):
    total = x.sum()
    return total, jnp.sin(x - total).max()


def test_the_message_names_the_line_that_caused_it():
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(MESH, P("data")))
    report = gm.communication(reduced_twice, x)
    report.check(all_reduce=2, collectives=2, sent_bytes=8, constant_bytes=1e3)
    with pytest.raises(gm.BudgetExceeded) as raised:
        report.check(all_reduce=1)
    first = inspect.getsourcelines(reduced_twice)[1]
    for line in (first + 1, first + 2):
        assert f"tests/test_budgets.py:{line} (reduced_twice)" in str(raised.value)


def test_a_pair_is_the_least_and_the_most():
    """Of a program in which each device computes everything: nothing is sent, and that is wrong."""
    alone = gm.communication(lambda x: jnp.sin(x).sum(), jnp.ones((64, 16)))
    alone.check(all_reduce=1)
    with pytest.raises(gm.BudgetExceeded, match="all_reduce: at least 1, found 0"):
        alone.check(all_reduce=(1, 1))
    together = gm.communication(lambda x: jnp.sin(x).sum(), over_rows(64, 16))
    together.check(all_reduce=(1, 1), sent_bytes=(4, 4))
    with pytest.raises(gm.BudgetExceeded, match="all_reduce: at most 0, found 1"):
        together.check(all_reduce=(0, 0))
