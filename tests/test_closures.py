"""Closed-over arrays: found wherever they hide, and named as the constants that they become."""

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_texts import read
from jax import lax
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.functions import meaning
from gspmd_mcmc.views.communication import with_origins
from gspmd_mcmc.views.program.closures import closed_over


def numbers(*shape, dtype: Any = np.float32):
    """No two alike, as the compiler does not keep a constant that is one number many times."""
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape) % 97


IMAGES = numbers(70, 50)
SETTINGS = {"data": {"labels": numbers(70, dtype=np.int32)}}
OTHER = numbers(3, 3)


def reads_a_global(w):
    return jnp.sin(IMAGES @ w)


def reads_inside(w):
    def inner(v):
        return v @ SETTINGS["data"]["labels"]

    return inner(w)


def has_defaults(w, scale=2.0, *, images=IMAGES):
    return jnp.sin(images @ w) * scale


def takes_it(images, w):
    return jnp.sin(images @ w)


@dataclasses.dataclass
class Model:
    images: Any

    def log_density(self, w):
        return jnp.sin(self.images @ w).sum()

    def __call__(self, w):
        return self.log_density(w)


class Slotted:
    __slots__ = ("images", "unset")

    def __init__(self, images):
        self.images = images

    def log_density(self, w):
        return jnp.sin(self.images @ w).sum()


Pair = namedtuple("Pair", "first second")


def closes_over(images):
    def log_density(w):
        return jnp.sin(images @ w).sum()

    return log_density


def deep(images):
    """As libraries close over a log density: a function of a function of an object."""
    algorithm = Pair(None, {"step": closes_over(images)})
    return lambda w: algorithm.second["step"](w)


BY_CLOSURE = "images, closed over by closes_over.<locals>.log_density"
BY_PARTIAL = "args[0], given to a partial of takes_it"
HIDDEN = [
    (lambda x: closes_over(x), BY_CLOSURE),
    (lambda x: jax.jit(closes_over(x)), BY_CLOSURE),
    (lambda x: jax.grad(closes_over(x)), BY_CLOSURE),
    (lambda x: jax.vmap(jax.value_and_grad(closes_over(x))), BY_CLOSURE),
    (lambda x: functools.wraps(len)(jax.checkpoint(closes_over(x))), BY_CLOSURE),
    (lambda x: deep(x), BY_CLOSURE),
    (lambda x: functools.partial(takes_it, x), BY_PARTIAL),
    (lambda x: functools.partial(takes_it, images=x), "images, given to a partial of takes_it"),
    (lambda x: jax.grad(functools.partial(takes_it, x)), BY_PARTIAL),
    (lambda x: jax.tree_util.Partial(takes_it, x), BY_PARTIAL),
    (lambda x: Model(x).log_density, "Model.images"),
    (lambda x: jax.jit(Model(x).log_density), "Model.images"),
    (lambda x: Model(x), "Model.images"),
    (lambda x: Slotted(x).log_density, "Slotted.images"),
    (
        lambda x: functools.partial(takes_it, {"raw": [OTHER, x]}),
        "args[0]['raw'][1], given to a partial of takes_it",
    ),
]


@pytest.mark.parametrize(("hide", "where"), HIDDEN)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_an_array_is_found_where_it_hides(hide, where, kind):
    array = kind(numbers(5, 4))
    assert [name for name, found in closed_over(hide(array)) if found is array] == [where]


@pytest.mark.parametrize(
    ("function", "where", "array"),
    [
        (reads_a_global, "IMAGES, a global that reads_a_global reads", IMAGES),
        (
            reads_inside,
            "SETTINGS['data']['labels'], a global that reads_inside reads",
            SETTINGS["data"]["labels"],
        ),
        (has_defaults, "images, a default of has_defaults", IMAGES),
    ],
)
def test_globals_and_defaults_are_found(function, where, array):
    assert [(name, found is array) for name, found in closed_over(function)] == [(where, True)]


def test_a_global_that_the_code_does_not_name_is_not_found():
    assert closed_over(takes_it) == []


