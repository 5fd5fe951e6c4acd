"""The No-U-Turn sampler: multinomial, iterative, one loop of leapfrogs.

A trajectory is doubled, forwards or backwards in time, until it turns. Doubling j adds a subtree of
2^j leaves, one leapfrog each; one flat loop takes the leapfrogs of all subtrees, so that of vmapped
chains none waits for another's subtree. U-turns are looked for in every balanced subtree, from O(log)
momenta: the tree is never held.

References
----------
Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 15 (2014); Betancourt, "A conceptual introduction to
Hamiltonian Monte Carlo", arXiv 1701.02434 (multinomial sampling, the generalised criterion, biased
progressive sampling); Phan, Pradhan and Jankowiak, arXiv 1912.11554, and Lao and Dillon, arXiv
2002.01184 (iterative trees); Stan's additional checks across adjacent subtrees.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import hmc, metrics, settings
from gspmd_mcmc.kernels.hmc import DIVERGENT_ENERGY_ERROR, HMCState
from gspmd_mcmc.kernels.integrators import PhasePoint, velocity_verlet_with_terms
from gspmd_mcmc.kernels.u_turns import Marks, mark, marks_to_check
from gspmd_mcmc.targets import checks, local
from gspmd_mcmc.tree import PyTree, pytree, set_fields, static

MOST_DOUBLINGS = 20


@pytree
@dataclass(frozen=True, eq=False)
class NUTSInfo:
    """What one transition did; every field is a scalar.

    Attributes
    ----------
    acceptance_rate
        The mean of min(1, exp(-energy error)) over all leaves that were visited.
    is_accepted
        Whether the chain moved.
    is_divergent, is_turning
        Whether an energy error over 1000, or not finite, ended the trajectory; whether a U-turn did.
        Where neither did, ``max_tree_depth`` was reached.
    energy
        The Hamiltonian where the transition ended, in nats.
    energy_error
        The Hamiltonian there less that of the start, in nats, summed over differences.
    num_integration_steps
        Leapfrogs, each one gradient.
    tree_depth
        Doublings that were kept: the next state was drawn from 2^tree_depth leaves.
    """

    acceptance_rate: jax.Array
    is_accepted: jax.Array
    is_divergent: jax.Array
    is_turning: jax.Array
    energy: jax.Array
    energy_error: jax.Array
    num_integration_steps: jax.Array
    tree_depth: jax.Array


@pytree
@dataclass(frozen=True, eq=False)
class Sample:
    """A leaf drawn from several by their weights exp(-energy error), and the sum of the weights."""

    position: PyTree
    log_density_grad: PyTree
    terms: PyTree
    energy_error: jax.Array
    log_weight: jax.Array


@pytree
@dataclass(frozen=True, eq=False)
class Trajectory:
    """A tree that grows: its two ends, what was drawn of it, and the subtree that is being added."""

    near: PhasePoint  # the end that moves
    far: PhasePoint
    is_forward: jax.Array
    sample: Sample
    momentum_sum: PyTree  # over the leaves of the tree, those of the new subtree left out
    depth: jax.Array  # doublings that were kept

    iteration: jax.Array  # of the loop: the same for all vmapped chains, and so never mapped
    new_sample: Sample
    new_momentum_sum: PyTree
    marks: Marks
    turned_at_first: jax.Array  # whether the tree and the new subtree's first leaf make a U-turn

    is_accepted: jax.Array
    is_divergent: jax.Array
    is_turning: jax.Array
    sum_acceptance_rate: jax.Array
    num_integration_steps: jax.Array

    @property
    def doubling(self) -> jax.Array:
        """Which doubling the next leaf belongs to: doubling j is iterations 2^j - 1 to 2^(j+1) - 2."""
        return 31 - jax.lax.clz(self.iteration + 1)

    @property
    def leaf(self) -> jax.Array:
        """The place of the next leaf in its doubling."""
        return self.iteration + 1 - (1 << self.doubling)


class Turns(NamedTuple):
    """Whether spans of leaves that end at the newest one make a U-turn."""

    within: jax.Array  # one of those that make the new subtree invalid
    across: jax.Array  # from the leaf before the new subtree
    whole: jax.Array  # from the far end of the tree


class Chance(NamedTuple):
    """The random numbers of a trajectory: of its doublings, and the key of its leaves."""

    is_forward: jax.Array  # [max_tree_depth]
    log_uniform: jax.Array  # [max_tree_depth]
    leaf_key: jax.Array


@pytree
@dataclass(frozen=True, eq=False, init=False)
class NUTS:
    """The multinomial No-U-Turn sampler.

    A pytree that holds its target, as `HMC` is: ``step = jax.jit(type(kernel).step)``, then
    ``state, info = step(kernel, rng_key, state)``. Another step size or metric compiles nothing anew.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or any pytree with `terms`, `grad` and `terms_and_grad`.
    step_size
        Of a leapfrog, in units of the metric.
    inverse_mass_matrix
        A tree like the position (diagonal), or None (identity).
    max_tree_depth
        Doublings of a trajectory at most, 1 to 20: no more than 2^max_tree_depth - 1 leapfrogs. A step
        holds 3 (max_tree_depth - 1) momenta. Static: another depth is another program.
    """

    target: Any
    step_size: jax.Array
    inverse_mass_matrix: PyTree | None
    max_tree_depth: int = static()

    def __init__(
        self,
        target: Any,
        step_size: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        max_tree_depth: int = 10,
    ):
        is_whole = isinstance(max_tree_depth, int | np.integer) and not isinstance(max_tree_depth, bool)
        if not is_whole or not 1 <= max_tree_depth <= MOST_DOUBLINGS:
            raise ValueError(
                f"NUTS: max_tree_depth: expected an integer from 1 to {MOST_DOUBLINGS}, got "
                f"{max_tree_depth!r}"
            )
        settings.require_target("NUTS", target)
        set_fields(
            self,
            target=target,
            step_size=settings.step_size_of("NUTS", step_size),
            inverse_mass_matrix=settings.metric_of("NUTS", target, inverse_mass_matrix),
            max_tree_depth=int(max_tree_depth),
        )

    def with_step_size(self, step_size: float | jax.Array) -> "NUTS":
        """Return the kernel with another step size; nothing compiles anew."""
        return tree.replace(self, step_size=settings.step_size_of("NUTS", step_size))

    def with_inverse_mass_matrix(self, inverse_mass_matrix: PyTree | None) -> "NUTS":
        """Return the kernel with another metric; from or to None is another program."""
        metric = settings.metric_of("NUTS", self.target, inverse_mass_matrix)
        return tree.replace(self, inverse_mass_matrix=metric)

    def one_leapfrog(self) -> "NUTS":
        """Return the kernel whose steps are one leapfrog: what a first step size is tried with."""
        return tree.replace(self, max_tree_depth=1)

    def drawn(self, rng_key: jax.Array) -> "NUTS":
        """Return the kernel of one step: nothing is drawn for all chains at once."""
        return self

    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`."""
        return hmc.init("NUTS", self.target, self.inverse_mass_matrix, position)

    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, NUTSInfo]:
        """One transition: a fresh momentum, a trajectory that ends at a U-turn, a draw from it."""
        checks.check_not_baked(self.target)
        momentum_key, trajectory_key = jax.random.split(rng_key)
        momentum = metrics.sample_momentum(momentum_key, self.inverse_mass_matrix, state.position)
        momentum = local.zero_pad(self.target, momentum)
        end = self.trajectory(self.chance(trajectory_key), state, momentum)

        energy = metrics.kinetic_energy(self.inverse_mass_matrix, momentum) - state.log_density
        info = NUTSInfo(
            acceptance_rate=end.sum_acceptance_rate / end.num_integration_steps,
            is_accepted=end.is_accepted,
            is_divergent=end.is_divergent,
            is_turning=end.is_turning,
            energy=energy + end.sample.energy_error,
            energy_error=end.sample.energy_error,
            num_integration_steps=end.num_integration_steps,
            tree_depth=end.depth,
        )
        proposal = HMCState(
            position=end.sample.position,
            log_density=tree.total(end.sample.terms),
            log_density_grad=end.sample.log_density_grad,
            terms=end.sample.terms,
        )
        return tree.where(end.is_accepted, proposal, state), info

    def chance(self, rng_key: jax.Array) -> Chance:
        """Draw the directions of the doublings and what chooses between old and new subtrees."""
        direction_key, choice_key, leaf_key = jax.random.split(rng_key, 3)
        shape = (self.max_tree_depth,)
        return Chance(
            is_forward=jax.random.bernoulli(direction_key, shape=shape),
            log_uniform=jnp.log(jax.random.uniform(choice_key, shape)),
            leaf_key=leaf_key,
        )

    def trajectory(self, chance: Chance, state: HMCState, momentum: PyTree) -> Trajectory:
        """Grow a tree from a state and a momentum until it turns, diverges, or is deep enough."""

        def grow(trajectory):
            return self._grow(chance, state, momentum, trajectory)

        begin = self._begin(chance, state, momentum)
        with jax.named_scope("leapfrog"):  # reports of a program's communication name the loop so
            return jax.lax.while_loop(lambda t: _any_chain(self._goes_on(t)), grow, begin)

    def _begin(self, chance: Chance, state: HMCState, momentum: PyTree) -> Trajectory:
        """Return the tree of one leaf."""
        zero, no, none = (
            jnp.zeros_like(state.log_density),
            jnp.zeros((), bool),
            jnp.zeros((), jnp.int32),
        )
        point = PhasePoint(state.position, momentum, state.log_density_grad)
        sample = Sample(state.position, state.log_density_grad, state.terms, zero, zero)
        num_marks = max(self.max_tree_depth - 1, 1)
        no_marks = jax.tree.map(lambda p: jnp.zeros((num_marks, *p.shape), p.dtype), momentum)
        return Trajectory(
            near=point,
            far=point,
            is_forward=chance.is_forward[0],
            sample=sample,
            momentum_sum=momentum,
            depth=none,
            iteration=none,
            new_sample=tree.replace(sample, log_weight=zero - jnp.inf),
            new_momentum_sum=jax.tree.map(jnp.zeros_like, momentum),
            marks=Marks(first=no_marks, before=no_marks, sum_before=no_marks),
            turned_at_first=no,
            is_accepted=no,
            is_divergent=no,
            is_turning=no,
            sum_acceptance_rate=zero,
            num_integration_steps=none,
        )

    def _goes_on(self, trajectory: Trajectory) -> jax.Array:
        is_over = trajectory.is_divergent | trajectory.is_turning
        return ~is_over & (trajectory.depth < self.max_tree_depth)

    def _grow(
        self, chance: Chance, state: HMCState, momentum: PyTree, trajectory: Trajectory
    ) -> Trajectory:
        """Take one leapfrog: add a leaf to the new subtree, and that to the tree when it is complete.

        The loop runs while any chain goes on; one that does not stands still and keeps its results.
        """
        goes_on = self._goes_on(trajectory)
        near, leaf = self._leapfrog(trajectory, goes_on, state, momentum)
        log_uniform = jnp.log(_uniform(chance.leaf_key, trajectory.iteration))
        here = Marks(near.momentum, trajectory.near.momentum, trajectory.new_momentum_sum)
        grown = tree.replace(
            trajectory,
            near=near,
            new_sample=_draw_uniformly(trajectory.new_sample, leaf, log_uniform),
            new_momentum_sum=tree.add(trajectory.new_momentum_sum, near.momentum),
            marks=mark(trajectory.marks, trajectory.leaf, here),
            sum_acceptance_rate=trajectory.sum_acceptance_rate
            + jnp.where(goes_on, jnp.exp(jnp.minimum(0, leaf.log_weight)), 0),
            num_integration_steps=trajectory.num_integration_steps + goes_on,
        )
        diverges = leaf.log_weight < -DIVERGENT_ENERGY_ERROR
        return _join(chance, self._turns(grown), goes_on, diverges, grown)

    def _leapfrog(
        self, trajectory: Trajectory, goes_on: jax.Array, state: HMCState, momentum: PyTree
    ) -> tuple[PhasePoint, Sample]:
        """Return the next point, and the leaf there: its weight is exp(-ΔH) from the start.

        ΔH = -Σ(terms′ - terms) + ΔK, differences taken term by term before any sum, as in `HMC`.
        """
        step_size = jnp.where(trajectory.is_forward, self.step_size, -self.step_size)
        near, terms = velocity_verlet_with_terms(
            trajectory.near,
            jnp.where(goes_on, step_size, 0),
            self.target.terms_and_grad,
            self._velocity,
        )
        kinetic = metrics.kinetic_energy_difference(self.inverse_mass_matrix, near.momentum, momentum)
        energy_error = kinetic - tree.total(tree.sub(terms, state.terms))
        # A log density of +inf is as wrong as NaN, and would never be left again.
        energy_error = jnp.where(jnp.isfinite(energy_error), energy_error, jnp.inf)
        return near, Sample(near.position, near.log_density_grad, terms, energy_error, -energy_error)

    def _turns(self, grown: Trajectory) -> Turns:
        """Apply the criterion, ρ·M⁻¹p > 0 at both ends of a span, to spans that end at the new leaf.

        All products are taken at once: where momenta lie over devices, one reduction serves them.
        """
        last, momentum_sum = grown.near.momentum, grown.new_momentum_sum

        def products(rho: PyTree, first: PyTree) -> list[jax.Array]:
            return [tree.dot(rho, self._velocity(p)) for p in (first, last)]

        def products_of_mark(one: Marks) -> list[jax.Array]:
            rho = tree.sub(momentum_sum, one.sum_before)
            return products(rho, one.first) + products(tree.add(rho, one.before), one.before)

        a, b, c, d = jax.vmap(products_of_mark)(grown.marks)
        e, f = products(tree.add(grown.momentum_sum, momentum_sum), grown.far.momentum)
        spans, spans_from_before = ~((a > 0) & (b > 0)), ~((c > 0) & (d > 0))
        of_spans, of_spans_from_before = marks_to_check(grown.leaf, len(a))
        return Turns(
            within=jnp.any(of_spans & spans) | jnp.any(of_spans_from_before & spans_from_before),
            across=spans_from_before[0],
            whole=~((e > 0) & (f > 0)),
        )

    def _velocity(self, momentum: PyTree) -> PyTree:
        return metrics.velocity(self.inverse_mass_matrix, momentum)


