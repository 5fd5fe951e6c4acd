"""Programs planned for meshes that are not there, against the same programs on meshes that are.

The MovieLens step has its real shapes: users x 3,706 films, 20 dimensions.
"""

import functools
import math
import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import Accelerator, BudgetExceeded, LayoutView, communication, make_abstract_mesh, plan
from gspmd_mcmc.planning import aot_compilation
from gspmd_mcmc.planning.aot_compilation import Compiled, compile_aot
from gspmd_mcmc.planning.chips import ACCELERATORS
from gspmd_mcmc.planning.plan import extrapolate, predict_report
from gspmd_mcmc.targets.streaming import tiling

S = jax.ShapeDtypeStruct
F32 = jnp.float32
ROWS = P("data")
PLAN: Any = sys.modules[plan.__module__]  # the function has the name of its module
MESH = make_abstract_mesh(data=8)
FILMS, DIMENSIONS, MANY_USERS = 3706, 20, 2_500_000


def on(mesh, *shape, spec=ROWS, dtype=F32):
    """An array that is never made, on a mesh."""
    return S(shape, dtype, sharding=NamedSharding(mesh, spec))


def sum_of_squares(x):
    return jnp.sum(x**2)


# Steps of kernels: each builds (function, *arguments) on a real mesh or an abstract one.


def flat_prior(params):
    return tuple(-0.5 * params[name] ** 2 for name in sorted(params))


def logistic_likelihood(params, block):
    return gm.bernoulli_logits(block["x"] @ params["w"] + params["b"], block["y"])


def logistic(mesh, spec: Any = ROWS, num_rows=4001):
    data = {"x": S((num_rows, 16), F32), "y": S((num_rows,), jnp.bool_)}
    target = gm.Posterior(flat_prior, gm.Plate(logistic_likelihood, gm.place(data, mesh, spec)))
    return gm.HMC(target, 1e-2, 10), {"w": (16,), "b": ()}


def effects_likelihood(params, block):
    z = (params["effect"] - params["mean"]) * jnp.exp(-params["log_sd"])
    return gm.poisson_log_rate(params["effect"], block["count"]) - 0.5 * z**2 - params["log_sd"]


def effects(mesh, count: Any = S((1001,), jnp.int32)):  # noqa: B008 - immutable
    data = gm.place({"count": count}, mesh, P("data"))
    target = gm.Posterior(flat_prior, gm.Plate(effects_likelihood, data, local="effect"))
    return gm.HMC(target, 1e-2, 10), {"effect": (1001,), "mean": (), "log_sd": ()}


def one_chain(model, mesh):
    kernel, sizes = model(mesh)
    state = jax.eval_shape(gm.HMC.init, kernel, {name: S(shape, F32) for name, shape in sizes.items()})
    return gm.HMC.step, kernel, jax.random.key(0), state


def four_chains(model, mesh):
    kernel, sizes = model(mesh)
    shapes = {name: S((4, *shape), F32) for name, shape in sizes.items()}
    init = jax.vmap(gm.HMC.init, in_axes=(None, 0), spmd_axis_name="chains")
    state = jax.eval_shape(init, kernel, gm.place(shapes, mesh, P("chains")))
    keys = gm.place(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4)), mesh, P("chains"))
    return jax.vmap(gm.HMC.step, in_axes=(None, 0, 0), spmd_axis_name="chains"), kernel, keys, state


def over_columns(mesh):
    """Columns of the data, and their coefficients, over a second mesh axis."""
    kernel, _ = logistic(mesh, {"x": P("data", "model"), "y": P("data")})
    position = {"w": on(mesh, 16, spec=P("model")), "b": on(mesh, spec=P())}

    def step(kernel, key, position):
        return kernel.step(key, kernel.init(position))

    return step, kernel, jax.random.key(0), position


def planned_for(build, mesh):
    function, *args = build(mesh)
    return compile_aot(function, tuple(args), mesh).report


def compiled(report):
    """What `compile_aot` returns, with this report."""
    return Compiled(report, text="", assembly=(), seconds=0.0)


def wire(report):
    """What a report says of the collectives."""
    return [
        (c.kind, c.shape, c.num_bytes, c.operand_bytes, c.axes, c.group_size, c.loops, c.source)
        for c in report.collectives
    ]


def held(report):
    """What a report says of the arguments."""
    return {a.path: (a.shape, a.dtype, a.num_bytes, a.bytes_per_device) for a in report.arguments}


