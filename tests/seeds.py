"""Statistical tests: with other seeds, and with a note of how far from their bounds they end.

``TEST_SEED=7 make test`` runs the suite with other seeds; `tests.margins` runs its statistical tests
with many, and tabulates what `within` noted.
"""

import json
import os
from pathlib import Path


def seed(number: int) -> int:
    """Return the seed that a test calls ``number``, another one for each TEST_SEED."""
    return number + 1_000_003 * int(os.environ.get("TEST_SEED", "0"))


def within(statistic, bound: float, what: str = "") -> None:
    """Assert that the statistic is below its bound; an AssertionError says of ``what``.

    Where the variable TEST_MARGINS names a file, both are noted there with the name of the test.
    """
    statistic, bound = float(statistic), float(bound)
    if file := os.environ.get("TEST_MARGINS"):
        test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
        note = {"test": test, "what": what, "statistic": statistic, "bound": bound}
        with Path(file).open("a") as notes:
            print(json.dumps(note), file=notes)
    assert statistic < bound, f"{statistic:.4g} {what}, where {bound:.4g} is the limit"
