"""What kinds of devices do in a second: peak figures of the vendors, with their sources.

Peaks are what nothing exceeds, not what programs reach. Products are dense, never with sparsity.

TPU memory and products: docs.cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e; v2 and v3: Norrie et
al., "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro 41 (2021), and
Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks", CACM 63 (2020): 700
and 900 GB/s, 46 and 123 TFLOP/s a chip of two cores, 700 and 940 MHz; a JAX device is one core. A
matrix unit is 128 x 128, that of v6e 256 x 256 (page v6e). Vector units: 8 x 128 lanes a core, two
operations a lane and cycle on v2 and v3 (Norrie et al.), four on later ones (How to Scale Your Model,
jax-ml.github.io/scaling-book/tpus), at 1.05, 1.5, 1.75 and 1.75 GHz. A float32 product is made of one
bfloat16 product, of three (``high``) or of six (``highest``): docs.jax.dev, ``jax.lax.Precision``. A
TPU's program is one sequence of instructions: no host launches its kernels.

GPUs: nvidia.com/en-us/data-center, data sheets of the T4, L4, V100 (SXM2), A100 (SXM), H100 (SXM), H200
and DGX B200 (an eighth of its eight cards). Figures "with sparsity" are halved. The vector figure is
float32's. A tensor core's smallest product has 16 terms and 8 columns (PTX ISA, ``mma.m16n8k16``).
float32 factors are rounded to TensorFloat-32 by default; with a precision of ``high`` or ``highest``
XLA's own products multiply them on the vector units, as the assembly of such programs shows.

A launch: 3.8 us a kernel of 2.9 us when launched one after the other, so 0.9 us more than the kernel
itself, and a kernel that does nothing takes about 2 us from end to end (developer.nvidia.com/blog/
cuda-graphs, a V100): 2.5 us are taken. With a wait of the host after each kernel it is 9.6 us, 5.8 us
more: that is a loop's readback.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc.planning.flops import Product
from gspmd_mcmc.planning.work import work_of
from gspmd_mcmc.views.program.hlo import read_program

_ALGORITHM = re.compile(r"dot_(\w+?)_\w+?(?:_x(\d))?$")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Throughput:
    """What a device does in a second at best.

    Attributes
    ----------
    memory_bandwidth
        Bytes between its memory and its processors.
    product_flops
        Of matrix products, by what its matrix units multiply: ``{"bf16": 989e12, "s8": ...}``.
    vector_flops
        Of everything else, and of products that no matrix unit makes.
    launch_seconds
        From one small kernel to the next.
    readback_seconds
        Of the host's wait for a loop's condition.
    clock_hz
        Cycles a second, where its compiler estimates in cycles.
    product_tile
        Terms and columns that a matrix unit multiplies at least, as padding if they are fewer.
    float32
        What a float32 product is made of, by precision: the factors, and how many products.
    """

    memory_bandwidth: float
    product_flops: Mapping[str, float]
    vector_flops: float
    launch_seconds: float = 0.0
    readback_seconds: float = 0.0
    clock_hz: float | None = None
    product_tile: tuple[int, int] = (1, 1)
    float32: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def stated_flops(self) -> float:
        """Of what kernels state of themselves: products of bfloat16 numbers."""
        return self.product_flops.get("bf16", self.vector_flops)

    def product_seconds(self, product: Product) -> float:
        """Seconds of one matrix product at best, with what a matrix unit pads it by."""
        factors, passes = self._made_of(product.factors)
        rate = self.product_flops.get(factors)
        if rate is None:
            return passes * product.flops / self.vector_flops
        terms, columns = self.product_tile
        # The narrow side lies in the matrix unit, all terms of it side by side; the long one streams
        # through.
        narrow, long = sorted((product.rows, product.columns))
        return 2 * long * _up_to(product.terms, terms) * _up_to(passes * narrow, columns) / rate

    def _made_of(self, factors: str) -> tuple[str, int]:
        """Return what matrix units multiply to make a product of such factors, and how often."""
        dtype, _, how = factors.partition(" ")
        if algorithm := _ALGORITHM.match(how):
            return algorithm.group(1), int(algorithm.group(2) or 1)
        if dtype == "f32":
            return self.float32.get(how, ("f32", 1))
        if dtype[0] in "su" and int(_BITS.findall(dtype)[0]) <= 8:
            dtype = "s8"
        if dtype.startswith("f8"):
            dtype = "f8"
        is_small = dtype in ("s8", "f8", "f16")
        return ("bf16" if is_small and dtype not in self.product_flops else dtype), 1


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


GPU_LAUNCH_SECONDS, GPU_READBACK_SECONDS = 2.5e-6, 5.8e-6  # of any GPU: see above
_BY_BF16 = {"": ("bf16", 1), "high": ("bf16", 3), "highest": ("bf16", 6)}
_BY_TF32 = {"": ("tf32", 1)}
_LANES = 8 * 128


def _tpu(
    bandwidth: float, products: Mapping[str, float], clock: float, alus: int, side: int = 128
) -> Throughput:
    """Return a TPU's figures; ``alus`` are those of a lane in all cores of a device."""
    return Throughput(
        memory_bandwidth=bandwidth,
        product_flops=products,
        vector_flops=_LANES * alus * clock,
        clock_hz=clock,
        product_tile=(side, side),
        float32=_BY_BF16,
    )