# On as many devices as there are.


@pytest.mark.parametrize(
    ("build", "axes"),
    [
        (functools.partial(four_chains, effects), {"chains": 2, "data": 4}),
        (over_columns, {"data": 4, "model": 2}),
    ],
)
def test_a_step_is_planned_as_it_is_compiled_for_devices(monkeypatch, build, axes):
    # A plan is of any devices. CPUs that are there cut blocks by hand, which leaves an axis out.
    monkeypatch.setattr(tiling, "_manual_axes", lambda rows: None)
    planned = planned_for(build, make_abstract_mesh(**axes))
    function, *args = build(gm.make_mesh(**axes))
    compiled = communication(function, *args)
    assert planned.count("all-reduce") >= 2
    assert wire(planned) == wire(compiled)
    assert held(planned) == held(compiled)
    assert planned.argument_bytes == compiled.argument_bytes
    assert planned.output_bytes == compiled.output_bytes
    assert (planned.num_devices, planned.mesh) == (8, axes)
    assert planned.unknown == ()


def test_a_plan_holds_what_a_run_holds():
    """The state of shapes has no layout; the compiler gives it that of real arrays."""
    kernel, _ = effects(gm.make_mesh(data=8), np.ones(1001, np.int32))
    state = kernel.init({"effect": jnp.zeros(1001), "mean": jnp.zeros(()), "log_sd": jnp.zeros(())})
    run = communication(jax.jit(gm.HMC.step), kernel, jax.random.key(0), state)
    planned = planned_for(functools.partial(one_chain, effects), MESH)
    assert held(planned) == held(run)
    assert wire(planned) == wire(run)


def mixed(flag, scale, half, keys, key, other, number, unused, x, *, power):
    draws = jax.vmap(jax.random.normal)(keys) + jax.random.normal(other)
    scaled = jnp.where(flag, half * scale, half).sum()
    out = {"key": jax.random.split(key), "none": None, "draws": draws, "kind": scaled, "one": 1.0}
    return out, sum_of_squares(x) ** power + number.real


def mixed_arguments(mesh):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    return (
        functools.partial(mixed, power=2),
        True,
        2.0,  # takes the dtype of `half`, so that no float32 is made of it
        on(mesh, 64, 3, dtype=jnp.bfloat16),
        gm.place(keys, mesh, P("data")),
        jax.random.key(1),
        jax.random.key(2, impl="rbg"),
        np.complex64(1),
        on(mesh, 1000),
        S((16,), np.float64),
    )


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of JAX 0.12
def test_arguments_of_all_kinds_are_planned_as_they_are_compiled():
    planned = planned_for(mixed_arguments, MESH)
    function, *args = mixed_arguments(gm.make_mesh(data=8))
    compiled = communication(function, *args)
    assert held(planned) == held(compiled)
    assert wire(planned) == wire(compiled)
    assert planned.output_bytes == compiled.output_bytes
    assert "[7]" not in held(planned)  # what is not used is not in the program
    assert held(planned)["[3]"] == ((16,), "key<fry>", 16 * 8, 2 * 8)
    assert held(planned)["[5]"] == ((), "key<rbg>", 16, 16)
    assert held(planned)["[2]"][1] == "bfloat16"
    assert "tests/test_plan.py" in planned.collectives[0].source


def test_donation_and_layouts_of_outputs_are_planned():
    def build(mesh):
        out = (NamedSharding(mesh, P("data")), NamedSharding(mesh, P()))
        step = jax.jit(lambda x, y: (x + 1, y * 2), donate_argnums=0, out_shardings=out)
        return step, on(mesh, 1600), on(mesh, 80)

    planned = planned_for(build, MESH)
    assert planned.alias_bytes == 800  # 1600 float32 over 8 devices
    assert planned.argument_bytes == 800 + 40
    assert [(c.kind, c.num_bytes) for c in planned.collectives] == [("all-gather", 320)]
    # An upper bound that counts donated memory once.
    assert planned.peak_bytes <= 840 + 320 + planned.temporary_bytes + planned.constant_bytes + 100


def test_the_mesh_is_there_when_no_argument_lies_on_it():
    def build(mesh):
        rows = NamedSharding(mesh, P("data"))
        return lambda x: sum_of_squares(jax.lax.with_sharding_constraint(2 * x, rows)), S((1600,), F32)

    planned = plan(build, data=8).report
    assert [(c.kind, c.axes) for c in planned.collectives] == [("all-reduce", ("data",))]
    assert planned.argument_bytes == 800


