"""The meaning of a function: what it reads counts, and who or where it is does not."""

import collections
import contextvars
import copy
import dataclasses
import decimal
import functools
import importlib
import operator
import pickle
import sys
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.targets.function import as_partial, run

NAMESPACE = types.ModuleType("users_settings")
sys.modules["users_settings"] = NAMESPACE


def means(function):
    """Return what stands for a function in the keys of programs."""
    return jax.tree.structure(as_partial(function))


# Code of a cell, whose ``f`` is a function, and another cell that changes what it reads.


class Slotted:
    __slots__ = ("mu",)

    def f(self, x):
        return x - self.mu


class Dynamic:
    """As configurations of libraries are: attributes come from a dict."""

    def __init__(self, **entries):
        self.__dict__["_entries"] = entries

    def __getattr__(self, name):
        return self.__dict__["_entries"][name]


HELPER = "mu = 0.0\ndef helper(x): return x - mu\n"
OBJECT = "class A:\n def __init__(s, mu): s.mu, s.notes = mu, []\n"
DATACLASS = "@dataclasses.dataclass\nclass A:\n mu: object\n"
CASES = {
    # Globals and code.
    "global": ("mu = 0.0\ndef f(x): return x - mu", "mu = 10.0"),
    "sign of zero": ("mu = 0.0\ndef f(x): return x / mu", "mu = -0.0"),
    "type of a number": ("mu = 1\ndef f(x): return x / mu", "mu = 1.0"),
    "nested function": ("mu = 0.0\ndef f(x):\n def g(y): return y - mu\n return g(x)", "mu = 1.0"),
    "another helper": (HELPER + "def f(x): return helper(x)", "def helper(x): return x + mu"),
    "jitted helper": (HELPER + "h = jax.jit(helper)\ndef f(x): return h(x)", "mu = 1.0"),
    "derivative": (HELPER + "h = jax.vmap(jax.grad(helper))\ndef f(x): return h(x)", "mu = 1.0"),
    "cached helper": (HELPER + "h = functools.lru_cache(helper)\ndef f(x): return h(x)", "mu = 1.0"),
    "decorated": (
        HELPER
        + "def twice(g):\n @functools.wraps(g)\n def h(x): return 2 * g(x)\n return h\n"
        + "@twice\ndef f(x): return helper(x)",
        "mu = 1.0",
    ),
    "recursion": ("mu = 0\ndef f(x, n=3): return x - mu if n == 0 else f(x, n - 1)", "mu = 1"),
    "builtin that is hidden": ("def f(x): return abs(x)", "def abs(x): return -x"),
    "partial": (
        HELPER + "def g(a, x): return a * helper(x)\nf = functools.partial(g, 2.0)",
        "mu = 1.0",
    ),
    "attribute of the function": ("def f(x): return x - f.mu\nf.mu = 0.0", "f.mu = 1.0"),
    "defaults": ("def f(x, mu=0.0): return x - mu", "f.__defaults__ = (1.0,)"),
    # As the library `decorator` does, which TFP is written with.
    "defaults of another": (
        HELPER + "def f(*args): return helper(*args)\nf.__defaults__, f.__wrapped__ = (1.0,), helper",
        "mu = 1.0",
    ),
    # As IPython's autoreload does.
    "code": ("def f(x): return x - 1\ndef g(x): return x - 2", "f.__code__ = g.__code__"),
    "custom derivative": (
        "slope = [1.0]\n@jax.custom_vjp\ndef f(x): return x\n"
        "f.defvjp(lambda x: (x, None), lambda _, g: (g * slope[0],))",
        "slope[0] = 2.0",
    ),
    "module": ("users.mu = 0.0\ndef f(x): return x - users.mu", "users.mu = 1.0"),
    "import within": (
        "users.mu = 0.0\ndef f(x):\n from users_settings import mu\n return x - mu",
        "users.mu = 1.0",
    ),
    # Data.
    "constant of a list": ("c = [1.0, [2.0]]\ndef f(x): return x - c[1][0]", "c[1][0] = 3.0"),
    "set": ("c = {1.0}\ndef f(x): return x - sum(c)", "c.add(2.0)"),
    "dict that is closed over": (
        "d = {'mu': 1.0}\ndef make(d):\n return lambda x: x - d['mu']\nf = make(d)",
        "d.update(mu=2.0)",
    ),
    "namespace": ("n = types.SimpleNamespace(mu=1.0)\ndef f(x): return x - n.mu", "n.mu = 2.0"),
    "array": ("a = np.zeros(5)\ndef f(x): return x - a[1]", "a[1] = 3.0"),
    "masked array": (
        "a = np.ma.masked_array([1.0, 2.0], mask=[False, False])\ndef f(x): return x - a",
        "a.mask[0] = True",
    ),
    "jax array": ("mu = jnp.ones(3)\ndef f(x): return x - mu", "mu = mu.at[1].set(2.0)"),
    "random state": ("r = np.random.default_rng(0)\ndef f(x): return x, r", "r.normal()"),
    "distribution": ("d = dist.Normal(0.0, 1.0)\ndef f(x): return x, d", "d.loc = 1.0"),
    "another float": ("c = {'mu': 1000.5}\ndef f(x): return x - c['mu']", "c['mu'] = float('2000.5')"),
    "list filled again": (
        "c = [1.5, 2.5]\ndef f(x): return x - c[0]",
        "c.clear(); c.extend([float('3.5'), 2.5])",
    ),
    "nested dict": (
        "c = {'a': {'b': {'mu': 1.5}}}\ndef f(x): return x - c['a']['b']['mu']",
        "c['a']['b']['mu'] = float('7.5')",
    ),
    "large integer": ("c = [10**20]\ndef f(x): return x - float(c[0])", "c[0] = 3 * 10**20"),
    "string": ("c = {'k': 'a'}\ndef f(x): return x - len(c['k'])", "c['k'] = 'a' * 5"),
    "long list": ("c = [1.0] * 500\ndef f(x): return x - sum(c)", "c[3] = 5.0"),
    "default of a dict": (
        "c = collections.defaultdict(lambda: 1.0)\ndef f(x): return x - c.copy()['z']",
        "c.default_factory = lambda: 5.0",
    ),
    "view of an array": ("a = np.zeros(5)\nv = a[1:]\ndef f(x): return x - v[0]", "a[1] = 5.0"),
    "array as a whole": ("a = np.zeros(3)\ndef f(x): return x - jnp.asarray(a)[0]", "a[:] = 5.0"),
    "array without axes": ("a = np.array(1.0)\ndef f(x): return x - a", "a[...] = 5.0"),
    "array of objects": (
        "a = np.array([{'mu': 1.0}], dtype=object)\ndef f(x): return x - a[0]['mu']",
        "a[0]['mu'] = 5.0",
    ),
    "bytes": ("c = bytearray(b'a')\ndef f(x): return x - c[0]", "c[0] = 5"),
    "data frame": (
        "c = pd.DataFrame({'m': [1.0]})\ndef f(x): return x - c['m'].iloc[0]",
        "c.loc[0, 'm'] = 5.0",
    ),
    # What functions write beside what they read.
    "entry next to a count": (
        "c = {'n': 0, 'mu': 1.0}\ndef f(x):\n c['n'] += 1\n return x - c['mu']",
        "c['mu'] = 5.0",
    ),
    "memo": (
        OBJECT + " @functools.cached_property\n def m(s): return s.mu\na = A(1.0)\n"
        "def f(x): return x - a.m",
        "a.__dict__['m'] = 5.0",
    ),
    # Names.
    "eval": ("mu = 1.0\ndef f(x): return x - eval('mu')", "mu = 5.0"),
    "globals": ("mu = 1.0\ndef f(x): return x - globals()['mu']", "mu = 5.0"),
    "attribute in a format": (
        OBJECT + "a = A(1.0)\ndef f(x): return x - float('{0.mu}'.format(a))",
        "a.mu = 5.0",
    ),
    "attrgetter": (
        OBJECT + "a, g = A(1.0), operator.attrgetter('mu')\ndef f(x): return x - g(a)",
        "a.mu = 5.0",
    ),
    "bound method of a list": ("c = [1.0]\ng = c.__getitem__\ndef f(x): return x - g(0)", "c[0] = 5.0"),
    "context variable": (
        "v = contextvars.ContextVar('v')\nv.set(1.0)\ndef f(x): return x - v.get()",
        "v.set(5.0)",
    ),
    "weak reference": (
        OBJECT + "a = A(1.0)\nw = weakref.ref(a)\ndef f(x): return x - w().mu",
        "a.mu = 5.0",
    ),
    "method that a library calls": (
        "class D(dist.Distribution):\n def log_prob(s, x): return -0.5 * (x - mu) ** 2\n"
        "mu = 1.0\nd = dist.Independent(dist.Normal(0.0, 1.0), 0)\nd.base_dist = D()\n"
        "def f(x): return d.log_prob(x)",
        "mu = 5.0",
    ),
    "matched attribute": (
        "class A:\n __match_args__ = ('mu',)\n def __init__(s, m): s.mu = m\n"
        "a = A(1.0)\ndef f(x):\n match a:\n  case A(m): return x - m",
        "a.mu = 5.0",
    ),
    "dict with attributes": (
        "class D(dict):\n __getattr__ = dict.__getitem__\nd = D(mu=1.0)\ndef f(x): return x - d.mu",
        "d['mu'] = 5.0",
    ),
    "digits of a decimal": (
        "c = [decimal.Decimal('1.0')]\ndef f(x): return x - len(str(c[0]))",
        "c[0] = decimal.Decimal('1.000')",
    ),
    "method of an array": (
        "a = np.zeros(3)\ng = a.__getitem__\ndef f(x): return x - g(1)",
        "a[1] = 5.0",
    ),
    "name of an attribute in a global": (
        OBJECT + "n, a = 'm' + 'u', A(1.0)\ndef f(x): return x - operator.attrgetter(n)(a)",
        "a.mu = 5.0",
    ),
    "lazy module": (
        "users.__getattr__ = lambda n: hidden\nhidden = 1.0\ndef f(x): return x - users.nothing",
        "hidden = 5.0",
    ),
    # Objects.
    "attribute of a subclass": (
        "class A: mu = 1.0\nclass B(A): pass\nb = B()\ndef f(x): return x - b.mu",
        "B.mu = 5.0",
    ),
    "second base class": (
        "class A: pass\nclass B: mu = 1.0\nclass C(A, B): pass\nc = C()\ndef f(x): return x - c.mu",
        "B.mu = 5.0",
    ),
    "metaclass": (
        "class M(type): mu = 1.0\nclass A(metaclass=M): pass\ndef f(x): return x - A.mu",
        "M.mu = 5.0",
    ),
    "another class": (
        "class A:\n def g(s): return 1.0\nclass B:\n def g(s): return 5.0\n"
        "a = A()\ndef f(x): return x - a.g()",
        "a.__class__ = B",
    ),
    "descriptor": (
        "class D:\n def __init__(s): s.v = 1.0\n def __get__(s, o, t=None): return s.v\n"
        "d = D()\nclass A: mu = d\na = A()\ndef f(x): return x - a.mu",
        "d.v = 5.0",
    ),
    "subclass of a distribution": (
        "class N(dist.Normal):\n def __init__(s, mu): super().__init__(0.0, 1.0); s.mu = mu\n"
        " def log_prob(s, x): return super().log_prob(x - s.mu)\n"
        "d = N(1.0)\ndef f(x): return d.log_prob(x)",
        "d.mu = 5.0",
    ),
    "method": (OBJECT + " def f(s, x): return x - s.mu\na = A(1.0)\nf = a.f", "a.mu = 2.0"),
    "callable object": (OBJECT + " def __call__(s, x): return x - s.mu\nf = A(1.0)", "f.mu = 2.0"),
    "attribute by name": (
        OBJECT + " def f(s, x): return x - getattr(s, 'm' + 'u')\na = A(1.0)\nf = a.f",
        "a.mu = 2.0",
    ),
    "property": (
        OBJECT + " @property\n def twice(s): return 2 * s.mu\n def f(s, x): return x - s.twice\n"
        "a = A(1.0)\nf = a.f",
        "a.mu = 2.0",
    ),
    "field": (DATACLASS + " def f(s, x): return x - s.mu\na = A(1.0)\nf = a.f", "a.mu = 2.0"),
    "slot": ("a = Slotted()\na.mu = 1.0\nf = a.f", "a.mu = 2.0"),
    "attributes of a dict": (
        "a = Dynamic(mu=1.0)\ndef f(x): return x - a.mu",
        "a._entries.update(mu=2.0)",
    ),
    "class attribute": (
        "class A:\n mu = 0.0\n def f(s, x): return x - s.mu\nf = A().f",
        "A.mu = 1.0",
    ),
    "class in a cell": (
        "class A:\n def mu(self): return 1.0\na = A()\ndef f(x): return x - a.mu()",
        "A.mu = lambda s: 2.0",
    ),
    "base class": (
        "class A:\n mu = 1.0\nclass B(A): pass\nb = B()\ndef f(x): return x - b.mu",
        "A.mu = 2.0",
    ),
    "object made within": (
        "mu = 1.0\nclass A:\n def __init__(self): self.m = mu\ndef f(x): return x - A().m",
        "mu = 2.0",
    ),
    "operator": (
        "mu = 1.0\nclass A:\n def __rsub__(self, x): return x - mu\na = A()\ndef f(x): return x - a",
        "mu = 2.0",
    ),
}


