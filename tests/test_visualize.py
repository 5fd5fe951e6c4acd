"""Layouts as text, held to snapshots that were looked at and to 80 columns, and as figures."""

import os
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import gspmd_mcmc as gm
from gspmd_mcmc import visualize
from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.views import palette
from gspmd_mcmc.views.notation import array_text, number_ranges, shorten, spec_text
from gspmd_mcmc.views.palette import OKABE_ITO, VIRIDIS, WHOLE, distinct_colors, gradient

SNAPSHOTS = Path(__file__).parent / "snapshots" / "visualize"
MESH = AbstractMesh((2, 4), ("chains", "data"))
CUBE = AbstractMesh((2, 2, 2), ("chains", "data", "model"))


@dataclass(frozen=True)
class RemoteDevice:
    """A device of a process that is not there, as a pod has them."""

    id: int
    process_index: int
    device_kind: str = "TPU v4"
    platform: str = "tpu"

    class client:
        @staticmethod
        def process_index():
            return 0


def remote_mesh(num_processes, shape, names):
    count = int(np.prod(shape))
    devices = [RemoteDevice(i, i * num_processes // count) for i in range(count)]
    return Mesh(np.array(devices, dtype=object).reshape(shape), names)


def spread(shape, spec, mesh: Mesh | AbstractMesh = MESH, dtype=jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def line_mesh(size):
    return AbstractMesh((size,), ("data",))


def square_mesh(size):
    return AbstractMesh((size, size), ("data", "model"))


def network():
    """Thirty leaves of a network, and four layouts among them."""
    mesh = square_mesh(4)
    layers = {f"layer_{i}": {"w": (512, 512), "b": (512,)} for i in range(14)}
    specs = {"w": [P(None, "model"), P("model")], "b": [P("model"), P()]}
    tree: dict = {
        layer: {name: spread(shape, specs[name][i % 2], mesh) for name, shape in leaves.items()}
        for i, (layer, leaves) in enumerate(layers.items())
    }
    return tree | {"batch": spread((4096, 512), P("data"), mesh), "step": np.int32(3)}


def everything():
    """What has no layout, or an odd one, beside NumPy arrays and numbers."""
    return {
        "deleted": _deleted(),
        "learning_rate": 0.1,
        "names": np.zeros((3, 2)),
        "one": jax.device_put(np.ones(3, np.float32), jax.devices()[0]),
        "shape": jax.ShapeDtypeStruct((3,), jnp.float32),
        "text": "hello",
        "three": jax.device_put(np.float32(1), jax.devices()[3]),
    }


def _deleted():
    array = jnp.ones(3)
    array.delete()
    return array


CASES = {
    "rank_0": lambda: spread((), P()),
    "rank_1": lambda: spread((16,), P("data")),
    "rank_2_rows": lambda: spread((16, 6), P("data")),
    "rank_2_columns": lambda: spread((6, 16), P(None, "data")),
    "rank_2_both": lambda: spread((16, 6), P("data", "chains")),
    "rank_3_one_split": lambda: spread((4, 100, 784), P("chains")),
    "rank_3_outer_split": lambda: spread((4, 100, 784), P("chains", None, "data")),
    "rank_3_panels": lambda: spread((4, 8, 6), P("chains", "data", "model"), CUBE),
    "rank_4_panels": lambda: spread((4, 1, 8, 6), P("chains", None, "data", "model"), CUBE),
    "rank_4_many_panels": lambda: spread(
        (4, 12, 8, 8), P("a", "b", "c", "d"), AbstractMesh((2, 3, 2, 2), tuple("abcd"))
    ),
    "replicated": lambda: spread((6000, 784), P()),
    "multi_axis": lambda: spread((32, 6), P(("data", "chains"))),
    "multi_axis_other_order": lambda: spread((32, 6), P(("chains", "data"))),
    "uneven_rows": lambda: spread((10, 6), P(("chains", "data"))),
    "uneven_last_block": lambda: spread((11,), P("data")),
    "padded_rows": lambda: gm.Padded(spread((16, 6), P(("chains", "data"))), 11),
    "zero_size": lambda: spread((0, 6), P("data")),
    "devices_1": lambda: spread((16, 6), P("data"), line_mesh(1)),
    "devices_64": lambda: spread((6400, 6), P("data"), line_mesh(64)),
    "devices_512": lambda: spread((51_200,), P("data"), line_mesh(512)),
    "devices_4096": lambda: spread((8192, 16_384), P("data", "model"), square_mesh(64)),
    "devices_4096_copies": lambda: spread((8192, 16_384), P(None, "model"), square_mesh(64)),
    "processes_2": lambda: spread((16, 6), P("b", "a"), remote_mesh(2, (2, 4), ("a", "b"))),
    "processes_8": lambda: spread((16, 6), P("b"), remote_mesh(8, (8, 4), ("a", "b"))),
    "sharding_alone": lambda: NamedSharding(MESH, P("data", "chains")),
    "mesh_alone": lambda: AbstractMesh((2, 2, 3), ("chains", "data", "model")),
    "two_meshes": lambda: {"x": spread((8,), P("data")), "y": spread((8,), P("data"), line_mesh(2))},
    "network": network,
    "everything": everything,
    "empty": dict,
}


@pytest.mark.parametrize("name", CASES)
def test_text_is_as_it_was_when_it_was_looked_at_and_fits_its_width(name):
    path = SNAPSHOTS / f"{name}.txt"
    view = visualize(CASES[name]())
    text = str(view) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert text == path.read_text()
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} == set(CASES)
    for width in (60, 80, 130):
        assert max(map(len, view.text(width).split("\n"))) <= width


def printed(view, **options):
    out = StringIO()
    Console(file=out, width=80, **options).print(view)
    return out.getvalue()


def test_a_terminal_gets_colours_and_the_same_text():
    view = visualize(spread((16, 6), P("data")))
    coloured = printed(view, force_terminal=True, color_system="truecolor")
    assert "48;2;230;159;0m" in coloured  # the orange of device 0 as a background
    plain = [line.rstrip() for line in printed(view).rstrip("\n").split("\n")]
    assert plain == str(view).split("\n")
    assert "\x1b" not in printed(view)
    assert repr(view) == str(view)


class AsciiOut(StringIO):
    encoding = "ascii"


def test_show_prints_plain_text_to_a_pipe_and_ascii_where_no_more_is_known(capsys, monkeypatch):
    view = visualize(spread((16, 6), P("data")))
    view.show()
    shown = capsys.readouterr().out.rstrip().split("\n")
    assert [line.rstrip() for line in shown] == str(view).split("\n")
    out = AsciiOut()
    monkeypatch.setattr("sys.stdout", out)
    view.show()
    text = out.getvalue()
    assert text.isascii() and "| 0,4 |" in text and "?" not in text


def test_a_tree_of_many_leaves_is_cut_short():
    tree = [spread((8,), P("data")) for _ in range(500)]
    text = str(visualize(tree))
    assert len(text.split("\n")) < 90
    assert "440 more leaves" in text
    assert len(visualize(tree).leaves) == 500


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 4], "0,4"),
        ([0, 1], "0,1"),
        (range(8), "0-7"),
        ([0, 2, 4, 6], "0,2,4,6"),
        (range(0, 16, 2), "0-14:2"),
        ([7, 6, 5, 4], "4-7"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "0-3,8-11"),
        ([i for i in range(64) if i % 8 < 4], "0-3,8-11,… (32)"),
        ([0, 1, 2, 3, 9], "0-3,9"),
    ],
)
def test_numbers_are_written_briefly(numbers, text):
    assert number_ranges(list(numbers)) == text


