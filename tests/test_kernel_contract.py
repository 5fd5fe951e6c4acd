"""What every kernel keeps: one chain on every mesh, one all-reduce a gradient, data as arguments.

That draws are the target's is in test_invariance.py; what a kernel has of its own is in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    CHAINS,
    MESHES,
    NUM_ROWS,
    OTHER_KINDS,
    PRECISION,
    VARIANCES,
    hierarchy,
    hierarchy_starts,
    mesh_of,
    quartic,
    quartic_and_constant,
    row_spec,
    split_leaves,
    steep,
    undefined_above_one,
)

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Transition
from gspmd_mcmc.kernels.integrators import LEAPFROG, MINIMAL_NORM
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.run_state import advance_chains as advance
from gspmd_mcmc.sampling.run_state import draw_kernel
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.targets import local

GRADIENT = 2  # numbers: of the shared latents of `hierarchy`
MARKS = 5  # of NUTS with trees of depth 6


class Case(NamedTuple):
    """A kernel, and what is particular to it.

    Attributes
    ----------
    make
        ``make(target, step_size, metric)``.
    step_size
        That suits `hierarchy`.
    limits
        For each loop, the numbers that its one all-reduce may send for a chain; of `MESH`.
    steps_of_divergence
        Gradients of step number 0 with a step size that is far too large.
    bad
        Arguments that are refused, and what the error says.
    """

    make: Callable[..., Any]
    step_size: float
    limits: dict[str, int]
    steps_of_divergence: int
    bad: tuple[tuple[dict, str], ...]


def hmc(target, step_size, metric=None, **options):
    options = {"num_integration_steps": 6, "inverse_mass_matrix": metric} | options
    return gm.HMC(target, step_size, **options)


def jittered_hmc(target, step_size, metric=None, **options):
    options = {"trajectory_length": 4 * step_size, "inverse_mass_matrix": metric} | options
    return gm.JitteredHMC(target, step_size, **options)


def nuts(target, step_size, metric=None, **options):
    settings: Any = {"max_tree_depth": 6} | options
    return gm.NUTS(target, step_size, metric, **settings)


def mams(target, step_size, metric=None, **options):
    options = {"trajectory_length": 4 * step_size, "splitting": LEAPFROG} | options
    return gm.MAMS(target, step_size, inverse_mass_matrix=metric, **options)


def mclmc(target, step_size, metric=None, **options):
    options = {"trajectory_length": 4 * step_size, "splitting": LEAPFROG} | options
    return gm.MCLMC(target, step_size, inverse_mass_matrix=metric, **options)


NO_LENGTH = ({"trajectory_length": 0.0}, "trajectory_length: expected a positive number")
NO_SPLITTING = ({"splitting": "leapfrog"}, "splitting: expected gspmd_mcmc.LEAPFROG")
NO_JITTER = ({"jitter": 1.5}, "jitter: expected a number between 0 and 1, got 1.5")
DEPTH = "max_tree_depth: expected an integer"
CASES = {
    "HMC": Case(hmc, 0.2, {"leapfrog": GRADIENT}, 6, (NO_JITTER, NO_SPLITTING)),
    "HMC, minimal norm": Case(
        *(partial(hmc, splitting=MINIMAL_NORM), 0.3, {"leapfrog": GRADIENT}, 12, ())
    ),
    "JitteredHMC": Case(
        *(jittered_hmc, 0.2, {}, 4),  # its meshes are in test_chees.py
        (
            *(NO_LENGTH, NO_JITTER, NO_SPLITTING),
            ({"max_leapfrogs": 0}, "max_leapfrogs: expected at least 1 and whole"),
        ),
    ),
    # A leaf's energy, its p·v and the products of two marks; all marks once in eight leaves.
    "NUTS": Case(
        *(nuts, 0.13),
        {"leapfrog": GRADIENT + 4 + 9, "block": 4 * MARKS, "doubling": 8},
        1,
        tuple(({"max_tree_depth": x}, f"{DEPTH} from 1 to 20, got {x}") for x in (0, 2.5, True)),
    ),
    # p·p, p·g and g·g of local latents.
    "MAMS": Case(
        *(mams, 0.8, {"leapfrog": GRADIENT + 3}, 4),
        (NO_LENGTH, NO_JITTER, NO_SPLITTING, ({"trajectory_length": jnp.inf}, NO_LENGTH[1])),
    ),
    # A step is no loop; momentum, gradient and noise where it sets out and where it arrives; a sum.
    "MCLMC": Case(mclmc, 0.8, {"steps": GRADIENT + 2 * 6 + 2}, 1, (NO_LENGTH, NO_SPLITTING)),
}  # fmt: skip
KERNELS = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ON_A_MESH = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.limits])
MESH = "2x4"  # to compare with one device


@jax.jit
def init(kernel, position):
    return kernel.init(position)


@jax.jit
def step(kernel, rng_key, state):
    """Step number 0 of one chain."""
    drawn, key = draw_kernel(kernel, rng_key, jnp.int32(0))
    return drawn.step(key, state)


# Local latents whose rows no mesh divides


def ten_steps(layout, kernel, states):
    def one(states, i):
        states, info = advance(kernel, jax.random.key(0), i, states, layout)
        positions = local.arrays(states.position)
        return states, (info.num_integration_steps, info.is_accepted, positions)

    with jax.named_scope("steps"):
        return jax.lax.scan(one, states, jnp.arange(10))[1]


def start_on(name: str, mesh: str, moved_row: int | None = None) -> Any:
    """Lay out chains; return the layout, the kernel and the states."""
    target, starts = hierarchy(mesh, moved_row), hierarchy_starts()
    layout = read_layout(mesh_of(mesh), target, starts, CHAINS, has_chains=True)
    kernel = CASES[name].make(target, CASES[name].step_size)
    return layout, kernel, init_chains(kernel, starts, layout=layout)


@cache
def program_on(name: str, mesh: str, is_double: bool = True) -> Any:
    with jax.enable_x64(is_double):
        layout, kernel, states = start_on(name, mesh)
        return jax.jit(partial(ten_steps, layout)).lower(kernel, states).compile()


@cache
def run_on(name: str, mesh: str, is_double: bool = True, moved_row: int | None = None) -> Any:
    """Lengths, acceptance [steps, chains] and padded positions."""
    with jax.enable_x64(is_double):
        _, kernel, states = start_on(name, mesh, moved_row)
        return jax.tree.map(np.asarray, program_on(name, mesh, is_double)(kernel, states))


def check_same_chains(name, mesh, tolerance=1e-9, is_double=True, moved_row=None):
    lengths, accepted, expected = run_on(name, "1", is_double)
    assert np.mean(accepted) > 0.5 and np.ptp(expected["mean"], axis=0).min() > 0.1
    assert np.ptp(lengths) > 2 or name in ("HMC", "HMC, minimal norm", "MCLMC")
    got_lengths, got_accepted, got = run_on(name, mesh, is_double, moved_row)
    np.testing.assert_array_equal(got_lengths, lengths)
    np.testing.assert_array_equal(got_accepted, accepted)
    pad, real = got["effect"][:, :, NUM_ROWS:], got["effect"][:, :, :NUM_ROWS]
    assert pad.shape[2] > 0 and np.ptp(pad, axis=0).max() == 0 and np.ptp(real, axis=0).min() > 0
    for leaf, values in (got | {"effect": real}).items():
        np.testing.assert_allclose(values, expected[leaf], rtol=tolerance, atol=tolerance)


@ON_A_MESH
def test_chains_are_the_same_on_a_mesh_and_their_pad_does_not_move(name):
    check_same_chains(name, MESH)


@pytest.mark.parametrize("mesh", ["7", "data and model"])
def test_hmc_is_the_same_on_meshes_of_other_forms(mesh):
    check_same_chains("HMC", mesh)


def test_hmc_in_float32_is_the_same_to_rounding():
    check_same_chains("HMC", MESH, tolerance=1e-4, is_double=False)


def test_a_chain_on_data_that_differ_in_one_row_is_rejected():
    with pytest.raises(AssertionError):
        check_same_chains("HMC", MESH, tolerance=1e-4, moved_row=NUM_ROWS - 1)


@ON_A_MESH
def test_a_gradient_costs_one_all_reduce_products_included(name):
    found, limits = gm.communication(program_on(name, MESH)), CASES[name].limits
    assert [kind for kind in OTHER_KINDS if found.count(kind)] == []
    gradients = next(iter(limits))
    times = sum(c.loops[-1].name == gradients for c in found.collectives if c.loops)
    assert found.runs("all-reduce", within=gradients) == times
    chains = CHAINS // MESHES[MESH]["chains"]
    for loop, numbers in limits.items():
        inside = [c for c in found.collectives if c.loops and c.loops[-1].name == loop]
        over_data = [c for c in inside if c.axes == ("data",)]
        # A step of MCLMC has a gradient's, and two of scalars.
        assert 1 <= len(over_data) <= (3 if loop == "steps" else 1), loop
        assert sum(c.num_bytes for c in over_data) <= 8 * chains * numbers, loop
        # Chains over the mesh ask once a leapfrog whether any goes on.
        asks = [("chains",), 1] if name == "NUTS" else []
        assert [x for c in inside if c not in over_data for x in (c.axes, c.num_bytes)] == asks, loop


@pytest.mark.parametrize(
    ("name", "adaptation", "num_bytes"),
    [
        ("MAMS", gm.MAMSAdaptation(metric=gm.Diagonal()), [12, 12]),
        ("MCLMC", gm.MCLMCAdaptation(metric=gm.Diagonal()), [None, 20]),
    ],
)
def test_tuning_adds_one_all_reduce_of_scalars_to_a_step(name, adaptation, num_bytes):
    """In the burn-in by HMC, and after it."""
    layout, kernel, states = start_on(name, MESH)

    def pinned(state):
        return layout.pin(state, tree.roles(state, layout.treedef))

    zeros = jnp.zeros(CHAINS)
    info = gm.Info(zeros, zeros > 0, zeros > 0, zeros, zeros, zeros)
    info = layout.pin(info, tree.roles(info, layout.treedef, of_each_chain=True))
    transition = Transition(states, states, info, None)
    kernel = jax.jit(adaptation.prepare)(kernel, states)
    burn_in, own = (stage.adaptation for stage in adaptation.stages(200))
    assert type(burn_in) is not type(own)
    for tuning, expected in zip((burn_in, own), num_bytes, strict=True):
        state = jax.jit(lambda kernel, states, t=tuning: pinned(t.init(kernel, states)))(kernel, states)
        updated = jax.jit(lambda kernel, state, step, t=tuning: pinned(t.update(state, kernel, step)))
        found = gm.communication(updated, kernel, state, transition)
        if expected is not None:
            assert [(c.kind, c.num_bytes) for c in found.collectives] == [("all-reduce", expected)]


# Chains side by side, and numbers of a kernel


def quartic_kernel(case, step_size=0.2, target=None):
    target = gm.LogDensity(quartic, jnp.asarray(PRECISION, jnp.float32)) if target is None else target
    return case.make(target, step_size, split_leaves(VARIANCES.astype(np.float32)))


START = split_leaves(np.array([1, -1, 0.1], np.float32))


@KERNELS
def test_a_chain_does_not_depend_on_the_chains_beside_it(case):
    kernel = quartic_kernel(case)
    positions = split_leaves(np.random.default_rng(7).normal(size=(8, 3)).astype(np.float32) * 0.3)
    keys = jax.random.split(jax.random.key(0), 8)
    states = jax.jit(jax.vmap(type(kernel).init, (None, 0)))(kernel, positions)
    together, info = jax.jit(jax.vmap(step, (None, 0, 0)))(kernel, keys, states)
    for i in range(8):
        alone, info_alone = step(kernel, keys[i], jax.tree.map(lambda x, i=i: x[i], states))
        assert info_alone.num_integration_steps == info.num_integration_steps[i]
        np.testing.assert_allclose(alone.position["a"], together.position["a"][i], rtol=1e-4, atol=1e-5)


@KERNELS
def test_another_step_size_or_metric_compiles_nothing_anew(case):
    kernel = quartic_kernel(case)
    state = init(kernel, START)
    ends = [step(kernel, jax.random.key(0), state)[0].position["b"]]
    before = step._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    metric = jax.tree.map(lambda m: 2 * m, kernel.inverse_mass_matrix)
    for other in (kernel.with_step_size(0.02), kernel.with_inverse_mass_matrix(metric)):
        ends.append(step(other, jax.random.key(0), state)[0].position["b"])
    assert step._cache_size() == before  # pyright: ignore[reportAttributeAccessIssue]
    assert len({float(x) for x in ends}) == 3


def mean_of_rows(x, rows):
    return -0.5 * x**2, -jnp.mean(rows) * x


@KERNELS
def test_a_program_that_closes_over_a_kernel_with_much_data_is_refused(case):
    kernel = case.make(gm.LogDensity(mean_of_rows, jnp.ones(300_000)), 0.1)
    state = init(kernel, jnp.zeros(2))
    drawn = kernel.with_jitter(jax.random.key(0), jnp.int32(0))
    with pytest.raises(ValueError, match=r"1\.2 MB .* the kernel an argument"):
        jax.jit(drawn.step)(jax.random.key(0), state)
    with pytest.raises(ValueError, match=r"1\.2 MB .* the kernel an argument"):
        jax.jit(kernel.init)(jnp.zeros(2))
    step(kernel, jax.random.key(0), state)


# A state's arrays are its own


@gm.pytree
@dataclass(frozen=True, eq=False)
class Borrowed(gm.Target):
    """Terms that are the position's own arrays, twice, and a gradient that is its data."""

    data: Any

    def terms(self, position):
        return position, position

    def terms_and_grad(self, position):
        return self.terms(position), self.data


