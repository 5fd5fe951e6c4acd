"""The code of the README and of its guides runs as printed, in a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GUIDE = re.compile(r"^\| \[.*?\]\((docs/\w+\.md)\)", re.MULTILINE)
ROW = re.compile(r"^(\w+) +((?:-?[\d.]+ *)+)$", re.MULTILINE)
README = ROOT / "README.md"
SAMPLING, ARCHITECTURE, COMING_FROM = (
    ROOT / "docs" / f"{name}.md" for name in ("sampling", "architecture", "coming_from")
)
GUIDES = [ROOT / path for path in GUIDE.findall(README.read_text())]  # in the README's order


def test_every_guide_is_named():
    assert sorted(GUIDES) == sorted((ROOT / "docs").glob("*.md"))


def test_code_blocks_run_one_after_the_other(tmp_path):
    pages = {page: BLOCK.findall(page.read_text()) for page in GUIDES}
    del pages[ARCHITECTURE], pages[COMING_FROM]  # tests of their own run their code
    # Runs of the README and of the samplers' guide take longer than LLVM does, so it may optimise their
    # programs; the other guides mostly compile. Fusions are the older ones of conftest throughout.
    pages[SAMPLING].append('jax.config.update("jax_disable_most_optimizations", True)\n')
    blocks = [block for page in pages.values() for block in page]
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    command = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900
    )
    assert len(blocks) > 10
    assert done.returncode == 0, done.stderr[-3000:]
    assert "20001 rows + 3 pad over data=4" in done.stdout
    assert "1 all-reduce a leapfrog" in done.stdout
    assert "mesh chains=2, data=4 (8 cpu devices 0-7)" in done.stdout  # visualize
    assert "loop leapfrog, 9 times" in done.stdout  # communication
    assert re.search(r"^fits: at most .* of a TPU v5e", done.stdout, re.MULTILINE)  # plan
    spec = "P(artitionSpec)?"  # as older JAX prints it
    assert re.search(rf"^\(4, 100, 1001\) {spec}\('chains', 'data'\)", done.stdout, re.MULTILINE)
    assert "'rate': 'float32[4, 100, 1001]'" in done.stdout
    assert "\n200 250\n" in done.stdout  # draws and steps of a run that went on from its checkpoint
    # Where a Sharded part's sample lies, and a log probability.
    assert re.search(rf"^{spec}\('data',\) -", done.stdout, re.MULTILINE)
    means = dict(re.findall(r"^w\[(\d+)\]\s+(-?[\d.]+)", done.stdout, re.MULTILINE))  # the worst first
    slopes = {str(i): 0.0 for i in range(16)} | {"0": 1.0, "1": -0.5}
    assert {i: round(float(mean), 1) + 0.0 for i, mean in means.items()} == slopes


def test_the_readme_s_example_prints_what_it_shows():
    """Means within a few Monte Carlo standard errors, as processors and versions of JAX round."""
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    (example,) = BLOCK.findall(text)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *rows = shown.strip().splitlines()
    assert first in done.stdout and rows[-1] in done.stdout
    expected, found = (
        {name: tuple(map(float, numbers.split())) for name, numbers in ROW.findall(printed)}
        for printed in (shown, done.stdout)
    )
    assert expected.keys() == found.keys() == {"mean", "sd", "log_density"}
    for name, (mean, sd, mcse, *_) in expected.items():
        assert abs(found[name][0] - mean) < 8 * mcse and 0.9 < found[name][1] / sd < 1.1


def test_pictures_and_links_lead_somewhere():
    found = [
        (page.parent, target)
        for page in (README, *GUIDES)
        for target in re.findall(r"\]\(([^)]*)\)", page.read_text())
    ]
    assert sum(target.endswith(".png") for _, target in found) >= 8
    assert len(found) >= 8 + len(GUIDES)
    local = [(folder, target) for folder, target in found if not target.startswith("https://")]
    files = [
        (folder / target.partition("#")[0], target) for folder, target in local if target[0] != "#"
    ]
    assert [target for file, target in files if not file.is_file()] == []
    anchors = [(file, target.partition("#")[2]) for file, target in files if "#" in target]
    for file, anchor in anchors:
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
        assert anchor in [title.lower().replace(" ", "-") for title in titles]
