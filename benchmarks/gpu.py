"""Ours beside the peers on this machine's GPU, and what was predicted beside what is measured.

``python -m benchmarks gpu [--out FILE.json]``: nothing to choose, under ten minutes. Leapfrogs a second
of MNIST, MovieLens and two models of groups by HMC, then effective draws a second of one model. Each
program's own text, as it was compiled here, gives its bytes, kernels and arithmetic. Its roofline comes
from the card's data sheet, and from the bandwidth, products and launches that are measured here first.
Data come from `--data-dir`, the cache, a download, or a simulation of the same shapes, on which speed
depends. Peers run where `make peers` put them, with a jax for the card.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import data, environment, ess, groups_data, mnist_data, movielens_data
from benchmarks.chips import leapfrog_of
from benchmarks.data import Sizes
from benchmarks.harness import Entrant, interpreter, launch, stopwatch
from benchmarks.results import spread
from gspmd_mcmc.planning.roofline import Roofline, roofline
from gspmd_mcmc.planning.throughput import THROUGHPUTS, Throughput, measure_throughput
from gspmd_mcmc.sampling.run_state import LOOPS_IN_GRAPHS
from gspmd_mcmc.views.program.hlo import read_program

# With so many chains, the first ones first.
PLANS = (("mnist", 1), ("movielens", 2), ("groups_ratings", 1), ("groups_effect", 1), ("mnist", 4))
CONTENDERS = ("ours", "ours:kernel", "numpyro", "blackjax", "blackjax:textbook")
ESS_MODEL = "german_credit"
LEAPFROGS = 20
STEP_SIZES = {"mnist": 1e-3, "movielens": 2e-3, "groups_ratings": 1e-4, "groups_effect": 1e-4}
ENOUGH_S = 360.0  # after so long no further plan begins: the effective draws come last
ALL_S, LEAST_S = 570.0, 45.0  # of the whole command; that a contender of the effective draws has
# Loops are CUDA graphs, of every contender, as `sample` has its own.
GRAPHS = " ".join(f"--{name}={value}" for name, value in LOOPS_IN_GRAPHS.items())
PREDICTIONS = ("by_data_sheet", "by_measured_throughput")
CARDS = {  # in the names of JAX's devices
    **{"H100": "H100 80GB", "H200": "H200", "B200": "B200", "A100-SXM4-80GB": "A100 80GB"},
    **{"A100-SXM4-40GB": "A100 40GB", "V100": "V100 32GB", "L4": "L4", "T4": "T4"},
}


def main(argv: list[str]) -> int:
    """Measure, print and save; return the exit status: 1 if a contender failed."""
    options = _options(argv)
    # Processes share the card: none may take three quarters of its memory at its start.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_FLAGS"] = f"{GRAPHS} {os.environ.get('XLA_FLAGS', '')}"  # the user's count
    console = Console(width=None if sys.stdout.isatty() else 170)
    took, rows = stopwatch(), []
    device = jax.devices()[0]
    card = next((name for sign, name in CARDS.items() if sign in device.device_kind.split()), None)
    if device.platform != "gpu":
        console.print(f"No GPU: JAX computes on {device.device_kind} here, and so is what follows.")
    measured = measure_throughput(0.2 if options.tiny else 0.5)
    sheet = THROUGHPUTS[card] if card else None
    parts: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "data_sheet": card,
        "measured_throughput": asdict(measured),
    }
    with tempfile.TemporaryDirectory() as folder, _data(options) as (data_dir, parts["data"]):
        console.print(f"Data: {'; '.join(parts['data'].values())}", markup=False)
        for model, chains in PLANS:
            if took() > ENOUGH_S:
                parts.setdefault("left_out_for_time", []).append(f"{model} x {chains}")
                continue
            with console.status(f"{model}, {chains} chains"):
                rows += _measure(model, chains, data_dir, options, (sheet, measured))
            environment.save(options.out, "gpu", seconds=took(), **parts, rows=rows)
        console.print(_table(rows))
        parts["ess"], status = _effective_draws(options, Path(folder), ALL_S - took())
    environment.save(options.out, "gpu", seconds=took(), **parts, rows=rows)
    console.print(
        "measured/s: leapfrogs of all chains a second, medians of rounds in turn. sheet/s: at best by "
        "the data sheet; here/s: at best by the bandwidth, products and launches measured on this "
        "device. MB, kernels: of the program as compiled here. Predictions are bounds: a kernel that "
        "does not reach its bandwidth is what they miss; where the arrays fit a cache they are none. "
        f"{took():.0f} s in all"
    )
    failures = [row for row in rows if row["errors"]]
    for row in failures:
        console.print(f"{row['contender']}: {'; '.join(row['errors'])}", markup=False)
    return int(bool(failures) or bool(status))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks gpu", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="write everything as JSON")
    data.add_option(parser)
    add("--tiny", action="store_true", help="a check of the command: small simulated data")
    add("--contenders", type=lambda text: text.split(","), default=CONTENDERS, help="default all")
    options = parser.parse_args(argv)
    for name in options.contenders:
        if name not in CONTENDERS:
            parser.error(f"--contenders: {name!r} is not one of {', '.join(CONTENDERS)}")
    return options


@contextmanager
def _data(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the folder of the data, and where they came from; with ``--tiny`` they are simulated."""
    if not options.tiny:
        with data.folder_of([data.MNIST, data.MOVIELENS], options.data_dir) as found:
            yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        simulate(Path(folder), (256, 8), Sizes(ratings=7_000, users=302, movies=64))
        yield folder, {"all": "small simulated data"}


