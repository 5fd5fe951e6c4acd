"""Where should this run? A model's leapfrog on a card and on this CPU, compared without the card.

A small model starts many kernels that do little, and a card takes longer to start a kernel than a CPU
takes to run it: so the CPU wins until there are enough chains. Both programs are compiled, and their
rooflines compared: the card's from its data sheet, this CPU's from what is measured here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractDevice

from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.views.plan import plan
from gspmd_mcmc.views.program.aot_compilation import build_program, compile_aot
from gspmd_mcmc.views.program.hlo import read_program
from gspmd_mcmc.views.program.work import work_of
from gspmd_mcmc.views.roofline import Roofline, roofline, time_text
from gspmd_mcmc.views.throughput import Throughput, measure_throughput

MOST_CHAINS = 1 << 16  # that are looked at


@dataclass(frozen=True)
class Placement:
    """Seconds of a leapfrog on a card and on a CPU for numbers of chains, and which is the faster.

    Attributes
    ----------
    card, cpu
        Rooflines of the same model's programs, by their number of chains.
    """

    card: Mapping[int, Roofline]
    cpu: Mapping[int, Roofline]

    def ratio(self, chains: int) -> float:
        """How many times as fast the card is; below 1 the CPU is faster."""
        return _seconds_of(self.cpu, chains) / _seconds_of(self.card, chains)

    @property
    def card_wins_from(self) -> int | None:
        """The least number of chains, a power of two, from which the card is faster; None: none."""
        numbers = (1 << k for k in range(MOST_CHAINS.bit_length()))
        return next((n for n in numbers if self.ratio(n) > 1), None)

    def __str__(self) -> str:
        """Say where to run, in words."""
        least = min(self.card)
        name = f"{least} chain{'s' * (least > 1)}"
        winner = "card" if self.ratio(least) > 1 else "CPU"
        lines = [f"{name}: {_line(self.card, least)}", f"{name}: {_line(self.cpu, least)}"]
        lines.append(f"With {name}, run it on the {winner}.")
        start = self.card_wins_from
        if start is None:
            lines.append(f"The card is not faster with up to {MOST_CHAINS:,} chains either.")
        elif start > least:
            lines.append(f"From about {start} chains on the card is faster.")
        return "\n".join([*lines, _assumption(self)])


def where_to_run(
    builds: Callable | Mapping[int, Callable],
    *,
    on: str = "H100",
    within: str = "leapfrog",
    trips: Mapping[str, int] | None = None,
) -> Placement:
    """Compare a model's leapfrog on a card and on this CPU, with no card at hand.

    Parameters
    ----------
    builds
        ``build(mesh)`` as `plan` takes it, for one chain; or several by their number of chains,
        ``{1: build, 16: build_16}``. Of one alone, each kernel's bytes and arithmetic are taken to grow
        with the chains, which is too much for data that all chains share. Of two, seconds lie on the
        line through both.
    on
        The chip, one device of it, as `plan` takes it.
    within
        The name of the loop whose iteration is compared.
    trips
        How often loops run, as in `communication`.

    Returns
    -------
    Placement
        ``print`` says where, and from how many chains the card is faster.

    Raises
    ------
    ValueError
        If there is no program, a number of chains is below 1, or a program has no such loop.
    ImportError
        As `plan` does.
    """
    programs = {1: builds} if callable(builds) else dict(builds)
    if not programs or min(programs) < 1:
        raise ValueError(
            f"builds: a function of a mesh, or several by numbers of chains, not {list(programs)}"
        )
    here = measure_throughput()
    card = {
        n: plan(build, data=1, on=on, trips=trips).roofline(within) for n, build in programs.items()
    }
    cpu = {n: _on_this_cpu(build, within, trips, here) for n, build in programs.items()}
    return Placement(card, cpu)


def _on_this_cpu(
    build: Callable, within: str, trips: Mapping[str, int] | None, here: Throughput
) -> Roofline:
    """Compile for one device of this CPU, where targets compute as they do on CPUs."""
    device: Any = AbstractDevice
    kind = device(device_kind="cpu", num_cores=None, platform="cpu")
    mesh = make_abstract_mesh(data=1).update(abstract_device=kind)
    function, args = build_program(build, mesh)
    work = work_of(read_program(compile_aot(function, args, mesh).text), within, trips=trips)
    return roofline(work, "this CPU", throughput=here, unit=within)


def _line(rooflines: Mapping[int, Roofline], chains: int) -> str:
    found = rooflines[min(rooflines)]
    least = "" if found.work.is_counted else "more than "
    seconds = least + time_text(_seconds_of(rooflines, chains))
    kernels = f"{found.work.kernels} kernels, bound by {found.bound}"
    return f"{seconds} a {found.unit} on {found.device} ({kernels})"


def _seconds_of(rooflines: Mapping[int, Roofline], chains: int) -> float:
    """Return the seconds for a number of chains: compiled for, on a line through two, or scaled."""
    if chains in rooflines:
        return rooflines[chains].seconds
    known = sorted(rooflines)
    if len(known) == 1:
        return rooflines[known[0]].seconds_of(chains / known[0])
    above = next((i for i, n in enumerate(known) if n > chains), len(known) - 1)
    low, high = known[max(above, 1) - 1], known[max(above, 1)]
    start, end = rooflines[low].seconds, rooflines[high].seconds
    return max(start + (end - start) * (chains - low) / (high - low), 0.0) or start


def _assumption(placement: Placement) -> str:
    if len(placement.card) == 1 or len(placement.cpu) == 1:
        return "(Arithmetic: bytes and operations of a kernel grow with the chains, launches do not.)"
    return "(Arithmetic: seconds of other numbers of chains lie on lines through those compiled for.)"
