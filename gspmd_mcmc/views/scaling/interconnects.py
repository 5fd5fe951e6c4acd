"""Links between devices, as latency and bandwidth, with cited figures for the usual ones.

Every preset is a published or modelled figure, not a measurement of ours, and data-sheet bandwidth
is seldom reached. Replace what you have measured: ``dataclasses.replace(NVLINK_4, bandwidth=370e9)``.

Directions: a data sheet's "bidirectional" figure adds what a device sends and what it receives.
``bandwidth`` here is one way, what a device can send while it receives as much: half of that figure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interconnect:
    """What joins devices: a switched network, or a torus of links between neighbours.

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
        0: switched, any device reaches any other at full bandwidth. 1, 2 or 3: a torus of so many
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
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"{self.name}: bandwidth is bytes a second, above 0, not {self.bandwidth}")
        for figure in ("latency", "overhead"):
            seconds = getattr(self, figure)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{self.name}: {figure} is seconds, 0 or more, not {seconds}")
        if self.max_devices is not None and not (
            self.max_devices == int(self.max_devices) and self.max_devices >= 2
        ):
            raise ValueError(f"{self.name}: max_devices is 2 or more, or None, not {self.max_devices}")
        if self.torus_axes not in (0, 1, 2, 3):
            raise ValueError(
                f"{self.name}: torus_axes is 0 (switched), 1, 2 or 3, not {self.torus_axes}"
            )

    def __str__(self) -> str:
        kind = f", {self.torus_axes}D torus" if self.torus_axes else ""
        reach = (
            "any number of devices" if self.max_devices is None else f"to {self.max_devices:,} devices"
        )
        launch = f" + {self.overhead * 1e6:g} us a collective" if self.overhead else ""
        return (
            f"{self.name} ({self.bandwidth / 1e9:g} GB/s one way, "
            f"{self.latency * 1e6:g} us{launch}{kind}, {reach})"
        )


_BOOK = "How to Scale Your Model, jax-ml.github.io/scaling-book"
_NCCL = "protocol LL128 in src/graph/tuning.cc of NCCL, github.com/NVIDIA/nccl commit b647562"
_HOP = f"about 1 us a hop: {_BOOK}/sharding"

TPU_V4_ICI = Interconnect(
    "TPU v4 ICI",
    bandwidth=6 * 4.5e10,
    latency=1e-6,
    max_devices=4096,
    torus_axes=3,
    source=f"6 links of 45 GB/s one way: {_BOOK}/tpus. Agrees with an all-reduce bandwidth of 1.1 PB/s "
    f"for a pod of 4,096 chips, 269 GB/s a chip: cloud.google.com/tpu/docs/v4. Latency {_HOP}",
)
TPU_V5E_ICI = Interconnect(
    "TPU v5e ICI",
    bandwidth=4 * 4.5e10,
    latency=1e-6,
    max_devices=256,
    torus_axes=2,
    source=f"4 links of 45 GB/s one way: {_BOOK}/tpus. The data sheet says 400 GB/s bidirectional "
    f"a chip, 200 GB/s one way: cloud.google.com/tpu/docs/v5e. Latency {_HOP}",
)
TPU_V5P_ICI = Interconnect(
    "TPU v5p ICI",
    bandwidth=6 * 9e10,
    latency=1e-6,
    max_devices=6144,
    torus_axes=3,
    source=f"6 links of 90 GB/s one way: {_BOOK}/tpus. The data sheet says 1,200 GB/s bidirectional "
    "a chip, 600 GB/s one way, pods of 8,960 chips, jobs of at most 6,144: "
    f"cloud.google.com/tpu/docs/v5p. Latency {_HOP}",
)
TPU_DCN = Interconnect(
    "TPU data centre network",
    bandwidth=6.25e9,
    latency=1e-4,
    source="50 Gb/s a chip (TPU v5p; v5e has half): cloud.google.com/tpu/docs/v5p. Latency: the bound "
    "of 100 us that Google states for its Jupiter network, cloud.google.com/blog/topics/systems/"
    "the-evolution-of-googles-jupiter-data-center-network; no figure per message was found",
)
NVLINK_3 = Interconnect(
    "NVLink 3 (A100)",
    bandwidth=3e11,
    latency=1.9e-6,
    max_devices=8,
    overhead=14e-6,
    source="600 GB/s bidirectional a GPU, 12 links of 25 GB/s each way: nvidia.com/data-center/nvlink; "
    f"8 GPUs a node. Latency of a ring's step and launch: {_NCCL}",
)
NVLINK_4 = Interconnect(
    "NVLink 4 (H100)",
    bandwidth=4.5e11,
    latency=1.9e-6,
    max_devices=8,
    overhead=14e-6,
    source="900 GB/s bidirectional a GPU, 18 links of 25 GB/s each way: developer.nvidia.com/blog/"
    "upgrading-multi-gpu-interconnectivity-with-the-third-generation-nvidia-nvswitch; 8 GPUs a node. "
    f"Latency of a ring's step and launch: {_NCCL}",
)
INFINIBAND_HDR = Interconnect(
    "InfiniBand HDR",
    bandwidth=25e9,
    latency=4e-6,
    overhead=14e-6,
    source="200 Gb/s each way, one adapter a GPU: docs.nvidia.com/networking/display/ConnectX6EN "
    f"(the adapter alone takes under 0.6 us). Latency of a ring's step (a tree's: 8.5 us), launch: "
    f"{_NCCL}",
)
INFINIBAND_NDR = Interconnect(
    "InfiniBand NDR",
    bandwidth=50e9,
    latency=4e-6,
    overhead=14e-6,
    source="400 Gb/s each way, one adapter a GPU: docs.nvidia.com/networking/display/ConnectX7VPI. "
    f"Latency of a ring's step (a tree's: 8.5 us), launch: {_NCCL}",
)
ETHERNET_10G = Interconnect(
    "Ethernet 10 Gb/s",
    bandwidth=1.25e9,
    latency=20e-6,
    source="10 Gb/s each way (IEEE 802.3ae). Latency: 20 us from end to end with TCP, Hurwitz and "
    "Feng, Hot Interconnects 11 (2003), hoti.org/archive/Hoti11_program/abstracts/24.html",
)
ETHERNET_100G = Interconnect(
    "Ethernet 100 Gb/s",
    bandwidth=12.5e9,
    latency=4e-6,
    overhead=14e-6,
    source="100 Gb/s each way (IEEE 802.3ba), with RDMA (RoCE). Latency of a ring's step over a "
    f"network, launch: {_NCCL}. With the kernel's TCP take the 20 us of 10 Gb/s Ethernet",
)
