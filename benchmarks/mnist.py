"""MNIST logistic regression: full-data gradients a second of one HMC program.

``python -m benchmarks mnist --data-dir DIR [--out FILE.json] [--quick] [--check]``. Real MNIST,
60,000 x 784, 10 classes; standard normal priors; 20 leapfrogs a step. A gradient is one chain's
gradient over all rows: 4 chains take 4 gradients a leapfrog.
"""

import argparse
import json
import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks import environment, mnist_data, table
from benchmarks.harness import Entrant, interpreter, launch, measure, stopwatch
from benchmarks.summary import summarise

IS_PEER = {"ours": False, "tfp": True, "numpyro": True, "blackjax": True, "roofline": False}
LEAPFROGS = 20
STEP_SIZE = 1e-3
TOLERANCE = 1e-4


def main(argv: list[str]) -> int:
    """Measure, or check, the contenders; return the exit status."""
    options = _options(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.check:
        return _check(options, console)
    took = stopwatch()
    results = []
    for devices, chains in product(options.devices, options.chains):
        results += _measure(options, devices, chains, console)
        if options.out:  # each time, so that a run that is broken off leaves what it has
            _write(options, results, took())
    table.legend(console)
    console.print(f"{took():.0f} s in all")
    return int(any(record["failed"] for record in results))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks mnist", description=__doc__)
    add = parser.add_argument
    add("--data-dir", default=os.environ.get("GSPMD_MCMC_DATA"), help="folder that holds mnist/")
    add("--out", type=Path, help="write everything as JSON")
    add("--quick", action="store_true", help="1 and 2 devices, 1 chain, 2 short rounds")
    add("--check", action="store_true", help="compare log densities and gradients with float64")
    add("--devices", type=_integers, help="default 1,2,8")
    add("--chains", type=_integers, help="default 1,4")
    add("--contenders", type=lambda text: text.split(","), default=list(IS_PEER))
    add("--rounds", type=int, help="default 7")
    add("--seconds", type=float, help="of one run, about; default 1")
    options = parser.parse_args(argv)
    defaults = {"devices": [1, 2, 8], "chains": [1, 4], "rounds": 7, "seconds": 1.0}
    if options.quick:
        defaults = {"devices": [1, 2], "chains": [1], "rounds": 2, "seconds": 0.3}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.data_dir:
        parser.error("--data-dir or GSPMD_MCMC_DATA must name the folder that holds mnist/")
    for name in options.contenders:
        if name not in IS_PEER:
            parser.error(f"--contenders: {name!r} is not one of {', '.join(IS_PEER)}")
    return options


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _entrants(options: argparse.Namespace, devices: int, chains: int) -> list[Entrant]:
    task = {
        "benchmark": "mnist",
        "devices": devices,
        "chains": chains,
        "leapfrogs": LEAPFROGS,
        "step_size": STEP_SIZE,
        "data_dir": str(Path(options.data_dir).resolve()),
    }
    return [
        Entrant(name, interpreter(IS_PEER[name]), {**task, "contender": name})
        for name in options.contenders
    ]


def _measure(options, devices: int, chains: int, console: Console) -> list[dict]:
    title = f"{devices} device{'s' * (devices > 1)}, {chains} chain{'s' * (chains > 1)}"
    entrants = _entrants(options, devices, chains)
    with console.status(title) as status:
        records = measure(
            entrants,
            options.rounds,
            options.seconds,
            lambda what: status.update(f"{title}: {what}"),
        )
    summarise(records)
    table.show(console, title, records)
    return records


def _write(options: argparse.Namespace, results: list[dict], seconds: float) -> None:
    document = {
        "benchmark": "mnist",
        "rows": 60_000,
        "leapfrogs": LEAPFROGS,
        "step_size": STEP_SIZE,
        "rounds": options.rounds,
        "seconds": seconds,
        "machine": environment.record(),
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def _check(options: argparse.Namespace, console: Console) -> int:
    """Compare every sampler's log density and gradient at the start with float64 NumPy."""
    data = mnist_data.load(options.data_dir)
    options.contenders = [name for name in options.contenders if name != "roofline"]
    is_good = True
    for chains in options.chains:
        truth = _truth(data, chains)
        for devices in options.devices:
            entrants = _entrants(options, devices, chains)
            launch(entrants)
            for entrant in entrants:
                is_good &= _check_one(entrant, truth, console)
                entrant.stop()
    return int(not is_good)


def _truth(data: mnist_data.Mnist, chains: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    start = mnist_data.start_position(chains)
    w, b = start["w"].reshape(chains, 784, -1), start["b"].reshape(chains, -1)
    each = [mnist_data.reference(data, w[i], b[i]) for i in range(chains)]
    log_density, w_grad, b_grad = (np.stack(part) for part in zip(*each, strict=True))
    return log_density, {"w": w_grad, "b": b_grad}


def _check_one(entrant: Entrant, truth: tuple, console: Console) -> bool:
    reply = entrant.attempt(Entrant.check) if entrant.is_live else None
    name = f"{entrant.name:9} {entrant.task['devices']} devices {entrant.task['chains']} chains"
    if reply is None:
        console.print(f"{name} [red]FAILED[/red]", "; ".join(entrant.record["errors"]))
        return False
    log_density, grads = truth
    errors = [_relative(reply["log_density"], log_density)]
    errors += [_relative(reply["grads"][leaf], grads[leaf]) for leaf in grads]
    norms = [np.linalg.norm(np.asarray(reply["grads"][leaf])) for leaf in grads]
    is_good = max(errors) < TOLERANCE
    first = np.ravel(reply["log_density"])[0]
    console.print(
        f"{name}  log density {first:.2f}  gradient norms w {norms[0]:.2f} b {norms[1]:.2f}  "
        f"relative errors {' '.join(f'{error:.1e}' for error in errors)}  "
        f"{'ok' if is_good else '[red]WRONG[/red]'}"
    )
    return is_good


def _relative(value: list, truth: np.ndarray) -> float:
    difference = np.asarray(value).reshape(truth.shape) - truth
    return float(np.linalg.norm(difference) / np.linalg.norm(truth))
