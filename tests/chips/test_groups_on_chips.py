"""An effect of each group of rows on chips, by their own compilers: no atomic, and nothing gathered."""

import functools

import audit
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

S = jax.ShapeDtypeStruct
MB = 10**6


def log_prior(x):
    return -0.5 * x["slope"] ** 2, -0.5 * x["log_sd"] ** 2


def of_group(x, row):
    return -0.5 * jnp.sum((x["effect"] * jnp.exp(-x["log_sd"])) ** 2, axis=1) - 2 * x["log_sd"]


def of_row(x, row):
    fitted = x["effect"][:, 0] + row["x"] @ x["slope"] + x["effect"][:, 1] * row["x"][:, 0]
    return -0.5 * (row["y"] - fitted) ** 2


@functools.cache
def keys(num_groups, num_rows):
    """Groups of very different size, which have a row each at least."""
    sizes = np.random.default_rng(0).lognormal(0.0, 1.0, num_groups)
    sizes = 1 + (sizes / sizes.sum() * (num_rows - num_groups)).astype(np.int64)
    sizes[: num_rows - sizes.sum()] += 1
    return np.repeat(np.arange(num_groups), sizes)


def random_effects(mesh, num_groups=6040, num_rows=1_000_000):
    """Two effects of each group, and 200 slopes that all share; the keys are real, the rows shapes."""
    groups = gm.Groups(keys(num_groups, num_rows), mesh, P("data"))
    rows = groups.place_rows({"y": S((num_rows,), jnp.float32), "x": S((num_rows, 200), jnp.float32)})
    plates = gm.Plate(of_group, groups.place(), local="effect"), gm.Plate(of_row, rows, local="effect")
    shapes = {"effect": (num_groups, 2), "slope": (200,), "log_sd": ()}
    return gm.Posterior(log_prior, *plates), {n: S(s, jnp.float32) for n, s in shapes.items()}


def by_index(mesh, num_groups=6040, num_rows=1_000_000):
    rows = {"y": (), "x": (200,), "group": ()}
    rows = {n: S((num_rows, *s), jnp.int32 if n == "group" else jnp.float32) for n, s in rows.items()}
    plate = gm.Plate(of_row_by_index, gm.place(rows, mesh, P("data")))
    return gm.Posterior(prior_by_index, plate), random_effects(mesh)[1]


def prior_by_index(x):
    return log_prior(x), of_group(x, {})


def of_row_by_index(x, row):
    return of_row(x | {"effect": x["effect"][row["group"]]}, row)


def build(model, **sizes):
    return functools.partial(programs.step, functools.partial(model, **sizes), "HMC")


@pytest.mark.parametrize(
    ("on", "axes"),
    [("H100", {"data": 1}), ("8 x H100", {"data": 8}), ("TPU v5e", {"chains": 2, "data": 4})],
)
def test_a_step_has_one_sum_a_leapfrog_and_no_atomic(on, axes):
    program = build(random_effects)
    plan = gm.plan(program, on=on, **axes)
    if axes["data"] == 1:
        assert plan.report.collectives == plan.atomics() == ()
    else:
        assert audit.violations(program, plan, 2_000 * MB) == []
    print(on, axes, plan.work("leapfrog").bytes_moved / MB, plan.report.peak_bytes / MB)


def test_effects_by_an_index_have_an_atomic():
    assert gm.plan(build(by_index), on="H100", data=1).atomics()


def sent(plan):
    inside = [c for c in plan.report.collectives if c.loops_within("leapfrog") is not None]
    return sum(c.num_bytes * c.times("leapfrog") for c in inside)


def test_a_million_groups_send_what_a_hundred_thousand_do():
    """On 256 chips; and a device needs more memory by its share of the latents and their tables."""
    few, many = (
        gm.plan(build(random_effects, num_groups=n, num_rows=3_000_000), on="TPU v5e", data=256)
        for n in (100_000, 1_000_000)
    )
    assert few.fits and many.fits
    assert sent(few) == sent(many) > 0
    assert {c.kind for c in many.report.collectives} == {"all-reduce"}
    print(sent(few), [(p.report.peak_bytes / MB, p.data_bytes / MB) for p in (few, many)])


