"""JAX beyond its public API: a release of JAX that lacks a name fails here, and runs are only slower.

One module of the package names JAX's internals, and looks each of them up when it is used.
"""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import jax_private, tree
from gspmd_mcmc.compat import positional
from gspmd_mcmc.fused.tracing import LOWERED, slope_of_cells
from gspmd_mcmc.jax_private import NAMES, open_program
from gspmd_mcmc.placement.mapped_axes import TRACES_ARE_APART, mapped_axes
from gspmd_mcmc.targets.streaming.chunkwise import chunkwise
from gspmd_mcmc.targets.streaming.products import with_narrow_factor_first

ROOT = Path(gm.__file__).parent
INTERNALS = re.compile(r"\bjax(lib)?\.(_src|interpreters|extend|lib|_jax)\b")
PROBE = "can_rewrite"  # in the place of a name: a JAX whose programs cannot be rewritten


def forget():
    for cached in (jax_private.found, jax_private.can_rewrite, positional._name_outputs):
        cached.cache_clear()
    jax.clear_caches()


@pytest.fixture
def hide(monkeypatch):
    """Give ``hide(*names)``: a JAX that lacks these names, or whose programs cannot be rewritten."""

    def gone(*_):
        raise AttributeError("gone")

    def hide(*names):
        forget()
        for name in names:
            if name == PROBE:
                monkeypatch.setattr(jax_private, "fresh_variable", gone)
            else:
                monkeypatch.setitem(NAMES, name, NAMES[name]._replace(where="jax:is_gone"))

    yield hide
    monkeypatch.undo()
    forget()


# This JAX has everything


@pytest.mark.parametrize("name", NAMES)
def test_this_jax_has(name):
    jax_private.found.cache_clear()
    assert jax_private.found(name) is not None


def test_this_jax_lets_programs_be_rewritten(recwarn):
    jax_private.can_rewrite.cache_clear()
    assert jax_private.can_rewrite() and not recwarn.list


def test_a_rewritten_program_computes_what_its_equations_say():
    program = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0 + 1.0)(0.5)
    sine, *others = open_program(program).eqns
    (cosine,) = open_program(jax.make_jaxpr(jnp.cos)(0.5)).eqns
    eqns = [cosine.replace(invars=sine.invars, outvars=sine.outvars), *others]
    (found,) = jax_private.evaluate(jax_private.with_equations(program, eqns), jnp.float32(0.5))
    np.testing.assert_allclose(found, 2 * np.cos(0.5) + 1, rtol=1e-6)


def test_unused_operations_of_functions_that_are_called_are_left_out():
    """What a call computes besides: also its operand is then unread."""
    program = jax.make_jaxpr(lambda x, y: jax.jit(lambda x, y: (jnp.exp(x), jnp.log(y)))(x, y))(
        1.0, 2.0
    )
    inner, is_kept = jax_private.without_unused(open_program(program), [True, False])
    assert is_kept == [True, False]
    assert "log" not in str(inner) and len(inner.invars) == len(inner.outvars) == 1
    kept, _ = jax_private.without_unused(open_program(program), [True, False], keep_inputs=True)
    assert len(kept.invars) == 2


ELEMENTWISE = {
    **{
        name: getattr(jnp, name)
        for name in ["abs", "exp", "exp2", "floor", "log", "log1p", "sign", "sqrt", "square", "tanh"]
    },
    **{"logistic": jax.nn.sigmoid, "rsqrt": jax.lax.rsqrt, "integer_pow": lambda x: x**3},
    **{"div": lambda x: 1 / x, "pow": lambda x: x**1.5, "max": lambda x: jnp.maximum(x, 0.4)},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_kernels_know_the_derivative_of_what_they_know(name):
    """JAX 0.12 has an operation of its own in the derivative of tanh."""

    def term(logit, cell):
        return ELEMENTWISE[name](logit) * logit * cell.astype(jnp.float32)

    assert name in LOWERED
    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint8)
    slope = slope_of_cells(term, shapes[0], [shapes[1]], (8, 128))
    assert slope is not None
    x = jnp.full((8, 128), 0.7)
    exact = jax.grad(lambda x: term(x, jnp.uint8(2)))(jnp.float32(0.7))
    np.testing.assert_allclose(slope(x, jnp.full(x.shape, 2, jnp.uint8)), exact, rtol=1e-5)


# A JAX that lacks something

ROWS = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def draws():
    """Draws of three latents on 8 devices, of two chains."""

    def likelihood(w, row):
        return -0.5 * (row @ w - 1) ** 2

    mesh = gm.make_mesh(chains=2, data=4)
    target = gm.Posterior(lambda w: -0.5 * w**2, gm.Plate(likelihood, gm.place(ROWS, mesh, P("data"))))
    kernel = gm.HMC(target, step_size=0.05, num_integration_steps=3)
    start = gm.per_chain(jnp.zeros((2, 3)))
    found = gm.sample(
        *(jax.random.key(0), target, start),
        **{"kernel": kernel, "num_chains": 2, "num_warmup": 0, "num_samples": 5, "progress": False},
    )
    return found.position


@pytest.fixture(scope="module")
def expected_draws():
    return draws()


@pytest.mark.parametrize(
    "names", [("eval_jaxpr",), ("get_axis_env",), (PROBE,), (*NAMES, PROBE)], ids=str
)
def test_sample_gives_the_same_draws_without(names, hide, expected_draws):
    hide(*names)
    with pytest.warns(gm.SamplingWarning) if is_read(names) else pytest.MonkeyPatch.context():
        found = draws()
    assert np.std(expected_draws) > 0.05
    np.testing.assert_allclose(found, expected_draws, rtol=1e-3, atol=1e-4)


