"""Functions of the blocks of an array over 8 devices, and loops around them, for tests of reports."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import communication

MESH = gm.make_mesh()
RING = [(i, (i + 1) % 8) for i in range(8)]
BLOCK_BYTES = 8 * 16 * 4  # of a device's block of X


def over_rows(*shape, dtype=jnp.float32):
    """An array that is never made, its rows over 8 devices."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P("data")))


X = over_rows(64, 16)
ROWS = P("data")


def on_blocks(function, out=ROWS):
    """A function of each device's block, with the collectives that it names and no other."""
    return jax.shard_map(function, mesh=MESH, in_specs=ROWS, out_specs=out, check_vma=False)


def psum(x):
    return lax.psum(x, "data")


def ring(x):
    return lax.ppermute(x, "data", RING)


def collectives(function, *args):
    return communication(on_blocks(function), *(args or (X,))).collectives


# Loops.


def nested(body):
    """The body 5 times in a loop of 3."""

    def outer(x):
        return lax.fori_loop(0, 3, lambda i, a: lax.fori_loop(0, 5, lambda j, b: body(b), a) + 1, x)

    return outer


def scanned(body):
    """The body 7 times in a scan of 4."""

    def inner(x, _):
        return lax.scan(lambda b, _: (body(b), None), x, None, length=7)[0], None

    return lambda x: lax.scan(inner, x, None, length=4)[0]


def until_large(body):
    return lambda x: lax.while_loop(lambda a: a[0, 0] < 100, body, x)


def one_psum(x):
    return psum(jnp.sin(x)) / 8


def psum_and_ring(x):
    return ring(one_psum(x))


def scoped(name, loop):
    """A loop in a named scope."""

    def run(x):
        with jax.named_scope(name):
            return loop(x)

    return run