def made(name):
    """The function of a cell that is run in a namespace of its own, and its change."""
    source, change = CASES[name]
    cells = {"__name__": "__main__", "users": NAMESPACE, "types": types}
    cells |= {"Slotted": Slotted, "Dynamic": Dynamic}
    cells |= {"jax": jax, "jnp": jnp, "np": np, "dist": dist}
    modules = (collections, contextvars, dataclasses, decimal, functools, operator, weakref)
    cells |= {m.__name__: m for m in modules}
    cells["pd"] = pd
    exec(source, cells)
    return cells["f"], lambda: exec(change, cells)


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_is_read_is_another_meaning(name):
    function, change = made(name)
    held = as_partial(function)
    before = jax.tree.structure(held)
    assert jax.tree.structure(held) == before
    change()
    assert jax.tree.structure(held) != before
    assert jax.tree.structure(held) == means(function)


# Their change leaves the value, or its derivative alone, as it is.
SAME_VALUE = {"type of a number", "custom derivative", "another helper"}
# Functions that take or return other things than arrays of floats.
NO_PROGRAM = {"random state", "distribution", "sign of zero", "masked array"}
NO_PROGRAM |= {"cached helper", "derivative"}


@pytest.mark.parametrize("name", sorted(set(CASES) - NO_PROGRAM))
def test_a_program_computes_what_the_function_computes_now(name):
    function, change = made(name)
    program = jax.jit(lambda function, x: function(x))
    held, x = as_partial(function), jnp.float32(2.0)
    before = [np.asarray(program(held, x)) for _ in range(3)]
    change()
    after = np.asarray(program(held, x))
    jax.clear_caches()
    np.testing.assert_allclose(after, np.asarray(function(x)), rtol=1e-6)
    assert not np.array_equal(before[0], after) or name in SAME_VALUE