def simulate(folder: Path, images: tuple[int, int], sizes: Sizes) -> None:
    """Write both data sets of these sizes, in subfolders."""
    for name in (data.MNIST, data.MOVIELENS):
        (folder / name).mkdir()
    data.simulate_images(folder / data.MNIST, images)
    data.simulate_ratings(folder / data.MOVIELENS, sizes)


def _data_bytes(model: str, data_dir: str) -> int:
    """Bytes that must be read once: pixels with labels, cells, or two columns of ratings."""
    if model == "mnist":
        mnist = mnist_data.load(data_dir)
        return mnist.images.nbytes + mnist.labels.nbytes
    if model == "movielens":
        return movielens_data.load(data_dir).nbytes
    return 2 * groups_data.load(data_dir).stars.nbytes


def _measure(
    model: str,
    chains: int,
    data_dir: str,
    options: argparse.Namespace,
    known: tuple[Throughput | None, Throughput],
) -> list[dict[str, Any]]:
    """Let contenders run in turn; return a row of each, with what its own program predicts."""
    task = {
        "benchmark": model, "devices": 1, "chains": chains, "leapfrogs": LEAPFROGS, "units": LEAPFROGS,
        "step_size": STEP_SIZES[model], "data_dir": data_dir,
    }  # fmt: skip
    entrants = []
    for name in options.contenders:
        contender, _, form = name.partition(":")
        if form == "kernel" and model.startswith("groups"):
            continue  # there is none
        own = {"contender": contender, "form": form or None}
        entrants.append(Entrant(name, interpreter(contender != "ours"), task | own))
    rounds, seconds = (2, 0.1) if options.tiny else (5, 1.0)
    texts: dict[str, str] = {}

    def prepare(entrant: Entrant) -> None:
        entrant.build()
        assert entrant.worker is not None
        texts[entrant.name] = entrant.worker.ask(do="text")["text"]
        entrant.warm_up(seconds)

    try:
        launch(entrants)
        for entrant in entrants:
            if entrant.is_live:
                entrant.attempt(prepare)
        for number in range(rounds):
            for entrant in entrants:
                if entrant.is_live:
                    entrant.attempt(lambda entrant, n=number: entrant.run(n))
    finally:
        for entrant in entrants:
            entrant.stop()
    num_bytes = _data_bytes(model, data_dir)
    return [_row(model, entrant, texts.get(entrant.name), num_bytes, known) for entrant in entrants]