STEP_IN_PLACE = jax.jit(lambda kernel, key, state: kernel.step(key, state), donate_argnums=2)


@KERNELS
@pytest.mark.parametrize("mesh", ["1", "8", "2x4", "mine"])
def test_a_step_that_takes_over_its_state_leaves_the_position_and_the_data(case, mesh):
    start = {n: jnp.array(x[0]) for n, x in hierarchy_starts().items()}
    if mesh == "mine":
        target = Borrowed(jax.tree.map(jnp.zeros_like, start))
    else:
        target = hierarchy(mesh)
        rows = gm.place(start["effect"], mesh_of(mesh), row_spec(MESHES[mesh]))
        start = gm.place(start, mesh_of(mesh)) | {"effect": rows}
    kernel = case.make(target, case.step_size)
    held = jax.tree.leaves((start, kernel))
    before = jax.tree.map(np.asarray, held)
    state = kernel.init(start)
    STEP_IN_PLACE(kernel, jax.random.key(0), state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.position))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, held), before)


@KERNELS
def test_no_program_copies_its_first_state(case):
    kernel = case.make(hierarchy("8"), case.step_size)
    position = {n: x[0] for n, x in hierarchy_starts().items()}
    program = jax.make_jaxpr(lambda kernel, x: kernel.init(x))(kernel, position)
    assert " copy " not in str(program)