# Classes that a program could return, and objects that are compared by identity, such as locks.
NOT_AGAIN = {"random state", "object made within", "metaclass", "subclass of a distribution"}
NOT_AGAIN |= {"memo", "context variable", "method that a library calls", "dict with attributes"}

NOT_AGAIN |= {"matched attribute"}


@pytest.mark.parametrize("name", sorted(set(CASES) - NOT_AGAIN))
def test_what_is_made_again_means_the_same(name):
    (one, _), (other, _) = made(name), made(name)
    assert one is not other
    assert means(one) == means(other)
    assert hash(means(one)) == hash(means(other))


# What does not count.


class Plain:
    shared = 1.0

    def __init__(self):
        self.mu, self.notes = 1.0, []

    def f(self, x):
        return x - self.mu


def test_what_code_does_not_read_is_no_part_of_the_meaning():
    thing: Any = Plain()
    held = as_partial(thing.f)
    before = jax.tree.structure(held)
    thing.notes.append("of a run")
    thing.more = 3
    thing.shared = 5.0
    thing.notes = [thing]
    assert jax.tree.structure(held) == before


def test_what_a_library_computes_once_and_keeps_is_no_part_of_the_meaning():
    mvn = dist.MultivariateNormal(jnp.zeros(2), scale_tril=jnp.eye(2))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    held = as_partial(lambda x: (mvn.log_prob(x), mesh))
    before = jax.tree.structure(held)
    assert mvn.covariance_matrix.shape == (2, 2)
    assert mesh.abstract_mesh.are_all_axes_auto
    assert jax.tree.structure(held) == before


