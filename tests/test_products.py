"""Gradients of ``x @ w`` sum over rows with the narrow factor first, as the user writes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.targets.streaming import tiling
from gspmd_mcmc.targets.streaming.products import with_narrow_factor_first

ROWS, FEATURES, CLASSES, CHAINS = 96, 24, 3, 2
RNG = np.random.default_rng(0)
BATCH = {
    "image": RNG.integers(0, 256, (ROWS, FEATURES), np.uint8),
    "label": RNG.integers(0, CLASSES, ROWS, np.int32),
}
POSITION = {
    "w": RNG.normal(size=(FEATURES, CLASSES)).astype(np.float32),
    "b": RNG.normal(size=CLASSES).astype(np.float32),
}
# Of all chains: a tile's sum stays as it is until it is added up.
PRODUCT_BYTES = CHAINS * FEATURES * CLASSES * 4
FACTORS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)


def package_terms(params, batch):
    logits = (batch["image"] / 255) @ params["w"] + params["b"][None]
    return gm.categorical_logits(logits, batch["label"])


def textbook_terms(params, batch):
    logits = (batch["image"] / 255) @ params["w"] + params["b"][None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]


def scaled_weights(params, batch):
    logits = batch["image"].astype(jnp.float32) @ (params["w"] / 255) + params["b"][None]
    return gm.categorical_logits(logits, batch["label"])


def factor_terms(params, batch):
    logits = gm.inner_products(params["rows"], params["w"])
    return jnp.sum(gm.bernoulli_logits(logits, batch["image"] > 99), axis=1)


TERMS = {
    "package": package_terms,
    "textbook": textbook_terms,
    "scaled weights": scaled_weights,
    "factors": factor_terms,
}


def case(name):
    """A plate's likelihood, its position, and what is local to the plate."""
    if name != "factors":
        return TERMS[name], POSITION, ()
    return TERMS[name], {"rows": FACTORS, "w": POSITION["w"]}, "rows"


def compiled_gradient(name, num_devices=None):
    terms, position, local = case(name)
    data = jax.tree.map(jnp.asarray, BATCH)
    if num_devices:
        data = gm.place(BATCH, gm.make_mesh(data=num_devices), P("data"))
    plate = gm.Plate(terms, data, local=local, tile_rows=5)
    gradient = jax.jit(lambda plate, position: plate.grad(position))
    return gradient.lower(plate, position).compile(), (plate, position)


def product_shapes(compiled):
    """Shapes of all matrix products, the axes of one chain or block left out."""
    found = re.findall(r"f32\[([\d,]*)\]\S* dot\(", compiled.as_text())
    return [tuple(int(n) for n in shape.split(",") if n != "1") for shape in found]


def as_it_was(monkeypatch):
    monkeypatch.setattr(tiling, "with_narrow_factor_first", lambda body: body)


@pytest.mark.parametrize("name", TERMS)
def test_a_gradient_of_one_device_has_the_narrow_factor_first(name, compiled_as_a_users):
    shapes = product_shapes(compiled_gradient(name)[0])
    assert (CLASSES, FEATURES) in shapes
    assert (FEATURES, CLASSES) not in shapes


def test_the_compiler_turns_plain_products_around(compiled_as_a_users, monkeypatch):
    """Without the rule the slow product is there: what the test above rejects."""
    as_it_was(monkeypatch)
    assert (FEATURES, CLASSES) in product_shapes(compiled_gradient("textbook")[0])


@pytest.mark.parametrize("name", TERMS)
def test_gradients_equal_those_of_all_rows_at_once(name):
    terms, position, _ = case(name)
    expected = jax.grad(lambda params: terms(params, BATCH).sum())(position)
    for num_devices in (None, 8):
        compiled, arguments = compiled_gradient(name, num_devices)
        got = compiled(*arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, expected)


def reports_of_chains(num_devices):
    gradient = jax.jit(jax.vmap(gm.Plate.grad, (None, 0)))
    for name in ("package", "factors"):
        _, (plate, position) = compiled_gradient(name, num_devices)
        of_chains = jax.tree.map(lambda x: np.stack([x] * CHAINS), position)
        yield gm.communication(gradient, plate, of_chains)


def messages(report):
    return [(c.kind, c.num_bytes, c.axes) for c in report.collectives]


@pytest.mark.parametrize("num_devices", [None, 8])
def test_the_rule_adds_no_collective_and_no_temporaries(num_devices, monkeypatch):
    with_rule = list(reports_of_chains(num_devices))
    jax.clear_caches()
    as_it_was(monkeypatch)
    for new, old in zip(with_rule, reports_of_chains(num_devices), strict=True):
        assert messages(new) == messages(old)
        assert len(messages(new)) == (1 if num_devices else 0)
        assert new.temporary_bytes <= old.temporary_bytes + PRODUCT_BYTES


def test_a_gradient_can_be_differentiated_forward():
    """Hessian times vector, of a plate and of all rows at once."""
    plate = gm.Plate(textbook_terms, jax.tree.map(jnp.asarray, BATCH), tile_rows=10)
    vector = jax.tree.map(np.ones_like, POSITION)
    whole = jax.grad(lambda params: textbook_terms(params, BATCH).sum())
    expected = jax.jvp(whole, (POSITION,), (vector,))[1]
    got = jax.jvp(plate.grad, (POSITION,), (vector,))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, expected)


def barriers(function, *args):
    return str(jax.make_jaxpr(with_narrow_factor_first(function))(*args)).count("optimization_barrier")


def sum_over_rows(x, y, **options):
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), **options)


def in_a_scan(x, y):
    return jax.lax.scan(lambda total, _: (total + sum_over_rows(x, y), None), x.T @ y, None, 2)[0]


WIDE, NARROW = RNG.normal(size=(2, 7, 5)).astype(np.float32), np.ones((7, 2), np.float32)


@pytest.mark.parametrize("function", [sum_over_rows, jax.jit(sum_over_rows), in_a_scan])
@pytest.mark.parametrize("factors", [(WIDE[0], NARROW), (NARROW, WIDE[0]), (WIDE[0], WIDE[1])])
def test_sums_over_rows_are_found_and_stay_what_they_are(function, factors):
    assert barriers(function, *factors) == 1
    got = with_narrow_factor_first(function)(*factors)
    np.testing.assert_allclose(got, function(*factors), rtol=1e-5)


def test_a_wide_first_factor_changes_places():
    jaxpr = str(jax.make_jaxpr(with_narrow_factor_first(sum_over_rows))(WIDE[0], NARROW))
    assert "f32[2,5] = optimization_barrier" in jaxpr


def test_other_products_are_left_alone():
    assert barriers(lambda x, y: x.T @ y.T, NARROW, NARROW.T @ NARROW @ NARROW.T) == 0
    assert barriers(jnp.matmul, WIDE, WIDE[0].T) == 0
    assert barriers(sum_over_rows, WIDE[0], NARROW.astype(jnp.bfloat16)) == 0


def test_precision_stays_with_its_factor():
    precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
    turned = with_narrow_factor_first(lambda x, y: sum_over_rows(x, y, precision=precision))
    text = re.sub(r"\s", "", str(jax.make_jaxpr(turned)(WIDE[0], NARROW)))
    assert "precision=(Precision.DEFAULT,Precision.HIGHEST)" in text
