"""Predictions against arithmetic by hand; what they do with traffic that grows; what they say."""

import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pytest

from gspmd_mcmc.views.chips import (
    ETHERNET_10G,
    INFINIBAND_NDR,
    NVLINK_4,
    TPU_DCN,
    TPU_V5E_ICI,
    Interconnect,
)
from gspmd_mcmc.views.collective_times import collective_seconds, ring_all_reduce, tree_all_reduce
from gspmd_mcmc.views.cost import POWERS_OF_TWO, fit_compute, predict
from gspmd_mcmc.views.cost_views import seconds as in_words
from gspmd_mcmc.views.program.report import Traffic

SWITCH = Interconnect("switch", bandwidth=1e9, latency=0.0, source="made up")
MOVIELENS = {"num_rows": 6040, "seconds_per_row": 0.03 / 6040}  # 0.03 s a gradient on 2 CPU cores.


@dataclass(frozen=True)
class Sent(Traffic):
    """What a report says of one collective."""

    kind: str = "all-reduce"
    operand_bytes: int = 622_608
    num_bytes: int = 622_608
    runs: float = 1.0
    axes: tuple[str, ...] = ("data",)
    group_size: int = 8


def constant(seconds):
    """All-reduce that takes as long on any number of devices, but one."""

    def constant_all_reduce(num_bytes, n, link):
        return seconds

    return constant_all_reduce


def test_strong_and_weak_scaling_by_hand():
    """1,000 rows of 1 ms; 40 MB twice a leapfrog, by a ring at 1 GB/s: 160 ms × (n-1)/n."""
    sent = [Sent(operand_bytes=40_000_000, runs=2.0)]
    prediction = predict(
        sent,
        num_rows=1000,
        seconds_per_row=1e-3,
        fixed_seconds=0.5,
        interconnect=SWITCH,
        devices=[1, 3, 4],
        all_reduce=ring_all_reduce,
    )
    strong, weak = prediction.strong, prediction.weak
    sends = [0, 0.16 * 2 / 3, 0.12]
    np.testing.assert_array_equal(strong.rows, [1000, 334, 250])
    np.testing.assert_allclose(strong.compute_seconds, [1.5, 0.834, 0.75])
    np.testing.assert_allclose(strong.communication_seconds, sends)
    np.testing.assert_allclose(strong.total_seconds, [1.5, 0.834 + sends[1], 0.87])
    np.testing.assert_allclose(strong.efficiency, [1, 0.5 / (0.834 + sends[1]), 1.5 / (4 * 0.87)])
    np.testing.assert_array_equal(weak.rows, 1000)
    np.testing.assert_allclose(weak.compute_seconds, 1.5)
    np.testing.assert_allclose(weak.communication_seconds, sends)
    np.testing.assert_allclose(weak.efficiency, [1, 1.5 / (1.5 + sends[1]), 1.5 / 1.62])
    # Efficiency is to one device even where that is not asked for.
    alone = predict([Sent()], **MOVIELENS, interconnect=ETHERNET_10G, devices=[1, 64])
    without = predict([Sent()], **MOVIELENS, interconnect=ETHERNET_10G, devices=[64])
    assert without.strong.efficiency[0] == alone.strong.efficiency[1] < 0.5
    assert without.weak.efficiency[0] == alone.weak.efficiency[1] > 0.9


