"""Work in separate processes: a row that crashes or hangs fails alone.

Compiled programs do not accumulate in them, and each process has its own precision.
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = "validation.worker"
TIMEOUT_S = 3600.0  # NUTS on 10^5 latents takes 1,000 leapfrogs a step until it has a metric
Keep = Callable[[Any, Mapping[str, Any]], None]


class ProcessEnded(RuntimeError):
    """The process died, or did not answer in time."""


def run_group(
    rows: Sequence[Any],
    task: Mapping[str, Any],
    keep: Keep,
    say: Callable[[Any], None],
    may_start: Callable[[], bool] = lambda: True,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run rows in a process; if it dies or hangs, that row fails and a new process runs the rest.

    Parameters
    ----------
    rows
        Dataclasses, all of one kind, and `Configuration`s all of one posterior and precision.
    task
        Further settings for the worker.
    keep
        ``keep(row, record)``, once for every row.
    say
        Called with each row that begins.
    may_start
        Whether there is time for another row; the rows left are recorded as not run.
    """
    rows = list(rows)
    while rows and may_start():
        process = Process(rows, task)
        try:
            while rows and may_start():
                say(rows[0])
                keep(rows[0], process.next_record(timeout_s))
                rows = rows[1:]
        except ProcessEnded as error:
            keep(rows[0], {"error": str(error)})
            rows = rows[1:]
        finally:
            process.close()
    for row in rows:
        keep(row, {"not_run": "the time limit came first"})


class Process:
    """A worker, its records one line of JSON each."""

    def __init__(self, rows: Sequence[Any], task: Mapping[str, Any]):
        kind = type(rows[0]).__name__
        request = json.dumps({**task, "kind": kind, "rows": [asdict(row) for row in rows]})
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, request],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the worker
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_record(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next record."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ProcessEnded(f"no result in {timeout_s:.0f} s") from None
        if line is None:
            raise ProcessEnded(self._last_words())
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join()
        self._words.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._words.seek(0)
        lines = [line.strip() for line in self._words if line.strip()]
        return f"died (exit {code}): {' | '.join(lines[-2:])[:400]}"