# What a step reports


@KERNELS
def test_divergence_is_reported_and_the_draw_stays_finite(case):
    kernel = case.make(gm.LogDensity(steep), 30.0)
    state, info = step(kernel, jax.random.key(0), init(kernel, jnp.full(3, -2.0)))
    assert info.is_divergent and info.acceptance_rate == 0 and not info.is_accepted
    if isinstance(kernel, gm.NUTS):
        assert not info.is_turning and info.energy_error == 0
    assert np.all(np.asarray(state.position) == -2.0)
    assert info.num_integration_steps == case.steps_of_divergence


@KERNELS
def test_an_infinite_log_density_is_a_divergence_and_is_never_entered(case):
    kernel = case.make(gm.LogDensity(undefined_above_one), 0.5)
    state, seen = init(kernel, jnp.full(2, 0.5)), []
    for i in range(30):
        state, info = step(kernel, jax.random.key(i), state)
        seen.append(bool(info.is_divergent))
        assert np.all(np.asarray(state.position) <= 1) and np.isfinite(state.log_density)
        assert 0 <= info.acceptance_rate <= 1
    assert any(seen) and not all(seen)


@KERNELS
def test_a_float32_log_density_of_millions_makes_the_same_steps(case):
    """A summand of -2.2e7, whose float32 neighbors are 2 nats away, must not show in any weight."""
    data = (jnp.asarray(PRECISION, jnp.float32), jnp.float32(-2.2e7))
    plain = quartic_kernel(case)
    large = tree.replace(plain, target=gm.LogDensity(quartic_and_constant, *data))
    state, other, errors = init(plain, START), init(large, START), []
    for i in range(5):
        state, info = step(plain, jax.random.key(i), state)
        other, other_info = step(large, jax.random.key(i), other)
        assert info.num_integration_steps == other_info.num_integration_steps
        np.testing.assert_allclose(other_info.energy_error, info.energy_error, atol=1e-5)
        np.testing.assert_allclose(other.position["a"], state.position["a"], rtol=1e-4, atol=1e-5)
        errors.append(abs(float(info.energy_error)))
    assert other.log_density < -2e7 and max(errors) > 1e-4


