"""Chips whose own compilers can be asked with no chip at hand, and the machines that they come in.

TPUs: the slices that libtpu 0.0.42 compiles for and that were ever built, chips along each axis of
the torus. ``usable_bytes`` is what that compiler says it has of a device's memory: it refuses a program
that needs more. GPUs: the compiler is told what card it compiles for. The figures are those of the
cards that XLA describes in ``xla/backends/gpu/target_config``; the L4's are NVIDIA's data sheet.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gspmd_mcmc.extras import require
from gspmd_mcmc.planning import chips

_GIB = 1 << 30
_OF_EVERY_CARD = {
    **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152},
    **{"block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535},
    **{"thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64},
    **{"registers_per_core_limit": 65536, "registers_per_block_limit": 65536},
}
_ON = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*)")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of device that programs are compiled for by its own compiler.

    Attributes
    ----------
    name
        As `plan` takes it: "TPU v3", "H100".
    device_kind, num_cores
        As its JAX devices have them.
    platform, lowered_for
        As JAX names what computes ("tpu", "gpu"), and what a program is lowered for ("tpu", "cuda").
    modules, extra
        The libraries that hold its compiler, and the extra of this package that brings them.
    """

    name: str
    device_kind: str
    num_cores: int | None = None
    platform: ClassVar[str]
    lowered_for: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    extra: ClassVar[str]

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a program can use."""
        raise NotImplementedError

    @property
    def sizes(self) -> str:
        """The numbers of devices that it comes in, in words."""
        raise NotImplementedError

    def shape(self, size: int) -> str | None:
        """Return the shape of so many devices, as its compiler writes it; None if there is none."""
        raise NotImplementedError

    def topology(self, size: int) -> dict[str, Any]:
        """Return the arguments of ``jax.experimental.topologies.get_topology_desc``."""
        raise NotImplementedError

    def has_room(self, num_bytes: int) -> bool:
        """Tell whether a program that its compiler took, and that needs so many bytes, fits."""
        raise NotImplementedError

    def check(self, count: int | None, size: int) -> None:
        """Raise unless programs can be compiled here for this many devices, and for ``count`` if given.

        Raises
        ------
        ValueError
            If the chip does not come in this number, or it is not that of ``on``.
        ImportError
            If the compiler is missing.
        """
        if count is not None and count != size:
            raise ValueError(
                f'on="{count} x {self.name}": the mesh has {size:,} devices. Its axes multiply to the '
                "number of chips"
            )
        if self.shape(size) is None:
            raise ValueError(
                f"on={self.name!r}: the mesh has {size:,} devices, and there is no such machine; there "
                f"are those of {self.sizes}"
            )
        require(*self.modules, extra=self.extra)


@dataclass(frozen=True, kw_only=True)
class Tpu(Chip):
    """A generation of TPUs.

    Attributes
    ----------
    version
        As libtpu names it.
    usable_gib
        Memory of a device that its compiler grants a program.
    shapes
        Chips along each axis, of each slice, ascending.
    devices_of_chip
        JAX devices of a chip. A mesh may have one alone.
    options
        What libtpu is told besides.
    """

    version: str
    usable_gib: float
    shapes: tuple[str, ...]
    num_cores: int | None = 1
    devices_of_chip: int = 1
    options: dict[str, str] = field(default_factory=dict, hash=False)
    platform = lowered_for = "tpu"
    modules = ("libtpu",)
    extra = "tpu"

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a program can use."""
        return int(self.usable_gib * _GIB)

    @property
    def sizes(self) -> str:
        """The numbers of devices that it comes in, in words."""
        return ", ".join(f"{n:,}" for n in dict.fromkeys((1, *map(self._num_devices, self.shapes))))

    def shape(self, size: int) -> str | None:
        """Return the shape of so many devices, as its compiler writes it; None if there is none."""
        if size == 1:
            return self.shapes[0]
        return next((s for s in self.shapes if self._num_devices(s) == size), None)

    def topology(self, size: int) -> dict[str, Any]:
        """Return the arguments of ``jax.experimental.topologies.get_topology_desc``."""
        shape = self.shape(size) or ""
        sides = [int(n) for n in shape.split("x")]
        # A host has four chips, unless it is said to have fewer.
        host = {"chips_per_host_bounds": [*sides, 1][:3]} if math.prod(sides) < 4 else {}
        return {"topology_name": f"{self.version}:{shape}", "platform": "tpu", **host, **self.options}

    def has_room(self, num_bytes: int) -> bool:
        """Tell whether a program that its compiler took fits: it does, as what does not is refused."""
        return True

    def __str__(self) -> str:
        return f"by the {self.name}'s own compiler; collectives and memory are its facts"

    def _num_devices(self, shape: str) -> int:
        return self.devices_of_chip * math.prod(int(n) for n in shape.split("x"))


