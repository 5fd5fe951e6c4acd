"""What the installed compiler writes, for varied programs: all of it is accounted for."""

import functools
import re

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.views.communication import read_report
from gspmd_mcmc.views.program.hlo import KINDS, read_program


def transforms(x, i):
    ordered = jnp.sort(x, axis=0), lax.top_k(x, 3), jnp.argsort(x[0])
    return jnp.fft.rfft(x).real, ordered, x[i], x.at[i].add(1.0)


def arithmetic(x, i):
    bits = lax.population_count(i) + lax.clz(i) ^ (i << 2) | (i >> 1) & ~i
    special = (
        lax.erf(x) + lax.lgamma(x) + jnp.cbrt(x) + jnp.arctan2(x, x + 1) + jnp.expm1(x) + jnp.log1p(x)
    )
    rounded = jnp.round(x) + jnp.floor(x) + jnp.ceil(x) + jnp.sign(x) + lax.rsqrt(x) + jnp.tan(x)
    hyperbolic = jnp.sinh(x) + jnp.cosh(x) + jnp.arcsinh(x) + jnp.arctanh(x / 9) + jax.nn.sigmoid(x)
    other = jnp.isfinite(x), lax.complex(x, x), lax.reduce_precision(x, 5, 10), x % 3.0, x**2.5
    return bits, special + rounded + hyperbolic, other, lax.bitcast_convert_type(x, jnp.int32)


def factorisations(x, i):
    symmetric = x @ x.T + 9 * jnp.eye(8)
    factor = jnp.linalg.cholesky(symmetric)
    solved = linalg.solve_triangular(factor, x, lower=True)
    factors = jnp.linalg.qr(x), jnp.linalg.svd(x), jnp.linalg.eigh(symmetric)
    return solved, factors, jnp.linalg.solve(symmetric, x)


def windows(x, i):
    image = x.reshape(1, 1, 8, 8)
    blurred = lax.conv_general_dilated(image, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")
    pool = functools.partial(
        lax.reduce_window, init_value=-jnp.inf, computation=lax.max, window_dimensions=(1, 1, 2, 2),
        window_strides=(1, 1, 2, 2), padding="VALID",
    )  # fmt: skip
    pooled = jax.grad(lambda y: pool(y).sum())(image)
    return blurred, pooled, jnp.cumsum(x), lax.pad(x, 0.0, ((1, 1, 1),) * 2)


def control(x, i):
    def body(carry, row):
        return lax.cond(row[0] > 0, jnp.sin, jnp.cos, carry), carry.sum()

    looped = lax.scan(body, x, x)
    searched = lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + 1, x)
    switched = lax.switch(i[0], (jnp.sin, jnp.cos, jnp.tan), x)
    return looped, searched, switched, lax.optimization_barrier(x)


def randoms(x, i):
    key = jax.random.fold_in(jax.random.key(0), i[0])
    other = jax.random.wrap_key_data(jnp.arange(4, dtype=jnp.uint32), impl="rbg")
    return jax.random.normal(key, (8,)), jax.random.gamma(key, 2.0), jax.random.normal(other, (8,))


def callbacks(x, i):
    jax.debug.callback(print, i)
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def slices(x, i):
    taken = lax.dynamic_slice(x, (i[0], i[1]), (2, 2))
    put = lax.dynamic_update_slice(x, taken, (i[1], i[0]))
    chosen = jnp.where(x > 0, x, 0), jnp.take_along_axis(x, i[:, None], 1), jnp.clip(x, 0, 1)
    return put, jnp.concatenate([x, x[::-1]]), chosen


VARIED = {
    transforms: "fft sort custom-call gather",
    arithmetic: "popcnt atan2 bitcast-convert reduce-precision complex is-finite",
    factorisations: "custom-call dot",
    windows: "convolution reduce-window pad",
    control: "while conditional",
    randoms: "xor",
    callbacks: "custom-call",
    slices: "dynamic-slice dynamic-update-slice concatenate select",
}


def compiled_text(function, sharded):
    spec = P("data") if sharded else P()
    sharding = NamedSharding(gm.make_mesh(), spec)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    i = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(gm.make_mesh(), P()))
    return jax.jit(function).lower(x, i).compile().as_text() or ""


@pytest.mark.parametrize("function", VARIED, ids=lambda f: f.__name__)
def test_all_that_the_installed_compiler_writes_is_accounted_for(function):
    """Counted without the reader: lines of computations are the indented ones."""
    alone = compiled_text(function, False)
    assert all(f" {opcode}(" in alone for opcode in VARIED[function].split())
    report = read_report(alone, memory={}, arguments=(), mesh={"data": 8})
    assert (report.unknown, report.collectives) == ((), ())

    text = compiled_text(function, True)
    program = read_program(text)
    operations = sum(len(operations) for operations in program.computations.values())
    assert sum(line.startswith("  ") for line in text.splitlines()) == operations > 10
    heads = [line for line in text.splitlines() if re.match(r"(ENTRY )?%", line)]
    assert len(heads) == len(program.computations)
    assert sum(line.startswith(f"ENTRY %{program.entry} ") for line in heads) == 1
    report = read_report(text, memory={}, arguments=(), mesh={"data": 8})
    assert report.unknown == ()
    for kind in KINDS:
        assert report.count(kind) >= len(re.findall(rf" {kind}(?:-start)?\(", text)), kind
