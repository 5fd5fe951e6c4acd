"""Programs are compiled as a user's are, whatever the other tests do to compile quickly."""

import os
import time

import pytest

_BEGAN = time.perf_counter()


@pytest.fixture(autouse=True, scope="session")
def _as_a_users():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
        yield


def pytest_terminal_summary(terminalreporter):
    seconds = time.perf_counter() - _BEGAN
    terminalreporter.write_line(f"programs compiled by the chips' own compilers in {seconds:.0f} s")
