"""Memory of accelerators and links between them, with cited figures for the usual ones.

Memory figures are the vendors'. Google counts in GiB; NVIDIA's GB are taken as 10^9 bytes, a little
less than its drivers report (85.5e9 on an "80 GB" H100). A program gets less than that: a TPU's runtime
reserves some (1.25 of the 32 GiB of a v4), and on a GPU JAX takes three quarters of the memory unless
XLA_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, "GPU memory allocation"): so it is counted here.

Links are published or modeled figures, not measurements of ours, and data-sheet bandwidth is seldom
reached. Replace what you have measured: ``dataclasses.replace(NVLINK_4, bandwidth=370e9)``. A data
sheet's "bidirectional" figure adds what a device sends and what it receives; ``bandwidth`` here is one
way, what a device can send while it receives as much: half of that figure.
"""

import math
from dataclasses import dataclass

from gspmd_mcmc.planning.throughput import THROUGHPUTS, Throughput

_TPU = "https://cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_GIB = 1 << 30
GPU_SHARE = 0.75  # share of a GPU's memory that JAX takes


@dataclass(frozen=True)
class Accelerator:
    """A kind of device.

    Attributes
    ----------
    name
        Such as "TPU v5e".
    memory_bytes
        Memory of one JAX device.
    source
        Where the figure is from.
    share
        The share of it that JAX takes.
    throughput
        What it does in a second; None: not known.
    """

    name: str
    memory_bytes: int
    source: str = ""
    share: float = 1.0
    throughput: Throughput | None = None

    @property
    def usable_bytes(self) -> int:
        """Memory that a program can use."""
        return int(self.share * self.memory_bytes)


ACCELERATORS = {
    name: Accelerator(name, num_bytes, source, share, THROUGHPUTS[name])
    for name, num_bytes, source, share in (
        ("TPU v2 core", 8 * _GIB, f"{_TPU}/v2", 1.0),
        ("TPU v3 core", 16 * _GIB, f"{_TPU}/v3", 1.0),
        ("TPU v4", 32 * _GIB, f"{_TPU}/v4", 1.0),
        ("TPU v5e", 16 * _GIB, f"{_TPU}/v5e", 1.0),
        ("TPU v5p", 95 * _GIB, f"{_TPU}/v5p", 1.0),
        ("TPU v6e", 32 * _GIB, f"{_TPU}/v6e", 1.0),
        ("T4", 16 * 10**9, f"{_NVIDIA}/tesla-t4", GPU_SHARE),
        ("L4", 24 * 10**9, f"{_NVIDIA}/l4", GPU_SHARE),
        ("V100 32GB", 32 * 10**9, f"{_NVIDIA}/v100", GPU_SHARE),
        ("A100 40GB", 40 * 10**9, f"{_NVIDIA}/a100", GPU_SHARE),
        ("A100 80GB", 80 * 10**9, f"{_NVIDIA}/a100", GPU_SHARE),
        ("H100 80GB", 80 * 10**9, f"{_NVIDIA}/h100", GPU_SHARE),
        ("H200", 141 * 10**9, f"{_NVIDIA}/h200", GPU_SHARE),
        ("B200", 180 * 10**9, f"{_NVIDIA}/dgx-b200", GPU_SHARE),
    )
}


def accelerator(which: "str | Accelerator") -> Accelerator:
    """Return the accelerator of that name; ValueError if there is none."""
    if isinstance(which, Accelerator):
        return which
    if which not in ACCELERATORS:
        raise ValueError(
            f"no accelerator {which!r}; there are {', '.join(ACCELERATORS)}. "
            "For another one pass Accelerator(name, memory_bytes)"
        )
    return ACCELERATORS[which]


