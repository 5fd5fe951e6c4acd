"""What every program of ours must hold to on a chip, by what the chip's own compiler made of it."""

import re

import jax

GRADIENT_BYTES = 1000  # of an all-reduce that carries a gradient; the others carry numbers of chains
LARGE_CONSTANT = 100_000


def violations(build, plan, most_bytes, gradients=None):
    """Say in words what is wrong with a program; nothing if it is as it must be.

    Parameters
    ----------
    build, plan
        The program as it was given to `plan`, and the plan.
    most_bytes
        Memory that a device may need.
    gradients
        Of a program without a loop of leapfrogs, how many gradients it takes.
    """
    report = plan.report
    found = []
    if not plan.fits:
        found.append(f"it does not fit: {plan.refusal}")
    if plan.compiled is None:
        return found
    if report.unknown:
        found.append(f"lines of unknown form: {report.unknown}")
    function, *args = build(plan.mesh)
    # A TPU's compiler makes pairs of float32 of float64; so it is looked for in what it was given too.
    written = f"{jax.make_jaxpr(function)(*args)} {plan.compiled.text}"
    if re.search(r"\b(f64|c128)\[", written):
        found.append("float64")
    if report.peak_bytes > most_bytes:
        found.append(f"memory: {report.peak_bytes:,} bytes, at most {most_bytes:,}")
    if report.largest_constant_bytes > LARGE_CONSTANT or report.whole:
        found.append(f"whole on each device: {report.constants[0]}, {report.whole}")
    moved = [c for c in report.collectives if c.kind != "all-reduce"]
    found += [f"not a sum: {c}" for c in moved]
    found += _sums(report, gradients)
    found += [f"atomic: {atomic}" for atomic in plan.atomics()]
    return found


def _sums(report, gradients):
    """Say where a leapfrog takes more or less than one sum over the rows' devices."""
    over_rows = [c for c in report.collectives if "data" in c.axes]
    names = {loop.name for nest in report.loop_nests for loop in nest}
    if report.mesh.get("data", 1) == 1:
        return [f"a sum among one device: {c}" for c in over_rows]
    if gradients is None:
        if "leapfrog" not in names:
            return ["no loop of leapfrogs"]
        inside = [c for c in over_rows if c.loops_within("leapfrog") is not None]
        count, expected = sum(c.times("leapfrog") for c in inside), 1
    else:
        inside = [c for c in over_rows if c.num_bytes >= GRADIENT_BYTES]
        count, expected = len(inside), gradients
    sums = "; ".join(map(str, inside))
    found = [] if count == expected else [f"{count} sums over rows, expected {expected}: {sums}"]
    # Chains go on as long as any does: NUTS asks them once a loop. No more than that is sent.
    others = (c for c in report.collectives if "data" not in c.axes and c.num_bytes > 8)
    return found + [f"a sum over chains: {c}" for c in others]
