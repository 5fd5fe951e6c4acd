"""docs/what_can_go_wrong.md names messages that there are, and misses none that needs a word."""

import ast
import re
from pathlib import Path

import pytest

import gspmd_mcmc as gm

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "what_can_go_wrong.md").read_text()
CELLS = [
    line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line
]
QUOTED = [text for cell in CELLS for text in re.findall(r"`([^`]+)`", cell)]
# A message of this form tells one argument, what was expected and what came: it needs no more words.
SAYS_ENOUGH = re.compile(r"expected|pip install")


def texts(node):
    """Literal parts of the strings in a piece of code."""
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def sources():
    for path in sorted((ROOT / "gspmd_mcmc").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


LITERALS = [text for _, module in sources() for text in texts(module)]


def classes():
    """Names of the errors and warnings that users meet."""
    found = {name for name in gm.__all__ if isinstance(getattr(gm, name), type)}
    return {name for name in found if issubclass(getattr(gm, name), Exception)}


def messages():
    """What is raised or warned of by running and placing, each with its place and literal parts."""
    for path, module in sources():
        if not path.startswith(
            ("gspmd_mcmc/sampling/", "gspmd_mcmc/placement/", "gspmd_mcmc/diagnostics/")
        ):
            continue
        for node in ast.walk(module):
            if not isinstance(node, ast.Call | ast.Raise):
                continue
            is_warning = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn"
            if not (is_warning or isinstance(getattr(node, "exc", None), ast.Call)):
                continue
            parts = texts(node)
            # One with no words of its own passes another message on.
            if max(map(len, parts), default=0) > 12 and not SAYS_ENOUGH.search(" ".join(parts)):
                yield f"{path}:{node.lineno}", parts


@pytest.mark.parametrize("quoted", sorted(set(QUOTED) - classes()))
def test_a_message_that_is_named_exists(quoted):
    assert any(quoted in text for text in LITERALS)


def test_every_error_class_is_named():
    assert {name for name in classes() if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize(
    ("place", "parts"), list(messages()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_message_is_named(place, parts):
    assert any(quoted in part for part in parts for quoted in QUOTED), parts


def test_a_message_that_is_not_there_would_be_seen():
    assert not any("no such message" in text for text in LITERALS) and len(list(messages())) > 20
