"""Workers, and measuring them in turn.

Each entrant runs in a process of its own (`benchmarks.worker`) that stays alive. Its program is
built alone; then all are asked for a short run one after the other, round after round (A B C A B C
...), so that a drift of the machine reaches all of them and ratios are taken within a round.
"""

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
TIMEOUT_S = 180.0
STARTS = 2  # a worker that dies is started anew once


class WorkerDied(RuntimeError):
    """The process ended, or did not answer in time."""


class WorkerError(RuntimeError):
    """The contender raised; its process lives."""


class Worker:
    """A process that answers requests, one line of JSON each way, each within ``limit_s`` seconds."""

    def __init__(self, python: str, task: dict, limit_s: float = TIMEOUT_S):
        if not Path(python).exists():
            raise WorkerError(f"{Path(python).name} of the peers is missing: run `make peers`")
        self.limit_s = limit_s
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", json.dumps(task)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )

    def ask(self, **request: Any) -> dict:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(self._last_words("died")) from None
        return self.answer()

    def answer(self) -> dict:
        """Wait for the next answer."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit_s)
        if not ready:
            raise WorkerDied(self._last_words(f"no answer in {self.limit_s:.0f} s"))
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise WorkerDied(self._last_words("died"))
        reply = json.loads(line)
        if not reply.pop("ok"):
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.stderr.close()

    def _last_words(self, what: str) -> str:
        self.process.kill()
        code = self.process.wait()
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr if line.strip()]
        telling = [line for line in lines if "stack trace" not in line and "@ " not in line]
        return f"{what} (exit {code}): " + " | ".join(telling[-2:])[:600]


@dataclass
class Entrant:
    """A contender in one configuration, and everything that was recorded of it."""

    name: str
    python: str
    task: dict
    record: dict = field(default_factory=dict)
    worker: Worker | None = None
    calls: int = 1

    def __post_init__(self):
        setting = {key: self.task[key] for key in ("devices", "chains")}
        self.record = {"contender": self.name, **setting, "starts": 0, "errors": [], "rounds": []}

    @property
    def is_live(self) -> bool:
        """Whether it still takes part."""
        return self.worker is not None

    def attempt(self, action: Callable, come_back: Callable | None = None) -> Any:
        """Do something with the worker; record a failure, and start a dead worker anew once."""
        try:
            return action(self)
        except (WorkerDied, WorkerError) as error:
            self.record["errors"].append(str(error))
            self.stop()
            if isinstance(error, WorkerDied) and self.record["starts"] < STARTS:
                self.attempt(come_back or (lambda entrant: (entrant.start(), entrant.ready())))
                return self.attempt(action) if self.is_live else None
            return None

    def start(self) -> None:
        """Start the process; it imports its library and places its data meanwhile."""
        self.record["starts"] += 1
        self.worker = Worker(self.python, self.task)

    def ready(self) -> None:
        """Wait until the process has its data."""
        self.record["ready"] = self._live().answer()

    def build(self) -> None:
        """Compile the program."""
        self.record["build"] = self._live().ask(do="build")

    def warm_up(self, seconds: float) -> None:
        """Run until fast, and find how many calls take about ``seconds``."""
        self._live().ask(do="run", calls=1)
        reply = self._live().ask(do="run", calls=1)
        self.calls = max(1, round(seconds / reply["seconds"]))

    def run(self, number: int) -> None:
        """Take part in a round."""
        reply = self._live().ask(do="run", calls=self.calls)
        reply["per_s"] = reply["units"] / reply["seconds"]
        for key in ("peak_rss_bytes", "peak_device_bytes"):
            if key in reply:
                self.record[key] = reply.pop(key)
        self.record["rounds"].append({"round": number, **reply})

    def check(self) -> dict:
        """Evaluate the log density and its gradient at the start."""
        return self._live().ask(do="check")

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def _live(self) -> Worker:
        assert self.worker is not None
        return self.worker


def launch(entrants: list[Entrant]) -> None:
    """Start all processes at once and wait for each."""
    for entrant in entrants:
        entrant.attempt(Entrant.start)
    for entrant in entrants:
        if entrant.is_live:
            entrant.attempt(Entrant.ready, Entrant.start)


def measure(entrants: list[Entrant], rounds: int, seconds: float, say: Callable) -> list[dict]:
    """Measure entrants of one configuration in alternation and return their records."""

    def prepare(entrant: Entrant) -> None:
        entrant.build()
        entrant.warm_up(seconds)

    def come_back(entrant: Entrant) -> None:
        entrant.start()
        entrant.ready()
        prepare(entrant)

    try:
        launch(entrants)
        for entrant in _live(entrants):
            say(f"building {entrant.name}")
            entrant.attempt(prepare)
        for number in range(rounds):
            for entrant in _live(entrants):
                say(f"round {number + 1} of {rounds}: {entrant.name}")
                entrant.attempt(lambda entrant, n=number: entrant.run(n), come_back)
    finally:
        for entrant in entrants:
            entrant.record["failed"] = not entrant.is_live
            entrant.stop()
    return [entrant.record for entrant in entrants]


def _live(entrants: list[Entrant]) -> list[Entrant]:
    return [entrant for entrant in entrants if entrant.is_live]


def interpreter(is_peer: bool) -> str:
    """Return the Python that a contender runs in."""
    return str(PEERS_PYTHON) if is_peer else sys.executable


def stopwatch() -> Callable[[], float]:
    """Return a function that tells the seconds since now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
