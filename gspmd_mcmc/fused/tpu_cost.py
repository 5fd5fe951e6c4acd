"""What a TPU's kernel states of its arithmetic: its compiler places it in a program by that.

So does `plan` predict, where it does not have the kernel's schedule. Products count as a matrix unit
makes them, with the padding of its sides, so that their floating-point operations over the chip's peak
are the seconds that they take. What is no product is left out.
"""

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl

SIDE = 128  # of a matrix unit; 256 on a TPU v6e, where narrow products take longer than stated here


def stated(
    products: Sequence[tuple[int, int, int]], transcendentals: int, arrays: Sequence[jax.Array]
) -> pl.CostEstimate:
    """State the cost of all tiles of a kernel.

    Parameters
    ----------
    products
        Rows, terms and columns of each product of bfloat16 numbers.
    transcendentals
        How many exponentials and the like it takes.
    arrays
        What it reads.
    """
    flops = 0
    for rows, terms, columns in products:
        narrow, long = sorted((rows, columns))
        flops += 2 * long * _up_to_side(terms) * _up_to_side(narrow)
    return pl.CostEstimate(
        flops=flops, transcendentals=transcendentals, bytes_accessed=sum(a.nbytes for a in arrays)
    )


def _up_to_side(number: int) -> int:
    return -(-number // SIDE) * SIDE