def test_the_crossover_is_where_the_lines_cross():
    """Compute 4.096 s / n, communication 0.1 s: equal at 40.96; at 0.064 s equal on 64 exactly."""
    known = {"num_rows": 4096, "seconds_per_row": 1e-3, "interconnect": SWITCH}
    prediction = predict([Sent()], **known, all_reduce=constant(0.1))
    assert prediction.crossover == prediction.strong.crossover == 64
    assert prediction.strong.crossover_between == pytest.approx(40.96)
    assert "between 32 and 64 devices (about 41)" in str(prediction)
    # 4.096 / (4.096 + 0.1 n) is under one half on the same 64 devices; with nothing sent it never is.
    assert "strong scaling is below one half from 64 devices" in str(prediction)
    assert "below one half" not in str(predict([Sent()], **known, all_reduce=constant(0.0)))
    assert predict([Sent()], **known, all_reduce=constant(0.064)).crossover == 128  # More, not as much.
    assert prediction.weak.crossover is prediction.weak.crossover_between is None
    assert "weak scaling:   compute takes longer than communication, up to 4,096" in str(prediction)
    marked = prediction.figure().axes[0].lines
    (mark,) = [line for line in marked if np.size(line.get_xdata()) == 1]
    np.testing.assert_allclose(np.asarray(mark.get_xydata()), [[40.96, 0.1]])
    # On the first devices that communicate.
    slow = predict([Sent()], num_rows=8, seconds_per_row=1e-9, interconnect=SWITCH)
    assert slow.crossover == slow.weak.crossover == 2
    assert slow.strong.crossover_between is None
    assert "communication takes longer than compute on 2 devices and after" in str(slow)


def test_movielens_over_10_gigabit_ethernet_by_hand():
    """622,608 bytes: 0.498 ms at 1.25 GB/s. A ring is best for two devices, a tree for 4,096."""
    prediction = predict([Sent()], **MOVIELENS, interconnect=ETHERNET_10G)
    np.testing.assert_array_equal(prediction.strong.devices, POWERS_OF_TWO)
    sends = prediction.strong.communication_seconds
    assert sends[0] == 0
    assert sends[1] == pytest.approx(2 * 20e-6 + 622_608 / 1.25e9)
    assert sends[12] == pytest.approx(2 * 12 * 20e-6 + 2 * 622_608 / 1.25e9)
    # 30 ms / n is as long as the tree's 1 ms + 40 us × log2(n) between 25 and 26 devices.
    exact = next(n for n in range(2, 99) if 0.03 / n < 2 * 622_608 / 1.25e9 + 40e-6 * math.log2(n))
    assert prediction.crossover == 32 and exact == 26
    assert prediction.strong.crossover_between == pytest.approx(exact, abs=1)
    assert prediction.weak.efficiency[-1] == pytest.approx(0.03 / (0.03 + sends[-1]))


def test_inside_a_node_and_between_nodes_by_hand():
    """16 GPUs: 7/8 of the bytes each way in a node of 8, an eighth of them between two nodes."""
    prediction = predict(
        [Sent()], **MOVIELENS, interconnect=[NVLINK_4, INFINIBAND_NDR], devices=[8, 16]
    )
    inside = 2 * (7 * 1.9e-6 + 7 / 8 * 622_608 / 450e9)
    across = 2 * (4e-6 + 622_608 / 8 / 2 / 50e9)
    assert prediction.strong.communication_seconds[1] == pytest.approx(14e-6 + inside + across)
    one_node = 14e-6 + 6 * 1.9e-6 + 2 * 622_608 / 450e9  # A tree of 8.
    assert prediction.strong.communication_seconds[0] == pytest.approx(one_node)


@pytest.mark.parametrize(
    ("kind", "strong", "weak"),
    [
        # Gathered: the whole, 8 MB; in weak scaling 8 MB on each of 16 devices.
        ("all-gather", 8e6, 16 * 8e6),
        # 1 MB on each of 8 devices, so half of it on 16; in weak scaling all 8 MB on each.
        ("all-to-all", 0.5e6, 8e6),
        ("collective-permute", 0.5e6, 8e6),
        # A gradient of shared latents: 1 MB, whatever the rows.
        ("reduce-scatter", 1e6, 1e6),
        ("all-reduce", 1e6, 1e6),
    ],
)
def test_what_grows_with_rows_and_what_does_not(kind, strong, weak):
    sent = Sent(kind, operand_bytes=1_000_000, num_bytes=8_000_000, group_size=8)
    prediction = predict([sent], **MOVIELENS, interconnect=SWITCH, devices=[16])
    for scaling, num_bytes in ((prediction.strong, strong), (prediction.weak, weak)):
        expected = collective_seconds(kind, num_bytes, 16, [SWITCH])
        assert scaling.communication_seconds[0] == pytest.approx(expected)
    moves = kind not in ("all-reduce", "reduce-scatter")
    text = " ".join(str(prediction).split())
    assert (f"The arrays of {kind} have a row for each data row" in text) == moves