def _uniform(rng_key: jax.Array, i: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(rng_key, i))


def _draw_uniformly(sample: Sample, leaf: Sample, log_uniform: jax.Array) -> Sample:
    """Draw from the leaves of a sample and one more, each with its weight's share."""
    log_weight = jnp.logaddexp(sample.log_weight, leaf.log_weight)
    chosen = tree.where(log_uniform < leaf.log_weight - log_weight, leaf, sample)
    return tree.replace(chosen, log_weight=log_weight)


def _join(
    chance: Chance, turns: Turns, goes_on: jax.Array, diverges: jax.Array, grown: Trajectory
) -> Trajectory:
    """Join a subtree that is complete and valid to the tree, and prepare the next doubling.

    Biased progressive sampling: the new subtree's sample replaces the old with probability
    min(1, W_new / W_old). A turn of the whole stops the trajectory but does not make it invalid.
    """
    is_complete = grown.leaf + 1 == 1 << grown.doubling
    turned_at_first = jnp.where(grown.leaf == 0, turns.whole, grown.turned_at_first)
    turns_whole = is_complete & (turns.whole | turned_at_first | turns.across)
    is_kept = goes_on & is_complete & ~diverges & ~turns.within

    new, old = grown.new_sample, grown.sample
    moves = is_kept & (chance.log_uniform[grown.doubling] < new.log_weight - old.log_weight)
    log_weight = jnp.where(is_kept, jnp.logaddexp(new.log_weight, old.log_weight), old.log_weight)

    is_forward = jnp.where(is_complete, chance.is_forward[grown.doubling + 1], grown.is_forward)
    near, far = tree.where(
        is_forward == grown.is_forward, (grown.near, grown.far), (grown.far, grown.near)
    )
    momentum_sum = tree.add(grown.momentum_sum, grown.new_momentum_sum)
    return tree.replace(
        grown,
        near=near,
        far=far,
        is_forward=is_forward,
        sample=tree.replace(tree.where(moves, new, old), log_weight=log_weight),
        momentum_sum=tree.where(is_complete, momentum_sum, grown.momentum_sum),
        depth=grown.depth + is_kept,
        iteration=grown.iteration + 1,
        new_sample=tree.replace(new, log_weight=jnp.where(is_complete, -jnp.inf, new.log_weight)),
        new_momentum_sum=jax.tree.map(lambda x: jnp.where(is_complete, 0, x), grown.new_momentum_sum),
        turned_at_first=turned_at_first,
        is_accepted=grown.is_accepted | moves,
        is_divergent=grown.is_divergent | goes_on & diverges,
        is_turning=grown.is_turning | goes_on & ~diverges & (turns.within | turns_whole),
    )


@jax.custom_batching.custom_vmap
def _any_chain(goes_on: jax.Array) -> jax.Array:
    """Tell whether any of the vmapped chains goes on: one answer for all of them.

    A condition of its own for each chain would make the loop select the whole carry of each chain, all
    marks included, in every iteration.
    """
    return goes_on


@_any_chain.def_vmap
def _(axis_size, in_batched, goes_on):
    return jnp.any(goes_on, axis=0) if in_batched[0] else goes_on, False
