"""How many steps of its loop a kernel of a GPU loads ahead."""

from jax.experimental.pallas import triton

MOST_STAGES = 3  # more were no faster on an H200
# Of shared memory, in bytes: the smallest cards with tensor cores for bfloat16 have 99 KB, and what a
# product takes on its way from registers needs the rest. A kernel that asks for more does not compile.
SHARED = 72 << 10


def settings(step: int, kept: int = 0) -> triton.CompilerParams:
    """Return the settings of a kernel that loads so many bytes a step, and keeps so many throughout."""
    ahead = max(SHARED - kept, 0) // step
    return triton.CompilerParams(num_warps=4, num_stages=min(1 + ahead, MOST_STAGES))
