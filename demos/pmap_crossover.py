"""From what size on several devices are faster than one, for `pmap_to_jit`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from pmap_race import pmap, seconds

import gspmd_mcmc as gm

MAX_CALLS = 200


class Way(NamedTuple):
    """A way to compute the dot products of rows: its name, its devices and its program."""

    name: str
    devices: list[Any]
    program: Callable
    place: Callable  # from an array [rows, 3] to where the program wants it


def ways(devices: list[Any]) -> list[Way]:
    """Return all ways: one device, and `pmap` and placement over all devices, half of them, ..."""
    on_one = jit_vmap()
    found = [Way("one device, jit(vmap)", devices[:1], on_one, lambda x: jax.device_put(x, devices[0]))]
    num = len(devices)
    while num > 1:
        found += [_by_pmap(devices[:num]), _by_placement(devices[:num])]
        num = num // 2 if num % 2 == 0 else 1
    return found


def jit_vmap() -> Callable:
    """Return a program for the dot products of rows."""
    return jax.jit(jax.vmap(jnp.vdot))


def _by_pmap(devices: list[Any]) -> Way:
    program = pmap(jax.vmap(jnp.vdot), devices=devices)
    mesh = gm.make_mesh(data=len(devices), devices=devices)

    def place(x):
        return gm.place(x.reshape(len(devices), -1, x.shape[1]), mesh, P("data"))

    return Way("pmap(vmap)", devices, program, place)


def _by_placement(devices: list[Any]) -> Way:
    mesh = gm.make_mesh(data=len(devices), devices=devices)
    return Way("placed, jit(vmap)", devices, jit_vmap(), lambda x: gm.place(x, mesh, P("data")))


def measure(devices: list[Any], sizes: list[int], num_rounds: int) -> list[dict[str, Any]]:
    """Time every way at every size, in rounds that alternate the ways.

    Returns
    -------
    list of dict
        ``way``, ``devices``, ``rows`` and ``ms``, the median over rounds.
    """
    rng = np.random.default_rng(0)
    found = []
    for size in sizes:
        pair = rng.normal(size=(2, size, 3)).astype(np.float32)
        runs = [(way, tuple(way.place(x) for x in pair)) for way in ways(devices)]
        exact = np.sum(pair[0] * pair[1], axis=1)
        for way, args in runs:
            values = np.asarray(way.program(*args)).ravel()
            np.testing.assert_allclose(values, exact, rtol=1e-4, atol=1e-4, err_msg=way.name)
        times = _rounds(runs, num_rounds)
        for (way, _), median in zip(runs, times, strict=True):
            num = len(way.devices)
            found.append({"way": way.name, "devices": num, "rows": size, "ms": 1e3 * median})
    return found


def _rounds(runs: list[tuple[Way, tuple]], num_rounds: int) -> list[float]:
    calls = [
        min(MAX_CALLS, max(1, round(0.003 / seconds(way.program, args, calls=2)))) for way, args in runs
    ]
    rounds = [
        [seconds(way.program, args, calls=n) for (way, args), n in zip(runs, calls, strict=True)]
        for _ in range(num_rounds)
    ]
    return np.median(rounds, axis=0).tolist()


def crossover(found: list[dict[str, Any]], way: str, num_devices: int) -> int | None:
    """Return the least number of rows from which on a way is faster than one device; None if never."""
    one = {row["rows"]: row["ms"] for row in found if row["devices"] == 1}
    times = {r["rows"]: r["ms"] for r in found if (r["way"], r["devices"]) == (way, num_devices)}
    first = None
    for rows in sorted(times, reverse=True):
        if times[rows] >= one[rows]:
            break
        first = rows
    return first


def plot_crossover(axis: Any, found: list[dict[str, Any]]) -> None:
    """Draw the time of each way over sizes: one device in black, more devices in darker shades."""
    most = max(row["devices"] for row in found)
    colors = {"pmap(vmap)": "#d55e00", "placed, jit(vmap)": "#0072b2"}
    for way, num in dict.fromkeys((row["way"], row["devices"]) for row in found):
        line = [(row["rows"], row["ms"]) for row in found if (row["way"], row["devices"]) == (way, num)]
        style = {"color": colors.get(way, "black"), "alpha": (num / most) ** 0.6 if num > 1 else 1.0}
        label = f"{way}, {num} devices" if num > 1 else way
        axis.plot(
            *zip(*line, strict=True), "o-", ms=3, lw=2.5 if num == 1 else 1.3, label=label, **style
        )
    axis.set(xscale="log", yscale="log", xlabel="dot products of vectors of length 3")
    axis.set(ylabel="ms a call", title="when one device is better")
    axis.legend(fontsize=8)
