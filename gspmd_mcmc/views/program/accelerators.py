"""How much memory accelerators have, a JAX device each.

The figures are the vendors'. Google counts in GiB; NVIDIA's GB are taken as 10^9 bytes, a little less
than its drivers report (85.5e9 on an "80 GB" H100). A program gets less than that: a TPU's runtime
reserves some (1.25 of the 32 GiB of a v4), and on a GPU JAX takes three quarters of the memory unless
XLA_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, "GPU memory allocation"): so it is counted here.
"""

from dataclasses import dataclass

_TPU = "https://cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_GIB = 1 << 30
_GPU = 0.75


@dataclass(frozen=True)
class Accelerator:
    """A kind of device.

    Attributes
    ----------
    name
        Such as "TPU v5e".
    memory_bytes
        Of one JAX device, all of it.
    source
        Where the figure is from.
    share
        What JAX takes of it.
    """

    name: str
    memory_bytes: int
    source: str = ""
    share: float = 1.0

    @property
    def usable_bytes(self) -> int:
        """Memory that a program can have."""
        return int(self.share * self.memory_bytes)


ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator("TPU v2 core", 8 * _GIB, f"{_TPU}/v2"),
        Accelerator("TPU v3 core", 16 * _GIB, f"{_TPU}/v3"),
        Accelerator("TPU v4", 32 * _GIB, f"{_TPU}/v4"),
        Accelerator("TPU v5e", 16 * _GIB, f"{_TPU}/v5e"),
        Accelerator("TPU v5p", 95 * _GIB, f"{_TPU}/v5p"),
        Accelerator("TPU v6e", 32 * _GIB, f"{_TPU}/v6e"),
        Accelerator("T4", 16 * 10**9, f"{_NVIDIA}/tesla-t4", _GPU),
        Accelerator("L4", 24 * 10**9, f"{_NVIDIA}/l4", _GPU),
        Accelerator("V100 32GB", 32 * 10**9, f"{_NVIDIA}/v100", _GPU),
        Accelerator("A100 40GB", 40 * 10**9, f"{_NVIDIA}/a100", _GPU),
        Accelerator("A100 80GB", 80 * 10**9, f"{_NVIDIA}/a100", _GPU),
        Accelerator("H100 80GB", 80 * 10**9, f"{_NVIDIA}/h100", _GPU),
        Accelerator("H200", 141 * 10**9, f"{_NVIDIA}/h200", _GPU),
        Accelerator("B200", 180 * 10**9, f"{_NVIDIA}/dgx-b200", _GPU),
    )
}


def accelerator(which: "str | Accelerator") -> Accelerator:
    """Find an accelerator by name.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if isinstance(which, Accelerator):
        return which
    if which not in ACCELERATORS:
        raise ValueError(
            f"no accelerator {which!r}; there are {', '.join(ACCELERATORS)}. "
            "For another one pass Accelerator(name, memory_bytes)"
        )
    return ACCELERATORS[which]