def test_float64_is_planned_where_it_is_on():
    with jax.enable_x64(True):
        planned = planned_for(lambda m: (sum_of_squares, on(m, 16, dtype=jnp.float64)), MESH)
    assert planned.argument_bytes == 2 * 8
    assert [(c.shape, c.num_bytes) for c in planned.collectives] == [("f64[]", 8)]


# On many more: MovieLens.


def movielens_likelihood(params, watched):
    logits = gm.inner_products(params["U"], params["V"])
    return gm.bernoulli_logits(logits, watched).sum(1) - 0.5 * (params["U"] ** 2).sum(1)


def movielens(mesh):
    watched = gm.place(S((MANY_USERS, FILMS), jnp.bool_), mesh, P("data"))
    target = gm.Posterior(flat_prior, gm.Plate(movielens_likelihood, watched, local="U"))
    kernel = gm.HMC(target, step_size=1e-2, num_integration_steps=10)
    shapes = {"U": (MANY_USERS, DIMENSIONS), "V": (FILMS, DIMENSIONS), "s": ()}
    position = {name: S(shape, F32) for name, shape in shapes.items()}
    state = jax.eval_shape(gm.HMC.init, kernel, position)
    return jax.jit(gm.HMC.step), kernel, jax.random.key(0), state


@functools.cache
def movielens_on(num_devices):
    return planned_for(movielens, make_abstract_mesh(data=num_devices))


def argument_bytes_of(num_devices):
    """What a device holds: its rows of the cells and of U, a single tile, and V, whole."""
    rows = math.ceil(MANY_USERS / num_devices)
    cells, u, v = rows * FILMS, 4 * rows * DIMENSIONS, 4 * FILMS * DIMENSIONS
    scalars = 4 * 6 + 8  # step size, leapfrogs, s, its gradient and prior, log density; the key
    # U and V in the position and in the gradient, V's prior, and a two-float sum of the tile.
    return cells + 2 * (u + v) + v + scalars + 8


@pytest.mark.parametrize("num", [512, 2048])
def test_movielens_sends_one_gradient_a_leapfrog_on_any_number_of_devices(num):
    report = movielens_on(num)
    assert report.num_devices == num
    assert report.runs("all-reduce", "leapfrog") == 1
    assert report.sent_bytes("leapfrog") == 4 * FILMS * DIMENSIONS
    report.check(within="leapfrog", all_reduce=1, collectives=1)
    report.check(all_gather=0, all_to_all=0, collective_permute=0, constant_bytes=1e4, whole_bytes=1e6)
    # The last gradient's, and with it the energy's sums.
    after = [c.num_bytes for c in report.collectives if not c.loops]
    assert after == [4 * FILMS * DIMENSIONS + 16]
    assert {c.group_size for c in report.collectives} == {num}
    assert report.argument_bytes == argument_bytes_of(num)
    assert report.temporary_bytes < 1.2 * 2**28  # a tile
    # Lines are named, and not those of the process that compiled it.
    gradient = next(c for c in report.collectives if c.loops)
    assert gradient.library_source.startswith("gspmd_mcmc/")
    assert "kernels/integrators.py" in gradient.loops[0].source
    files = {frame.file for c in report.collectives for frame in c.stack}
    assert files
    assert not any("aot_process" in file for file in files)


# Above 2,048 devices: the rule.


@pytest.fixture
def movielens_plan(monkeypatch):
    """The step on 8,192 devices; the three programs that it needs are compiled once for all tests."""

    def cached(function, args, mesh):
        return compiled(movielens_on(mesh.size))

    monkeypatch.setattr(PLAN, "compile_aot", cached)
    return plan(movielens, data=8192, accelerator="TPU v5e", trips={"leapfrog": 10})


def test_movielens_is_planned_on_8192_devices(movielens_plan):
    report = movielens_plan.report
    assert (report.num_devices, report.mesh) == (8192, {"data": 8192})
    assert report.runs("all-reduce", "leapfrog") == 1
    assert report.runs("all-reduce") == 11
    assert report.sent_bytes("leapfrog") == 4 * FILMS * DIMENSIONS
    assert {c.group_size for c in report.collectives} == {8192}
    assert report.argument_bytes == argument_bytes_of(8192)
    assert report.argument_bytes == sum(a.bytes_per_device for a in report.arguments)
    assert movielens_plan.rule.compiled == (512, 1024, 2048)
    assert movielens_plan.fits


