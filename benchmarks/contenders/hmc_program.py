"""One HMC transition of a library, compiled once and called again and again."""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass
class HmcProgram:
    """A sampler as the harness sees it.

    Attributes
    ----------
    transition
        A jitted (or pmapped) ``transition(carry, *data) -> carry``: one HMC step of every chain.
    carry, data
        Its arguments, placed. Data are arguments: closed over, they would be copied to each device.
    units
        What a transition counts: gradients or leapfrogs.
    acceptance
        ``acceptance(carry)``: the last transition's acceptance rate.
    evaluate
        ``evaluate() -> (log_density, grads)`` at the start, for `check`.
    """

    transition: Any
    carry: Any
    data: tuple
    units: int
    acceptance: Callable
    evaluate: Callable
    devices: int

    def build(self) -> dict:
        """Trace and compile the transition; report what the compiler made of it."""
        start = time.perf_counter()
        lowered = self.transition.lower(self.carry, *self.data)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        compiled = time.perf_counter()
        report = {"trace_s": traced - start, "compile_s": compiled - traced}
        hlo = self.compiled.as_text()
        report["collectives"] = collectives(hlo)
        report["collectives_in_loops"] = collectives(loops(hlo))
        if self.devices > 1 and not report["collectives"].get("all-reduce"):
            raise RuntimeError("no all-reduce on several devices: the data are not sharded")
        return report | memory(self.compiled)

    def text(self) -> dict:
        """Return what was compiled."""
        return {"text": self.compiled.as_text()}

    def run(self, calls: int) -> dict:
        """Make ``calls`` transitions, each from the last one's end."""
        start = time.perf_counter()
        for _ in range(calls):
            self.carry = self.compiled(self.carry, *self.data)
        jax.block_until_ready(self.carry)
        seconds = time.perf_counter() - start
        acceptance = float(np.mean(self.acceptance(self.carry)))
        return {"seconds": seconds, "units": calls * self.units, "acceptance": acceptance}

    def check(self) -> dict:
        """Return the log density and its gradient at the start."""
        log_density, grads = self.evaluate()
        lists = {name: np.asarray(grad, np.float64).tolist() for name, grad in grads.items()}
        return {"log_density": np.asarray(log_density, np.float64).tolist(), "grads": lists}


def collectives(hlo: str) -> dict[str, int]:
    """Count the collective operations in a compiled program's text."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)
    return dict(Counter(found))


def loops(hlo: str) -> str:
    """Return the text of what a compiled program does in its loops, each body once.

    A transition's outermost loop is over its leapfrogs, so a collective that stands in the body runs
    once a leapfrog; one that stands in a loop over tiles inside it runs for every tile.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\n((?:.*\n)*?)\}", hlo, re.MULTILINE))
    found, waiting = {}, re.findall(r"body=%?([\w.\-]+)", hlo)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in found:
            found[name] = bodies[name]
            waiting += re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", bodies[name])
    return "".join(found.values())


def memory(compiled) -> dict[str, int]:
    """Return the program's bytes per device, where the backend tells them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {
        "temp_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
    }
