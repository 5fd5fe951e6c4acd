"""The devices of a layout: their numbers, processes and mesh axes, and how a drawing names them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import AbstractMesh, Mesh

from gspmd_mcmc.views.notation import number_ranges

ABSTRACT = "abstract"
MAX_PROCESSES = 3


@dataclass(frozen=True)
class Devices:
    """Devices in the order of their mesh; only their names are kept.

    Attributes
    ----------
    numbers
        Their ids; their positions in the mesh where it is abstract.
    processes
        The process that each belongs to.
    is_addressable
        Whether this process can reach the memory of each.
    kind
        "cpu", "NVIDIA H200", ...; "abstract" for a mesh without devices.
    axes
        Names and sizes of the mesh axes; () where there is no mesh.
    """

    numbers: tuple[int, ...]
    processes: tuple[int, ...]
    is_addressable: tuple[bool, ...]
    kind: str
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def spans_processes(self) -> bool:
        """Whether they belong to several processes, or to another one than this."""
        return len(set(self.processes)) > 1 or not all(self.is_addressable)

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        noun = f"{self.kind} device{'s' * (len(self) != 1)}"
        if not self.spans_processes:
            return f"{len(self)} {noun} {number_ranges(self.numbers)}"
        processes = sorted(set(self.processes))
        return f"{len(self)} {noun} in {len(processes)} processes"


def devices_of(devices: Iterable, axes: tuple[tuple[str, int], ...] = ()) -> Devices:
    """Read the names of JAX devices."""
    devices = tuple(devices)
    return Devices(
        numbers=tuple(d.id for d in devices),
        processes=tuple(d.process_index for d in devices),
        is_addressable=tuple(d.process_index == d.client.process_index() for d in devices),
        kind=" and ".join(dict.fromkeys(d.device_kind for d in devices)),
        axes=axes,
    )


@lru_cache(maxsize=64)
def mesh_devices(mesh: Mesh | AbstractMesh) -> Devices:
    """Devices of a mesh in its order; those of an abstract mesh are named by their positions."""
    axes = tuple(mesh.shape.items())
    if isinstance(mesh, Mesh):
        return devices_of(mesh.devices.flat, axes)
    size = mesh.size
    return Devices(tuple(range(size)), (0,) * size, (True,) * size, ABSTRACT, axes)


def device_names(devices: Devices, positions: Sequence[int]) -> str:
    """Name the devices at some positions: ``0,4``, ``0-7``; ``p0:0-3 (p1:4-7)`` over processes.

    Parentheses mark devices that this process does not address. More than three processes are
    written together, ``p0-7:0-63``, in parentheses if this process addresses none of the devices.
    """
    if not devices.spans_processes:
        return number_ranges([devices.numbers[i] for i in positions])
    by_process: dict[int, list[int]] = {}
    for i in positions:
        by_process.setdefault(devices.processes[i], []).append(i)
    if len(by_process) > MAX_PROCESSES:
        return _of_processes(devices, sorted(by_process), positions)
    return " ".join(_of_processes(devices, [p], at) for p, at in sorted(by_process.items()))


def _of_processes(devices: Devices, processes: list[int], positions: Sequence[int]) -> str:
    numbers = number_ranges([devices.numbers[i] for i in positions])
    text = f"p{number_ranges(processes)}:{numbers}"
    return text if any(devices.is_addressable[i] for i in positions) else f"({text})"