def _gpu(bandwidth: float, vector: float, **products: float) -> Throughput:
    return Throughput(
        memory_bandwidth=bandwidth,
        product_flops=products,
        vector_flops=vector,
        launch_seconds=GPU_LAUNCH_SECONDS,
        readback_seconds=GPU_READBACK_SECONDS,
        product_tile=(16, 8),
        float32=_BY_TF32 if "tf32" in products else {},
    )


THROUGHPUTS = {
    "TPU v2 core": _tpu(350e9, {"bf16": 23e12}, 0.7e9, 2),
    "TPU v3 core": _tpu(450e9, {"bf16": 61.5e12}, 0.94e9, 2),
    "TPU v4": _tpu(1228e9, {"bf16": 275e12, "s8": 275e12}, 1.05e9, 8),
    "TPU v5e": _tpu(819e9, {"bf16": 197e12, "s8": 393e12}, 1.5e9, 4),
    "TPU v5p": _tpu(2765e9, {"bf16": 459e12, "s8": 918e12}, 1.75e9, 8),
    "TPU v6e": _tpu(1638e9, {"bf16": 918e12, "s8": 1836e12}, 1.75e9, 4, side=256),
    "T4": _gpu(320e9, 8.1e12, f16=65e12, s8=130e12),
    "L4": _gpu(300e9, 30.3e12, tf32=60e12, bf16=121e12, f16=121e12, s8=242e12, f8=242e12),
    "V100 32GB": _gpu(900e9, 15.7e12, f16=125e12, f64=7.8e12),
    "A100 40GB": _gpu(1555e9, 19.5e12, tf32=156e12, bf16=312e12, f16=312e12, s8=624e12, f64=19.5e12),
    "A100 80GB": _gpu(2039e9, 19.5e12, tf32=156e12, bf16=312e12, f16=312e12, s8=624e12, f64=19.5e12),
    "H100 80GB": _gpu(
        3.35e12, 67e12, tf32=494e12, bf16=989e12, f16=989e12, s8=1979e12, f8=1979e12, f64=67e12
    ),
    "H200": _gpu(
        4.8e12, 67e12, tf32=494e12, bf16=989e12, f16=989e12, s8=1979e12, f8=1979e12, f64=67e12
    ),
    "B200": _gpu(
        8e12, 75e12, tf32=1125e12, bf16=2250e12, f16=2250e12, s8=4500e12, f8=4500e12, f64=37e12
    ),
}


def measure_throughput(seconds: float = 0.5) -> Throughput:
    """Measure the device that this process computes on, in about six times so many seconds.

    Bandwidth: a float32 array of 256 MB times a number, in place. Products: of 2,048 squared, float32
    in full precision and in the device's default one, and bfloat16. Vector: a chain of multiplications
    and additions on an array that stays in cache. A launch: a loop of kernels that do next to nothing,
    its time over their number. On an accelerator products are of 4,096 squared, the chain is one kernel
    over a larger array, and calls wait in line: the host takes longer to start a small one than the
    device to do it.
    """
    is_cpu = jax.default_backend() == "cpu"
    side, lanes, calls = (2048, 1 << 14, 1) if is_cpu else (4096, 1 << 24, 10)
    fastest = partial(_fastest, seconds=seconds, calls=calls)
    large = [jnp.ones(1 << 26)]
    square, small = jnp.ones((side, side)), jnp.ones(lanes)
    half = square.astype(jnp.bfloat16)

    def halve() -> jax.Array:
        large[0] = _halved(large[0])
        return large[0]

    moved = 2 * large[0].nbytes / fastest(halve)
    factors = {"f32": (square, "highest"), "default": (square, None), "bf16": (half, None)}
    products = {
        name: 2 * side**3 / fastest(lambda x=x, how=how: _product(x, how))
        for name, (x, how) in factors.items()
    }
    vector = _TURNS * 2 * small.size / fastest(lambda: _chained(small, not is_cpu))
    looped = _looped.lower(jnp.zeros(8)).compile()
    kernels = work_of(read_program(looped.as_text() or "")).kernels
    launch = fastest(lambda: looped(jnp.zeros(8))) / max(kernels, 1)
    return Throughput(moved, products, vector, launch, float32={"": ("default", 1)})


_TURNS = 1000
_halved = jax.jit(lambda x: 0.5 * x, donate_argnums=0)  # in place: new pages would cost a CPU more


@partial(jax.jit, static_argnums=1)
def _product(x: jax.Array, precision: str | None) -> jax.Array:
    return jnp.matmul(x, x, precision=precision, preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnums=1)
def _chained(x: jax.Array, is_one_kernel: bool) -> jax.Array:
    return jax.lax.fori_loop(0, _TURNS, lambda _, y: 0.5 * y + 1, x, unroll=is_one_kernel)


@jax.jit
def _looped(x: jax.Array) -> jax.Array:
    """Sort eight numbers many times: nothing fuses such kernels."""
    return jax.lax.fori_loop(0, _TURNS, lambda _, y: jnp.sort(y), x)


def _fastest(run: Callable[[], jax.Array], *, seconds: float, calls: int) -> float:
    """Return the least seconds of a call, of so many in line, after one that compiles."""
    jax.block_until_ready(run())
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(calls):
            done = run()
        jax.block_until_ready(done)
        least = min(least, (time.perf_counter() - start) / calls)
    return least