def test_collectives_over_other_axes_keep_their_group():
    known = {**MOVIELENS, "interconnect": ETHERNET_10G, "devices": [1, 4, 64]}
    model = Sent(axes=("model",), group_size=2)
    prediction = predict([model], **known)
    expected = collective_seconds("all-reduce", 622_608, 2, [ETHERNET_10G])
    np.testing.assert_allclose(prediction.strong.communication_seconds, expected)
    np.testing.assert_allclose(prediction.weak.efficiency, 1)
    assert "Over axes other than 'data' groups and bytes stay as compiled" in str(prediction)
    renamed = predict([model], **known, axis="model")
    assert renamed.strong.communication_seconds[0] == 0


def test_groups_over_two_axes_grow_along_one():
    """8 devices over data × model, 4 along data as another collective shows: two along model."""
    both, alone = Sent(axes=("data", "model"), group_size=8), Sent(runs=0.0, group_size=4)
    known = {**MOVIELENS, "interconnect": ETHERNET_10G, "devices": [1, 64]}
    seen = predict([both, alone], **known).strong.communication_seconds
    expected = [collective_seconds("all-reduce", 622_608, n, [ETHERNET_10G]) for n in (2, 128)]
    np.testing.assert_allclose(seen, expected)
    np.testing.assert_allclose(
        predict([both], **known, axis_size=4).strong.communication_seconds, expected
    )
    with pytest.raises(ValueError, match="say axis_size="):
        predict([both], **known)
    with pytest.raises(ValueError, match="groups of 8 devices, which the 3 along 'data' do not divide"):
        predict([both], **known, axis_size=3)
    with pytest.raises(ValueError, match=r"groups over 'data' alone have \[4\] devices, not 2"):
        predict([both, alone], **known, axis_size=2)

    # Unknown axes are taken for the growing one, and that is said.
    known = {**MOVIELENS, "interconnect": ETHERNET_10G}
    unknown, data = predict([Sent(axes=())], **known), predict([Sent()], **known)
    np.testing.assert_array_equal(unknown.strong.total_seconds, data.strong.total_seconds)
    assert "Collectives over unknown axes run over 'data'" in str(unknown)
    assert "unknown axes" not in str(data)


def test_a_kind_without_a_formula_is_reported_and_not_dropped():
    unknown = Sent("ragged-all-to-all", operand_bytes=1000, runs=3.0)
    known = {**MOVIELENS, "interconnect": ETHERNET_10G}
    prediction, without = predict([Sent(), unknown], **known), predict([Sent()], **known)
    assert prediction.model.not_modeled == (unknown,)
    np.testing.assert_array_equal(prediction.strong.total_seconds, without.strong.total_seconds)
    assert "NOT MODELED, so communication takes longer than shown: 3 x ragged-all-to-all" in str(
        prediction
    )
    assert "NOT MODELED" in prediction.figure().get_supxlabel()
    assert "NOT MODELED" not in str(without) + without.figure().get_supxlabel()


@pytest.mark.parametrize(("efficiency", "n"), [(0.5, 2), (10 / 11, 64), (10 / 11, 4096)])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_rows_for_an_efficiency_are_the_fewest_that_reach_it(kind, n, efficiency):
    sent = [Sent(), Sent(kind, operand_bytes=50, num_bytes=400)]
    prediction = predict(sent, **MOVIELENS, interconnect=ETHERNET_10G, fixed_seconds=1e-6)
    rows = prediction.rows_for(efficiency, n)

    def reached(rows):
        again = predict(sent, **MOVIELENS, interconnect=ETHERNET_10G, fixed_seconds=1e-6).model
        compute = again.compute_seconds(rows)
        return compute / (compute + again.communication_seconds(n, n * rows))

    assert rows > 1
    assert reached(rows) >= efficiency > reached(rows - 1)