@dataclass(frozen=True, kw_only=True)
class Gpu(Chip):
    """A card, in the terms of XLA's ``GpuDeviceInfoProto``; memory in bytes."""

    cores: int
    fpus_per_core: int
    threads_per_core: int = 2048
    shared_memory_per_core: int
    memory: int
    memory_bandwidth: int  # bytes a second
    l2_cache: int
    clock_rate_ghz: float
    capability: tuple[int, int]  # CUDA's
    extension: str = "NONE"  # of the instructions that the compiler may use
    platform, lowered_for = "gpu", "cuda"
    modules = ("jax_cuda12_plugin", "jax_plugins", "nvidia")  # and the packages below the latter two
    extra = "cuda"
    of_host: ClassVar[int] = 8

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a program can use: the share that JAX takes."""
        return int(chips.GPU_SHARE * self.memory)

    @property
    def sizes(self) -> str:
        """The numbers of devices that it comes in, in words."""
        return f"1 to {self.of_host}, and whole hosts of {self.of_host}"

    def shape(self, size: int) -> str | None:
        """Return the shape of so many devices: slices, hosts, cards of a host."""
        if size <= self.of_host:
            return f"1x1x{size}"
        return None if size % self.of_host else f"1x{size // self.of_host}x{self.of_host}"

    def topology(self, size: int) -> dict[str, Any]:
        """Return the arguments of ``jax.experimental.topologies.get_topology_desc``."""
        told = {"topology": self.shape(size), "target_config": self.target_config()}
        return {"topology_name": "topology", "platform": "cuda", **told}

    def has_room(self, num_bytes: int) -> bool:
        """Tell whether a program that needs so many bytes fits what JAX takes of the card's memory."""
        return num_bytes <= self.usable_bytes

    def __str__(self) -> str:
        return (
            f"by the compiler for the {self.name}; collectives and memory are its facts. Kernels are "
            "predicted: on a card it would time several, and may choose others"
        )

    def target_config(self) -> str:
        """Write XLA's ``GpuTargetConfigProto`` of the card, in text form."""
        info = {
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "threads_per_core_limit": self.threads_per_core,
            "shared_memory_per_core": self.shared_memory_per_core,
            # CUDA keeps 1 KiB for itself.
            "shared_memory_per_block_optin": self.shared_memory_per_core - 1024,
            "memory_bandwidth": self.memory_bandwidth,
            "l2_cache_size": self.l2_cache,
            "clock_rate_ghz": self.clock_rate_ghz,
            "device_memory_size": self.memory,
            # What CUDA grants on all of these (CUDA C++ programming guide, compute capabilities).
            **_OF_EVERY_CARD,
        }
        fields = " ".join(f"{name}: {value}" for name, value in info.items())
        major, minor = self.capability
        capability = f"major: {major} minor: {minor} feature_extension: {self.extension}"
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ {capability} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            f'device_description_str: "{self.device_kind}"'
        )


_FLAT = ("1x1", "1x2", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = (
    *("1x1x1", "1x2x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Tpu(
            name="TPU v2", device_kind="TPU v2",
            version="v2", shapes=_FLAT, devices_of_chip=2, usable_gib=7.48,
        ),
        Tpu(
            name="TPU v3", device_kind="TPU v3",
            version="v3", shapes=(*_FLAT, "16x32", "32x32"), devices_of_chip=2, usable_gib=15.48,
        ),
        Tpu(
            name="TPU v4", device_kind="TPU v4", num_cores=2,
            version="v4", shapes=_DEEP, options={"chip_config_name": "megacore"}, usable_gib=30.75,
        ),
        Tpu(
            name="TPU v5e", device_kind="TPU v5 lite",
            version="v5e", shapes=_FLAT, usable_gib=15.75,
        ),
        Tpu(
            name="TPU v5p", device_kind="TPU v5", num_cores=2,
            version="v5p", shapes=(*_DEEP, "16x16x24"), usable_gib=95.74,
        ),
        Tpu(
            name="TPU v6e", device_kind="TPU v6 lite",
            version="v6e", shapes=_FLAT, usable_gib=31.25,
        ),
        Gpu(
            name="A100 80GB", device_kind="NVIDIA A100-SXM4-80GB",
            capability=(8, 0), cores=108, fpus_per_core=64, clock_rate_ghz=1.41,
            shared_memory_per_core=164 << 10, l2_cache=40 << 20,
            memory_bandwidth=2_039_040_000_000, memory=85_100_068_864,
        ),
        Gpu(
            name="L4", device_kind="NVIDIA L4",
            capability=(8, 9), cores=58, fpus_per_core=128, clock_rate_ghz=2.04, threads_per_core=1536,
            shared_memory_per_core=100 << 10, l2_cache=48 << 20,
            memory_bandwidth=300_000_000_000, memory=24_000_000_000,
        ),
        Gpu(
            name="H100", device_kind="NVIDIA H100 80GB HBM3",
            capability=(9, 0), cores=132, fpus_per_core=128, clock_rate_ghz=1.98,
            shared_memory_per_core=228 << 10, l2_cache=50 << 20, extension="ACCELERATED_FEATURES",
            memory_bandwidth=3_352_320_000_000, memory=84_942_979_072,
        ),
        Gpu(
            name="H200", device_kind="NVIDIA H200 141GB HBM3e",
            capability=(9, 0), cores=132, fpus_per_core=128, clock_rate_ghz=1.98,
            shared_memory_per_core=228 << 10, l2_cache=50 << 20, extension="ACCELERATED_FEATURES",
            memory_bandwidth=4_800_000_000_000, memory=151_397_597_184,
        ),
        Gpu(
            name="B200", device_kind="NVIDIA B200",
            capability=(10, 0), cores=148, fpus_per_core=128, clock_rate_ghz=1.965,
            shared_memory_per_core=228 << 10, l2_cache=132_644_864, extension="ACCELERATED_FEATURES",
            memory_bandwidth=7_672_320_000_000, memory=191_514_411_008,
        ),
    )
}  # fmt: skip


def chip_of(on: str) -> tuple[int | None, Chip]:
    """Read ``on`` of `plan`: the number of devices, where it says one, and the chip."""
    found = _ON.fullmatch(on.strip()) if isinstance(on, str) else None
    count, name = found.groups() if found else (None, "")
    if name not in CHIPS:
        raise ValueError(
            f"on={on!r}: expected one of {', '.join(CHIPS)}, or with the number of devices, "
            '"8 x H100": chips whose compilers are known. For another chip leave on= out: the program '
            "is compiled for virtual CPU devices, and accelerator= gives the memory that it must fit"
        )
    return (int(count) if count else None), CHIPS[name]
