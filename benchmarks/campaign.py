"""What benchmarks share: options, measuring a grid of configurations, checking against float64."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks import data, environment, results
from benchmarks.harness import Entrant, interpreter, launch, measure, stopwatch

PEERS = ("tfp", "numpyro", "blackjax")
TEXTBOOK = tuple(f"{peer}:textbook" for peer in PEERS)  # as one writes the model down
FLOOR = "roofline"  # no sampler: it has nothing to check
TOLERANCE = 1e-4
SETTINGS = ("rows", "leapfrogs", "step_size", "unit")  # recorded with the results


@dataclass(frozen=True)
class Benchmark:
    """One model, and how it is measured.

    Attributes
    ----------
    name, about
        As on the command line; what the help says.
    folder
        The data set that it reads, as `benchmarks.data` names it.
    contenders
        Modules of `benchmarks.contenders` that have a function of this name. On the command line a
        colon and the name of a form may follow: ``numpyro:textbook``.
    rows, leapfrogs, step_size
        Of the model, of a transition, of a leapfrog.
    unit, units
        What is counted, and how many of them ``units(chains)`` a leapfrog of all chains makes.
    legend
        What the table's rates and its floor mean.
    chains, quick_chains
        Default numbers of chains.
    truth
        ``truth(data_dir, chains) -> (log_densities [chains], {leaf: gradients [chains, ...]})`` at the
        start, in float64.
    """

    name: str
    about: str | None
    folder: str
    contenders: tuple[str, ...]
    rows: int
    leapfrogs: int
    step_size: float
    unit: str
    units: Callable[[int], int]
    legend: str
    chains: tuple[int, ...]
    quick_chains: tuple[int, ...]
    truth: Callable[[str, int], tuple[np.ndarray, dict[str, np.ndarray]]]


def main(benchmark: Benchmark, argv: list[str]) -> int:
    """Measure, or check, the contenders; return the exit status."""
    options = _options(benchmark, argv)
    with data.folder_of([benchmark.folder], options.data_dir) as (options.data_dir, sources):
        return _run(benchmark, options, sources)


def _run(benchmark: Benchmark, options: argparse.Namespace, sources: dict[str, str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"Data: {'; '.join(sources.values())}", markup=False)
    if options.check:
        return _check(benchmark, options, console)
    took = stopwatch()
    found = []
    for devices, chains in product(options.devices, options.chains):
        found += _measure(benchmark, options, devices, chains, console)
        # Each time, so that a run that is interrupted leaves what it has.
        environment.save(
            options.out,
            benchmark.name,
            **{name: getattr(benchmark, name) for name in SETTINGS},
            data=sources,
            rounds=options.rounds,
            seconds=took(),
            results=found,
        )
    results.legend(console, benchmark.legend)
    console.print(f"{took():.0f} s in all")
    return int(any(record["failed"] for record in found))


def _options(benchmark: Benchmark, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"benchmarks {benchmark.name}", description=benchmark.about)
    add = parser.add_argument
    data.add_option(parser)
    add("--out", type=Path, help="write everything as JSON")
    add("--quick", action="store_true", help="1 and 2 devices, few chains, 2 short rounds")
    add("--check", action="store_true", help="compare log densities and gradients with float64")
    add("--devices", type=_integers, help="default 1,2,8")
    add("--chains", type=_integers, help=f"default {','.join(map(str, benchmark.chains))}")
    add("--contenders", type=lambda text: text.split(","), default=list(benchmark.contenders))
    add("--rounds", type=int, help="default 7")
    add("--seconds", type=float, help="of one run, about; default 1")
    options = parser.parse_args(argv)
    defaults = {"devices": [1, 2, 8], "chains": benchmark.chains, "rounds": 7, "seconds": 1.0}
    if options.quick:
        quick = {"devices": [1, 2], "chains": benchmark.quick_chains, "rounds": 2, "seconds": 0.3}
        defaults = quick
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in options.contenders:
        if name.partition(":")[0] not in benchmark.contenders:
            parser.error(f"--contenders: {name!r} is not one of {', '.join(benchmark.contenders)}")
    return options


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _entrants(benchmark: Benchmark, options, devices: int, chains: int) -> list[Entrant]:
    task = {
        "benchmark": benchmark.name,
        "devices": devices,
        "chains": chains,
        "leapfrogs": benchmark.leapfrogs,
        "units": benchmark.units(chains) * benchmark.leapfrogs,
        "step_size": benchmark.step_size,
        "data_dir": options.data_dir,
    }
    entrants = []
    for name in options.contenders:
        contender, _, form = name.partition(":")
        own = {"contender": contender, "form": form or None}
        entrants.append(Entrant(name, interpreter(contender in PEERS), task | own))
    return entrants


def _measure(benchmark, options, devices: int, chains: int, console: Console) -> list[dict]:
    title = f"{devices} device{'s' * (devices > 1)}, {chains} chain{'s' * (chains > 1)}"
    entrants = _entrants(benchmark, options, devices, chains)
    with console.status(title) as status:
        records = measure(
            entrants,
            options.rounds,
            options.seconds,
            lambda what: status.update(f"{title}: {what}"),
        )
    results.summarize(records)
    results.show(console, title, benchmark.unit, records)
    return records


def _check(benchmark: Benchmark, options: argparse.Namespace, console: Console) -> int:
    """Compare every sampler's log density and gradient at the start with float64 NumPy."""
    options.contenders = [name for name in options.contenders if name != FLOOR]
    is_good = True
    for chains in options.chains:
        truth = benchmark.truth(options.data_dir, chains)
        for devices in options.devices:
            entrants = _entrants(benchmark, options, devices, chains)
            launch(entrants)
            for entrant in entrants:
                is_good &= _check_one(entrant, truth, console)
                entrant.stop()
    return int(not is_good)


def _check_one(entrant: Entrant, truth: tuple, console: Console) -> bool:
    reply = entrant.attempt(Entrant.check) if entrant.is_live else None
    name = f"{entrant.name:11} {entrant.task['devices']} devices {entrant.task['chains']} chains"
    if reply is None:
        console.print(f"{name} [red]FAILED[/red]", "; ".join(entrant.record["errors"]))
        return False
    log_density, grads = truth
    errors = [_relative(reply["log_density"], log_density)]
    errors += [_relative(reply["grads"][leaf], grads[leaf]) for leaf in grads]
    norms = [f"{leaf} {np.linalg.norm(np.asarray(reply['grads'][leaf])):.2f}" for leaf in grads]
    is_good = max(errors) < TOLERANCE
    first = np.ravel(reply["log_density"])[0]
    console.print(
        f"{name}  log density {first:.2f}  gradient norms {' '.join(norms)}  "
        f"relative errors {' '.join(f'{error:.1e}' for error in errors)}  "
        f"{'ok' if is_good else '[red]WRONG[/red]'}"
    )
    return is_good


def _relative(value: list, truth: np.ndarray) -> float:
    difference = np.asarray(value).reshape(truth.shape) - truth
    return float(np.linalg.norm(difference) / np.linalg.norm(truth))
