"""What the compilers of TPUs and GPUs make of each sampler's leapfrog, with no chip at hand.

``python -m benchmarks chips [--out FILE.json] [--chips "8 x TPU v3,H100"] [--models ...]``. MNIST
(60,000 x 784, one chain and four), MovieLens (6,040 x 3,706, one and two) and a million ratings by as
many users of as many films (one), compiled from shapes alone. Bytes moved, kernels, collectives and
memory are the compiler's facts, of one device; leapfrogs a second are arithmetic on them and on the
vendors' peak figures (`gspmd_mcmc.planning.roofline`), or the cycles that a TPU's compiler schedules:
nothing is measured.
The compilers come with the extras ``tpu`` and ``cuda``; peers are found in this environment or in that
of ``make peers``.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import chips_programs, environment
from benchmarks.harness import PEERS_PYTHON
from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.planning.aot_compilation import build_program, compile_aot
from gspmd_mcmc.planning.atomics import find_atomics
from gspmd_mcmc.planning.plan import mesh_on
from gspmd_mcmc.planning.roofline import Roofline, roofline
from gspmd_mcmc.planning.topologies import chip_of
from gspmd_mcmc.planning.work import Work, work_of
from gspmd_mcmc.views.program.hlo import Program, read_program

CHIPS = ("8 x TPU v3", "8 x TPU v5e", "1 x H100", "8 x H100")
MODELS = {"mnist": (1, 4), "movielens": (1, 2), "ratings": (1,)}  # with how many chains
PEERS = ("blackjax", "blackjax:textbook", "numpyro", "numpyro:textbook")
CONTENDERS = ("ours", "ours:kernel", "ours:index", *PEERS)
OF_ALL_KERNELS = ("ours", "ours:kernel")  # of the others HMC alone
# Forms of ours that not every model has.
FORMS = {"ours:kernel": ("mnist", "movielens"), "ours:index": ("ratings",)}
# Leapfrogs a second on 8 TPU v3 cores, measured by it: of one chain, of two.
NOTEBOOK = {"mnist": 2100, "movielens": 829}
COLUMNS = (
    *("model", "chip", "chains", "kernel", "contender", "MB moved", "times data", "kernels"),
    *("all-reduces", "gathers", "atomics", "peak MB", "predicted/s", "bound by"),
)


def main(argv: list[str]) -> int:
    """Compile all programs, print and save the table; return the exit status."""
    options = _options(argv)
    console = Console(width=None if sys.stdout.isatty() else 170)
    _find_peers()
    began, rows, skipped = time.perf_counter(), [], []
    for case in _cases(options):
        name = ", ".join(map(str, case.values()))
        try:
            with console.status(name):
                rows.append(_row(**case))
        except (ImportError, RuntimeError) as error:  # what a compiler refuses, or fails at
            skipped.append(case | {"why": f"{type(error).__name__}: {error}"})
            console.print(f"{name}: left out: {str(error).splitlines()[0]}", markup=False)
        # Each time, so that a run that is interrupted leaves what it has.
        seconds = round(time.perf_counter() - began, 1)
        environment.save(
            options.out, "chips", seconds=seconds, notebook=NOTEBOOK, rows=rows, skipped=skipped
        )
    console.print(_table(rows))
    console.print(
        "Of one device, one leapfrog of all chains. MB moved, kernels, collectives, atomics on floats, "
        "memory: facts of the chip's compiler (on a card, a GPU's would time kernels and may choose "
        "others). Predicted leapfrogs a second and what bounds them: arithmetic on vendors' peaks; on "
        "a TPU its compiler's own estimate of its kernels where that is slower. Kernels that are no "
        "programs of XLA's count the cycles that a TPU's compiler scheduled; < where nothing is known "
        "of what they compute. Nothing is measured. "
        "times data: of the data in bytes, whatever form a contender keeps them in. The notebook's own "
        f"run on 8 TPU v3 cores, measured: {NOTEBOOK['mnist']:,} (MNIST, 1 chain), "
        f"{NOTEBOOK['movielens']:,} (MovieLens, 2 chains). {time.perf_counter() - began:.0f} s in all"
    )
    return int(not rows)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks chips", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="write the rows as JSON")
    add("--chips", type=_names, default=CHIPS, help=f"default {', '.join(CHIPS)}")
    add("--models", type=_names, default=tuple(MODELS), help=f"default {', '.join(MODELS)}")
    add("--contenders", type=_names, default=CONTENDERS, help=f"default {', '.join(CONTENDERS)}")
    add("--kernels", type=_names, default=tuple(chips_programs.KERNELS), help="of ours; default all")
    options = parser.parse_args(argv)
    known = {"models": MODELS, "contenders": CONTENDERS, "kernels": chips_programs.KERNELS}
    for option, names in known.items():
        for name in getattr(options, option):
            if name not in names:
                parser.error(f"--{option}: {name!r} is not one of {', '.join(names)}")
    for name in options.chips:
        try:
            chip_of(name)
        except ValueError as error:
            parser.error(f"--chips: {error}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _find_peers() -> None:
    """Find the peers in the environment of ``make peers`` where this one has none."""
    folders = PEERS_PYTHON.parents[1].glob("lib/python*/site-packages")
    sys.path.extend(str(folder) for folder in folders if str(folder) not in sys.path)


def _cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"model": model, "on": on, "kernel": kernel, "contender": contender, "chains": chains}
        for model in options.models
        for on in options.chips
        for chains in MODELS[model]
        for contender in options.contenders
        if model in FORMS.get(contender, MODELS)
        for kernel in (options.kernels if contender in OF_ALL_KERNELS else ("HMC",))
    ]


def _row(model: str, on: str, kernel: str, contender: str, chains: int) -> dict[str, Any]:
    """Compile a program and return what is said of it."""
    count, chip = chip_of(on)
    mesh, chip = mesh_on(make_abstract_mesh(data=count or 1), chip.name)
    build = chips_programs.build(model, contender, kernel, chains)
    function, args = build_program(build, mesh)
    compiled = compile_aot(function, args, mesh, chip)
    program = read_program(compiled.text)
    work = leapfrog_of(program)
    found = roofline(work, chip.name, data_bytes=chips_programs.DATA_BYTES[model] // mesh.size)
    return {
        "model": model,
        "chip": chip.name,
        "devices": mesh.size,
        "chains": chains,
        "kernel": kernel,
        "contender": contender,
        **_facts(found),
        "peak_memory_bytes": compiled.report.peak_bytes,
        "atomics_on_floats": [str(atomic) for atomic in find_atomics(compiled.assembly, program)],
        "compile_seconds": round(compiled.seconds, 2),
        **_arithmetic(found),
    }


def leapfrog_of(program: Program) -> Work:
    """Return the work of one leapfrog: ours names its loop, a peer's is the one that moves most."""
    names = dict.fromkeys(nest[-1].name for nest in program.loop_nests())
    outer = [nest[0].name for nest in program.loop_nests() if len(nest) == 1]
    wanted = ["leapfrog"] if "leapfrog" in names else list(dict.fromkeys(outer))
    return max((work_of(program, name) for name in wanted), key=lambda work: work.bytes_moved)