def test_an_object_that_shows_nothing_is_known_by_identity():
    one, other = object(), object()
    assert means(lambda x: (x, one)) != means(lambda x: (x, other))
    files = (i for i in range(3))
    held = as_partial(lambda x: (x, files))
    assert jax.tree.structure(held) == jax.tree.structure(held)


def test_other_code_is_another_meaning():
    functions = [
        lambda x: x + 1,
        lambda x: x + 1.0,
        lambda x: x - 1,
        lambda x, y=1: x + y,
        lambda x: (x + 1,),
        lambda x: (lambda y: y + 1)(x),
        lambda x: (lambda y: y + 2)(x),
        jax.jit(lambda x: x + 1),
        functools.partial(jnp.add, 1),
        functools.partial(jnp.add, 2),
        jnp.sin,
        jnp.cos,
        jax.nn.softplus,
        jax.grad(jnp.sin),
        jax.grad(jnp.cos),
        jax.vmap(jnp.sin),
    ]
    assert len({means(f) for f in functions}) == len(functions)


def test_what_a_function_writes_itself_is_no_part_of_its_meaning():
    """A count of calls, a cache that it fills: else each call would trace the next program."""

    class Counts:
        def __init__(self):
            self.num_calls, self.cache, self.mu, self.log = 0, {}, 1.0, []

        @functools.cached_property
        def scale(self):
            return 2.0

        def f(self, x):
            self.num_calls += 1
            self.cache["last"] = self.num_calls
            self.log.append(len(self.log))
            return (x - self.mu) * self.scale

    counts = Counts()
    held = as_partial(counts.f)
    for _ in range(5):
        assert float(run(held, 3.0)) == 4.0
    assert counts.num_calls <= 2
    counts.mu = 2.0
    assert float(run(held, 3.0)) == 2.0