@dataclass(frozen=True)
class Interconnect:
    """What joins devices: a switched network, or a torus of links between neighbors.

    Attributes
    ----------
    name
        As tables and figures show it.
    bandwidth
        Bytes a second that one device can send, one way, over all of its links together.
    latency
        Seconds from device to device for a message of no bytes; on a torus, for one hop.
    max_devices
        The most devices that it joins (a node, a pod), those of inner interconnects counted too;
        None: any number.
    source
        Where the figures are from.
    torus_axes
        0: switched, any device reaches any other at full bandwidth. 1, 2 or 3: a torus of this many
        axes, each with a ring of links in both directions; ``bandwidth`` is shared out equally.
    overhead
        Seconds that a collective takes before its first message (launching its kernel), whatever
        its size. Of several interconnects in one collective the largest counts, once.

    Raises
    ------
    ValueError
        If a figure is not a number, is negative, or is zero where it divides.
    """

    name: str
    bandwidth: float
    latency: float
    max_devices: int | None = None
    source: str = ""
    torus_axes: int = 0
    overhead: float = 0.0

    def __post_init__(self):
        most = self.max_devices
        is_right = {
            "bandwidth is bytes a second, above 0": 0 < self.bandwidth < math.inf,
            "latency is seconds, 0 or more": 0 <= self.latency < math.inf,
            "overhead is seconds, 0 or more": 0 <= self.overhead < math.inf,
            "max_devices is 2 or more, or None": most is None or (most == int(most) and most >= 2),
            "torus_axes is 0 (switched), 1, 2 or 3": self.torus_axes in (0, 1, 2, 3),
        }
        for rule, holds in is_right.items():
            if not holds:
                value = getattr(self, rule.partition(" ")[0])
                raise ValueError(f"{self.name}: {rule}, not {value}")

    def __str__(self) -> str:
        kind = f", {self.torus_axes}D torus" if self.torus_axes else ""
        most = self.max_devices
        reach = "any number of devices" if most is None else f"up to {most:,} devices"
        launch = f" + {self.overhead * 1e6:g} us a collective" if self.overhead else ""
        return (
            f"{self.name} ({self.bandwidth / 1e9:g} GB/s one way, "
            f"{self.latency * 1e6:g} us{launch}{kind}, {reach})"
        )


_BOOK = "How to Scale Your Model, jax-ml.github.io/scaling-book"
_NCCL = "protocol LL128 in src/graph/tuning.cc of NCCL, github.com/NVIDIA/nccl commit b647562"
_HOP = f"about 1 us a hop: {_BOOK}/sharding"

