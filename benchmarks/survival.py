"""Runs that are killed at random moments and continued: what becomes of their draws.

``python -m benchmarks survival [--kills 50] [--terms 0] [--seed 0] [--out FILE.json]``. A small run
with checkpoints and a sink is ended after a random time, by SIGKILL or SIGTERM; the same call continues
it in a new process, which is ended again, and so on. A run that reaches its end first is followed by a
new one in another folder. Every run's draws are compared with those of a run that nothing interrupted:
none may be missing, doubled, or different in a single bit. A second process that calls the same while
the first lives must be refused.

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
from gspmd_mcmc.sampling import run as runs
from gspmd_mcmc.sampling.resumption import Saver
from gspmd_mcmc.storage import saved_draws

NUM_WARMUP, NUM_SAMPLES, CHAINS = 200, 1000, 4
# A checkpoint each so many seconds, and draws to disk twice as often; steps of a chunk.
EVERY, CHUNK = 0.1, 20
# Kills of which one counts its time from the start of the process; the others from the first chunk.
EARLY = 5
PREEMPTED, REFUSED = 75, 76
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
    runs.next_size = lambda count, seconds: CHUNK


def run(**options: Any) -> gm.Draws:
    """Begin a run, or continue the one in the folder ``checkpoint``, with chains over two devices."""
    target = gm.LogDensity(log_density, jnp.asarray([0.5, 1.0, 4.0]))
    return gm.sample(
        jax.random.key(1),
        target,
        {"a": jnp.zeros(3), "b": jnp.zeros(())},
        mesh=gm.make_mesh(chains=2),
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
    arrays: Any = arrays_of(run())
    np.savez(out, **arrays)


def attempt(folder: Path) -> None:
    """Begin the run of a folder, or continue it: the call is the same."""
    sink = gm.ZarrSink(folder / "draws", flush_seconds=EVERY / 2)
    run(checkpoint=folder, every=EVERY, to=sink)


def compare(folder: Path, whole: Path, out: Path) -> None:
    """Write how the draws of a run differ from those that nothing interrupted."""
    found = arrays_of(gm.open_draws(folder / "draws"))
    out.write_text(json.dumps(differences(found, dict(np.load(whole)))))


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return how many draws, of arrays [chains, draws, ...], are missing, too many, and different."""
    counts, wanted = ({x.shape[1] for x in named.values()} for named in (found, expected))
    if len(counts) > 1:
        return {"lengths": sorted(counts)}
    (count,), (num_samples,) = counts, wanted
    same = min(count, num_samples)
    differ = np.zeros(same, bool)
    for name in found.keys() & expected.keys():
        unequal = found[name][:, :same] != expected[name][:, :same]
        differ |= unequal.reshape(len(unequal), same, -1).any(axis=(0, 2))
    return {
        "missing": max(num_samples - count, 0),
        "too_many": max(count - num_samples, 0),
        "different": int(differ.sum()),
        "arrays_missing": sorted(expected.keys() - found.keys()),
    }


def finish_and_compare(folder: Path, whole: Path, out: Path) -> None:
    """Continue a run to its end, and compare its draws."""
    attempt(folder)
    compare(folder, whole, out)


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
    except gm.CheckpointNotSaved:
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def tell_of_the_first_chunk(pipe: int) -> None:
    """Write to a pipe when a first chunk has ended."""
    after_chunk, told = Saver.after_chunk, []

    def tell(self):
        if not told:
            told.append(os.write(pipe, b"x"))
        after_chunk(self)

    Saver.after_chunk = tell