def test_an_array_is_found_once():
    array = numbers(4)
    assert len(closed_over((closes_over(array), Model(array), [array, {"x": array}]))) == 1


def test_arguments_are_not_closed_over_but_what_their_functions_close_over_is():
    inside, leaf = numbers(4), numbers(5)
    data = gm.place({"x": np.ones((16, 4), np.float32)}, gm.make_mesh(), P("data"))
    target = gm.Posterior(lambda w: -0.5 * w**2, gm.Plate(lambda w, row: row["x"] @ (w * inside), data))
    found = closed_over(takes_it, (target, {"leaf": leaf}))
    assert [array is inside for _, array in found] == [True]
    assert found[0][0].startswith("inside, closed over by ")


def test_strange_objects_do_no_harm():
    class Lazy:
        def __getattr__(self, name):
            raise RuntimeError("computed when asked")

    unbound = [lambda: later]  # noqa: F821
    if unbound is None:
        later = 1
    cycle: dict = {"x": numbers(3)}
    cycle["self"] = cycle
    objects = np.array([object(), "text"], dtype=object)
    words = np.array(["a", "b"])
    things = (Lazy(), Lazy, unbound, cycle, objects, words, np, jnp.sin, print, None, {1, 2}, b"x")
    assert [name for name, _ in closed_over(lambda: things)] == [
        f"things[3]['x'], closed over by {test_strange_objects_do_no_harm.__name__}.<locals>.<lambda>"
    ]


def test_a_search_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(meaning, "MOST_OBJECTS", 100)
    near, far = numbers(3), numbers(4)
    many = [near, [[i] for i in range(1000)], [[[far]]]]
    with pytest.warns(UserWarning, match="100 objects are read"):
        assert [found is near for _, found in closed_over(lambda: many)] == [True]


# As constants of a program.


W = jnp.ones(50)


def origins(function, *args):
    report = gm.communication(function, *args)
    return {c.shape: c.origin for c in report.constants if c.num_bytes >= 1000}


@pytest.mark.parametrize(
    ("function", "origin"),
    [
        (reads_a_global, "IMAGES, a global that reads_a_global reads"),
        (Model(jnp.asarray(IMAGES)).log_density, "Model.images"),
        (
            jax.jit(jax.grad(closes_over(IMAGES))),
            BY_CLOSURE,
        ),
    ],
)
def test_a_constant_has_the_name_of_the_array_that_it_was(function, origin):
    assert origins(function, W) == {"f32[70,50]": origin}


def test_of_several_arrays_that_have_as_many_numbers_each_is_named_by_its_shape_or_its_dtype():
    tall, wide, ints = numbers(70, 50), numbers(50, 70), numbers(70, 50, dtype=np.int32)

    def log_density(w, i):
        return lax.fori_loop(0, 3, lambda _, v: jnp.sin(wide @ (tall @ v)), w), ints + i

    name = "test_of_several_arrays_that_have_as_many_numbers_each_is_named_by_its_shape_or_its_dtype"
    by = f"closed over by {name}.<locals>.log_density"
    assert origins(log_density, W, 1) == {
        "f32[70,50]": f"tall, {by}",
        "f32[50,70]": f"wide, {by}",
        "s32[70,50]": f"ints, {by}",
    }


def test_what_the_compiler_converted_or_reshaped_is_named():
    report = read("%c = f32[70,50]{1,0} constant({...})")
    converted, wide, flat = numbers(70, 50, dtype=np.uint8), numbers(50, 70), numbers(3500)

    def origin(*arrays):
        named = with_origins(report, functools.partial(takes_it, *arrays), ())
        return named.constants[0].origin.partition(",")[0]

    assert origin(wide, converted) == "args[1]"
    assert origin(flat, numbers(7)) == "args[0]"
    assert origin(numbers(70, 49)) == ""


def test_an_argument_of_the_same_shape_is_not_named():
    closed = numbers(70, 50)

    def product(x, w):
        return jnp.sin(closed @ w), x + 1

    (origin,) = origins(product, closed + 1, W).values()
    assert origin.startswith("closed, closed over by")
    assert " or " not in origin