def test_rows_for_says_when_no_number_is_enough():
    gathers = Sent("all-gather", operand_bytes=10**9, num_bytes=8 * 10**9)
    prediction = predict([gathers], **MOVIELENS, interconnect=ETHERNET_10G)
    with pytest.raises(ValueError, match="no number of rows makes compute 90.0% of a leapfrog on 64"):
        prediction.rows_for(0.9, 64)
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="efficiency is above 0 and below 1"):
            prediction.rows_for(wrong, 64)
    assert predict([], **MOVIELENS, interconnect=ETHERNET_10G).rows_for(0.99, 64) == 1


def test_a_straight_line_is_fitted_exactly_and_one_below_zero_goes_through_zero():
    """(1, 1), (2, 3): least squares through 0 has slope (1 + 6) / (1 + 4) = 1.4."""
    fit = fit_compute([(100, 0.5 + 100 * 2e-3), (400, 0.5 + 400 * 2e-3), (1000, 0.5 + 1000 * 2e-3)])
    assert fit.seconds_per_row == pytest.approx(2e-3)
    assert fit.fixed_seconds == pytest.approx(0.5)
    assert fit.largest_error < 1e-12
    fit = fit_compute([(1, 1.0), (2, 3.0)])
    assert (fit.seconds_per_row, fit.fixed_seconds) == (pytest.approx(1.4), 0.0)
    assert fit.largest_error == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([(10, 1.0)], "two different numbers of rows"),
        ([(10, 1.0), (10, 2.0)], "two different numbers of rows"),
        ([(10, 2.0), (20, 1.0)], "more rows are not slower"),
        ([(10, math.nan), (20, 1.0)], "rows and seconds are above 0"),
        ([(0, 1.0), (20, 1.0)], "rows and seconds are above 0"),
    ],
)
def test_measurements_that_give_no_line_are_refused(measured, message):
    with pytest.raises(ValueError, match=message):
        fit_compute(measured)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_rows": 0}, "num_rows is a whole number, 1 or more, not 0"),
        ({"num_rows": 2.5}, "num_rows is a whole number, 1 or more, not 2.5"),
        ({"seconds_per_row": 0.0}, "seconds_per_row is measured, above 0, not 0.0"),
        ({"seconds_per_row": math.nan}, "seconds_per_row .* not nan"),
        ({"fixed_seconds": -1.0}, "fixed_seconds is 0 or more, not -1.0"),
        ({"devices": []}, "devices: one whole number or more"),
        ({"devices": [1.5]}, "devices: one whole number or more"),
        ({"devices": [0, 1]}, "devices: growing numbers, 1 or more"),
        ({"devices": [4, 2]}, "devices: growing numbers, 1 or more"),
        ({"interconnect": []}, "an Interconnect, or several, the innermost first"),
        ({"interconnect": "ethernet"}, r"an Interconnect, or several, .* not \('ethernet',\)"),
        ({"interconnect": ["ethernet"]}, "an Interconnect, or several, the innermost first"),
        ({"interconnect": NVLINK_4}, "4,096 devices are more than NVLink 4"),
        ({"interconnect": [ETHERNET_10G, NVLINK_4]}, "each joins more devices than the one before it"),
        (
            {"traffic": [Sent(), Sent(operand_bytes=-1)]},
            r"traffic\[1\] \(all-reduce\): operand_bytes .* -1",
        ),
        ({"traffic": [Sent(runs=math.nan)]}, r"traffic\[0\] \(all-reduce\): runs is a number"),
        ({"traffic": [Sent(runs=None)]}, r"traffic\[0\] \(all-reduce\): runs is a number"),  # pyright: ignore
        ({"traffic": [Sent(group_size=0)]}, r"traffic\[0\] \(all-reduce\): group_size is 1 or more"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, message):
    right = {"traffic": [Sent()], **MOVIELENS, "interconnect": ETHERNET_10G}
    given = right | wrong
    with pytest.raises(ValueError, match=message):
        predict(given.pop("traffic"), **given)


