"""The meaning of a function: what it reads counts, and who or where it is does not."""

import copy
import dataclasses
import functools
import pickle
import sys
import types
from collections import deque, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.functions.function import as_partial, run
from gspmd_mcmc.functions.meaning import Look

NAMESPACE = types.ModuleType("users_settings")
sys.modules["users_settings"] = NAMESPACE


def means(function):
    """Return what stands for a function in the keys of programs."""
    return jax.tree.structure(as_partial(function))


# Each makes a function, and something that changes what it reads.


def written(source, change):
    """Code of a cell, run in a namespace of its own; ``f`` is its function, ``change`` another cell."""

    def make():
        cells = {"__name__": "__main__", "jnp": jnp, "jax": jax, "np": np, "functools": functools}
        exec(source, cells)
        return cells["f"], lambda: exec(change, cells)

    return make


@dataclasses.dataclass
class Settings:
    mu: Any
    inner: Any = None

    def f(self, x):
        return x - self.mu

    def nested(self, x):
        return x - self.inner.mu

    def __call__(self, x):
        return x - self.mu


class Plain:
    shared = 1.0

    def __init__(self, mu):
        self.mu = mu
        self.notes = []

    def f(self, x):
        return x - self.mu

    def g(self, x):
        return x - self.shared

    def by_name(self, x):
        return x - getattr(self, "m" + "u")

    @property
    def twice(self):
        return 2 * self.mu

    def through_property(self, x):
        return x - self.twice

    @staticmethod
    def static(x):
        return x - SETTINGS["mu"]

    @classmethod
    def of_class(cls, x):
        return x - cls.shared


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


SETTINGS: dict[str, Any] = {"mu": 1.0}
Pair = namedtuple("Pair", "first second")


def with_object(cls, method, change, *args):
    def make():
        thing = cls(*args)
        return getattr(thing, method), lambda: change(thing)

    return make


def closing_over(value, change, use=lambda value, x: x):
    def make():
        return lambda x: use(value, x), lambda: change(value)

    return make


def of_an_array(size):
    def make():
        array = np.zeros(size)
        return lambda x: x - array[1], lambda: array.__setitem__(1, 3.0)

    return make


def of_a_module():
    NAMESPACE.mu = 0.0  # pyright: ignore
    return lambda x: x - NAMESPACE.mu, lambda: setattr(NAMESPACE, "mu", 1.0)  # pyright: ignore


def of_an_import():
    def f(x):
        from users_settings import mu  # pyright: ignore

        return x - mu

    NAMESPACE.mu = 0.0  # pyright: ignore
    return f, lambda: setattr(NAMESPACE, "mu", 1.0)


def of_a_static_method():
    SETTINGS["mu"] = 1.0
    return Plain.static, lambda: SETTINGS.update(mu=2.0)


def of_an_attribute():
    def f(x):
        return x - f.mu  # pyright: ignore

    f.mu = 0.0  # pyright: ignore
    return f, lambda: setattr(f, "mu", 1.0)


def of_defaults():
    def f(x, mu=0.0):
        return x - mu

    return f, lambda: setattr(f, "__defaults__", (1.0,))


def of_replaced_code():
    """As IPython's autoreload does."""

    def f(x):
        return x - 1

    def g(x):
        return x - 2

    return f, lambda: setattr(f, "__code__", g.__code__)


def of_a_custom_derivative():
    slope = [1.0]

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g * slope[0],))
    return f, lambda: slope.__setitem__(0, 2.0)


def patched(cls):
    def make():
        owner = type(cls.__name__, (cls,), {"shared": 0.0, "__module__": __name__})
        return owner(1.0).g, lambda: setattr(owner, "shared", 1.0)

    return make


