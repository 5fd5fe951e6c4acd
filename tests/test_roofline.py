"""The time of a leapfrog from what a program does and what a device does in a second."""

from dataclasses import replace
from typing import Any

import pytest

from gspmd_mcmc.planning.chips import ACCELERATORS, ETHERNET_10G, LINKS, NVLINK_4, Accelerator
from gspmd_mcmc.planning.collective_times import collective_seconds
from gspmd_mcmc.planning.flops import Product
from gspmd_mcmc.planning.roofline import roofline
from gspmd_mcmc.planning.throughput import THROUGHPUTS, measure_throughput
from gspmd_mcmc.planning.topologies import CHIPS
from gspmd_mcmc.planning.work import Kernel, Work
from gspmd_mcmc.views.program.report import Traffic

KERNEL = Kernel("fusion", "model.py:7", 0, 0, 0, (), 0, (), None)
H100 = THROUGHPUTS["H100 80GB"]
SENT = Traffic("all-reduce", (), 8, 31_400, 31_400, 1)


def work_of(**changes):
    return Work((replace(KERNEL, **changes),))


# What bounds it.


@pytest.mark.parametrize(
    ("changes", "bound", "seconds"),
    [({"bytes_read": 3_350_000_000, "bytes_written": 335_000_000}, "memory", 1.1e-3),
     ({"bytes_read": 335_000_000, "tile_bytes": 3_015_000_000}, "memory", 1e-3),
     ({"products": (Product("bf16", 1 << 20, 1 << 10, 1 << 10),)}, "arithmetic", 2 * 2**40 / 989e12),
     ({"other_flops": 67_000_000_000}, "arithmetic", 1e-3),
     ({"bytes_read": 4}, "launches", 2.5e-6),
     ({"runs": 40, "bytes_read": 4}, "launches", 1e-4)],
)  # fmt: skip
def test_the_longest_of_memory_arithmetic_and_launches_counts(changes, bound, seconds):
    found = roofline(work_of(**changes), "H100 80GB")
    assert found.bound == bound
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
    assert found.per_second == pytest.approx(1 / seconds, rel=1e-3)


def test_kernels_run_one_after_the_other_and_the_host_waits_for_the_condition():
    large, small = replace(KERNEL, bytes_read=335_000_000), replace(KERNEL, bytes_read=4, runs=3)
    found = roofline(Work((large, small), readbacks=1), "H100 80GB")
    assert found.seconds == pytest.approx(1e-4 + 3 * 2.5e-6 + 5.8e-6)
    assert found.launch_seconds == pytest.approx(4 * 2.5e-6 + 5.8e-6)


def test_collectives_take_what_their_links_say():
    work = work_of(bytes_read=4, collectives=(SENT,))
    wire = collective_seconds("all-reduce", 31_400, 8, LINKS["H100 80GB"])
    found = roofline(work, "H100 80GB")
    assert found.wire_seconds == wire and found.bound == "the wire"
    assert found.seconds == pytest.approx(2.5e-6 + wire)
    slow = roofline(work, "H100 80GB", interconnect=[NVLINK_4, ETHERNET_10G])
    assert slow.wire_seconds == wire  # eight are joined by NVLink alone
    other = collective_seconds("all-reduce", 31_400, 8, (ETHERNET_10G,))
    assert roofline(work, "H100 80GB", interconnect=ETHERNET_10G).wire_seconds == other != wire
    alone = work_of(bytes_read=4, collectives=(replace(SENT, group_size=1),))
    assert roofline(alone, "L4").wire_seconds == 0


# What matrix units do.

THIN = Product("f32", 7500, 784, 10)


@pytest.mark.parametrize(
    ("device", "factors", "rate", "padded"),
    [("TPU v3 core", "f32", 61.5e12, (7500, 896, 128)),
     ("TPU v3 core", "f32 high", 61.5e12, (7500, 896, 128)),  # three terms of 10 columns
     ("TPU v3 core", "f32 highest", 61.5e12, (7500, 896, 128)),
     ("TPU v3 core", "s8", 61.5e12, (7500, 896, 128)),  # it has no unit for bytes
     ("TPU v5e", "u8", 393e12, (7500, 896, 128)),
     ("TPU v6e", "bf16", 918e12, (7500, 1024, 256)),
     ("H100 80GB", "bf16", 989e12, (7500, 784, 16)),
     ("H100 80GB", "f32", 494e12, (7500, 784, 16)),  # TensorFloat-32
     ("H100 80GB", "f32 high", 67e12, (7500, 784, 10)),  # vector units
     ("H100 80GB", "f32 dot_bf16_bf16_f32_x3", 989e12, (7500, 784, 32)),
     ("H100 80GB", "f32 dot_tf32_tf32_f32", 494e12, (7500, 784, 16)),
     ("V100 32GB", "f32", 15.7e12, (7500, 784, 10)),
     ("L4", "f8e4m3fn", 242e12, (7500, 784, 16))],
)  # fmt: skip
def test_a_product_takes_the_unit_of_its_factors_and_its_padding(device, factors, rate, padded):
    rows, terms, columns = padded
    expected = 2 * rows * terms * columns / rate
    for product in (replace(THIN, factors=factors), Product(factors, 10, 784, 7500)):
        assert THROUGHPUTS[device].product_seconds(product) == pytest.approx(expected)


