"""What one HMC step of each library sends between 8 devices, and what it holds on each.

``python -m benchmarks communication [--data-dir DIR] [--out FILE.json] [--devices N]``. Nothing is
timed and nothing is run: programs are compiled, for real MNIST with its rows laid over the devices (one
chain, 20 leapfrogs), and read by `gspmd_mcmc.communication`. NumPyro and BlackJAX stand twice: their
data as arguments of the program, as in the speed benchmarks, and closed over, as their users write it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import data, environment
from benchmarks.harness import ROOT, interpreter

LEAPFROGS, STEP_SIZE = 20, 1e-3
CONTENDERS = ("ours", "numpyro", "numpyro closed over", "blackjax", "blackjax closed over", "tfp")


def main(argv: list[str]) -> int:
    """Compile each contender in a process of its own; print and write the reports."""
    parser = argparse.ArgumentParser(prog="benchmarks communication", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with data.folder_of([data.MNIST], options.data_dir) as (folder, sources):
        console.print(f"Data: {sources[data.MNIST]}", markup=False)
        records = [_in_process(name, folder, options.devices) for name in CONTENDERS]
    _show(console, records, options.devices)
    environment.save(options.out, "communication", data=sources, results=records)
    return int(any("error" in record for record in records))


def _in_process(name: str, data_dir: str, devices: int) -> dict:
    python = interpreter(is_peer=name != "ours")
    if not Path(python).exists():
        return {"name": name, "error": "the peers' Python is missing: run `make peers`"}
    task = json.dumps({"name": name, "data_dir": data_dir, "devices": devices})
    command = [python, "-m", "benchmarks.communication", task]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"name": name, "error": done.stderr.strip()[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def report_of(name: str, data_dir: str, devices: int) -> dict:
    """Compile one contender's step and return what its report says."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    from importlib import import_module

    import gspmd_mcmc as gm

    settings = {
        "form": None,
        "chains": 1,
        "leapfrogs": LEAPFROGS,
        "units": LEAPFROGS,
        "step_size": STEP_SIZE,
    }
    task = SimpleNamespace(devices=devices, data_dir=data_dir, **settings)
    library, _, closed = name.partition(" ")
    program = import_module(f"benchmarks.contenders.{library}").mnist(task)
    transition, rows = program.transition, program.data

    def closing_over(carry):
        return transition(carry, *rows)

    args = (program.carry,) if closed else (program.carry, *rows)
    report = gm.communication(closing_over if closed else transition, *args)
    return {"name": name, **_facts(report)}


def _facts(report: Any) -> dict:
    """Return what is kept of a report; a leapfrog is an iteration of its outermost loops."""
    kinds = {c.kind for c in report.collectives if c.loops}
    return {
        "collectives_per_leapfrog": {kind: report.runs(kind, within=1) for kind in kinds},
        "bytes_per_leapfrog": report.sent_bytes(within=1),
        "collectives": len(report.collectives),
        "unknown": len(report.unknown),
        "argument_bytes": report.argument_bytes,
        "temporary_bytes": report.temporary_bytes,
        "largest_constant_bytes": report.largest_constant_bytes,
        "whole": list(report.whole),
    }


def _show(console: Console, records: list[dict], devices: int) -> None:
    table = Table(title=f"one HMC step of MNIST on {devices} devices; bytes on one of them")
    names = ("", "a leapfrog sends", "arguments", "temporaries", "largest constant", "whole on each")
    for column in names:
        table.add_column(column, overflow="fold")
    for record in records:
        table.add_row(record["name"], *_cells(record))
    console.print(table)


def _cells(record: dict) -> list[str]:
    from gspmd_mcmc.errors import bytes_text

    if "error" in record:
        return [f"FAILED: {record['error'].splitlines()[-1]}"]
    counts = record["collectives_per_leapfrog"]
    sent = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
    fields = ("argument_bytes", "temporary_bytes", "largest_constant_bytes")
    held = [bytes_text(record[name]) for name in fields]
    sent = f"{sent}, {bytes_text(record['bytes_per_leapfrog'])}"
    return [sent, *held, "\n".join(record["whole"]) or "-"]


if __name__ == "__main__":
    print(json.dumps(report_of(**json.loads(sys.argv[1]))))