def of_rating(x, row):
    return of_row(x, row) - 0.5 * gm.lookup(x["film"], row["film"]) ** 2


def crossed(mesh, num_films=3706, num_rows=1_000_000, is_known=False):
    """The same, and an effect of each film, which all rows share; the order of films may be known."""
    groups = gm.Groups(keys(6040, num_rows), mesh, P("data"))
    shapes = {"y": ((), jnp.float32), "x": ((200,), jnp.float32), "film": ((), jnp.int32)}
    columns: dict = {n: S((num_rows, *s), d) for n, (s, d) in shapes.items()}
    if is_known:
        often = np.random.default_rng(0).geometric(4 / num_films, num_rows) % num_films
        columns["film"] = gm.LookupIndex(often.astype(np.int32), num_films)
    rows = groups.place_rows(columns)
    plates = (
        gm.Plate(of_group, groups.place(), local="effect"),
        gm.Plate(of_rating, rows, local="effect"),
    )
    position = random_effects(mesh)[1] | {"film": S((num_films,), jnp.float32)}
    return gm.Posterior(lambda x: (*log_prior(x), -0.5 * x["film"] ** 2), *plates), position


def test_a_table_that_rows_look_up_has_no_atomic_on_a_card():
    """And needs half the kernels, and less, where rows were put in order when they were placed."""
    plans = [gm.plan(build(crossed, is_known=known), on="H100", data=1) for known in (False, True)]
    assert all(plan.report.collectives == plan.atomics() == () for plan in plans)
    each, known = (plan.work("leapfrog").kernels for plan in plans)
    assert known < each / 3
    print(each, known)


def sorts(plan):
    return [kernel.name for kernel in plan.work("leapfrog").each if "sort" in kernel.name]


def test_rows_in_a_known_order_are_not_sorted_in_each_leapfrog_on_a_tpu():
    sorted_each, known = (
        gm.plan(build(crossed, is_known=known), on="TPU v5e", data=8) for known in (False, True)
    )
    assert sorts(sorted_each) and not sorts(known)
    assert audit.violations(build(crossed, is_known=True), known, 2_000 * MB) == []
    assert sent(known) == sent(sorted_each)


def of_group_and_its_subgroups(x, row):
    of_subgroups = jnp.where(row["is_there"], (x["inner"] - x["effect"][:, :1]) ** 2, x["inner"] ** 2)
    return of_group(x, row) - 0.5 * jnp.sum(of_subgroups, axis=1)


def of_row_of_a_subgroup(x, row):
    return of_row(x, row) - 0.5 * gm.lookup_within(x["inner"], row["inner"]) ** 2


def nested(mesh, num_groups=6040, num_rows=1_000_000, most=12):
    """The same, and an effect of each of a group's subgroups, of which there are twelve at most."""
    groups = gm.Groups(keys(num_groups, num_rows), mesh, P("data"))
    shapes = {"y": ((), jnp.float32), "x": ((200,), jnp.float32), "inner": ((), jnp.int32)}
    rows = groups.place_rows({n: S((num_rows, *s), d) for n, (s, d) in shapes.items()})
    table = groups.place({"is_there": S((num_groups, most), jnp.bool_)})
    plates = (
        gm.Plate(of_group_and_its_subgroups, table, local=("effect", "inner")),
        gm.Plate(of_row_of_a_subgroup, rows, local=("effect", "inner")),
    )
    position = random_effects(mesh)[1] | {"inner": S((num_groups, most), jnp.float32)}
    return gm.Posterior(log_prior, *plates), position


def test_subgroups_have_no_atomic_on_a_card_and_send_nothing():
    plan = gm.plan(build(nested), on="H100", data=1)
    assert plan.report.collectives == plan.atomics() == ()
    plans = [gm.plan(build(model), on="TPU v5e", data=8) for model in (random_effects, nested)]
    assert sent(plans[0]) == sent(plans[1]) > 0
    assert {c.kind for c in plans[1].report.collectives} == {"all-reduce"}