def test_the_rule_predicts_2048_devices_from_1024_and_1536():
    """On 512 the compiler shares one buffer of users less, so temporaries begin above that."""
    small, large, true = (movielens_on(n) for n in (1024, 1536, 2048))
    predicted = predict_report(small, large, 1024, 1536, "data", 2048)
    assert wire(predicted) == wire(true)
    for name in ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes"):
        assert getattr(predicted, name) == pytest.approx(getattr(true, name), rel=1e-3), name


def test_the_rule_says_how_far_it_is_off(monkeypatch):
    sizes = (512, 1024, 2048)
    reports = [movielens_on(n) for n in sizes]
    monkeypatch.setattr(PLAN, "smaller_sizes", lambda mesh: ("data", sizes))
    monkeypatch.setattr(
        PLAN, "compile_aot", lambda function, args, mesh: compiled(movielens_on(mesh.size))
    )
    _, rule = extrapolate(movielens, make_abstract_mesh(data=8192))
    off = []
    for name in ("argument_bytes", "output_bytes", "temporary_bytes", "constant_bytes"):
        first, second, last = (getattr(report, name) for report in reports)
        a, b = np.linalg.solve([[1, 1 / sizes[0]], [1, 1 / sizes[1]]], [first, second])
        off.append(abs(a + b / sizes[2] - last) / reports[2].peak_bytes)
    assert rule.error == pytest.approx(max(off), abs=1 / reports[2].peak_bytes)
    assert f"off by at most {rule.error:.2%} on the last" in str(rule)


@pytest.fixture
def on_real_devices(monkeypatch):
    """Set the limit at 8 devices, and compile for 2, 4 and 8 here."""

    def compile_here(function, args, mesh):
        on_real = jax.tree.map(lambda x: on(real(mesh), *x.shape, spec=x.sharding.spec), args)
        return compiled(communication(function, *on_real))

    monkeypatch.setattr(PLAN, "MOST_DEVICES", 8)
    monkeypatch.setattr(PLAN, "compile_aot", compile_here)


def real(mesh):
    return gm.make_mesh(data=mesh.size, devices=jax.devices()[: mesh.size])


def descent(mesh):
    """Three steps down a gradient, the rows over the mesh."""

    def run(x, w):
        with jax.named_scope("descent"):
            return jax.lax.fori_loop(
                0, 3, lambda i, w: w - jax.grad(lambda w: sum_of_squares(x @ w))(w), w
            )

    return run, on(mesh, 3200, 50), on(mesh, 50, spec=P())


def test_an_extrapolated_plan_is_what_would_be_compiled(on_real_devices):
    true = planned_for(descent, make_abstract_mesh(data=32))
    planned = plan(descent, data=32)
    assert planned.rule is not None
    assert (planned.rule.axis, planned.rule.compiled) == ("data", (2, 4, 8))
    assert wire(planned.report) == wire(true)
    assert planned.report.runs("all-reduce") == 3
    assert held(planned.report) == held(true)
    assert planned.report.argument_bytes == true.argument_bytes == 4 * 50 * (100 + 1)
    assert planned.report.peak_bytes == pytest.approx(true.peak_bytes, rel=0.02)
    assert "extrapolated: compiled for data = 2, 4, 8" in str(planned)


def test_what_grows_with_the_mesh_is_off_and_the_rule_says_so(on_real_devices):
    """Every device contributes a row of 80 bytes, which all devices gather."""

    def build(mesh):
        gathered = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(real(mesh), P()))
        return gathered, on(mesh, mesh.size, 20)

    report, rule = extrapolate(build, make_abstract_mesh(data=32))
    sent = report.collectives[0]
    assert (sent.kind, sent.operand_bytes, sent.group_size) == ("all-gather", 80, 32)
    assert (sent.shape, sent.operand_shape) == (f"{sent.num_bytes} bytes", "f32[1,20]")
    assert sent.num_bytes < 32 * 80
    assert rule.error > 0.2


def test_trips_that_depend_on_the_mesh_are_not_known_on_another(on_real_devices):
    def build(mesh):
        def turns(x):
            with jax.named_scope("turns"):
                return jax.lax.fori_loop(0, mesh.size, lambda i, a: jnp.sin(a) + a.sum(), x)

        return turns, on(mesh, 64)

    report, _ = extrapolate(build, make_abstract_mesh(data=32))
    assert [(loop.name, loop.trips) for loop in report.loops] == [("turns", None)]
    assert report.with_trips(turns=32).runs("all-reduce") == 32


