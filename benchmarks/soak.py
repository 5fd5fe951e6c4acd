"""A long run on MNIST with a sink and checkpoints: whether memory and open files stay what they are.

``python -m benchmarks soak [--data-dir DIR] [--minutes 30] [--every 10] [--leapfrogs 20]
[--out FILE.json]``. Logistic regression on all images, one chain, HMC. After each chunk the resident
memory, what of it the allocator has in use, and the open files are noted; the run ends by itself
(Ctrl-C's way) when the time is over. Slopes are those of lines through the sizes after the first fifth,
by which time all is compiled, both buffers have been written, and some tens of checkpoints too, each in
threads of its own, until the allocator's arenas, one a thread, have all grown as large as they get.
"""

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

import gspmd_mcmc as gm
from benchmarks import data, environment
from benchmarks.sink import kernel_on_mnist, sample_one_chain

MANY = 1_000_000  # draws, more than there is time for
SETTLED = 0.2  # share of the run that is left out of the slope
OPEN_FILES = Path("/proc/self/fd")


class Watch:
    """A callback that notes memory and open files, and ends the run in time.

    Parameters
    ----------
    seconds
        How long the run may take.
    """

    def __init__(self, seconds: float):
        self.seconds, self.began = seconds, time.monotonic()
        self.times: list[float] = []
        self.rss: list[int] = []
        self.heap: list[int] = []
        self.files: list[int] = []

    def __call__(self, report: gm.ChunkReport) -> None:
        """Note what there is now."""
        now = time.monotonic() - self.began
        self.times.append(now)
        self.rss.append(environment.rss_bytes() or 0)
        self.heap.append(environment.heap_bytes() or 0)
        self.files.append(len(list(OPEN_FILES.iterdir())) if OPEN_FILES.exists() else 0)
        if now > self.seconds and len(self.times) > 1:
            os.kill(os.getpid(), signal.SIGINT)


def main(argv: list[str]) -> int:
    """Run, print, write JSON; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks soak", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between checkpoints")
    parser.add_argument("--leapfrogs", type=int, default=20, help="of a draw")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    watch = Watch(60 * options.minutes)
    try:
        with data.folder_of([data.MNIST], options.data_dir) as (data_dir, sources):
            print(f"Data: {sources[data.MNIST]}", flush=True)
            num_draws = soak(data_dir, options.leapfrogs, folder, options.every, watch)
    finally:
        shutil.rmtree(folder)
    found = {"draws": num_draws, **trends(watch)}
    print(
        f"{found['draws']} draws in {found['minutes']:.1f} minutes: memory {found['rss_mb']:.0f} MB, "
        f"slope {found['slope_mb_a_minute']:+.3f} MB a minute, {found['heap_mb']:.0f} MB of it in use, "
        f"slope {found['heap_slope_mb_a_minute']:+.3f}; open files {found['files'][0]} to "
        f"{found['files'][1]}, at the end {found['files'][2]}"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        series = {
            "seconds": watch.times,
            "rss_bytes": watch.rss,
            "heap_bytes": watch.heap,
            "open_files": watch.files,
        }
        document = {"benchmark": "soak", "machine": environment.record(), **found, **series}
        options.out.write_text(json.dumps(document) + "\n")
    return 0


def soak(data_dir: str, leapfrogs: int, folder: Path, every: float, watch: Watch) -> int:
    """Sample until the watch says stop; return how many draws are on disk."""
    kernel = kernel_on_mnist(data_dir, leapfrogs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)  # that it was stopped
        sample_one_chain(
            kernel,
            num_samples=MANY,
            to=gm.ZarrSink(folder / "draws", chunk_bytes=2**22, flush_seconds=5.0),
            checkpoint=folder / "run",
            every=every,
            callback=watch,
        )
    return gm.open_draws(folder / "draws").num_draws


def trends(watch: Watch) -> dict[str, object]:
    """Return means and slopes of memory, and the least, most and last open files, once settled."""
    times, files = np.asarray(watch.times), np.asarray(watch.files)
    late = times >= SETTLED * times[-1]

    def line(sizes: list[int]) -> tuple[float, float]:
        megabytes = np.asarray(sizes)[late] / 1e6
        slope = np.polyfit(times[late] / 60, megabytes, 1)[0] if late.sum() > 1 else 0.0
        return float(megabytes.mean()), float(slope)

    (rss, rss_slope), (heap, heap_slope) = line(watch.rss), line(watch.heap)
    return {
        "minutes": float(times[-1] / 60),
        "rss_mb": rss,
        "slope_mb_a_minute": rss_slope,
        "heap_mb": heap,
        "heap_slope_mb_a_minute": heap_slope,
        "files": [int(files[late].min()), int(files[late].max()), int(files[-1])],
    }
