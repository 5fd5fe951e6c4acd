"""Layouts as figures and in notebooks, and the colours of both."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import visualize
from gspmd_mcmc.views import palette
from gspmd_mcmc.views.palette import OKABE_ITO, VIRIDIS, WHOLE, distinct_colors, gradient

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MESH = AbstractMesh((2, 4), ("chains", "data"))


def spread(shape, spec, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def tree():
    return {
        "rows": spread((16, 6), P("data")),
        "labels": spread((16,), P("data")),
        "w": spread((2, 16, 6), P("chains", "data")),
        "scale": spread((), P()),
        "strip": spread((10,), P(("chains", "data"))),
        "host": np.zeros(3),
    }


def texts_of(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


@pytest.fixture
def drawn():
    """Draw figures to their last pixel, with warnings as errors, and close them."""
    figures = []

    def draw(figure):
        figures.append(figure)
        figure.canvas.draw()
        return figure

    yield draw
    for figure in figures:
        plt.close(figure)


def test_a_figure_has_the_mesh_and_every_layout_once(drawn):
    figure = drawn(visualize(tree()).figure())
    axes = figure.axes
    titles = [texts_of(ax) for ax in axes]
    assert len(axes) == 5
    assert sum("mesh chains=2, data=4" in t for t in titles) == 1
    (rows,) = [t for t in titles if "P(data=4): 4 blocks × 2 copies" in t]
    assert {"0,4", "1,5", "2,6", "3,7", "same layout: ['labels']", "axis 1 →"} <= set(rows)
    (whole,) = [t for t in titles if "P(): whole on 8 devices" in t]
    assert "0-7" in whole
    # It says where the bytes are.
    assert "6 leaves on mesh chains=2, data=4" in figure.texts[0].get_text()
    assert "total on the host: 24 B" in figure.texts[0].get_text()


def test_cells_lie_in_the_order_of_the_array(drawn):
    figure, ax = plt.subplots()
    visualize(spread((1600, 600), P("data", "chains")), ax=ax)
    drawn(figure)
    where: dict = {}  # The first text "0" is that of the cell, the next ones are ticks.
    for text in ax.texts:
        where.setdefault(text.get_text(), text.get_position())
    for i in range(4):
        x, y = where[str(i)]  # chains=0: the first half of the columns
        assert where[str(i + 4)][1] == y and where[str(i + 4)][0] > x
    rows = [where[str(i)][1] for i in range(4)]
    assert rows == sorted(rows) and ax.get_ylim()[0] > ax.get_ylim()[1]  # y grows downwards


def test_text_stays_inside_its_cell(drawn):
    mesh = AbstractMesh((4, 16), ("data", "model"))
    figure, ax = plt.subplots(figsize=(4, 3))
    visualize(spread((8, 32), P("data", "model"), mesh), ax=ax)
    drawn(figure)
    width = ax.patches[0].get_window_extent().width
    devices = [text for text in ax.texts if text.get_text().isdigit() and text.get_fontsize() != 8]
    assert len(devices) == 64
    assert all(text.get_window_extent().width <= width for text in devices)


def test_missing_rows_are_hatched(drawn):
    def hatched(leaf):
        figure, ax = plt.subplots()
        visualize(leaf, ax=ax)
        drawn(figure)
        return sum(patch.get_hatch() is not None for patch in ax.patches)

    assert hatched(spread((16,), P(("chains", "data")))) == 0
    assert hatched(spread((10,), P(("chains", "data")))) == 3  # 2 a block: 5 full ones, 3 empty ones
    padded = gm.place({"x": np.ones((10, 3))}, gm.make_mesh(data=8), P("data"))["x"]
    assert hatched(padded) == 3


@pytest.mark.parametrize(
    "spec", [P("a"), P("a", "b"), P("a", "b", "c"), P("a", "b", "c", "d")], ids=str
)
def test_any_rank_is_drawn_on_one_axes(spec, drawn):
    figure, ax = plt.subplots()
    view = visualize(spread((4, 4, 4, 4), spec, AbstractMesh((2, 2, 2, 2), tuple("abcd"))), ax=ax)
    drawn(figure)
    filled = [p for p in ax.patches if p.get_fill() and p.get_hatch() is None]
    assert len(filled) == view.leaves[0].num_shards


def test_4096_devices_make_few_cells(drawn):
    mesh = AbstractMesh((64, 64), ("data", "model"))
    (_, ax) = drawn(visualize(spread((8192, 8192), P("data", "model"), mesh)).figure()).axes
    assert len(ax.patches) <= 2 * 36
    assert {"0", "63", "4032", "4095", "⋯", "⋮", "⋱"} <= set(texts_of(ax))


def test_only_a_leaf_can_be_drawn_on_axes_and_no_figure_of_nothing():
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"expected one leaf.*got 6 leaves, 5 of them"):
        visualize(tree(), ax=ax)
    with pytest.raises(ValueError, match=r"got 1 leaves, 0 of them"):
        visualize(np.zeros(3), ax=ax)
    plt.close(figure)
    with pytest.raises(ValueError, match="expected a leaf that lies on devices"):
        visualize({"a": 1}).figure()


def test_a_notebook_gets_the_text_in_colors_with_names_escaped():
    tagged = tree() | {"<b>": spread((16,), P("data"))}
    page = visualize(tagged)._repr_mimebundle_([], [])["text/html"]
    assert "P(data=4): 4 blocks × 2 copies" in page
    assert f"background-color: {OKABE_ITO[0].lower()}" in page
    assert "<b>" not in page and "['&lt;b&gt;']" in page


@pytest.mark.parametrize("color", [*OKABE_ITO, *VIRIDIS, WHOLE, *gradient(range(100)).values()])
def test_text_on_a_colour_can_be_read(color):
    """WCAG 2 asks for a contrast of 4.5 of small text."""
    low, high = sorted(map(palette.luminance, (color, palette.ink(color))))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_device_has_one_colour_wherever_it_is():
    assert distinct_colors(range(8))[3] == distinct_colors([3])[3] == distinct_colors([1, 3])[3]
    assert len(set(distinct_colors([0, 8, 16]).values())) == 3