def wait_for(pid: int, seconds: float) -> int | None:
    """Wait for a process to end; return its status, or None if it did not in that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def do(work: Callable[[], None], what: str) -> float:
    """Do some work in a new process to its end; return the seconds from its first chunk on."""
    pid, ready = fork(work)
    os.read(ready, 1)
    os.close(ready)
    began = time.monotonic()
    code = wait_for(pid, WAIT)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if code != 0:
        raise RuntimeError(f"{what}: the process ended with {code}")
    return time.monotonic() - began


def end(work: Callable[[], None], seconds: float, number: int, *, is_early: bool) -> int:
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


def second_is_refused(work: Callable[[], None]) -> bool:
    """Begin some work; tell whether another process that does the same meanwhile is refused."""
    pid, ready = fork(work)
    os.read(ready, 1)
    os.close(ready)
    os.kill(pid, signal.SIGSTOP)  # so that it does not end first
    code = end(work, WAIT, int(signal.SIGKILL), is_early=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return code == REFUSED


def draws_on_disk(folder: Path) -> int | None:
    """Return how many draws a store shows; None where there is no store yet."""
    try:
        return saved_draws.read_root(folder / "draws")["attributes"]["num_draws"]
    except saved_draws.NotOurStore:
        return None


def survive(
    folder: Path, signals: list[int], rng: np.random.Generator, console: Console
) -> dict[str, Any]:
    """End runs by these signals, one after the other; compare the draws of each that got to its end."""
    cache, whole, report = folder / "cache", folder / "whole.npz", folder / "report.json"

    def in_jax(work: Callable[..., None], *args: Any) -> Callable[[], None]:
        def start_and_work() -> None:
            start_jax(cache)
            work(*args)

        return start_and_work

    def finish(run: Path) -> dict[str, Any]:
        do(in_jax(finish_and_compare, run, whole, report), f"the end of {run.name}")
        return json.loads(report.read_text())

    do(in_jax(whole_run, whole), "the run that nothing interrupts")
    # Once with checkpoints, for the cache, and to learn how long a run takes.
    first = folder / "run_0"
    length = do(in_jax(attempt, first), "the first run")
    is_refused = second_is_refused(in_jax(attempt, folder / "run_of_two"))
    results, log, run = [finish(first)], [], folder / "run_1"
    while len(log) < len(signals):
        seconds, number = float(rng.uniform(0, length)), signals[len(log)]
        is_early = len(log) % EARLY == EARLY - 1
        is_new = not run.exists()
        code = end(in_jax(attempt, run), seconds, number, is_early=is_early)
        if code not in (0, PREEMPTED, -number):
            raise RuntimeError(f"{run.name}: attempt {len(log)} ended by itself, with {code}")
        if code:
            shown = {"run": run.name, "seconds": round(seconds, 3), "signal": number, "code": code}
            log.append(shown | {"draws": draws_on_disk(run)})
            console.print(f"{len(log)} of {len(signals)}: {log[-1]}")
        else:
            # A run may be faster than the first one was; then no signal would come before its end.
            length = min(length, seconds) if is_new else length
            results.append(finish(run))
            run = run.with_name(f"run_{len(results)}")
    results.append(finish(run))
    results.append(finish(folder / "run_of_two"))
    return {"length": length, "ends": log, "runs": results, "second_is_refused": is_refused}


def main(argv: list[str]) -> int:
    """Kill, continue, compare; 1 if a draw is missing, doubled or different, or two runs meet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--terms", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rng = np.random.default_rng(options.seed)
    signals = [int(signal.SIGKILL)] * options.kills + [int(signal.SIGTERM)] * options.terms
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        record = survive(Path(folder), [int(n) for n in rng.permutation(signals)], rng, console)
    bad = [r for r in record["runs"] if any(r.values())]
    in_warmup = sum(not x["draws"] for x in record["ends"])
    saved = sum(x["code"] == PREEMPTED for x in record["ends"])
    console.print(
        f"{options.kills} x SIGKILL and {options.terms} x SIGTERM in {len(record['runs'])} runs of "
        f"{NUM_SAMPLES} draws: {in_warmup} before the first draw was on disk, {saved} times SIGTERM "
        f"saved the run; draws missing, doubled or different in {len(bad)} runs {bad or ''}; a second "
        f"process was {'' if record['second_is_refused'] else 'NOT '}refused"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"seed": options.seed} | environment.record()
        options.out.write_text(json.dumps(about | record, indent=1))
    return int(bool(bad) or not record["second_is_refused"])