def test_a_walk_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("gspmd_mcmc.functions.meaning.MOST_OBJECTS", 100)
    many = [[i] for i in range(1000)]
    with pytest.warns(
        UserWarning, match=r"100 objects are read: changes in many\[98\], closed over by"
    ):
        held = as_partial(lambda x: many)
        assert jax.tree.structure(held) == means(lambda x: many)


# Programs.

mu = 0.0


def body_that_reads(carry, _):
    return carry - mu, None


@jax.jit
def jitted_that_reads(x):
    return x - mu


@jax.checkpoint
def checkpointed_that_reads(x):
    return jitted_that_reads(x)


@pytest.mark.parametrize(
    "inner",
    [
        lambda x: jax.lax.scan(body_that_reads, x, None, length=1)[0],
        lambda x: jitted_that_reads(x),
        lambda x: checkpointed_that_reads(x),
        lambda x: jax.lax.cond(True, jitted_that_reads, lambda y: y, x),
        lambda x: jax.vmap(jitted_that_reads)(x[None])[0],
    ],
    ids=["scan", "jit", "checkpoint", "cond", "vmap"],
)
def test_what_jax_remembers_of_functions_inside_is_traced_anew_too(inner, monkeypatch):
    target = gm.LogDensity(lambda x: -0.5 * inner(x) ** 2)
    grad = jax.jit(type(target).grad)
    assert float(grad(target, jnp.float32(1.0))) == -1.0
    monkeypatch.setitem(globals(), "mu", 10.0)
    assert float(grad(target, jnp.float32(1.0))) == 9.0


