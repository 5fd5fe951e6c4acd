"""The machine's floor: a gradient's matrix products alone, and for MNIST one read of the data.

Each is tried in several forms when the contender is built and the fastest is timed. Everything is
in gradients of one chain a second: one read of the data serves all chains.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks import mnist_data
from benchmarks.contenders import factorisation
from benchmarks.contenders.handwritten import sweep, tiles_of
from benchmarks.contenders.placing import place, row_mesh, scaled

BLOCK_ROWS = (None, 750, 1500, 2500)  # None: all rows of a device at once
REPEATS = 5
TRIALS = 3


def mnist(task) -> "Roofline":
    """The floor of multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    data = mnist_data.load(task.data_dir)
    spec = PartitionSpec("data")
    images = {
        "uint8": place(mesh, spec, data.images.shape, lambda index: data.images[index]),
        "float32": place(mesh, spec, data.images.shape, scaled(data.images)),
    }
    return Roofline(images, mesh, task.chains, data.images.shape[1])


def movielens(task) -> "Factorisation":
    """The floor of matrix factorisation."""
    mesh = row_mesh(task.devices)
    _, position = factorisation.load(task, mesh)
    return Factorisation(position, mesh)


class Factorisation:
    """Three products and one sigmoid an entry, in the fastest of several tile sizes."""

    def __init__(self, position: dict[str, jax.Array], mesh):
        self.position, self.mesh = position, mesh

    def build(self) -> dict:
        """Compile every tile size and keep the fastest."""
        start = time.perf_counter()
        rows = self.position["U"].shape[1] // self.mesh.size
        self.fastest = min((self._work(tile) for tile in tiles_of(rows)), key=_trial)
        return {"search_s": time.perf_counter() - start, "forms": {"products": self.fastest.name}}

    def run(self, calls: int) -> dict:
        """Time ``calls``."""
        return {"seconds": _seconds(self.fastest, calls), "units": calls * REPEATS}

    def _work(self, tile: int) -> "_Work":
        layouts = factorisation.LAYOUT["U"], factorisation.LAYOUT["V"]
        specs = {"in_specs": layouts, "out_specs": layouts[0]}
        leapfrogs = functools.partial(_leapfrogs, tile)
        work = jax.jit(jax.shard_map(leapfrogs, mesh=self.mesh, **specs, check_vma=False))
        return _Work(f"{tile} rows", work, (self.position["U"], self.position["V"]), REPEATS)


def _leapfrogs(tile: int, users: jax.Array, movies: jax.Array) -> jax.Array:
    """Sweep over the rows `REPEATS` times, each with values that depend on the last."""

    def leapfrog(_, point):
        users, movies = point
        by_user, by_movie = sweep(tile, users, movies, lambda logits, _: jax.nn.sigmoid(logits))
        return users + 1e-12 * by_user, movies + 1e-12 * by_movie.swapaxes(1, 2)

    users, movies = jax.lax.fori_loop(0, REPEATS, leapfrog, (users, movies))
    return users + 1e-12 * movies.sum()


class Roofline:
    """The fastest forms found of three pieces of work: products, and two reads."""

    def __init__(self, images: dict[str, jax.Array], mesh, chains: int, features: int):
        self.images, self.mesh, self.chains = images, mesh, chains
        self.weights = jnp.full((mnist_data.NUM_CLASSES * chains, features), 0.01)

    def build(self) -> dict:
        """Compile every form and keep the fastest of each kind."""
        start = time.perf_counter()
        candidates = {
            "products": self._products(),
            "read_float32": self._reads("float32", _FLOAT_READS),
            "read_uint8": self._reads("uint8", _BYTE_READS),
        }
        self.fastest = {kind: min(forms, key=_trial) for kind, forms in candidates.items()}
        forms = {kind: work.name for kind, work in self.fastest.items()}
        return {"search_s": time.perf_counter() - start, "forms": forms}

    def run(self, calls: int) -> dict:
        """Time ``calls`` of each; the products are the contender's own figure."""
        seconds = {kind: _seconds(work, calls) for kind, work in self.fastest.items()}
        extra = {
            f"{kind}_per_s": self.chains * calls * self.fastest[kind].repeats / seconds[kind]
            for kind in ("read_float32", "read_uint8")
        }
        gradients = self.chains * calls * REPEATS
        return {"seconds": seconds["products"], "units": gradients, "extra": extra}

    def _products(self) -> list["_Work"]:
        rows = self.images["uint8"].shape[0] // self.mesh.size
        return [
            _Work(
                f"{dtype}, {block or 'all'} rows, {order}",
                self._over_rows(functools.partial(_gradients, product, block or rows), "weights"),
                (images, self.weights),
                REPEATS,
            )
            for dtype, images in self.images.items()
            for order, product in _PRODUCTS.items()
            for block in BLOCK_ROWS
            # All rows as bytes would be a float32 copy of the whole in every gradient.
            if (rows % block == 0 if block else dtype == "float32")
        ]

    def _reads(self, dtype: str, forms: dict[str, Callable]) -> list["_Work"]:
        data = (self.images[dtype],)
        return [_Work(name, self._over_rows(form), data, 1) for name, form in forms.items()]

    def _over_rows(self, work: Callable, *whole: str) -> Callable:
        """Run on each device's rows, without any sum over devices."""
        by_rows = PartitionSpec("data")
        specs = {"in_specs": (by_rows, *(PartitionSpec() for _ in whole)), "out_specs": by_rows}
        return jax.jit(jax.shard_map(work, mesh=self.mesh, **specs, check_vma=False))


class _Work:
    """A compiled piece of work, and how many gradients' worth one call is."""

    def __init__(self, name: str, function: Callable, arguments: tuple, repeats: int):
        self.name, self.arguments, self.repeats = name, arguments, repeats
        self.compiled = function.lower(*arguments).compile()
        self()

    def __call__(self) -> None:
        jax.block_until_ready(self.compiled(*self.arguments))


def _gradients(product: Callable, block: int, images: jax.Array, weights: jax.Array) -> jax.Array:
    """Add up the blocks' products `REPEATS` times, each with weights that depend on the last."""
    starts = jnp.arange(0, images.shape[0], block)

    def gradient(_, weights):
        def body(total, start):
            rows = jax.lax.dynamic_slice_in_dim(images, start, block).astype(jnp.float32)
            return total + product(rows, weights), None

        total, _ = jax.lax.scan(body, jnp.zeros_like(weights), starts)
        return weights + 1e-12 * total

    return jax.lax.fori_loop(0, REPEATS, gradient, weights)


_PRODUCTS = {
    "classes first": lambda rows, weights: (weights @ rows.T) @ rows,
    "rows first": lambda rows, weights: (rows @ weights.T).T @ rows,
}
_FLOAT_READS = {
    "sum": lambda images: images.sum()[None],
    "sum by column": lambda images: images.sum(0),
    "sum by row": lambda images: images.sum(1),
}
# XLA reads bytes 20 times as fast for their maximum as for their sum, which it does not vectorise.
_BYTE_READS = {
    "maximum": lambda images: images.max()[None],
    "maximum by column": lambda images: images.max(0),
    "sum as float32": lambda images: images.astype(jnp.float32).sum()[None],
}


def _seconds(work: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - start


def _trial(work: Callable) -> float:
    return min(_seconds(work, 1) for _ in range(TRIALS))
