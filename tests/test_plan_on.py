"""Plans by a chip's own compiler: what needs no such compiler. With them: tests/chips."""

import functools
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.planning import aot_compilation, aot_process, topologies
from gspmd_mcmc.planning.topologies import CHIPS, Gpu, Tpu, chip_of
from gspmd_mcmc.planning.work import work_of
from gspmd_mcmc.views.program.hlo import read_program

PLAN: Any = sys.modules[gm.plan.__module__]
S = jax.ShapeDtypeStruct
H100: Any = CHIPS["H100"]


def logistic_likelihood(params, block):
    return gm.bernoulli_logits(block["x"] @ params["w"], block["y"])


def step(mesh, seen=None):
    data = gm.place({"x": S((64, 3), jnp.float32), "y": S((64,), bool)}, mesh, P("data"))
    target = gm.Posterior(lambda p: -0.5 * p["w"] ** 2, gm.Plate(logistic_likelihood, data))
    kernel = gm.HMC(target, 0.1, 3)
    if seen is not None:
        seen.append((target.platform, kernel.gradient_precision))
    state = jax.eval_shape(gm.HMC.init, kernel, {"w": S((3,), jnp.float32)})
    return gm.HMC.step, kernel, jax.random.key(0), state


knows_chips = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="on= is refused before JAX 0.10.2, which knows chips that are not there",
)


@pytest.fixture
def installed(monkeypatch):
    """All compilers, as far as anyone can tell."""
    monkeypatch.setattr(topologies, "require", lambda *modules, extra: None)


@pytest.fixture
def on_virtual_devices(monkeypatch, installed):
    """Compile for the CPU what was to be compiled for a chip; what was asked for is kept."""
    asked = []
    export_as_asked = jax.export.export

    def export(function, platforms, disabled_checks):
        asked.append(platforms)
        return export_as_asked(function, platforms=["cpu"], disabled_checks=disabled_checks)

    def compiled(program, options, inner=aot_compilation._compile):
        asked.append(options["topology"])
        return inner(program, options | {"topology": None})

    monkeypatch.setattr(aot_compilation.export, "export", export)
    monkeypatch.setattr(aot_compilation, "_compile", compiled)
    return asked


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"on": "TPU v9"}, "on='TPU v9': expected one of TPU v2, TPU v3, "),
        ({"on": 8}, "on=8: expected one of TPU v2"),
        ({"on": ""}, "on='': expected one of TPU v2"),
        ({"on": "4 x H100"}, 'on="4 x H100": the mesh has 8 devices'),
        (
            {"on": "TPU v5e", "data": 512},
            "512 devices, and there is no such machine; there are those of 1,",
        ),
        (
            {"on": "TPU v3", "data": 3},
            "there are those of 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1,024",
        ),
        ({"on": "H100", "data": 12}, "there are those of 1 to 8, and whole hosts of 8"),
        ({"on": "H100", "accelerator": "H200"}, "give one of them"),
    ],
)
def test_a_chip_that_cannot_be_asked_is_refused_before_anything_is_built(given, says, installed):
    with pytest.raises(ValueError, match=re.escape(says)):
        gm.plan(lambda mesh: pytest.fail("built"), **({"data": 8} | given))


@pytest.mark.parametrize(
    ("on", "module", "extra"),
    [
        ("TPU v3", "libtpu", "tpu"),
        ("8 x H100", "jax_cuda12_plugin", "cuda"),
        ("H100", "nvidia", "cuda"),
    ],
)
def test_a_compiler_that_is_missing_is_named_with_what_brings_it(on, module, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else name)
    with pytest.raises(
        ImportError, match=re.escape(f"{module} is missing: pip install 'gspmd_mcmc[{extra}]'")
    ):
        gm.plan(step, data=8, on=on)


def test_an_older_jax_says_which_is_needed(monkeypatch, installed):
    monkeypatch.setattr(PLAN, "AbstractDevice", lambda device_kind, num_cores: None)
    with pytest.raises(ImportError, match="jax 0.10.2 or later is needed"):
        gm.plan(step, data=8, on="TPU v3")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_number_of_devices_has_a_topology_of_at_least_as_many(chip):
    assert chip_of(chip.name) == (None, chip)
    assert chip_of(f"16 x {chip.name}") == chip_of(f"16x{chip.name}") == (16, chip)
    sizes = [n for n in range(1, 10_000) if chip.shape(n)]
    assert {1, 2, 4, 8, 16, 256} <= set(sizes)
    told = f"{sizes[-1]:,}" if isinstance(chip, Tpu) else "whole hosts"
    assert told in chip.sizes
    for size in sizes:
        topology = chip.topology(size)
        shape = topology["topology_name"].partition(":")[2] or topology["topology"]
        chips = math.prod(int(n) for n in shape.split("x"))
        devices = chips * getattr(chip, "devices_of_chip", 1)
        assert devices == size or (size == 1 and devices == 2)
        json.dumps(topology)  # It goes to another process.