def test_the_text_says_that_it_predicts_and_what_it_assumes():
    prediction = predict([Sent()], **MOVIELENS, interconnect=[TPU_V5E_ICI, TPU_DCN])
    text = str(prediction)
    assert text.startswith("PREDICTION, nothing was measured but compute")
    assert "1 x all-reduce of 622,608 bytes over data (compiled for 8)" in text
    for said in (
        "do not overlap",
        "contention",
        "ring and tree",
        "180 GB/s one way, 1 us, 2D torus, up to 256 devices",
        "6.25 GB/s one way, 100 us, any number of devices",
        "reduce-scatter inside, all-reduce across",
        "each side closed to a ring",
        *[phrase for link in (TPU_V5E_ICI, TPU_DCN) for phrase in link.source.split()],
    ):
        assert said in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 96
    own = predict([Sent()], **MOVIELENS, interconnect=ETHERNET_10G, all_reduce=tree_all_reduce)
    assert "All-reduce takes tree_all_reduce" in str(own)
    assert "torus" not in str(own)
    nothing = predict([], **MOVIELENS, interconnect=ETHERNET_10G)
    assert "sent: nothing (was the program compiled for one device?)" in str(nothing)


def test_the_table_has_a_row_for_each_number_of_devices():
    prediction = predict([Sent()], **MOVIELENS, interconnect=ETHERNET_10G)
    table = [line for line in str(prediction).splitlines() if line.count("|") == 2]
    assert len({line.index("|", 10) for line in table}) == 1  # Columns stand below each other.
    rows = [[cell.split() for cell in line.split("|")] for line in table[2:]]
    assert [int(row[0][0].replace(",", "")) for row in rows] == list(POWERS_OF_TWO)
    assert rows[1] == [
        ["2"],
        ["3,020", "15", "ms", "538", "us", "96.5%"],
        ["30", "ms", "538", "us", "98.2%"],
    ]


def test_seconds_in_words():
    words = [in_words(value) for value in (0, 2, 0.01234, 0.9996, 5e-10, 7200)]
    assert words == ["0 s", "2 s", "12.3 ms", "1 s", "0.5 ns", "7,200 s"]


def test_the_figure_shows_the_numbers_and_says_that_it_predicts():
    prediction = predict([Sent()], **MOVIELENS, interconnect=[NVLINK_4, INFINIBAND_NDR])
    figure, strong = prediction.figure(), prediction.strong
    assert figure.get_suptitle().startswith("PREDICTION, not a measurement")
    assert "NVLink 4 (H100), then InfiniBand NDR" in figure.get_suptitle()
    left, right = figure.axes
    assert left.get_xscale() == left.get_yscale() == "log"
    lines = {line.get_label(): np.asarray(line.get_xydata()).T for line in left.lines}
    np.testing.assert_allclose(lines["ideal"], [strong.devices, 0.03 / strong.devices])
    np.testing.assert_allclose(lines["compute"], [strong.devices, strong.compute_seconds])
    np.testing.assert_allclose(lines["total"], [strong.devices, strong.total_seconds])
    np.testing.assert_allclose(
        lines["communication"][1], strong.communication_seconds[1:]
    )  # Not the 0.
    efficiencies = {line.get_label(): np.asarray(line.get_ydata()) for line in right.lines}
    np.testing.assert_allclose(efficiencies["weak: 6,040 rows each"], prediction.weak.efficiency)
    np.testing.assert_allclose(efficiencies["strong: 6,040 rows in all"], strong.efficiency)
    said = " ".join(text.get_text().replace("\n", " ") for text in (*left.texts, *right.texts))
    assert "communication overtakes compute between 256 and 512 devices (about 341)" in said
    assert "NVLink 4 (H100) is full" in said
    assert plt.get_fignums() == []


@pytest.mark.parametrize("interconnect", [SWITCH, [NVLINK_4, INFINIBAND_NDR]])
@pytest.mark.parametrize("traffic", [[], [Sent()]])
@pytest.mark.parametrize("devices", [[1], [3], [1, 7, 4096]])
def test_figures_and_tables_are_drawn_for_any_devices(interconnect, traffic, devices):
    prediction = predict(traffic, **MOVIELENS, interconnect=interconnect, devices=devices)
    prediction.figure().canvas.draw()
    assert f"{devices[-1]:,} |" in str(prediction)