def test_a_program_that_changes_with_the_mesh_is_not_extrapolated(on_real_devices):
    def build(mesh):
        spec = P() if mesh.size > 4 else P("data")
        return sum_of_squares, on(mesh, 64, spec=spec)

    message = (
        "cannot be extrapolated: 1 x all-reduce over data only with data=2. Plan a mesh of at most 8"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        extrapolate(build, make_abstract_mesh(data=32))


def test_a_mesh_with_two_long_axes_is_refused():
    with pytest.raises(RuntimeError, match="leaves 2 along 'chains'; make them smaller"):
        plan(lambda m: (sum_of_squares, on(m, 1024)), chains=1024, data=1024)


# Against an accelerator.


def test_a_plan_says_whether_it_fits(movielens_plan):
    peak = movielens_plan.report.peak_bytes
    verdict = f"fits: at most {peak / 1e6:.1f} MB of the 17.2 GB that JAX has of a TPU v5e"
    assert verdict in str(movielens_plan)
    exact = replace(movielens_plan, accelerator=Accelerator("toy", peak))
    assert exact.fits
    assert "fits: " in str(exact) and "of a toy (100.0%)" in str(exact)
    small = replace(movielens_plan, accelerator=Accelerator("toy", peak - 1))
    assert not small.fits
    assert "DOES NOT FIT: " in str(small)
    none = replace(movielens_plan, accelerator=None)
    assert none.fits is None
    assert "on each of 8,192 devices" in str(none)
    # Of a GPU three quarters are counted.
    whole = replace(movielens_plan, accelerator=Accelerator("toy", peak, share=0.75))
    assert not whole.fits
    assert ACCELERATORS["H100 80GB"].usable_bytes == 60e9


def test_a_plan_says_where_one_device_would_be_faster(movielens_plan, monkeypatch):
    assert movielens_plan.small_data is None
    monkeypatch.setattr(PLAN, "compile_aot", lambda *args: compiled(movielens_on(512)))
    said = " ".join(str(plan(functools.partial(one_chain, effects), data=8)).split())
    assert re.search(r"small data on many devices: Plate.*, 0.00 MB of rows on 8 devices", said)
    by_chains = plan(functools.partial(four_chains, effects), chains=4, data=1)
    assert by_chains.small_data is None


def test_an_accelerator_that_is_not_known_is_refused_before_anything_is_built():
    with pytest.raises(ValueError, match=r"no accelerator 'v5e'; there are .*TPU v5e.*Accelerator\("):
        plan(lambda mesh: pytest.fail("built"), data=8, accelerator="v5e")


def test_every_accelerator_has_its_source():
    for name, device in ACCELERATORS.items():
        assert (device.name, device.source[:8]) == (name, "https://")
        assert 8e9 <= device.memory_bytes <= 200e9


def test_a_plan_is_drawn_in_100_columns(movielens_plan):
    lines = str(movielens_plan).splitlines()
    assert max(map(len, lines)) <= 100
    for part in ("P(data=8192)", "all-reduce f32[3706,20]", "temporaries", "extrapolated"):
        assert any(part in line for line in lines), part
    assert isinstance(movielens_plan.layout, LayoutView)
    watched = movielens_plan.layout["[0].target.plates[0].data"].leaves[0]
    assert watched.shape == (math.ceil(MANY_USERS / 8192) * 8192, FILMS)


# Data that are whole on every device.

CELLS = np.random.default_rng(0).normal(size=(5000, 100)).astype(np.float32)


def test_data_that_a_function_closes_over_are_named():
    report = planned_for(lambda m: (lambda w: jnp.sum((CELLS @ w) ** 2), on(m, 100, spec=P())), MESH)
    assert len(report.whole) == 1
    assert report.whole[0].startswith("constant f32[5000,100], 2 MB: CELLS, a global that")
    with pytest.raises(BudgetExceeded, match="CELLS, a global that"):
        report.check(whole_bytes=1e6)


# What goes wrong.


def on_a_real_mesh(mesh):
    there = gm.make_mesh(data=8)
    return sum_of_squares, {"x": gm.place(np.ones(16, np.float32), there, P("data"))}


def static(x, n):
    return x.sum() * len(range(n))


X = on(MESH, 16)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (X, TypeError, "build: expected a function of a mesh, got ShapeDtypeStruct"),
        (lambda m: sum_of_squares, TypeError, "(function, *arguments), got a function"),
        (lambda m: (X, sum_of_squares), TypeError, "got a tuple of ShapeDtypeStruct, function"),
        (lambda m: (), TypeError, "got a tuple of nothing"),
        (on_a_real_mesh, ValueError, "argument [0]['x'] lies on Mesh('data': 8, axis_types=(Auto,))"),
        (
            lambda m: (sum_of_squares, on(make_abstract_mesh(data=4), 16)),
            ValueError,
            "argument [0] lies on AbstractMesh('data': 4, axis_types=(Auto,)), not on the mesh that",
        ),
        (
            lambda m: (sum_of_squares, on(m, 10)),
            ValueError,
            "argument [0] of shape (10,) does not cut into equal parts under P",
        ),
        (lambda m: (static, X, "three"), TypeError, "argument [1]: expected an array, a ShapeDtype"),
        (lambda m: (static, X, static), TypeError, "got a function. Bind what is static"),
        (
            lambda m: (jax.jit(static, static_argnums=1), X, 3),
            ValueError,
            "takes some of its arguments as static. Bind what is static before: functools.partial",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(build, error, message):
    with pytest.raises(error, match=re.escape(message)):
        plan(build, data=8)


def closes_over_a_shape(mesh):
    data = on(mesh, 16, 3)
    return lambda w: jnp.sum(data @ w), on(mesh, 3, spec=P())


def computes_with_shapes(mesh):
    kernel, position = effects(mesh)
    return (
        gm.HMC.step,
        kernel,
        jax.random.key(0),
        kernel.init({n: S(s, F32) for n, s in position.items()}),
    )


def keeps_its_own_devices(mesh):
    there = NamedSharding(gm.make_mesh(data=4, devices=jax.devices()[:4]), P("data"))
    return lambda x: jax.lax.with_sharding_constraint(x, there), on(mesh, 16)


def prints(mesh):
    def loss(x):
        jax.debug.print("{}", x)
        return sum_of_squares(x)

    return loss, on(mesh, 16)


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (closes_over_a_shape, "What the function reads is an argument"),
        (computes_with_shapes, "jax.eval_shape(gspmd_mcmc.HMC.init, kernel, position)"),
        (keeps_its_own_devices, "Make shardings from that mesh"),
        (prints, "The function calls back to Python"),
    ],
)
def test_to_errors_of_jax_it_is_added_what_to_do(build, hint):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        plan(build, data=8)
    said = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert any(hint in text for text in said)


