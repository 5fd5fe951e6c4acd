"""Runs that are killed at random moments and gone on with: what becomes of their draws.

``python -m benchmarks survival [--kills 50] [--seed 0] [--signal KILL|TERM] [--out FILE.json]``. A
small run with checkpoints and a sink is killed after a random time, gone on with in a new process,
killed again, and so on; one that reaches its end before is begun anew in another folder. Every run's
draws are compared with those of a run that nothing interrupted: none may be missing, doubled, or
different in a single bit.

This process imports all and starts no backend of JAX; each attempt is a fork of it, with programs from
one persistent cache. So an attempt costs what the run itself costs.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import gspmd_mcmc as gm
from benchmarks import environment
from gspmd_mcmc.sampling import chunks, keeping, zarr_format

NUM_WARMUP, NUM_SAMPLES, CHAINS = 200, 1000, 4
# A checkpoint each so many seconds, and draws to disk twice as often; steps of a chunk.
EVERY, CHUNK = 0.1, 20
# Kills of which one counts its time from the start of the process; the others from the first chunk.
EARLY = 5
PREEMPTED = 75
WAIT = 300.0  # seconds, for an attempt that does not end


def log_density(x, scale):
    """Return the summands of a Gaussian."""
    return {"a": -0.5 * (x["a"] / scale) ** 2, "b": -0.5 * (x["b"] - 1) ** 2}


def start_jax(cache: Path) -> None:
    """Start two CPU devices; programs come from the cache where it has them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    chunks.next_size = lambda count, seconds: CHUNK


def target_and_mesh():
    """Return the target, and a mesh of two devices that chains lie over."""
    return gm.LogDensity(log_density, jnp.asarray([0.5, 1.0, 4.0])), gm.make_mesh(chains=2)


def begin(**options: Any) -> gm.Draws:
    """Begin a run."""
    target, mesh = target_and_mesh()
    return gm.sample(
        jax.random.key(1),
        target,
        {"a": jnp.zeros(3), "b": jnp.zeros(())},
        mesh=mesh,
        num_chains=CHAINS,
        num_warmup=NUM_WARMUP,
        num_samples=NUM_SAMPLES,
        kernel=gm.HMC(target, 0.1, 8, jitter=0.5),
        warmup=gm.WindowAdaptation(metric=gm.Diagonal()),
        progress=False,
        **options,
    )


def whole_run(out: Path) -> None:
    """Make the draws that every other run is compared with."""
    draws = begin()
    np.savez(out, **arrays_of(draws))


def attempt(folder: Path) -> None:
    """Begin the run of a folder, or go on with it."""
    if (folder / "steps").is_dir() and any(p.name.isdigit() for p in (folder / "steps").iterdir()):
        target, mesh = target_and_mesh()
        gm.resume(folder, target, mesh=mesh, progress=False)
        return
    sink = gm.ZarrSink(folder / "draws", flush_seconds=EVERY / 2)
    begin(checkpoint=folder, every=EVERY, to=sink)


def compare(folder: Path, whole: Path, out: Path) -> None:
    """Write how many draws of a run are missing, too many, and different."""
    saved = gm.open_draws(folder / "draws")
    found, expected = arrays_of(saved), dict(np.load(whole))
    count = saved.num_draws
    same = min(count, NUM_SAMPLES)
    differ = np.zeros(same, bool)
    for name, values in expected.items():
        unequal = found[name][:, :same] != values[:, :same]
        differ |= unequal.reshape(CHAINS, same, -1).any(axis=(0, 2))
    report = {
        "missing": max(NUM_SAMPLES - count, 0),
        "too_many": max(count - NUM_SAMPLES, 0),
        "different": int(differ.sum()),
        "arrays_missing": sorted(set(expected) - set(found)),
    }
    out.write_text(json.dumps(report))


def arrays_of(draws: gm.Draws) -> dict[str, np.ndarray]:
    """Return all arrays of draws by name."""
    named = {f"position_{name}": x for name, x in draws.position.items()} | draws.stats
    return {name: np.asarray(x) for name, x in named.items()}


