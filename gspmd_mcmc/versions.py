"""Which JAX this package needs."""

import re

import jax

OLDEST_JAX = (0, 9, 0)  # as pyproject.toml has it


def require_jax(version: str) -> None:
    """Raise if a version of JAX is older than what this package was written for.

    A newer one than was tested is let in: what it may lack says so where it is used.

    Raises
    ------
    ImportError
        With what to do.
    """
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise ImportError(
            f"jax {version} is too old: gspmd_mcmc needs {oldest} or newer. "
            f"pip install 'jax>={oldest}' 'jaxlib>={oldest}'"
        )


require_jax(jax.__version__)
