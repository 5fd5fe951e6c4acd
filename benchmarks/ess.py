"""Effective draws a second and a gradient: what a sampler is worth, tuning and all.

Every contender samples the same log density from the same starts, in a process of its own, one after
the other; it writes its draws to a file, and one and the same code judges all. Who has not converged
has no effective sample size.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import gspmd_mcmc as gm
from benchmarks import data, environment, ess_table
from benchmarks.ess_models import MODELS, check_options, folder_of, names
from benchmarks.ess_models.model import Budget, Model
from benchmarks.harness import Worker, WorkerDied, WorkerError, interpreter, stopwatch

CONVERGED, DOUBTFUL = 1.01, 1.05
LIMIT_S = 900.0
AGAIN_S = 20.0
QUICK_MODELS = ("eight_schools", "arK")
QUICK_CONTENDERS = ("ours", "numpyro", "blackjax")
QUICK = {"few": Budget(4, 300, 300), "many": Budget(32, 200, 100)}


@dataclass(frozen=True)
class Contender:
    """A function of a module of `benchmarks.contenders`, and what it runs with."""

    module: str
    function: str
    is_peer: bool = True
    tunes_many: bool = False
    needs_rotations: bool = False


CONTENDERS = {
    "ours": Contender("ess_ours", "default", is_peer=False),
    "ours:snaper": Contender("ess_ours", "snaper", is_peer=False, tunes_many=True),
    "ours:mams": Contender("ess_ours", "mams", is_peer=False),
    "ours:rotated": Contender("ess_ours", "rotated", is_peer=False, needs_rotations=True),
    "numpyro": Contender("ess_numpyro", "nuts"),
    "blackjax": Contender("ess_blackjax", "nuts"),
    "blackjax:chees": Contender("ess_blackjax", "chees", tunes_many=True),
    "tfp": Contender("ess_tfp", "nuts"),
    "nutpie": Contender("ess_nutpie", "nuts"),
}


def main(argv: list[str]) -> int:
    """Measure, and return the exit status: 1 if a contender failed to run."""
    options = _options(argv)
    with folder_of(options) as (options.data_dir, sources):
        return _all_models(options, sources)


def _all_models(options: argparse.Namespace, sources: dict[str, str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 220)
    for source in sources.values():
        console.print(f"Data: {source}", markup=False)
    took, records = stopwatch(), []

    def write() -> None:
        environment.save(
            options.out,
            "ess",
            data=sources,
            rounds=options.rounds,
            quick=options.quick,
            converged=CONVERGED,
            doubtful=DOUBTFUL,
            seconds=took(),
            load=os.getloadavg(),
            results=records,
        )

    for name in options.models:
        model = replace(MODELS[name], **QUICK) if options.quick else MODELS[name]
        _measure(model, options, records, console, write)
        ess_table.show(console, model, [record for record in records if record["model"] == name])
    console.print(ess_table.LEGEND)
    print(ess_table.markdown(records, MODELS))
    console.print(f"{took():.0f} s in all")
    return int(any("error" in record for record in records))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks ess", description=__doc__)
    add = parser.add_argument
    data.add_option(parser)
    add("--out", type=Path, help="write everything as JSON, after every run")
    add("--models", type=names, help=f"of {', '.join(MODELS)}")
    add("--contenders", type=names, help=f"of {', '.join(CONTENDERS)}")
    add("--rounds", type=int, default=1, help="runs of each contender, with a seed of its own")
    add("--limit", type=float, default=LIMIT_S, help="seconds that one run may take")
    add("--quick", action="store_true", help="two small models, three contenders, short runs")
    options = parser.parse_args(argv)
    options.models = options.models or (QUICK_MODELS if options.quick else tuple(MODELS))
    check_options(parser, options, MODELS, CONTENDERS)
    return options


def _entered(model: Model, options: argparse.Namespace) -> tuple[str, ...]:
    if options.contenders:
        return options.contenders
    every = QUICK_CONTENDERS if options.quick else tuple(CONTENDERS)
    suits = (name for name in every if model.rotations or not CONTENDERS[name].needs_rotations)
    return tuple(name for name in suits if name not in model.left_out)


def _measure(
    model: Model, options: argparse.Namespace, records: list[dict], console: Console, write: Callable
) -> None:
    """Let the contenders run in turn, round after round, each in a process that stays alive."""
    names = _entered(model, options)
    workers: dict[str, Worker] = {}
    moments: dict[str, Moments] = {}
    failed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, console.status(model.name) as status:
        try:
            for number in range(options.rounds):
                for name in (name for name in names if name not in failed):
                    status.update(f"{model.name}: {name}, round {number + 1} of {options.rounds}")
                    record = _entry(model, name, number)
                    records.append(record)
                    try:
                        if name not in workers:
                            workers[name] = _start(model, name, options)
                        draws = _run(workers[name], Path(folder, "draws.npz"), record)
                        moments[name] = _judge(record, draws)
                        _compare(record, moments[name], moments.get(names[0]))
                    except (WorkerDied, WorkerError) as error:
                        record["error"] = str(error)
                        failed.add(name)
                    write()
        finally:
            for worker in workers.values():
                worker.close()


def _budget(model: Model, name: str) -> Budget:
    return model.many if CONTENDERS[name].tunes_many else model.few


def _entry(model: Model, name: str, number: int) -> dict[str, Any]:
    return {"model": model.name, "contender": name, "round": number} | asdict(_budget(model, name))


def _start(model: Model, name: str, options: argparse.Namespace) -> Worker:
    contender = CONTENDERS[name]
    task = {
        "contender": contender.module,
        "benchmark": contender.function,
        "model": model.name,
        "devices": 1,
        "data_dir": options.data_dir,
    } | asdict(_budget(model, name))
    worker = Worker(interpreter(contender.is_peer), task, options.limit)
    worker.answer()
    return worker


def _run(worker: Worker, path: Path, record: dict) -> dict[str, np.ndarray]:
    """Let a contender run; record its times and counts, and return its draws."""

    def ask() -> dict:
        return worker.ask(do="run", seed=record["round"], path=str(path))

    reply = ask()
    if _seconds(reply) < AGAIN_S and record["round"] == 0:
        # A short first run is mostly what happens once; only its compiling is taken from it.
        first, reply = reply, ask()
        for phase in ("warmup", "sampling"):
            reply[phase]["compile_s"] = first[phase]["compile_s"]
    # Another's niceness would make a comparison of seconds unfair; the record shows it.
    record |= reply | {"nice": os.getpriority(os.PRIO_PROCESS, worker.process.pid)}
    with np.load(path) as draws:
        return dict(draws)


def _seconds(reply: dict) -> float:
    return reply["warmup"]["seconds"] + reply["sampling"]["seconds"]


@dataclass(frozen=True)
class Moments:
    """Of every latent, as one vector: mean over all draws, its squared standard error."""

    mean: np.ndarray
    squared_error: np.ndarray


def _judge(record: dict, draws: dict[str, np.ndarray]) -> Moments:
    """Record R-hat, and what effective sample sizes come to where it allows them."""
    sizes, ratios = _flat(gm.ess_bulk(draws)), _flat(gm.rhat(draws))
    record |= {"latents": len(sizes), **judged(ratios, sizes, record["warmup"], record["sampling"])}
    flat = {name: np.asarray(x, np.float64) for name, x in draws.items()}
    mean = _flat({name: x.mean(axis=(0, 1)) for name, x in flat.items()})
    variance = _flat({name: x.var(axis=(0, 1)) for name, x in flat.items()})
    return Moments(mean, variance / sizes)


def _flat(statistics: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(statistics[name])) for name in sorted(statistics)])


def verdict(ratio: float) -> str:
    """Say what a greatest R-hat means: converged to 1.01, doubtful to 1.05, else not converged."""
    if ratio <= CONVERGED:
        return "converged"
    return "doubtful" if ratio <= DOUBTFUL else "not converged"


def judged(ratios: np.ndarray, sizes: np.ndarray, warmup: dict, sampling: dict) -> dict:
    """Return R-hat and, unless the chains have not converged, effective draws by second and gradient.

    Parameters
    ----------
    ratios, sizes
        R-hat and bulk effective sample size of every latent.
    warmup, sampling
        Their ``seconds``, without compiling, and ``leapfrogs`` of all chains.

    Returns
    -------
    dict
        ``rhat``, the greatest; ``verdict``; and ``ess``: ``least`` and ``median`` over latents, each
        with ``size``, ``per_s`` and ``per_1000`` gradients of the run after warm-up, and ``per_s_all``
        and ``per_1000_all`` with warm-up's.
    """
    # A latent that never moved has no R-hat: it has not converged.
    ratio = float(np.max(np.where(np.isnan(ratios), np.inf, ratios)))
    result: dict[str, Any] = {"rhat": ratio, "verdict": verdict(ratio)}
    if result["verdict"] == "not converged":
        return result
    seconds = sampling["seconds"], sampling["seconds"] + warmup["seconds"]
    gradients = sampling["leapfrogs"], sampling["leapfrogs"] + warmup["leapfrogs"]
    result["ess"] = {
        name: {
            "size": size,
            "per_s": size / seconds[0],
            "per_s_all": size / seconds[1],
            "per_1000": 1000 * size / gradients[0],
            "per_1000_all": 1000 * size / gradients[1],
        }
        for name, size in (("least", float(np.min(sizes))), ("median", float(np.median(sizes))))
    }
    return result


def _compare(record: dict, own: Moments, first: Moments | None) -> None:
    """Record the largest difference of means to the first contender's, in standard errors."""
    if first is not None and first is not own:
        error = np.sqrt(own.squared_error + first.squared_error)
        record["largest_z"] = float(np.max(np.abs(own.mean - first.mean) / error))