# Errors


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, *bad) for name, case in CASES.items() for bad in case.bad]
    + [
        (name, *bad)
        for name in CASES
        for bad in (
            ({"step_size": 0.0}, "step_size: expected a positive number, got 0.0"),
            ({"metric": jnp.zeros(3)}, "expected positive variances"),
            ({"target": quartic}, "wrap a function as gspmd_mcmc.LogDensity"),
        )
    ],
)
def test_bad_arguments_are_refused(name, arguments, message):
    given = {"target": gm.LogDensity(steep), "step_size": 0.1} | arguments
    with pytest.raises((ValueError, TypeError), match=message):
        CASES[name].make(**given)


@KERNELS
def test_a_metric_of_other_shapes_and_a_bad_start_are_refused(case):
    kernel = case.make(gm.LogDensity(steep), 0.1, jnp.ones(2))
    with pytest.raises(ValueError, match="inverse_mass_matrix: expected a tree of shapes"):
        kernel.init(jnp.zeros(3))
    with pytest.raises(gm.NonFiniteStart, match="position .the whole. has 1 values"):
        kernel.init(jnp.asarray([jnp.nan, 0]))


@pytest.mark.parametrize("name", ["MAMS", "MCLMC"])
def test_one_dimension_is_refused(name):
    with pytest.raises(ValueError, match="expected two dimensions at least, got 1"):
        CASES[name].make(gm.LogDensity(steep), 0.1).init(jnp.zeros(1))
