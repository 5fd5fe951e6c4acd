"""Formulas of collectives against cases by hand, and against the busiest link of a torus."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from gspmd_mcmc.planning import chips
from gspmd_mcmc.planning.chips import INFINIBAND_NDR, NVLINK_4, TPU_V4_ICI, TPU_V5E_ICI, Interconnect
from gspmd_mcmc.planning.collective_times import (
    MODELED_KINDS,
    collective_seconds,
    fastest_all_reduce,
    levels_of,
    pairwise_all_to_all,
    permute,
    ring_all_reduce,
    torus_sides,
    tree_all_reduce,
)

SWITCH = Interconnect("switch", bandwidth=2e9, latency=3e-6)
PAIRS = [Interconnect("a", 1e9, 0, 2, overhead=2.0), Interconnect("b", 1e8, 0, overhead=5.0)]
PRESETS = [v for v in vars(chips).values() if isinstance(v, Interconnect)]


def routed_bytes(sides, num_bytes):
    """Bytes over each directed link when every device sends each other an equal share, by axis."""
    n, load = math.prod(sides), {}
    for source, target in itertools.product(np.ndindex(*sides), repeat=2):
        at = list(source)
        for axis, side in enumerate(sides):
            distance = (target[axis] - at[axis]) % side
            ahead = 0.5 - 0.5 * np.sign(2 * distance - side)  # Half each way where both are as long.
            for step, hops, share in ((1, distance, ahead), (-1, side - distance, 1 - ahead)):
                hop = at[axis]
                for _ in range(hops if share else 0):
                    link = (*at[:axis], hop, *at[axis + 1 :], axis, step)
                    load[link] = load.get(link, 0.0) + share * num_bytes / n
                    hop = (hop + step) % side
            at[axis] = target[axis]
    return load


@pytest.mark.parametrize("sides", [(2,), (5,), (8,), (4, 4), (2, 4), (2, 2, 4)])
def test_all_to_all_on_a_torus_takes_what_its_busiest_link_carries(sides):
    n, axes = math.prod(sides), len(sides)
    torus = Interconnect("torus", bandwidth=1e9, latency=0.0, torus_axes=axes)
    one_way = torus.bandwidth / (2 * axes)
    busiest = max(routed_bytes(sides, 1e6).values())
    assert torus_sides(n, axes) == sides
    assert pairwise_all_to_all(1e6, n, torus) == pytest.approx(busiest / one_way, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "n", "links", "seconds"),
    [
        ("all-reduce", 8e6, 8, [Interconnect("a", 1e9, 1e-3)], 6e-3 + 16e-3),  # A tree: 2 × 3 steps.
        ("all-reduce", 8e6, 2, [Interconnect("a", 1e9, 1e-3)], 2e-3 + 8e-3),  # A ring.
        ("all-reduce", 8e6, 3, [Interconnect("a", 1e9, 1e-6)], 4e-6 + 32e-3 / 3),  # A ring of 3.
        ("all-gather", 8e6, 4, [Interconnect("a", 1e9, 1e-3)], 3e-3 + 6e-3),
        ("reduce-scatter", 8e6, 4, [Interconnect("a", 1e9, 1e-3)], 3e-3 + 6e-3),
        ("all-to-all", 8e6, 4, [Interconnect("a", 1e9, 1e-3)], 3e-3 + 6e-3),
        ("collective-permute", 8e6, 4, [Interconnect("a", 1e9, 1e-3)], 1e-3 + 8e-3),
        # Two neighbours' links in each direction share the bandwidth: a quarter of it for one link.
        ("collective-permute", 8e6, 4, [Interconnect("t", 1e9, 1e-3, torus_axes=2)], 1e-3 + 32e-3),
        # 2 × 2 × 2: three steps; a reduce-scatter of 7/8 of the bytes over all links at once.
        ("reduce-scatter", 8e6, 8, [Interconnect("t", 1e9, 1e-3, torus_axes=3)], 3e-3 + 7e-3),
        # Two chips of a 3D torus are joined by the links of one axis only.
        ("reduce-scatter", 8e6, 2, [Interconnect("t", 1e9, 1e-3, torus_axes=3)], 1e-3 + 12e-3),
        # Launching counts once: the longest. Half of the bytes are reduced across, by a ring.
        ("all-reduce", 8e6, 4, PAIRS, 5 + 2 * 4e-3 + 40e-3),
        ("all-gather", 8e6, 4, PAIRS, 5 + 4e-3 + 20e-3),
        ("collective-permute", 8e6, 4, PAIRS, 5 + 80e-3),
        ("all-to-all", 8e6, 4, PAIRS, 5 + 4e-3 + 40e-3),
    ],
)  # fmt: skip
def test_cases_computed_by_hand(kind, num_bytes, n, links, seconds):
    assert collective_seconds(kind, num_bytes, n, links) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("link", PRESETS, ids=lambda link: link.name)
@pytest.mark.parametrize("kind", MODELED_KINDS)
def test_one_device_sends_nothing_and_more_never_less(kind, link):
    reach = link.max_devices or 4096
    sizes = [2**k for k in range(int(math.log2(reach)) + 1)]
    seconds = [collective_seconds(kind, 1e6, n, [link]) for n in sizes]
    assert seconds[0] == 0 and seconds[1] > 0
    if kind != "collective-permute" and not link.torus_axes:  # Small tori have fewer links.
        assert np.all(np.diff(seconds) > 0)
    more = collective_seconds(kind, 2e6, sizes[-1], [link])
    assert more > seconds[-1]


def test_limits_of_latency_and_of_bandwidth():
    slow, narrow = Interconnect("slow", 1e30, 1.0), Interconnect("narrow", 1.0, 0.0)
    assert ring_all_reduce(1, 1000, slow) == pytest.approx(2 * 999)
    assert tree_all_reduce(1, 1000, slow) == pytest.approx(2 * 10)
    assert fastest_all_reduce(1, 1000, slow) == tree_all_reduce(1, 1000, slow)
    assert ring_all_reduce(1, 1000, narrow) == pytest.approx(2 * 0.999)
    assert fastest_all_reduce(1, 1000, narrow) == ring_all_reduce(1, 1000, narrow)
    assert permute(1, 1, slow) == 0


@pytest.mark.parametrize(
    ("n", "axes", "sides"),
    [(1, 3, ()), (4, 3, (2, 2)), (16, 3, (2, 2, 4)), (32, 3, (2, 4, 4)), (64, 3, (4, 4, 4)),
     (128, 3, (4, 4, 8)), (256, 3, (4, 8, 8)), (4096, 3, (16, 16, 16)), (6144, 3, (16, 16, 24)),
     (8, 2, (2, 4)), (32, 2, (4, 8)), (256, 2, (16, 16)), (7, 3, (7,))],
)  # fmt: skip
def test_tori_have_the_shapes_that_tpu_slices_have(n, axes, sides):
    """cloud.google.com/tpu/docs/v4, v5e and v5p list them."""
    assert torus_sides(n, axes) == sides


def test_levels_are_filled_from_the_inside():
    rack = dataclasses.replace(INFINIBAND_NDR, name="rack", max_devices=32)
    far = dataclasses.replace(INFINIBAND_NDR, name="far")
    three = [NVLINK_4, rack, far]
    assert levels_of(1, three) == []
    assert levels_of(8, three) == [(NVLINK_4, 8)]
    assert levels_of(12, three) == [(NVLINK_4, 8), (rack, 2)]
    assert levels_of(4096, three) == [(NVLINK_4, 8), (rack, 4), (far, 128)]


def test_more_devices_than_are_joined_are_refused():
    with pytest.raises(
        ValueError, match=r"16 devices are more than NVLink 4 \(H100\) joins \(8\).*next"
    ):
        collective_seconds("all-reduce", 1.0, 16, [NVLINK_4])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bandwidth": 0.0}, "mine: bandwidth is bytes a second, above 0, not 0.0"),
        ({"bandwidth": math.nan}, "bandwidth .* not nan"),
        ({"latency": -1e-6}, "mine: latency is seconds, 0 or more, not -1e-06"),
        ({"latency": math.nan}, "latency .* not nan"),
        ({"overhead": math.inf}, "overhead .* not inf"),
        ({"max_devices": 1}, "max_devices is 2 or more, or None, not 1"),
        ({"max_devices": 2.5}, "max_devices is 2 or more, or None, not 2.5"),
        ({"torus_axes": 4}, "torus_axes is 0 .* not 4"),
    ],
)
def test_an_interconnect_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Interconnect("mine", 1e9, 1e-6), **wrong)


@pytest.mark.parametrize("link", PRESETS, ids=lambda link: link.name)
def test_presets_say_where_their_figures_are_from_and_can_be_overridden(link):
    assert "." in link.source and ("Latency" in link.source)
    doubled = dataclasses.replace(link, bandwidth=2 * link.bandwidth, latency=0.0, overhead=0.0)
    halved = collective_seconds("all-gather", 1e6, 4, [doubled])
    without = dataclasses.replace(link, latency=0.0, overhead=0.0)
    assert halved == pytest.approx(collective_seconds("all-gather", 1e6, 4, [without]) / 2)


def test_presets_agree_with_figures_of_whole_pods_and_gpus():
    """All-reduce bandwidth of a pod, of Google's pages; half of NVIDIA's bidirectional figures."""
    assert TPU_V4_ICI.bandwidth * 4096 == pytest.approx(1.1e15, rel=0.01)
    assert TPU_V5E_ICI.bandwidth * 256 == pytest.approx(
        51.2e12, rel=0.11
    )  # The book's links are 10% slower.
    assert NVLINK_4.bandwidth == 18 * 25e9
    assert INFINIBAND_NDR.bandwidth == 400e9 / 8
    assert chips.NVLINK_5.bandwidth == 2 * NVLINK_4.bandwidth
    # Links of 496 and 656 Gb/s, four a chip of two cores.
    assert chips.TPU_V2_ICI.bandwidth == 2 * 496e9 / 8
    assert chips.TPU_V3_ICI.bandwidth == 2 * 656e9 / 8
    assert len(PRESETS) == 14