def _row(
    model: str,
    entrant: Entrant,
    text: str | None,
    data_bytes: int,
    known: tuple[Throughput | None, Throughput],
) -> dict[str, Any]:
    record = entrant.record
    device = record.get("ready", {}).get("device", "")
    row: dict[str, Any] = {
        "model": model, "chains": record["chains"], "kernel": "HMC", "contender": entrant.name,
        "device": device, "errors": list(record["errors"]),
    }  # fmt: skip
    here = jax.devices()[0].device_kind
    if device and device != here:
        row["errors"].append(
            f"it ran on {device}, not on {here}: give its environment a jax that knows the card, "
            '.venv-peers/bin/python -m pip install "jax[cuda12]==0.10.2"'
        )
    if record["rounds"]:
        row["measured_leapfrogs_per_second"] = spread([r["per_s"] for r in record["rounds"]])
        row["acceptance"] = record["rounds"][-1]["acceptance"]
    if text is not None:
        row |= _predicted(text, device, data_bytes, known)
    return row


def _predicted(
    text: str, device: str, data_bytes: int, known: tuple[Throughput | None, Throughput]
) -> dict[str, Any]:
    work = leapfrog_of(read_program(text))
    found: dict[str, Roofline | None] = {
        name: throughput and roofline(work, device, data_bytes=data_bytes, throughput=throughput)
        for name, throughput in zip(PREDICTIONS, known, strict=True)
    }
    return {
        "bytes_moved_per_leapfrog": work.bytes_moved,
        "bytes_of_data": data_bytes,
        "kernels_per_leapfrog": work.kernels,
        "product_flops_per_leapfrog": work.product_flops,
        "predicted_leapfrogs_per_second": {name: r and r.per_second for name, r in found.items()},
        "predicted_seconds": {name: r and r.parts for name, r in found.items()},
        "bound_by": {name: r and r.bound for name, r in found.items()},
        "notes": list(work.notes),
    }


def _effective_draws(options: argparse.Namespace, folder: Path, seconds: float) -> tuple[Any, int]:
    """Run the benchmark `ess` of one model in so many seconds; return its results and exit status."""
    out = folder / "ess.json"
    contenders = [name for name in options.contenders if name in ess.CONTENDERS] or ["ours"]
    # The model's data are simulated: the folder is named, and not read.
    chosen = ["--models", ESS_MODEL, "--contenders", ",".join(contenders), "--data-dir", str(folder)]
    chosen += ["--quick"] if options.tiny else []
    limit = max(LEAST_S, seconds / len(contenders))
    status = ess.main([*chosen, "--limit", str(limit), "--out", str(out)])
    return json.loads(out.read_text())["results"], status


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = ("model", "chains", "contender", "measured/s (min-max)", "sheet/s", "here/s", "MB moved")
    table = Table(*columns, "kernels", "bound by", box=box.SIMPLE)
    for column in table.columns[3:8]:
        column.justify = "right"
    for row in rows:
        rate = row.get("measured_leapfrogs_per_second")
        predicted = row.get("predicted_leapfrogs_per_second", {})
        bounds = row.get("bound_by", {})
        table.add_row(
            row["model"], str(row["chains"]), row["contender"],
            f"{rate['median']:,.1f} ({rate['min']:,.1f}-{rate['max']:,.1f})" if rate else "FAILED",
            *(f"{x:,.0f}" if (x := predicted.get(name)) else "" for name in PREDICTIONS),
            f"{row.get('bytes_moved_per_leapfrog', 0) / 1e6:,.1f}",
            str(row.get("kernels_per_leapfrog", "")),
            next((bounds[name] for name in PREDICTIONS if bounds.get(name)), ""),
        )  # fmt: skip
    return table