HELPER = "mu = 0.0\ndef helper(x): return x - mu\n"
CASES = {
    "global": written("mu = 0.0\ndef f(x): return x - mu", "mu = 10.0"),
    "sign of zero": written("mu = 0.0\ndef f(x): return x / mu", "mu = -0.0"),
    "type of a number": written("mu = 1\ndef f(x): return x / mu", "mu = 1.0"),
    "nested function": written(
        "mu = 0.0\ndef f(x):\n def g(y): return y - mu\n return g(x)", "mu = 1.0"
    ),
    "comprehension": written("mu = 0.0\ndef f(x): return sum([x - mu for _ in range(2)])", "mu = 1.0"),
    "helper's global": written(HELPER + "def f(x): return helper(x)", "mu = 1.0"),
    "another helper": written(HELPER + "def f(x): return helper(x)", "def helper(x): return x + mu"),
    "jitted helper": written(HELPER + "h = jax.jit(helper)\ndef f(x): return h(x)", "mu = 1.0"),
    "derivative": written(HELPER + "h = jax.vmap(jax.grad(helper))\ndef f(x): return h(x)", "mu = 1.0"),
    "cached helper": written(
        HELPER + "h = functools.lru_cache(helper)\ndef f(x): return h(x)", "mu = 1.0"
    ),
    "decorated": written(
        HELPER
        + "def twice(g):\n @functools.wraps(g)\n def h(x): return 2 * g(x)\n return h\n"
        + "@twice\ndef f(x): return helper(x)",
        "mu = 1.0",
    ),
    "recursion": written("mu = 0\ndef f(x, n=3): return x - mu if n == 0 else f(x, n - 1)", "mu = 1"),
    "builtin that is hidden": written("def f(x): return abs(x)", "def abs(x): return -x"),
    "partial": written(
        HELPER + "def g(a, x): return a * helper(x)\nf = functools.partial(g, 2.0)", "mu = 1.0"
    ),
    "constant of a list": written("c = [1.0, [2.0]]\ndef f(x): return x - c[1][0]", "c[1][0] = 3.0"),
    "set": written("c = {1.0}\ndef f(x): return x - sum(c)", "c.add(2.0)"),
    "class in a cell": written(
        "class A:\n def mu(self): return 1.0\na = A()\ndef f(x): return x - a.mu()",
        "A.mu = lambda s: 2.0",
    ),
    "base class": written(
        "class A:\n mu = 1.0\nclass B(A): pass\nb = B()\ndef f(x): return x - b.mu", "A.mu = 2.0"
    ),
    "attribute over a class's": written(
        "class A:\n mu = 1.0\na = A()\ndef f(x): return x - a.mu", "a.mu = 2.0"
    ),
    "object made within": written(
        "mu = 1.0\nclass A:\n def __init__(self): self.m = mu\ndef f(x): return x - A().m", "mu = 2.0"
    ),
    "operator": written(
        "mu = 1.0\nclass A:\n def __rsub__(self, x): return x - mu\na = A()\ndef f(x): return x - a",
        "mu = 2.0",
    ),
    "jax array": written("mu = jnp.ones(3)\ndef f(x): return x - mu", "mu = mu.at[1].set(2.0)"),
    "field": with_object(Settings, "f", lambda s: setattr(s, "mu", 2.0), 1.0),
    "callable object": lambda: (s := Settings(1.0), lambda: setattr(s, "mu", 2.0)),
    "field of a field": with_object(
        Settings, "nested", lambda s: setattr(s.inner, "mu", 2.0), 1.0, Settings(1.0)
    ),
    "field of a plain object": with_object(Plain, "f", lambda s: setattr(s, "mu", 2.0), 1.0),
    "attribute by name": with_object(Plain, "by_name", lambda s: setattr(s, "mu", 2.0), 1.0),
    "property": with_object(Plain, "through_property", lambda s: setattr(s, "mu", 2.0), 1.0),
    "class attribute": patched(Plain),
    "slot": lambda: (s := Slotted(), setattr(s, "mu", 1.0), (s.f, lambda: setattr(s, "mu", 2.0)))[2],
    "attributes of a dict": lambda: (
        c := Dynamic(mu=1.0),
        (lambda x: x - c.mu, lambda: c._entries.update(mu=2.0)),
    )[1],
    "dict": closing_over({"mu": 1.0}, lambda d: d.update(mu=2.0), lambda d, x: x - d["mu"]),
    "queue": closing_over(deque([1.0]), lambda d: d.append(2.0), lambda d, x: x - d[-1]),
    "namespace": closing_over(
        types.SimpleNamespace(mu=1.0), lambda n: setattr(n, "mu", 2.0), lambda n, x: x - n.mu
    ),
    "tuple of dicts": closing_over(
        Pair({"mu": 1.0}, None), lambda p: p.first.update(mu=2.0), lambda p, x: x - p.first["mu"]
    ),
    "array": of_an_array(5),
    "large array": of_an_array(100_000),
    "array of objects": closing_over(
        np.array([{"mu": 1.0}], dtype=object),
        lambda a: a[0].update(mu=2.0),
        lambda a, x: x - a[0]["mu"],
    ),
    "masked array": closing_over(
        np.ma.masked_array([1.0, 2.0], mask=[False, False]), lambda a: a.mask.__setitem__(0, True)
    ),
    "random state": closing_over(np.random.default_rng(0), lambda g: g.normal()),
    "distribution": closing_over(dist.Normal(0.0, 1.0), lambda d: setattr(d, "loc", 1.0)),
    "module": of_a_module,
    "import within": of_an_import,
    "static method": of_a_static_method,
    "attribute of the function": of_an_attribute,
    "defaults": of_defaults,
    "code": of_replaced_code,
    "custom derivative": of_a_custom_derivative,
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_is_read_is_another_meaning(name):
    function, change = CASES[name]()
    held = as_partial(function)
    before = jax.tree.structure(held)
    assert jax.tree.structure(held) == before
    change()
    assert jax.tree.structure(held) != before
    assert jax.tree.structure(held) == means(function)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"random state", "object made within"}))
def test_what_is_made_again_means_the_same(name):
    (one, _), (other, _) = CASES[name](), CASES[name]()
    assert one is not other or name == "static method"
    assert means(one) == means(other)
    assert hash(means(one)) == hash(means(other))


# What does not count.


def test_what_code_does_not_read_is_no_part_of_the_meaning():
    thing = Plain(1.0)
    held = as_partial(thing.f)
    before = jax.tree.structure(held)
    thing.notes.append("of a run")
    thing.more = 3  # pyright: ignore
    thing.shared = 5.0
    thing.notes = [thing]
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
    assert len(Look(lambda x: many).meaning.entries) < 200
    assert means(lambda x: many) == means(lambda x: many)


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
    assert float(fresh["prior"]) == -0.5 and float(kept(target, position)["v"]) == 2.0
    monkeypatch.undo()


def doubled_sum(x, y):
    return 2 * (x + y)


def test_a_function_goes_through_copies_and_pickles():

    function = as_partial(jax.tree_util.Partial(doubled_sum, jnp.float32(1.0)))
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert jax.tree.structure(other) == jax.tree.structure(function)
        assert float(other(2.0)) == 6.0
