"""Where the arrays of a tree live: as a table and drawings for terminals, notebooks and figures."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.jupyter import JupyterMixin
from rich.text import Text

from gspmd_mcmc.tree import PyTree
from gspmd_mcmc.views.layouts.layout_figure import draw_on, figure_of
from gspmd_mcmc.views.layouts.layout_text import header, text_view, to_ascii, totals_lines
from gspmd_mcmc.views.layouts.leaf_layout import LeafLayout, Totals
from gspmd_mcmc.views.layouts.pictures import drawings_of
from gspmd_mcmc.views.layouts.tree_layouts import read_tree
from gspmd_mcmc.views.notation import several

TEXT_WIDTH = 80


class LayoutView(JupyterMixin):
    """Where the leaves of a tree live; what `visualize` returns.

    ``str`` (and a REPL) gives plain text of 80 columns, ``rich.print``, `show` and a notebook colors,
    `figure` a matplotlib figure. ``view[path]`` is the view of a leaf or of a subtree.

    Attributes
    ----------
    leaves
        The layout of each leaf, in the order of the tree.
    totals
        Bytes on each device and on the host.
    """

    def __init__(self, leaves: tuple[LeafLayout, ...]):
        self.leaves = leaves
        self.totals = Totals.of(leaves)

    def __getitem__(self, path: str) -> "LayoutView":
        """View the leaves whose path is, or begins with, ``path`` (as the table writes it).

        Raises
        ------
        KeyError
            If there is no such leaf.
        """
        found = tuple(leaf for leaf in self.leaves if leaf.path == path)
        found = found or tuple(leaf for leaf in self.leaves if leaf.path.startswith(path))
        if not found:
            known = several([leaf.path for leaf in self.leaves], 8)
            raise KeyError(f"{path}: expected the path of a leaf, or its beginning; there are {known}")
        return LayoutView(found)

    def text(self, width: int = TEXT_WIDTH) -> str:
        """Return the view as plain text no wider than ``width`` columns (at least 60)."""
        return "\n".join(line.plain for line in text_view(self.leaves, self.totals, max(width, 60)))

    def show(self) -> None:
        """Print the view: in colors to a terminal, as plain text to a file or a pipe."""
        console = Console()
        if console.encoding.startswith("utf"):
            console.print(self)
        else:
            print(to_ascii(self.text(console.width)))

    def figure(self) -> Any:
        """Return a matplotlib Figure with a panel for each mesh and each layout of the tree.

        Raises
        ------
        ValueError
            If no leaf lies on devices.
        """
        title = header(self.leaves) + totals_lines(self.totals)
        return figure_of(drawings_of(self.leaves), title)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the view in the width of the console."""
        for line in text_view(self.leaves, self.totals, max(options.max_width, 60)):
            line.no_wrap, line.overflow = True, "crop"
            yield line

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def visualize(
    tree: PyTree, *, shape: int | tuple[int, ...] | None = None, ax: Any = None
) -> LayoutView:
    """Show where the arrays of a tree live: which device holds which block, and how many bytes.

    Only shapes and shardings are read: nothing is computed, and no data move.

    Parameters
    ----------
    tree
        Any pytree, or a `Draws`. Its leaves may be jax arrays, ``ShapeDtypeStruct`` (on a real mesh or
        an ``AbstractMesh``, whose devices are named by their positions), shardings, meshes, `Padded`
        arrays, NumPy arrays and numbers. Tracers, and shapes without a sharding, are said to have no
        layout.
    shape
        The shape of the array that a sharding without an array is to cut.
    ax
        A matplotlib Axes to draw on; the tree must then be one leaf on devices.

    Returns
    -------
    LayoutView
        Print it, show it in a notebook, ask for its ``figure()``, or read its ``leaves``.

    Raises
    ------
    ValueError
        With ``ax``, if the tree is not one leaf with a layout on devices.

    Examples
    --------
    >>> mesh = jax.sharding.AbstractMesh((64, 64), ("data", "model"))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    >>> print(visualize(jax.ShapeDtypeStruct((1_000_000, 512), "float32", sharding=rows)))
    """
    shape = (shape,) if isinstance(shape, int) else shape
    view = LayoutView(read_tree(tree, None if shape is None else tuple(shape)))
    if ax is not None:
        drawn = [leaf for leaf in view.leaves if leaf.grid is not None]
        if len(view.leaves) != 1 or not drawn:
            raise ValueError(
                f"visualize(ax=...): expected one leaf that lies on devices, got {len(view.leaves)} "
                f"leaves, {len(drawn)} of them on devices; pick one, or take visualize(tree).figure()"
            )
        draw_on(ax, drawn[0])
    return view