def is_read(names):
    """Whether a run on this JAX reads one of the names."""
    return names != ("get_axis_env",) or TRACES_ARE_APART


def test_without_rewriting_functions_are_called_as_they_are(hide):
    are_traced = []

    def sums(w):
        are_traced.append(tree.is_traced(w[0]))
        return jnp.sum(w[0] * ROWS, axis=1)

    hide(PROBE)
    with pytest.warns(gm.SamplingWarning, match=r"JAX \S+ has programs that cannot be rewritten"):
        assert with_narrow_factor_first(sums) is sums
    found = chunkwise(sums, [jnp.ones((2, 3))], lambda latents: [jnp.repeat(latents[0], 32, axis=0)])
    np.testing.assert_allclose(found, ROWS.sum(1), rtol=1e-5)
    assert are_traced == [False]


@pytest.mark.skipif(not TRACES_ARE_APART, reason="this JAX keeps traces from outside of maps")
def test_where_jax_does_not_tell_nothing_is_known(hide):
    assert mapped_axes() is not None
    hide("get_axis_env")
    with pytest.warns(
        gm.SamplingWarning, match=r"JAX \S+ has no jax:is_gone: .* slower under jax.vmap"
    ):
        assert mapped_axes() is None


def test_without_jax_s_search_unused_operations_are_found_among_a_program_s_own(hide):
    program = open_program(jax.make_jaxpr(lambda x, y: (jnp.exp(x) * 2, jnp.log(y)))(1.0, 2.0))
    exact = [jax_private.without_unused(program, [True, False], keep) for keep in (True, False)]
    hide("dce_jaxpr")
    with pytest.warns(gm.SamplingWarning, match="unused operations"):
        own = [jax_private.without_unused(program, [True, False], keep) for keep in (True, False)]
    assert [kept for _, kept in own] == [kept for _, kept in exact] == [[True, True], [True, False]]
    assert [str(inner) for inner, _ in own] == [str(inner) for inner, _ in exact]


def test_without_jax_s_search_numpyro_models_are_read_as_they_are(hide):
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions

    def model(x, y):
        width = numpyro.sample("width", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(width * x, 1.0), obs=y)

    def value():
        target = gm.from_numpyro(model, jnp.asarray(ROWS[:, 0]), jnp.asarray(ROWS[:, 1]))
        return tree.total(target.terms({"width": jnp.float32(0.3)}))

    expected = value()
    hide("dce_jaxpr")
    with pytest.warns(gm.SamplingWarning, match="unused operations"):
        np.testing.assert_allclose(value(), expected, rtol=1e-5)


def test_without_a_registry_results_of_positional_shardings_have_no_names_and_a_warning_says_so(hide):
    hide("out_sharding_handlers")
    handlers = jax_private.resolve_name("jax._src.interpreters.pxla:_orig_out_sharding_handlers")
    ours = handlers.pop(gm.PositionalSharding, None)
    with pytest.warns(gm.SamplingWarning, match=r"without a mesh and a spec.*Use sharding.named\(\)"):
        sharding = gm.PositionalSharding(jax.devices()).reshape(8, 1)
    found = jnp.sin(jax.device_put(ROWS, sharding))
    assert not isinstance(found.sharding, NamedSharding)
    np.testing.assert_allclose(found, np.sin(ROWS), rtol=1e-5)
    handlers.update({} if ours is None else {gm.PositionalSharding: ours})


@pytest.mark.parametrize("name", positional.LOWERINGS)
def test_without_a_lowering_arrays_of_fewer_axes_are_refused_before_they_are_placed(name, hide):
    sharding = gm.PositionalSharding(jax.devices()).reshape(1, 8)
    hide(name)
    with pytest.warns(gm.SamplingWarning), pytest.raises(NotImplementedError, match=jax.__version__):
        jax.device_put(ROWS[:, 0], sharding)
    np.testing.assert_array_equal(jax.device_put(ROWS[:, 0], sharding.named(1)), ROWS[:, 0])
    np.testing.assert_array_equal(jax.device_put(ROWS.T, sharding), ROWS.T)


# The import

BLOCKED = ("jax.extend", "jax.extend.core", "jax.interpreters", "jax.interpreters.partial_eval")


def test_the_import_needs_no_internals_and_leaves_jax_as_it_is():
    code = f"""
import sys, jax, jax.core
from jax._src.interpreters import pxla
before = dict(pxla._orig_out_sharding_handlers)
sys.modules |= dict.fromkeys({BLOCKED}, None)
del jax.core.eval_jaxpr
import gspmd_mcmc as gm
assert pxla._orig_out_sharding_handlers == before
jax.config.update("jax_num_cpu_devices", 2)
gm.PositionalSharding(jax.devices())
assert gm.PositionalSharding in pxla._orig_out_sharding_handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_module_of_the_package_names_internals():
    files = [path for path in ROOT.rglob("*.py") if INTERNALS.search(path.read_text())]
    assert [path.name for path in files] == ["jax_private.py"]


@pytest.mark.parametrize(
    "line", ["from jax._src import core", "import jax.extend.core as c", "jax.interpreters.pxla.x"]
)
def test_a_use_of_internals_is_found(line):
    assert INTERNALS.search(line) and not INTERNALS.search("jax.experimental jax.lax.library jax.core")