@pytest.mark.parametrize("where", ["build", "function", "jitted"])
def test_an_error_of_the_caller_passes_through(where):
    error = ValueError("my own")

    def fail(*args):
        raise error

    wrong = {"build": fail, "function": lambda m: (fail, X), "jitted": lambda m: (jax.jit(fail), X)}
    with pytest.raises(ValueError, match="my own") as raised:
        plan(wrong[where], data=8)
    assert raised.value is error
    assert not any("shape" in note for note in getattr(error, "__notes__", []))


def test_more_devices_than_can_be_compiled_for_are_refused(monkeypatch):
    mesh = make_abstract_mesh(data=4096)
    with pytest.raises(ValueError, match="a mesh of 4096 devices; at most 2048"):
        compile_aot(sum_of_squares, (on(mesh, 4096),), mesh)
    # An argument elsewhere is found before smaller meshes are compiled for.
    monkeypatch.setattr(PLAN, "compile_aot", lambda *args: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=re.escape("argument [0] lies on AbstractMesh('data': 8")):
        plan(lambda mesh: (sum_of_squares, X), data=4096)


def test_what_the_other_process_says_or_a_missing_extra_is_in_the_error(monkeypatch):
    broken = aot_compilation._environment() | {"JAX_PLATFORMS": "abacus"}
    monkeypatch.setattr(aot_compilation, "_environment", lambda: broken)
    with pytest.raises(
        RuntimeError, match=r"(?s)compiling for 8 devices failed, exit status 1:.*abacus"
    ):
        plan(lambda mesh: (sum_of_squares, X), data=8)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for name in [name for name in sys.modules if name.endswith("export.serialization")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=re.escape("pip install 'gspmd_mcmc[plan]'")):
        plan(lambda mesh: (sum_of_squares, X), data=8)
