"""Layouts as figures and as HTML, and the colours of both."""

import itertools
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import visualize
from gspmd_mcmc.views.palette import (
    OKABE_ITO,
    VIRIDIS,
    WHOLE,
    channels,
    distinct_colors,
    gradient,
    ink,
    luminance,
)

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
    axes = drawn(visualize(tree()).figure()).axes
    titles = [texts_of(ax) for ax in axes]
    assert len(axes) == 5
    assert sum("mesh chains=2, data=4" in t for t in titles) == 1
    (rows,) = [t for t in titles if "P(data=4): 4 blocks × 2 copies" in t]
    assert {"0,4", "1,5", "2,6", "3,7", "same layout: ['labels']", "axis 1 →"} <= set(rows)
    (whole,) = [t for t in titles if "P(): whole on 8 devices" in t]
    assert "0-7" in whole


def test_a_figure_says_where_the_bytes_are(drawn):
    figure = drawn(visualize(tree()).figure())
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


def test_only_a_leaf_can_be_drawn_on_axes():
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"expected one leaf.*got 6 leaves, 5 of them"):
        visualize(tree(), ax=ax)
    with pytest.raises(ValueError, match=r"got 1 leaves, 0 of them"):
        visualize(np.zeros(3), ax=ax)
    plt.close(figure)


def test_a_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="expected a leaf that lies on devices"):
        visualize({"a": 1}).figure()


class Checker(HTMLParser):
    """Collects texts, tags and attributes, and minds that tags are closed in their order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(view):
    checker = Checker()
    checker.feed(view._repr_html_())
    assert checker.open == []
    return checker


def test_html_has_the_table_and_the_drawings():
    page = parsed(visualize(tree()))
    assert page.tags.count("table") == 1 and page.tags.count("tr") == 7
    assert {"['rows']", "f32[16,6]", "P(data=4)", "0,4", "3,7", "0-7", "5 empty"} <= set(page.texts)
    assert "P(data=4): 4 blocks × 2 copies" in page.texts


def test_html_needs_nothing_from_outside():
    page = parsed(visualize(tree()))
    assert set(page.tags) <= {"div", "table", "tr", "th", "td"}
    assert {name for name, _ in page.attributes} == {"style"}
    assert "url(" not in visualize(tree())._repr_html_()


def test_html_escapes_names():
    html = visualize({"<script>alert(1)</script>": spread((16,), P("data"))})._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html


def test_html_leaves_the_ink_of_the_page_alone_outside_of_cells():
    """Text on a coloured cell is black or white; all other text has the page's own colour."""
    styles = [value for name, value in parsed(visualize(tree())).attributes if name == "style"]
    inked = [s for s in styles if s and ("color:#000000" in s or "color:#FFFFFF" in s)]
    assert inked and all("linear-gradient(#" in style for style in inked)
    assert any("color:inherit" in style for style in styles if style)


# Severe protanopia, deuteranopia and tritanopia on linear RGB: Machado, Oliveira and Fernandes (2009).
# Rows of the matrices, nine numbers each.
DEFICIENCIES = {
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.01182 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.3039",
    "none": "1 0 0 0 1 0 0 0 1",
}


def seen(color, matrix):
    """CIE L*a*b* of a colour as seen with a deficiency."""
    c = np.array(channels(color))
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(np.array(matrix.split(), float).reshape(3, 3) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = to_xyz @ rgb / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_of_devices_differ_to_every_eye(deficiency):
    """A difference of 2.3 in L*a*b* is just noticeable; three times that is asked of any two."""
    matrix = DEFICIENCIES[deficiency]
    for a, b in itertools.combinations((*OKABE_ITO, WHOLE), 2):
        assert np.linalg.norm(seen(a, matrix) - seen(b, matrix)) > 7


def test_the_test_of_colours_can_fail():
    red, green = "#C44E52", "#7B8B3F"
    distance = [np.linalg.norm(seen(red, m) - seen(green, m)) for m in DEFICIENCIES.values()]
    assert min(distance) < 20 < distance[-1]


@pytest.mark.parametrize("color", [*OKABE_ITO, *VIRIDIS, WHOLE, *gradient(range(100)).values()])
def test_text_on_a_colour_can_be_read(color):
    """WCAG 2 asks for a contrast of 4.5 of small text."""
    low, high = sorted([luminance(color), luminance(ink(color))])
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_device_has_one_colour_wherever_it_is():
    assert distinct_colors(range(8))[3] == distinct_colors([3])[3] == distinct_colors([1, 3])[3]
    assert len(set(distinct_colors([0, 8, 16]).values())) == 3
