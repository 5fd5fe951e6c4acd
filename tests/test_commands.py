"""Every command that README, the guides and the READMEs print runs as printed, up to its first work.

Each one starts in a separate process, offline and without data or caches. It is ended once it has
worked for a second after it named its data. A command that ends by itself must succeed. Targets of
make are expanded by ``make -n``, and the files that they call must exist.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    ROOT / "validation" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SHELL = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`((?:python|make|pip|\.venv[\w-]*/bin/python) [^`]+)`")
# What a reader replaces; a folder of data is left to the default.
PLACEHOLDERS = {
    **{"[--data-dir DIR]": "", "WORD": "BFMI --check", "NAME": "mnist", "--rows N": "--rows 2000"},
    **{"tests/test_x.py": "tests/test_versions.py"},
}
# Commands that end for a reason that the reader has to know, with what they must say.
NEEDS = {
    "benchmarks chips": (r"left out: pip install|bound by", "the compilers of chips"),
    "validation": (r"posteriordb", "a download of the reference posteriors"),
}
INSTALLS = re.compile(r"\bpip install\b")
SECONDS, LONGEST = 1.0, 7.0  # of processor time, after the first line and in all without one


def commands() -> list[str]:
    """Return each distinct command once."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in SHELL.findall(text):
            found += [line.split("#")[0].strip() for line in block.splitlines()]
        found += [match.replace("\n", " ") for match in INLINE.findall(text)]
    return sorted({command for command in found if command})


def runs() -> list[str]:
    """Return the arguments of Python of each command that runs, its placeholders replaced."""
    found = []
    for command in commands():
        head, _, arguments = command.partition(" ")
        if head.endswith("python") and not INSTALLS.search(command):
            for name, value in PLACEHOLDERS.items():
                arguments = arguments.replace(name, value)
            found.append(" ".join(re.sub(r"[\[\]]", " ", arguments).split()))
    # Where a result goes changes nothing in how a command begins.
    return sorted({re.sub(r" --out FILE(\.json)?", "", arguments) for arguments in found})


def session_seconds(session: int) -> float:
    """Return the processor time of all processes of a session so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))  # its own, and of the children that ended
    return ticks / os.sysconf("SC_CLK_TCK")


def run_until_it_works(arguments: str, tmp_path: Path) -> tuple[int | None, str]:
    """Return the exit status, None if it was still working when it was ended, and its output."""
    words = shlex.split(arguments)
    for option in ("--out", "--table"):
        if option in words:
            given = words[words.index(option) + 1]
            words[words.index(option) + 1] = str(tmp_path / Path(given).name)
            if (ROOT / given).is_file():
                shutil.copy(ROOT / given, tmp_path)
    environment = {name: x for name, x in os.environ.items() if name != "GSPMD_MCMC_DATA"}
    # Nothing listens there: no mirror answers.
    environment |= dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    log = tmp_path / "output"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        first = None
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            spent = session_seconds(process.pid)
            if first is None and re.search(r"^(Data|Models): ", log.read_text(), re.MULTILINE):
                first = spent
            if spent > LONGEST or (first is not None and spent > first + SECONDS):
                break
            time.sleep(0.1)
        return process.poll(), log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_benchmarks_of_readme_are_among_the_commands():
    names = {words[2] for words in map(str.split, runs()) if words[1] == "benchmarks"}
    assert {"mnist", "movielens", "groups", "energy", "communication", "gpu", "ess"} <= names


@pytest.mark.parametrize(
    "arguments", ["-m benchmarks mnist --no-such-option", "-m benchmarks groups --data-dir DIR"]
)
def test_a_command_that_stops_is_noticed(arguments, tmp_path):
    status, output = run_until_it_works(arguments, tmp_path)
    assert status not in (None, 0) and ("usage:" in output or "--data-dir" in output)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processor time is read from /proc")
@pytest.mark.parametrize("arguments", runs())
def test_a_command_runs_as_printed(arguments, tmp_path):
    status, output = run_until_it_works(arguments, tmp_path)
    tail = output[-2000:]
    needs = next((what for name, what in NEEDS.items() if f"-m {name}" in arguments), None)
    if status in (None, 0):
        assert "Traceback" not in output and "usage:" not in output, tail
    else:
        assert needs is not None, f"it ended with {status}: {tail}"
        assert re.search(needs[0], output), f"it needs {needs[1]}, and did not say so: {tail}"


@pytest.mark.parametrize("target", sorted({c.split()[1] for c in commands() if c.startswith("make ")}))
def test_a_target_of_make_calls_what_there_is(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for script in re.findall(r"bin/python (\w\S*\.py)", done.stdout):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"bin/python -m (benchmarks|validation|tests\.\w+)", done.stdout):
        path = ROOT / Path(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_what_is_installed_by_name_are_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(page.read_text() for page in PAGES)
    for names in re.findall(r"pip install '?\"?(?:\.|gspmd_mcmc)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(extras), names