def test_every_function_of_a_target_counts(monkeypatch):
    """Prior, likelihood, bijection, derived and bound ones; and what `Partial` binds stays argument."""
    cell = {"mu": 1.0}

    def log_prior(p):
        return -0.5 * (p["w"] - cell["mu"]) ** 2

    def log_likelihood(scale, p, rows):
        return -0.5 * scale * (rows - cell["mu"] * p["w"]) ** 2

    bound = jax.tree_util.Partial(log_likelihood, jnp.float32(2.0))
    target = gm.Posterior(
        log_prior,
        gm.Plate(bound, jnp.arange(4.0)),
        transform=lambda p: {"w": p["w"] + cell["mu"]},
        derived=lambda p: {"v": p["w"] * cell["mu"]},
    )
    assert [x.shape for x in jax.tree.leaves(target)] == [(), (4,)]
    parts = [target.log_prior, target.plates[0].log_likelihood, target.transform, target.derived]
    before = [jax.tree.structure(part) for part in parts]
    terms, kept = jax.jit(type(target).terms), jax.jit(type(target).kept)
    position = {"w": jnp.float32(1.0)}
    old = terms(target, position), kept(target, position)
    cell["mu"] = 2.0
    assert all(jax.tree.structure(p) != b for p, b in zip(parts, before, strict=True))
    fresh = terms(target, position)
    assert not np.allclose(old[0]["plates"][0], fresh["plates"][0])
    assert float(fresh["prior"]) == -0.5 and float(kept(target, position)["v"]) == 6.0
    monkeypatch.undo()


def doubled_sum(x, y):
    return 2 * (x + y)


def test_a_function_goes_through_copies_and_pickles():

    function = as_partial(jax.tree_util.Partial(doubled_sum, jnp.float32(1.0)))
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert jax.tree.structure(other) == jax.tree.structure(function)
        assert float(other(2.0)) == 6.0


def test_code_that_exec_runs_without_a_name_is_the_user_s():
    cells: dict = {}
    exec("mu = 1.0\nclass A:\n m = 1.0\na = A()\ndef f(x): return x - mu - a.m", cells)
    function = as_partial(cells["f"])
    for change in ("mu = 2.0", "A.m = 2.0"):
        before = jax.tree.structure(function)
        exec(change, cells)
        assert jax.tree.structure(function) != before


def test_a_relative_import_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "package_of_the_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("mu = 1.0\n")
    (package / "model.py").write_text("def f(x):\n    from .settings import mu\n    return x - mu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model, settings = (
        importlib.import_module(f"package_of_the_user.{n}") for n in ("model", "settings")
    )
    function = as_partial(model.f)
    before = jax.tree.structure(function)
    assert jax.tree.structure(function) == before
    monkeypatch.setattr(settings, "mu", 2.0)
    assert jax.tree.structure(function) != before