def fork(work: Callable[[], None]) -> tuple[int, int]:
    """Do some work in a new process; return its number, and a pipe that tells of the first chunk."""
    sys.stdout.flush()
    sys.stderr.flush()
    ready, begun = os.pipe()
    pid = os.fork()
    if pid:
        os.close(begun)
        return pid, ready
    code = 1
    try:
        tell_of_the_first_chunk(begun)
        work()
        code = 0
    except gm.Preempted:
        code = PREEMPTED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def tell_of_the_first_chunk(pipe: int) -> None:
    """Write to a pipe when a first chunk has ended."""
    after_chunk, told = keeping.Keeper.after_chunk, []

    def tell(self):
        if not told:
            told.append(os.write(pipe, b"x"))
        after_chunk(self)

    keeping.Keeper.after_chunk = tell


def wait_for(pid: int, seconds: float) -> int | None:
    """Wait for a process to end; return its status, or None if it did not in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def do(work: Callable[[], None], what: str) -> float:
    """Do some work in a new process to its end; return the seconds that it took."""
    began = time.monotonic()
    pid, ready = fork(work)
    code = wait_for(pid, WAIT)
    os.close(ready)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if code != 0:
        raise RuntimeError(f"{what}: the process ended with {code}")
    return time.monotonic() - began


def kill(work: Callable[[], None], seconds: float, number: int, *, is_early: bool) -> int:
    """Begin some work, send it a signal after a time, and return its status once it has ended."""
    pid, ready = fork(work)
    if not is_early:
        os.read(ready, 1)
    os.close(ready)
    code = wait_for(pid, seconds)
    if code is not None:
        return code
    os.kill(pid, number)
    code = wait_for(pid, WAIT)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise RuntimeError(f"a process did not end {WAIT:.0f} s after signal {number}")
    return code


def draws_on_disk(folder: Path) -> int | None:
    """Return how many draws a store shows; None where there is no store yet."""
    try:
        return zarr_format.read_root(folder / "draws")[1]["num_draws"]
    except zarr_format.NotOurStore:
        return None


def survive(folder: Path, kills: int, seed: int, number: int) -> dict[str, Any]:
    """Kill runs so many times in all, and compare the draws of each once it has reached its end."""
    cache, whole, report = folder / "cache", folder / "whole.npz", folder / "report.json"

    def in_jax(work: Callable[..., None], *args: Any) -> Callable[[], None]:
        def start_and_work() -> None:
            start_jax(cache)
            work(*args)

        return start_and_work

    def finish(run: Path) -> dict[str, Any]:
        do(in_jax(attempt, run), "the end of a run")
        do(in_jax(compare, run, whole, report), "the comparison")
        return json.loads(report.read_text())

    do(in_jax(whole_run, whole), "the run that nothing interrupts")
    # Once with checkpoints, for the cache, and to learn how long such a run takes.
    results = [finish(folder / "run_0")]
    length = do(in_jax(attempt, folder / "run_timed"), "a run with checkpoints")
    rng, log, run = np.random.default_rng(seed), [], folder / "run_1"
    while len(log) < kills:
        seconds = float(rng.uniform(0, length))
        is_early = len(log) % EARLY == EARLY - 1
        code = kill(in_jax(attempt, run), seconds, number, is_early=is_early)
        if code not in (0, PREEMPTED, -number):
            raise RuntimeError(f"{run.name}: attempt {len(log)} ended by itself, with {code}")
        if code:
            log.append({"run": run.name, "seconds": round(seconds, 3), "code": code})
            log[-1]["draws"] = draws_on_disk(run)
        else:
            results.append(finish(run))
            run = run.with_name(f"run_{len(results)}")
    results.append(finish(run))
    return {"length": length, "kills": log, "runs": results}


def main(argv: list[str]) -> int:
    """Kill, go on, compare; 1 if a draw is missing, doubled or different."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    number = int(getattr(signal, f"SIG{options.signal}"))
    with tempfile.TemporaryDirectory() as folder:
        record = survive(Path(folder), options.kills, options.seed, number)
    bad = [r for r in record["runs"] if any(r.values())]
    in_warmup = sum(not k["draws"] for k in record["kills"])
    saved = sum(k["code"] == PREEMPTED for k in record["kills"])
    Console().print(
        f"{len(record['kills'])} x SIG{options.signal} in {len(record['runs'])} runs of "
        f"{NUM_SAMPLES} draws: {in_warmup} before the first draw was on disk, {saved} ended by "
        f"themselves; draws missing, doubled or different in {len(bad)} runs {bad or ''}"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"signal": options.signal, "seed": options.seed} | environment.record()
        options.out.write_text(json.dumps(about | record, indent=1))
    return int(bool(bad))