def test_terms_of_a_wide_product_are_products_of_their_own():
    wide = Product("f32 high", 7500, 896, 128)
    one = THROUGHPUTS["TPU v3 core"].product_seconds(replace(wide, factors="f32"))
    assert THROUGHPUTS["TPU v3 core"].product_seconds(wide) == pytest.approx(3 * one)


def test_the_compiler_s_own_estimate_counts_where_it_is_more():
    work = work_of(bytes_read=450_000, collectives=(SENT,), estimated_cycles=1880)
    found = roofline(work, "TPU v3 core")  # 1 us of memory, 2 us of cycles
    assert found.seconds == pytest.approx(1e-6 + found.wire_seconds)
    assert found.predicted_seconds == pytest.approx(2e-6 + found.wire_seconds)
    assert found.per_second == 1 / found.predicted_seconds
    less = roofline(work_of(bytes_read=450_000, estimated_cycles=9), "TPU v3 core")
    assert less.predicted_seconds == less.seconds


def test_every_accelerator_with_memory_has_a_throughput_with_sound_figures():
    assert set(THROUGHPUTS) == set(ACCELERATORS)
    for name, device in ACCELERATORS.items():
        found: Any = device.throughput
        assert found is THROUGHPUTS[name]
        # No device reads its memory faster than it computes, nor multiplies slower than it adds.
        assert 1e11 < found.memory_bandwidth < found.vector_flops < max(found.product_flops.values())


def test_this_device_is_measured():
    found = measure_throughput(seconds=0.01)
    assert 1e8 < found.memory_bandwidth < 1e13
    assert 1e8 < found.product_flops["f32"] < 1e15
    assert 1e-9 < found.launch_seconds < 1e-3
    assert found.product_seconds(THIN) == THIN.flops / found.product_flops["default"]
    full = replace(THIN, factors="f32 highest")
    assert found.product_seconds(full) == THIN.flops / found.product_flops["f32"]


# What is said.


def test_the_text_tells_facts_from_arithmetic():
    work = replace(
        work_of(
            bytes_read=400, bytes_written=100, tile_bytes=50, products=(THIN,), other_flops=7,
            collectives=(SENT,), estimated_cycles=940,
        ),
        readbacks=1, notes=("cond.1: branch 0 of 2 counts",),
    )  # fmt: skip
    found = roofline(work, "TPU v3 core", data_bytes=250)
    facts, arithmetic = str(found).split("From these, over the device's peak figures (arithmetic")
    for fact in (
        "as its compiler has it (facts)", "500 B moved (400 B read, 100 B written), 50 B more by whole",
        "the data are 250 B: 2.0 times that is moved", "fusion: 500 B, model.py:7", "kernels: 1",
        "GFLOP of f32", "all-reduce, 31.4 kB among 8 devices", "940 cycles, 1 us",
        "cond.1: branch 0 of 2 counts",
    ):  # fmt: skip
        assert fact in facts
    assert "at best" in arithmetic and "leapfrogs a second" in arithmetic and "bound by" in arithmetic
    assert "by the compiler's own estimate" not in arithmetic
    slow = replace(work, each=(replace(work.each[0], estimated_cycles=94_000_000),))
    assert "10 leapfrogs a second, by the compiler's own estimate" in str(roofline(slow, "TPU v3 core"))
    unknown = replace(work, each=(*work.each, replace(KERNEL, is_counted=False)))
    assert "predicted: fewer than " in str(roofline(unknown, "TPU v3 core"))
    assert "fewer than" not in str(found)
    # A TPU v3 core multiplies 61.5e12 times a second.
    stating = replace(work, each=(*work.each, replace(KERNEL, stated_flops=int(61.5e9))))
    stating = roofline(stating, "TPU v3 core")
    assert stating.arithmetic_seconds - found.arithmetic_seconds == pytest.approx(1e-3, rel=1e-2)
    assert "61.5 GFLOP as kernels state" in str(stating)
    assert found.bytes_ratio == 2
    assert roofline(work, "TPU v3 core").bytes_ratio is None


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_that_programs_are_compiled_for_has_a_roofline_and_links_if_it_has_several(chip):
    found = roofline(work_of(bytes_read=10**9), chip)
    assert found.bound == "memory" and found.seconds > 1e-5
    if chip != "L4":
        assert roofline(work_of(bytes_read=4, collectives=(SENT,)), chip).wire_seconds > 0


# What is not known is refused.


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [("H1000", {}, "no accelerator 'H1000'"),
     (Accelerator("mine", 10**9), {}, r"mine: what it does in a second is not known.*throughput="),
     ("L4", {"collectives": (SENT,)}, "L4: what joins its devices is not known: give interconnect="),
     ("H200", {"collectives": (replace(SENT, group_size=0),)}, "groups of 0 devices: its time is not"),
     ("H200", {"collectives": (replace(SENT, kind="send"),)}, "send of 31,400.*Known: all-reduce")],
)  # fmt: skip
def test_what_is_not_known_is_refused(device, changes, message):
    with pytest.raises(ValueError, match=message):
        roofline(work_of(**changes), device)