def _facts(found: Roofline) -> dict[str, Any]:
    work = found.work
    return {
        "bytes_moved_per_leapfrog": work.bytes_moved,
        "bytes_with_tiles_per_leapfrog": work.memory_bytes,
        "bytes_of_data": found.data_bytes,
        "kernels_per_leapfrog": work.kernels,
        "all_reduces_per_leapfrog": work.count("all-reduce"),
        "all_gathers_per_leapfrog": work.count("all-gather"),
        "other_collectives_per_leapfrog": sum(c.runs for c in work.collectives)
        - work.count("all-reduce")
        - work.count("all-gather"),
        "product_flops_per_leapfrog": work.product_flops,
        "other_flops_per_leapfrog": work.other_flops,
        "stated_flops_per_leapfrog": work.stated_flops,
        "compilers_own_estimate_seconds": found.estimated_seconds,
        "notes": list(work.notes),
    }


def _arithmetic(found: Roofline) -> dict[str, Any]:
    return {
        "predicted_leapfrogs_per_second": found.per_second,
        "predicted_counts_all_arithmetic": found.work.is_counted,
        "predicted_seconds": found.parts,
        "bound_by": found.bound,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, box=box.SIMPLE)
    for column in table.columns[5:13]:
        column.justify = "right"
    for row in rows:
        gathers = row["all_gathers_per_leapfrog"] + row["other_collectives_per_leapfrog"]
        table.add_row(
            row["model"], f"{row['devices']} x {row['chip']}", str(row["chains"]), row["kernel"],
            row["contender"], f"{row['bytes_moved_per_leapfrog'] / 1e6:,.1f}",
            f"{row['bytes_moved_per_leapfrog'] / row['bytes_of_data']:.1f}",
            str(row["kernels_per_leapfrog"]), str(row["all_reduces_per_leapfrog"]), str(gathers),
            str(len(row["atomics_on_floats"])), f"{row['peak_memory_bytes'] / 1e6:,.0f}",
            "< " * (not row["predicted_counts_all_arithmetic"])
            + f"{row['predicted_leapfrogs_per_second']:,.0f}", row["bound_by"],
        )  # fmt: skip
    return table