def test_bytes_have_units():
    counts = (0, 999, 1000, 31_360, 999_999, 3 * 10**9)
    assert [bytes_text(n) for n in counts] == ["0 B", "999 B", "1 kB", "31.4 kB", "1 MB", "3 GB"]


def test_arrays_and_specs_are_written_as_jax_users_read_them():
    assert array_text(jnp.dtype("bfloat16"), (2, 3)) == "bf16[2,3]"
    assert array_text(jax.random.key(0).dtype, ()) == "key<fry>[]"
    assert array_text(np.dtype("bool"), (4,)) == "bool[4]"
    assert spec_text(P(("a", "b"), None, "c"), {"a": 2, "b": 3, "c": 4}) == "P((a=2, b=3), None, c=4)"
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 7) == "ab…hijk"


def test_the_shape_of_a_vector_may_be_a_number():
    sharding = NamedSharding(gm.make_mesh(data=8), P("data"))
    assert str(visualize(sharding, shape=16)) == str(visualize(sharding, shape=(16,)))


@dataclass(frozen=True)
class Chip(RemoteDevice):
    coords: tuple[int, ...] = (0, 0, 0)


def test_coordinates_of_chips_are_shown_in_the_order_of_the_mesh():
    ring = [(0, (0, 0, 0)), (1, (1, 0, 0)), (3, (1, 1, 0)), (2, (0, 1, 0))]
    mesh = Mesh(np.array([Chip(i, 0, coords=at) for i, at in ring]), ("data",))
    shown = " ".join(str(visualize(mesh)).split())
    assert (
        "chips in mesh order: 0 at (0, 0, 0), 1 at (1, 0, 0), 3 at (1, 1, 0), 2 at (0, 1, 0)" in shown
    )
    assert "chips in mesh order" not in str(visualize(MESH)) + str(visualize(gm.make_mesh()))


# Figures and notebooks.


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
