"""The No-U-Turn sampler: multinomial, iterative, one loop of leapfrogs.

A trajectory is doubled, forwards or backwards in time, until it turns. Doubling j adds a subtree of
2^j leaves, one leapfrog each. Vmapped chains are at the same leaf of the same doubling, and a loop ends
when no chain continues, so that what is done once a doubling, or once a block of leaves, is outside the
loop over leaves. Every balanced subtree is checked for U-turns, from O(log) velocities: the tree itself
is never stored.

References
----------
Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 15 (2014); Betancourt, "A conceptual introduction to
Hamiltonian Monte Carlo", arXiv 1701.02434 (multinomial sampling, the generalized criterion, biased
progressive sampling); Phan, Pradhan and Jankowiak, arXiv 1912.11554, and Lao and Dillon, arXiv
2002.01184 (iterative trees); Stan's additional checks across adjacent subtrees.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.errors import answers
from gspmd_mcmc.kernels import hmc, u_turns
from gspmd_mcmc.kernels.hmc import DIVERGENT_ENERGY_ERROR, HamiltonianKernel, HMCState
from gspmd_mcmc.kernels.integrators import PhasePoint, velocity_verlet_with_terms
from gspmd_mcmc.kernels.kernel import Info, positive, target_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.product_precision import FULL, gradient_precision_of
from gspmd_mcmc.kernels.u_turns import BLOCK, Path
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.anywhere import step_anywhere
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static

MOST_DOUBLINGS = 20


@pytree
@dataclass(frozen=True, eq=False)
class NUTSInfo(Info):
    """What one transition of `NUTS` did; see `Info`.

    ``acceptance_rate`` is the mean of min(1, exp(-energy error)) over all visited leaves, and
    ``energy_error`` that of the state at the end of the transition.

    Attributes
    ----------
    is_turning
        Whether a U-turn ended the trajectory. Where neither a U-turn nor a divergence did, it reached
        ``max_tree_depth``.
    tree_depth
        Doublings that were kept: the next state is drawn from 2^tree_depth leaves.
    """

    is_turning: jax.Array
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
class Progress:
    """What a chain has done in a transition; once its trajectory has ended nothing changes."""

    is_divergent: jax.Array
    is_turning: jax.Array
    sum_acceptance_rate: jax.Array
    num_integration_steps: jax.Array

    @property
    def is_active(self) -> jax.Array:
        """Whether the trajectory has not ended."""
        return ~(self.is_divergent | self.is_turning)


@pytree
@dataclass(frozen=True, eq=False)
class Trajectory:
    """A tree that grows by doublings: its two ends, and the leaf that was drawn from it."""

    near: PhasePoint  # the end that grows
    far: PhasePoint
    is_forward: jax.Array
    sample: Sample
    momentum_sum: PyTree  # over the leaves
    doubling: jax.Array  # the next: the same for all vmapped chains, and so never mapped
    depth: jax.Array  # doublings that were kept
    is_accepted: jax.Array
    progress: Progress


@pytree
@dataclass(frozen=True, eq=False)
class Subtree:
    """What a doubling adds to a tree, leaf by leaf: its end, the leaf that was drawn, and its path."""

    near: PhasePoint
    sample: Sample
    path: Path
    progress: Progress


class Start(NamedTuple):
    """The first leaf of the trajectory, with which the energies of the others are compared."""

    terms: PyTree
    momentum: PyTree
    velocity: PyTree


class Chance(NamedTuple):
    """The random numbers of a trajectory: of its doublings, and the key of its leaves."""

    is_forward: jax.Array  # [max_tree_depth]
    log_uniform: jax.Array  # [max_tree_depth]
    leaf_key: jax.Array


@pytree
@dataclass(frozen=True, eq=False, init=False)
class NUTS(HamiltonianKernel):
    """The multinomial No-U-Turn sampler.

    A pytree that holds its target, as `HMC` is: ``step = jax.jit(type(kernel).step)``, then
    ``state, info = step(kernel, rng_key, state)``. Another step size or metric recompiles nothing.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or a `Target` of your own.
    step_size
        The time of a leapfrog, in units of the metric.
    inverse_mass_matrix
        A tree like the position (diagonal), a `Metric`, or None (identity).
    max_tree_depth
        The largest number of doublings of a trajectory, 1 to 20: at most 2^max_tree_depth - 1
        leapfrogs. A step holds 3 max_tree_depth momenta. Static: another depth is another program.
    gradient_precision
        As in `HMC`, but "float32" by default: the tree needs the terms at each leapfrog, so that less
        precise gradients are a second pass over the data. Static.
    """

    target: Target
    step_size: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    max_tree_depth: int = static()
    gradient_precision: str = static()
    is_per_chain: bool = static(default=False)

    @answers(
        "Call it as NUTS(target, step_size, inverse_mass_matrix, max_tree_depth)",
        max_num_doublings="it is max_tree_depth= here",
    )
    def __init__(
        self,
        target: Target,
        step_size: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        max_tree_depth: int = 10,
        gradient_precision: str | None = FULL,
    ):
        is_whole = isinstance(max_tree_depth, int | np.integer) and not isinstance(max_tree_depth, bool)
        if not is_whole or not 1 <= max_tree_depth <= MOST_DOUBLINGS:
            raise ValueError(
                f"NUTS: max_tree_depth: expected an integer from 1 to {MOST_DOUBLINGS}, got "
                f"{max_tree_depth!r}. For another depth in warm-up (NumPyro's pair), sample twice: the "
                "second time with a NUTS of the first one's step size and inverse mass matrix, from "
                "gspmd_mcmc.per_chain(draws.state.position), num_warmup=0"
            )
        set_fields(
            self,
            target=target_of("NUTS", target),
            step_size=positive("NUTS", "step_size", step_size),
            inverse_mass_matrix=metrics.laid_out("NUTS", target, inverse_mass_matrix),
            max_tree_depth=int(max_tree_depth),
            gradient_precision=gradient_precision_of("NUTS", target, gradient_precision),
        )

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, NUTSInfo]:
        """Take one step: a fresh momentum, a trajectory that ends at a U-turn, a draw from it."""
        checks.check_not_baked(self.target)
        momentum_key, trajectory_key = jax.random.split(rng_key)
        momentum = self.sample_momentum(momentum_key, state.position)
        end = self.trajectory(self.chance(trajectory_key), state, momentum)

        energy = metrics.kinetic_energy(self.inverse_mass_matrix, momentum) - state.log_density
        info = NUTSInfo(
            acceptance_rate=end.progress.sum_acceptance_rate / end.progress.num_integration_steps,
            is_accepted=end.is_accepted,
            is_divergent=end.progress.is_divergent,
            is_turning=end.progress.is_turning,
            energy=energy + end.sample.energy_error,
            energy_error=end.sample.energy_error,
            num_integration_steps=end.progress.num_integration_steps,
            tree_depth=end.depth,
        )
        sample = end.sample
        proposal = HMCState.at(sample.position, sample.terms, sample.log_density_grad)
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
        start = Start(state.terms, momentum, self.velocity(momentum))

        def continues(trajectory):
            return (trajectory.doubling < self.max_tree_depth) & _any_chain(
                trajectory.progress.is_active
            )

        def double(trajectory):
            return self._join(chance, trajectory, self._grow(chance, start, trajectory))

        with jax.named_scope("doubling"):  # reports of a program's communication name loops so
            return jax.lax.while_loop(continues, double, _begin(chance, state, momentum))

    def _grow(self, chance: Chance, start: Start, trajectory: Trajectory) -> Subtree:
        """Grow the subtree of a doubling by blocks, until it is complete or no chain is active."""
        size = 1 << trajectory.doubling
        step_size = jnp.where(trajectory.is_forward, self.step_size, -self.step_size)

        def continues(subtree):
            return (subtree.path.num_leaves < size) & _any_chain(subtree.progress.is_active)

        def add_block(subtree):
            end = jnp.minimum(subtree.path.num_leaves + BLOCK, size)
            log_uniforms = _log_uniforms(chance, size - 1 + subtree.path.num_leaves)
            return self._add_block(start, step_size, log_uniforms, end, subtree)

        with jax.named_scope("block"):
            return jax.lax.while_loop(continues, add_block, self._no_leaves(trajectory))

    def _no_leaves(self, trajectory: Trajectory) -> Subtree:
        zero = jnp.zeros_like(trajectory.sample.log_weight)
        velocity = self.velocity(trajectory.near.momentum)
        return Subtree(
            near=trajectory.near,
            sample=tree.replace(trajectory.sample, log_weight=zero - jnp.inf),
            path=u_turns.begin(velocity, zero, self.max_tree_depth),
            progress=trajectory.progress,
        )

    def _add_block(
        self,
        start: Start,
        step_size: jax.Array,
        log_uniforms: jax.Array,
        end: jax.Array,
        subtree: Subtree,
    ) -> Subtree:
        """Add leaves up to number ``end``; then check the spans that end at the end of a block."""

        def continues(subtree):
            return (subtree.path.num_leaves < end) & _any_chain(subtree.progress.is_active)

        def add(subtree):
            place = subtree.path.num_leaves % BLOCK
            log_uniform = u_turns.read_slice(log_uniforms, place, 1)[0]
            return self._add_leaf(start, step_size, log_uniform, subtree)

        with jax.named_scope("leapfrog"):
            subtree = jax.lax.while_loop(continues, add, subtree)
        return _note_turns(subtree, u_turns.turns_at_end_of_block(subtree.path, subtree.near.momentum))

    def _add_leaf(
        self, start: Start, step_size: jax.Array, log_uniform: jax.Array, subtree: Subtree
    ) -> Subtree:
        """Take one leapfrog: add a leaf to a subtree."""
        is_active = subtree.progress.is_active
        near, velocity, leaf = self._leapfrog(start, jnp.where(is_active, step_size, 0), subtree.near)
        path = u_turns.add(subtree.path, near.momentum, velocity)
        grown = Subtree(
            near=near,
            sample=_draw_uniformly(subtree.sample, leaf, log_uniform),
            path=path,
            progress=_count_leaf(subtree.progress, leaf),
        )
        return _note_turns(grown, u_turns.turns_at_newest_marks(path, near.momentum))

    def _leapfrog(
        self, start: Start, step_size: jax.Array, near: PhasePoint
    ) -> tuple[PhasePoint, PyTree, Sample]:
        """Return the next point, its velocity and the leaf there, of weight exp(-ΔH) from the start."""
        near, terms = velocity_verlet_with_terms(near, step_size, self.terms_and_grad, self.velocity)
        velocity = self.velocity(near.momentum)
        velocities = tree.add(velocity, start.velocity)
        kinetic = 0.5 * tree.dot(tree.sub(near.momentum, start.momentum), velocities)
        error = hmc.energy_error(kinetic, terms, start.terms)
        leaf = Sample(near.position, near.log_density_grad, terms, error, -error)
        return near, velocity, leaf

    def _join(self, chance: Chance, trajectory: Trajectory, subtree: Subtree) -> Trajectory:
        """Join a subtree to the tree if it is complete and valid, and prepare the next doubling.

        Biased progressive sampling: the sample of the new subtree replaces the old one with probability
        min(1, W_new / W_old). A U-turn of the whole tree ends the trajectory, which stays valid.
        """
        is_kept, path = subtree.progress.is_active, subtree.path  # if one continues, all are complete
        near, far = trajectory.near.momentum, trajectory.far.momentum
        turns = u_turns.whole_turns(path, trajectory.momentum_sum, far, near, self.velocity)
        new, old = subtree.sample, trajectory.sample
        log_uniform = u_turns.read_slice(chance.log_uniform, trajectory.doubling, 1)[0]
        moves = is_kept & (log_uniform < new.log_weight - old.log_weight)
        log_weight = jnp.where(is_kept, jnp.logaddexp(new.log_weight, old.log_weight), old.log_weight)
        is_forward = u_turns.read_slice(chance.is_forward, trajectory.doubling + 1, 1)[0]
        ends = (subtree.near, trajectory.far)
        near, far = tree.where(is_forward == trajectory.is_forward, ends, ends[::-1])
        return Trajectory(
            near=near,
            far=far,
            is_forward=is_forward,
            sample=tree.replace(tree.where(moves, new, old), log_weight=log_weight),
            momentum_sum=tree.add(trajectory.momentum_sum, path.momentum_sum),
            doubling=trajectory.doubling + 1,
            depth=trajectory.depth + is_kept,
            is_accepted=trajectory.is_accepted | moves,
            progress=_note_turns(subtree, turns).progress,
        )


def _begin(chance: Chance, state: HMCState, momentum: PyTree) -> Trajectory:
    """Return the tree of one leaf."""
    zero, no, none = jnp.zeros_like(state.log_density), jnp.zeros((), bool), jnp.zeros((), jnp.int32)
    point = PhasePoint(state.position, momentum, state.log_density_grad)
    return Trajectory(
        near=point,
        far=point,
        is_forward=chance.is_forward[0],
        sample=Sample(state.position, state.log_density_grad, state.terms, zero, zero),
        momentum_sum=momentum,
        doubling=none,
        depth=none,
        is_accepted=no,
        progress=Progress(no, no, zero, none),
    )


def _count_leaf(progress: Progress, leaf: Sample) -> Progress:
    is_active = progress.is_active
    rate = jnp.where(is_active, jnp.exp(jnp.minimum(0, leaf.log_weight)), 0)
    return tree.replace(
        progress,
        is_divergent=progress.is_divergent | is_active & (leaf.log_weight < -DIVERGENT_ENERGY_ERROR),
        sum_acceptance_rate=progress.sum_acceptance_rate + rate,
        num_integration_steps=progress.num_integration_steps + is_active,
    )


def _note_turns(subtree: Subtree, turns: jax.Array) -> Subtree:
    progress = subtree.progress
    is_turning = progress.is_turning | progress.is_active & turns
    return tree.replace(subtree, progress=tree.replace(progress, is_turning=is_turning))


def _log_uniforms(chance: Chance, first: jax.Array) -> jax.Array:
    """Draw the uniform numbers of a block of leaves: shape [BLOCK]."""
    leaves = first + jnp.arange(BLOCK)
    return jnp.log(jax.vmap(lambda i: _uniform(chance.leaf_key, i))(leaves))


def _uniform(rng_key: jax.Array, i: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(rng_key, i))


def _draw_uniformly(sample: Sample, leaf: Sample, log_uniform: jax.Array) -> Sample:
    """Draw from the leaves of a sample and one more, in proportion to their weights."""
    log_weight = jnp.logaddexp(sample.log_weight, leaf.log_weight)
    chosen = tree.where(log_uniform < leaf.log_weight - log_weight, leaf, sample)
    return tree.replace(chosen, log_weight=log_weight)


@jax.custom_batching.custom_vmap
def _any_chain(is_active: jax.Array) -> jax.Array:
    """Tell whether any of the vmapped chains continues: one answer for all of them.

    With a condition for each chain, vmap would make the loop select the whole carry of each chain, with
    all its marks, in every iteration.
    """
    return is_active


@_any_chain.def_vmap
def _(axis_size, in_batched, is_active):
    return jnp.any(is_active, axis=0) if in_batched[0] else is_active, False