_CACM = "Jouppi et al., A Domain-Specific Supercomputer, CACM 63 (2020)"
TPU_V2_ICI = Interconnect(
    "TPU v2 ICI", bandwidth=2 * 6.2e10, latency=1e-6, max_devices=512, torus_axes=2,
    source=f"4 links a chip of 496 Gb/s each way, half of them for each of its two cores: {_CACM}. "
    f"Latency {_HOP}",
)  # fmt: skip
TPU_V3_ICI = Interconnect(
    "TPU v3 ICI", bandwidth=2 * 8.2e10, latency=1e-6, max_devices=2048, torus_axes=2,
    source=f"4 links a chip of 656 Gb/s each way, half of them for each of its two cores: {_CACM}. "
    f"Latency {_HOP}",
)  # fmt: skip
TPU_V4_ICI = Interconnect(
    "TPU v4 ICI", bandwidth=6 * 4.5e10, latency=1e-6, max_devices=4096, torus_axes=3,
    source=f"6 links of 45 GB/s one way: {_BOOK}/tpus. Agrees with an all-reduce bandwidth of 1.1 PB/s "
    f"for a pod of 4,096 chips, 269 GB/s a chip: cloud.google.com/tpu/docs/v4. Latency {_HOP}",
)  # fmt: skip
TPU_V5E_ICI = Interconnect(
    "TPU v5e ICI", bandwidth=4 * 4.5e10, latency=1e-6, max_devices=256, torus_axes=2,
    source=f"4 links of 45 GB/s one way: {_BOOK}/tpus. The data sheet says 400 GB/s bidirectional "
    f"a chip, 200 GB/s one way: cloud.google.com/tpu/docs/v5e. Latency {_HOP}",
)  # fmt: skip
TPU_V5P_ICI = Interconnect(
    "TPU v5p ICI", bandwidth=6 * 9e10, latency=1e-6, max_devices=6144, torus_axes=3,
    source=f"6 links of 90 GB/s one way: {_BOOK}/tpus. The data sheet says 1,200 GB/s bidirectional "
    "a chip, 600 GB/s one way, pods of 8,960 chips, jobs of at most 6,144: "
    f"cloud.google.com/tpu/docs/v5p. Latency {_HOP}",
)  # fmt: skip
TPU_V6E_ICI = Interconnect(
    "TPU v6e ICI", bandwidth=4e11, latency=1e-6, max_devices=256, torus_axes=2,
    source="800 GB/s bidirectional a chip over 4 ports: docs.cloud.google.com/tpu/docs/v6e. "
    f"Latency {_HOP}",
)  # fmt: skip
TPU_DCN = Interconnect(
    "TPU data center network", bandwidth=6.25e9, latency=1e-4,
    source="50 Gb/s a chip (TPU v5p; v5e has half): cloud.google.com/tpu/docs/v5p. Latency: the bound "
    "of 100 us that Google states for its Jupiter network, cloud.google.com/blog/topics/systems/"
    "the-evolution-of-googles-jupiter-data-center-network; no figure per message was found",
)  # fmt: skip
NVLINK_3 = Interconnect(
    "NVLink 3 (A100)", bandwidth=3e11, latency=1.9e-6, max_devices=8, overhead=14e-6,
    source="600 GB/s bidirectional a GPU, 12 links of 25 GB/s each way: nvidia.com/data-center/nvlink; "
    f"8 GPUs a node. Latency of a ring's step and launch: {_NCCL}",
)  # fmt: skip
NVLINK_4 = Interconnect(
    "NVLink 4 (H100)", bandwidth=4.5e11, latency=1.9e-6, max_devices=8, overhead=14e-6,
    source="900 GB/s bidirectional a GPU, 18 links of 25 GB/s each way: developer.nvidia.com/blog/"
    "upgrading-multi-gpu-interconnectivity-with-the-third-generation-nvidia-nvswitch; 8 GPUs a node. "
    f"Latency of a ring's step and launch: {_NCCL}",
)  # fmt: skip
NVLINK_5 = Interconnect(
    "NVLink 5 (B200)", bandwidth=9e11, latency=1.9e-6, max_devices=8, overhead=14e-6,
    source="1.8 TB/s bidirectional a GPU: nvidia.com/data-center/nvlink; 8 GPUs a node. "
    f"Latency of a ring's step and launch, as of the generation before: {_NCCL}",
)  # fmt: skip
INFINIBAND_HDR = Interconnect(
    "InfiniBand HDR", bandwidth=25e9, latency=4e-6, overhead=14e-6,
    source="200 Gb/s each way, one adapter a GPU: docs.nvidia.com/networking/display/ConnectX6EN (the "
    f"adapter alone takes under 0.6 us). Latency of a ring's step (a tree's: 8.5 us), launch: {_NCCL}",
)  # fmt: skip
INFINIBAND_NDR = Interconnect(
    "InfiniBand NDR", bandwidth=50e9, latency=4e-6, overhead=14e-6,
    source="400 Gb/s each way, one adapter a GPU: docs.nvidia.com/networking/display/ConnectX7VPI. "
    f"Latency of a ring's step (a tree's: 8.5 us), launch: {_NCCL}",
)  # fmt: skip
ETHERNET_10G = Interconnect(
    "Ethernet 10 Gb/s", bandwidth=1.25e9, latency=20e-6,
    source="10 Gb/s each way (IEEE 802.3ae). Latency: 20 us from end to end with TCP, Hurwitz and "
    "Feng, Hot Interconnects 11 (2003), hoti.org/archive/Hoti11_program/abstracts/24.html",
)  # fmt: skip
ETHERNET_100G = Interconnect(
    "Ethernet 100 Gb/s", bandwidth=12.5e9, latency=4e-6, overhead=14e-6,
    source="100 Gb/s each way (IEEE 802.3ba), with RDMA (RoCE). Latency of a ring's step over a "
    f"network, launch: {_NCCL}. With the kernel's TCP take the 20 us of 10 Gb/s Ethernet",
)  # fmt: skip

LINKS = {  # what joins the devices of a kind where nothing else is said, the innermost first
    "TPU v2 core": (TPU_V2_ICI, TPU_DCN),
    "TPU v3 core": (TPU_V3_ICI, TPU_DCN),
    "TPU v4": (TPU_V4_ICI, TPU_DCN),
    "TPU v5e": (TPU_V5E_ICI, TPU_DCN),
    "TPU v5p": (TPU_V5P_ICI, TPU_DCN),
    "TPU v6e": (TPU_V6E_ICI, TPU_DCN),
    "A100 40GB": (NVLINK_3, INFINIBAND_HDR),
    "A100 80GB": (NVLINK_3, INFINIBAND_HDR),
    "H100 80GB": (NVLINK_4, INFINIBAND_NDR),
    "H200": (NVLINK_4, INFINIBAND_NDR),
    "B200": (NVLINK_5, INFINIBAND_NDR),
}
