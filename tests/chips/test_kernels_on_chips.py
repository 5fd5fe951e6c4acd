"""Every kernel on the notebook's two models at full size, for chips, by their own compilers."""

from typing import Any

import audit
import programs
import pytest

import gspmd_mcmc as gm

# What a device may need in MB, by model: of NUTS, and of every other kernel. NUTS reads terms and
# gradients in one pass, in which a likelihood has kernels on GPUs alone. On TPUs its products of bytes
# are exact there, and take more memory than the plain expression's.
V3 = {
    **{"mnist": (24, 14), "mnist in a kernel": (26, 15)},
    **{"movielens": (140, 68), "movielens in kernels": (140, 61)},
}
V3_IN_TWO = {
    **{"mnist": (39, 18), "mnist in a kernel": (41, 19)},
    **{"movielens": (92, 40), "movielens in kernels": (92, 45)},
}
V5E_IN_TWO = {
    **{"mnist": (20, 17), "mnist in a kernel": (22, 17)},
    **{"movielens": (42, 14), "movielens in kernels": (42, 14)},
}
CARDS = {
    **{"mnist": (63, 86), "mnist in a kernel": (37, 34)},
    **{"movielens": (95, 65), "movielens in kernels": (72, 61)},
}
PLACES: dict[str, Any] = {
    "8 TPU v3": ("TPU v3", {"data": 8}, V3),
    "2 x 4 TPU v3": ("TPU v3", {"chains": 2, "data": 4}, V3_IN_TWO),
    "2 x 4 TPU v5e": ("TPU v5e", {"chains": 2, "data": 4}, V5E_IN_TWO),
    "8 H100": ("8 x H100", {"data": 8}, CARDS),
}
PODS: dict[str, Any] = {
    "256 TPU v5e": ("TPU v5e", {"data": 256}),
    "1,024 TPU v5p": ("TPU v5p", {"data": 1024}),
}
# What has no loop of leapfrogs, and its gradients a step.
GRADIENTS = {"MCLMC": 2}
MB = 10**6


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=[pytest.mark.quick] * (k == "HMC")) for k in programs.KERNELS]
)
@pytest.mark.parametrize("model", programs.MODELS)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_right_on_chips(place, model, kernel):
    on, axes, most = PLACES[place]
    build = programs.build(model, kernel)
    plan = gm.plan(build, on=on, **axes)
    megabytes = most[model][0 if kernel == "NUTS" else 1]
    print(place, model, kernel, plan.report.peak_bytes / MB)
    assert audit.violations(build, plan, megabytes * MB, GRADIENTS.get(kernel)) == []


@pytest.mark.parametrize("model", programs.MODELS)
@pytest.mark.parametrize("place", PODS)
def test_a_step_is_right_on_a_pod(place, model):
    on, axes = PODS[place]
    build = programs.build(model, "HMC")
    plan = gm.plan(build, on=on, **axes)
    assert audit.violations(build, plan, 16 * MB) == []
    assert {c.group_size for c in plan.report.collectives} == {axes["data"]}


@pytest.mark.parametrize("model", programs.MODELS)
def test_a_step_on_one_card_sends_nothing(model):
    build = programs.build(model, "HMC", num_chains=1)
    plan = gm.plan(build, on="H100", data=1)
    assert plan.report.collectives == plan.report.unknown == plan.atomics() == ()
    assert plan.fits
    assert plan.work("leapfrog").bytes_moved > plan.data_bytes > 2 * 10**7
    text = " ".join(str(plan).split())
    assert "times that is moved" in text
    assert "kernels are predicted" in text.lower()


CHIPS_OF_ALL_KINDS = {
    "TPU v2": 8,
    "TPU v4": 4,
    "TPU v6e": 4,
    "A100 80GB": 8,
    "L4": 1,
    "H200": 2,
    "B200": 8,
}


@pytest.mark.parametrize("on", CHIPS_OF_ALL_KINDS)
def test_every_other_chip_has_a_compiler_here(on):
    plan = gm.plan(programs.build("mnist", "HMC"), on=on, data=CHIPS_OF_ALL_KINDS[on])
    assert plan.fits
    assert plan.report.unknown == ()
    best = plan.roofline("leapfrog")
    assert best.seconds > plan.data_bytes / best.throughput.memory_bandwidth
    assert plan.compiled is not None
    assert {c.times("leapfrog") for c in plan.report.collectives if c.loops} <= {1}


def test_terms_and_gradients_of_all_rows_are_not_there_at_the_same_time():
    """At a trajectory's end, in products of two precisions, each pass has arrays of all cells."""
    plan = gm.plan(programs.build("movielens", "HMC"), data=8, on="TPU v3")
    assert plan.report.peak_bytes < 50e6