def test_a_card_is_described_by_its_own_figures():
    texts = [chip.target_config() for chip in CHIPS.values() if isinstance(chip, Gpu)]
    assert len(set(texts)) == len(texts)
    fields = dict(re.findall(r"(\w+): ([\w.]+)", H100.target_config()))
    assert fields["core_count"] == "132"
    assert fields["shared_memory_per_block_optin"] == "232448"
    assert float(fields["memory_bandwidth"]) == pytest.approx(3.35e12, rel=1e-2)
    assert {text.count("{") - text.count("}") for text in texts} == {0}


@knows_chips
@pytest.mark.parametrize(
    ("on", "platforms", "topology", "seen"),
    [
        ("TPU v3", ["tpu"], "v3:2x2", ("tpu", "bfloat16_3x")),
        ("8 x H100", ["cuda"], "topology", ("gpu", "tensorfloat32")),
    ],
)
def test_a_program_is_built_and_exported_for_the_chip(
    on, platforms, topology, seen, on_virtual_devices
):
    """The target chooses as it would there: products of the chip's precision."""
    found = []
    planned = gm.plan(functools.partial(step, seen=found), data=8, on=on)
    assert found == [seen]
    assert on_virtual_devices[0] == platforms
    assert on_virtual_devices[1]["topology_name"] == topology
    assert planned.chip is chip_of(on)[1]
    assert planned.fits
    assert planned.report.runs("all-reduce", "leapfrog") == 1
    assert f"by the {'TPU' if 'TPU' in on else 'compiler for the H100'}" in str(planned)
    is_guess = "Kernels are predicted" in " ".join(str(planned).split())
    assert is_guess == ("H100" in on)


@knows_chips
@pytest.mark.parametrize("on", ["TPU v3", "H100"])
def test_while_a_program_is_traced_the_context_is_the_chip(on, on_virtual_devices):
    """By that JAX 0.11 knows for which card a kernel is."""
    kinds = []

    def build(mesh):
        def traced(x):
            context: Any = jax.sharding.get_abstract_mesh()
            kinds.append(context.abstract_device.device_kind)
            return x + 1

        return traced, gm.place(jax.ShapeDtypeStruct((8,), jnp.float32), mesh, P())

    chip = gm.plan(build, data=1, on=on).chip
    assert chip is not None and kinds and set(kinds) == {chip.device_kind}


@knows_chips
def test_a_program_that_the_compiler_refuses_does_not_fit(monkeypatch, installed):
    def compiled(program, options, inner=aot_compilation._compile):
        if options["topology"] is None:
            return inner(program, options)
        raise aot_compilation.Refused("Ran out of memory: 20.00G exceeds 15.48G")

    monkeypatch.setattr(aot_compilation, "_compile", compiled)
    planned = gm.plan(step, data=8, on="TPU v3")
    assert planned.fits is False
    text = " ".join(str(planned).split())
    assert "DOES NOT FIT: the TPU v3's own compiler refuses it. Ran out of memory: 20.00G" in text
    assert "for virtual CPU devices" in text  # The rest is not the chip's.


@knows_chips
def test_what_a_card_has_not_is_found_in_the_compilers_figures(on_virtual_devices, monkeypatch):
    small = Gpu(**{**vars(CHIPS["H100"]), "memory": 100})
    monkeypatch.setitem(CHIPS, "H100", small)
    planned = gm.plan(step, data=8, on="H100")
    assert planned.fits is False
    assert "DOES NOT FIT: at most" in str(planned)


