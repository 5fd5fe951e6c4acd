"""The first call: seconds from a log density to a summary, imports left out.

Ours, NumPyro and BlackJAX run NUTS on the same log densities from the same starts, in turn, round after
round, every run in a process of its own; and once more with JAX's persistent compilation cache, which a
run before the first round has filled.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import data, environment
from benchmarks.ess_models import check_options, folder_of, names
from benchmarks.harness import ROOT, interpreter

CONTENDERS = ("ours", "numpyro", "blackjax")
# On MNIST short trajectories: the program is the same, but for the length of NUTS' stack of states.
LONG = {"num_warmup": 1000, "num_samples": 1000, "max_tree_depth": 10}
SHORT = {"num_warmup": 50, "num_samples": 50, "max_tree_depth": 3}
BUDGETS = {"eight_schools": LONG, "arK": LONG, "mnist_6000": SHORT, "mnist_60000": SHORT}
DEFAULT_MODELS = ("eight_schools", "arK", "mnist_60000")
CHAINS = 4
LIMIT_S = 900.0


def main(argv: list[str]) -> int:
    """Measure, print, write JSON; return the exit status: 1 if a contender failed."""
    options = _options(argv)
    with folder_of(options) as (options.data_dir, sources), tempfile.TemporaryDirectory() as cache:
        print(f"Models: {', '.join(options.models)}", flush=True)
        records = []
        for model in options.models:
            for contender in options.contenders if options.cache else ():
                run(model, contender, options.data_dir, f"{cache}/{contender}")
            for number in range(options.rounds):
                for contender in options.contenders:
                    record = {"model": model, "contender": contender, "round": number}
                    record |= run(model, contender, options.data_dir)
                    if options.cache:
                        again = run(model, contender, options.data_dir, f"{cache}/{contender}")
                        record["cached_s"] = again.get("first_s")
                    records.append(record)
                    environment.save(options.out, "compile", data=sources, results=records)
    show(records)
    return int(any("error" in record for record in records))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks compile", description=__doc__)
    add = parser.add_argument
    data.add_option(parser)
    add("--out", type=Path, help="write everything as JSON, after every run")
    add("--rounds", type=int, default=5)
    add("--models", type=names, default=DEFAULT_MODELS, help=f"of {', '.join(BUDGETS)}")
    add("--contenders", type=names, default=CONTENDERS, help=f"of {', '.join(CONTENDERS)}")
    add("--no-cache", dest="cache", action="store_false", help="leave the persistent cache out")
    options = parser.parse_args(argv)
    check_options(parser, options, BUDGETS, CONTENDERS)
    return options


def run(model: str, contender: str, data_dir: str | None, cache: str | None = None) -> dict:
    """Run a contender in a fresh process; return its seconds and programs, or its ``error``."""
    task = {"model": model, "contender": contender, "chains": CHAINS, "data_dir": data_dir}
    # Nobody's runs may be served by a cache that the caller's environment names.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    variables["JAX_TRACEBACK_FILTERING"] = "off"  # else the last lines of an error do not say its cause
    if cache:
        variables |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    python = interpreter(is_peer=contender != "ours")
    command = [python, "-m", "benchmarks.contenders.first_calls", json.dumps(task | BUDGETS[model])]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LIMIT_S:.0f} s"}
    except FileNotFoundError:
        return {"error": "the peers' Python is missing: run `make peers`"}
    if done.returncode:
        return {"error": " | ".join(done.stderr.strip().splitlines()[-2:])[:600]}
    return json.loads(done.stdout.splitlines()[-1])


def medians(records: list[dict]) -> dict[tuple[str, str], dict[str, float]]:
    """Return (model, contender) to the medians over rounds; a contender that failed has none."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for model, contender in dict.fromkeys((r["model"], r["contender"]) for r in records):
        own = [r for r in records if (r["model"], r["contender"]) == (model, contender)]
        if not any("error" in record for record in own):
            keys = [k for k in ("first_s", "programs", "second_s", "cached_s") if own[0].get(k)]
            found[model, contender] = {k: statistics.median(r[k] for r in own) for k in keys}
    return found


def show(records: list[dict]) -> None:
    """Print the medians, and what failed."""
    table = Table(title=f"first call, {CHAINS} chains, medians")
    for column in ("model", "contender", "first, s", "programs", "second, s", "with a cache, s"):
        table.add_column(column)
    for (model, contender), row in medians(records).items():
        cached = f"{row['cached_s']:.2f}" if "cached_s" in row else ""
        first, second = f"{row['first_s']:.2f}", f"{row['second_s']:.2f}"
        table.add_row(model, contender, first, f"{row['programs']:.0f}", second, cached)
    Console().print(table)
    for record in records:
        if "error" in record:
            print(f"{record['model']}, {record['contender']}: {record['error']}")