def test_a_refusal_reaches_the_parent_and_an_assembly_too(monkeypatch, tmp_path):
    """What the other process writes is read: a refusal raises, and no other error is one."""
    # Of a kernel, thousands of allocations follow.
    written = {"refusal": "RESOURCE_EXHAUSTED: Ran out of memory on HBM.\n\n  1. Size: 2.38M\n" * 2}

    class Done:
        returncode = 0

    def run(command, **options):
        (Path(command[-1]) / "compiled.json").write_text(json.dumps(written))
        is_for_chip = json.loads((Path(command[-1]) / "options.json").read_text())["topology"]
        flags = options["env"].get("XLA_FLAGS", "")
        for flag in ("--xla_gpu_autotune_level=0", "--xla_dump_emitter_re=ptx"):
            assert (flag in flags) == bool(is_for_chip)
        return Done()

    monkeypatch.setattr(aot_compilation.subprocess, "run", run)
    options = {"axes": {"data": 8}, "donated": [], "topology": CHIPS["TPU v3"].topology(8)}
    with pytest.raises(aot_compilation.Refused, match=r"^Ran out of memory on HBM\.$"):
        aot_compilation._compile(b"", options)
    written = {"text": "", "assembly": []}
    with pytest.raises(RuntimeError, match="left no assembly, without which no atomic operation"):
        aot_compilation._compile(b"", options | {"topology": CHIPS["H100"].topology(8)})
    written = {"text": "", "assembly": ["atom"]}
    assert aot_compilation._compile(b"", options | {"topology": None})["assembly"] == ["atom"]


KERNEL_OF_A_TPU = """HloModule jit_f, is_scheduled=true, num_partitions=1

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %other.1 = f32[8,128]{1,0} fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"7"}
  ROOT %mine.2 = f32[8,128]{1,0} custom-call(%other.1), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUzv"}}
}
"""


def schedule(*loops, waits=0):
    """Write a schedule as a TPU's compiler does: two bundles and a wait around each loop.

    A loop is given by marks, what its first bundle says besides, its bundles, and its last bundle.
    """
    lines = ["     0   :  { %s0 = inlined_call_operand.hbm }", "   0x1   :  { %1 = sst }"]
    for marks, first, num, last in loops:
        lines += [f"   0x2 LB: {marks} {{ %2 = smov 0 {first} }}"]
        lines += [f"   0x3   : {marks} {{ %v1 = vadd.f32 1.0, %v2 }}"] * (num - 2 - waits)
        lines += ["   0x4   :  { } /* End region 1 */"] * waits
        lines += [f"   0x5   : {marks} {{ %p1 = scmp.ge.s32.totalorder %s1{last} }}"]
    return "LB: loop body\n" + "\n".join([*lines, "   0x6   :  { %3 = shalt.err }"])


GRID = ("> ", "/* phi copy :: iteration index, stage = 0 */", 100, ", 12 /* loop exit test */")
OF_STRIPS = (">> ", "", 30, ", 5 /* loop exit test */")
TWO = (">", "", 30, OF_STRIPS[3]), (">", "", 20, ", 3 /* loop exit test */")
SCHEDULE = {
    "17-mine.2-01-schedule-analysis_packed-bundles-post-ra.txt": "\ttotal scheduled bundles:    250\n",
    "17-mine.2-00-packed-bundles-post-ra.txt": schedule(GRID),
    "18-mine.21-00-packed-bundles-post-ra.txt": "",
}


def of_kernel(*loops, waits=0):
    return SCHEDULE | {"17-mine.2-00-packed-bundles-post-ra.txt": schedule(*loops, waits=waits)}


@pytest.mark.parametrize(
    ("left", "cycles"),
    [
        (SCHEDULE, 7 + 3 + 1000),  # two of twelve steps only fetch or write back
        (of_kernel(GRID, waits=40), 7 + 3 + 1000),
        (of_kernel(), 7 + 3),
        # Loops of its own: in the grid's, after one another, and one whose rounds nobody knows.
        (of_kernel((*GRID[:2], 100, GRID[3]), OF_STRIPS), 7 + 3 + 10 * (100 + 5 * 30)),
        (
            of_kernel((">", "", 30, OF_STRIPS[3]), (">", "", 20, ", 3 /* loop exit test */")),
            7 + 3 + 210,
        ),
        (of_kernel((*OF_STRIPS[:3], "")), 7),
        ({"17-mine.2-00-packed-bundles-post-ra.txt": schedule(GRID).replace("LB:", "  :")}, 7),
        ({"17-mine.2-00-packed-bundles-post-ra.txt": "of another form"}, 7),
        ({}, 7),
        (SCHEDULE | {"19-mine.2-00-packed-bundles-post-ra.txt": "of another module"}, 7),
    ],
)
def test_the_cycles_of_a_tpu_s_kernel_are_those_of_its_schedule(left, cycles, tmp_path):
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    text = aot_process._with_cycles(KERNEL_OF_A_TPU, tmp_path)
    work = work_of(read_program(text))
    assert work.estimated_cycles == cycles
    assert work.is_counted == (cycles > 7)
