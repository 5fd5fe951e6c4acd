"""A kernel and a warm-up from outside the package: killed on a 2 x 4 mesh, continued on three devices.

Nothing here has the names or the shapes that the library's own states have: what each array is follows
from how its field is declared, and from that alone.
"""

import signal
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm

# Rows have three of pad on four devices, and two on three.
NUM_ROWS, PADDED = 13, 16
KEEP = 0.7  # of a momentum, from one step to the next
TRAIL = 2


def total(tree):
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


def normal_like(key, like):
    leaves, treedef = jax.tree.flatten(like)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    return treedef.unflatten(
        [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


@gm.pytree
@dataclass(frozen=True, eq=False)
class Walker:
    """A chain; ``rates`` is as long as rows with their pad, and is no row."""

    position: Any = gm.like_position()
    log_density: jax.Array = gm.derived()
    terms: Any = gm.derived()
    log_density_grad: Any = gm.like_position(pad=gm.Pad.ZERO, is_derived=True)
    inertia: Any = gm.like_position(pad=gm.Pad.ZERO)
    trail: Any = gm.like_position(num_axes=1)  # [TRAIL, ...]
    rates: jax.Array = gm.shared()  # [PADDED]


@gm.pytree
@dataclass(frozen=True, eq=False)
class GeneralizedHMC(gm.Kernel):
    """One leapfrog with a momentum that is kept in part (Horowitz, 1991)."""

    target: Any
    step_size: jax.Array
    scale: Any = gm.like_position()
    # Unused here; of the contract.
    inverse_mass_matrix: Any = None
    walker: ClassVar[type] = Walker

    def init(self, position):
        terms, slope = self.target.terms_and_grad(position)
        return self.walker(
            position=position,
            log_density=total(terms),
            terms=terms,
            log_density_grad=slope,
            inertia=jax.tree.map(jnp.zeros_like, position),
            trail=jax.tree.map(lambda x: jnp.stack([x] * TRAIL), position),
            rates=jnp.zeros(PADDED),
        )

    def step(self, rng_key, state):
        noise_key, accept_key = jax.random.split(rng_key)
        noise, e = normal_like(noise_key, state.position), self.step_size
        is_data = jax.tree.map(lambda g: g != 0, state.log_density_grad)  # no pad row moves
        start = jax.tree.map(
            lambda p, n, real: jnp.where(real, KEEP * p + np.sqrt(1 - KEEP**2) * n, 0.0),
            *(state.inertia, noise, is_data),
        )
        half = jax.tree.map(
            lambda p, s, g: p + e / 2 * s * g, start, self.scale, state.log_density_grad
        )
        position = jax.tree.map(lambda x, s, p: x + e * s * p, state.position, self.scale, half)
        terms, slope = self.target.terms_and_grad(position)
        end = jax.tree.map(lambda p, s, g: p + e / 2 * s * g, half, self.scale, slope)
        gain = total(jax.tree.map(jnp.subtract, terms, state.terms))
        kinetic = 0.5 * total(jax.tree.map(lambda a, b: (a - b) * (a + b), end, start))
        error = jnp.where(jnp.isfinite(kinetic - gain), kinetic - gain, jnp.inf)
        rate = jnp.exp(jnp.minimum(-error, 0.0))
        is_accepted = jax.random.uniform(accept_key) < rate

        def push(trail, x):
            return jnp.concatenate([trail[1:], x[None]])

        moved = self.walker(position, total(terms), terms, slope, end, state.trail, state.rates)
        turned = replace(state, inertia=jax.tree.map(jnp.negative, start))
        after = jax.tree.map(lambda a, b: jnp.where(is_accepted, a, b), moved, turned)
        after = replace(
            after,
            trail=jax.tree.map(push, state.trail, after.position),
            rates=push(state.rates, rate),
        )
        info = gm.Info(
            acceptance_rate=rate,
            is_accepted=is_accepted,
            is_divergent=error > 1000,
            energy=-after.log_density,
            energy_error=error,
            num_integration_steps=jnp.ones((), jnp.int32),
        )
        return after, info


@gm.pytree
@dataclass(frozen=True, eq=False)
class Learned:
    """What a warm-up has learned; ``gains`` is as long as the padded rows, and is no row."""

    jumps: Any = gm.like_position()
    farthest: Any = gm.like_position(has_chains=True)
    log_steps: jax.Array = gm.each_chain()
    gains: jax.Array = gm.shared()
    count: jax.Array = gm.shared()


@gm.pytree
@dataclass(frozen=True, eq=False)
class JumpAdaptation(gm.Adaptation):
    """Scales follow how far chains jump; each chain moves its log step size towards a rate."""

    rate: float = 0.7

    def init(self, kernel: Any, states):
        return Learned(
            jumps=jax.tree.map(jnp.square, kernel.scale),
            farthest=jax.tree.map(jnp.abs, states.position),
            log_steps=jnp.full(states.log_density.shape, jnp.log(kernel.step_size)),
            gains=1 / (1 + jnp.arange(float(PADDED))),
            count=jnp.zeros((), jnp.int32),
        )

    def tuned(self, kernel: Any, state):
        # Chains that went far have a share in every scale, by the mean over chains.
        far = jax.tree.map(lambda x: 0.01 * jnp.mean(x, axis=0), state.farthest)
        scale = jax.tree.map(lambda j, f: jnp.sqrt(j) + f, state.jumps, far)
        return replace(kernel, step_size=jnp.exp(jnp.mean(state.log_steps)), scale=scale)

    def update(self, state, kernel, transition):
        trail = transition.after.trail
        gain = 0.3 * state.gains[state.count % PADDED]

        def jumped(old, x):
            return (1 - gain) * old + gain * (0.5 + jnp.mean((x[:, -1] - x[:, 0]) ** 2, axis=0))

        recent = jnp.mean(transition.after.rates[:, -4:], axis=1)
        return Learned(
            jumps=jax.tree.map(jumped, state.jumps, trail),
            farthest=jax.tree.map(
                lambda far, x: jnp.maximum(far, jnp.abs(x)), state.farthest, transition.after.position
            ),
            log_steps=state.log_steps + gain * (recent - self.rate),
            gains=state.gains,
            count=state.count + 1,
        )


def log_prior(x):
    return -0.5 * x["mean"] ** 2


def log_likelihood(x, rows):
    return -0.5 * (x["effect"] - x["mean"]) ** 2 - 2 * (rows["y"] - x["effect"]) ** 2


MESHES: dict[str, dict[str, int]] = {"2x4": {"chains": 2, "data": 4}, "3": {"data": 3}}


def sample(mesh, kernel=GeneralizedHMC, **options) -> gm.Draws:
    y = np.random.default_rng(5).normal(1.0, 1.5, NUM_ROWS)
    data = gm.place({"y": y}, mesh_of(MESHES[mesh]), P("data"))
    target = gm.Posterior(log_prior, gm.Plate(log_likelihood, data, local="effect"))
    start = {"mean": jnp.zeros(()), "effect": jnp.zeros(NUM_ROWS)}
    scale = jax.tree.map(jnp.ones_like, gm.HMC(target, 0.1, 1).init(start).position)
    return gm.sample(
        jax.random.key(0),
        target,
        start,
        kernel=kernel(target, jnp.asarray(0.3), scale),
        warmup=JumpAdaptation(),
        num_warmup=40,
        num_samples=30,
        progress=False,
        **options,
    )


def terminate_at(phase, done):
    """Return a callback that sends SIGTERM when a phase has come so far."""

    def callback(report):
        if report.phase == phase and report.done >= done:
            signal.raise_signal(signal.SIGTERM)

    return callback


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("gspmd_mcmc.sampling.run.next_size", lambda count, seconds: 7)


@pytest.mark.parametrize("point", [("warm-up", 20), ("sampling", 8)])
def test_it_is_killed_on_one_mesh_and_continued_on_another(point, tmp_path):
    whole = sample("2x4")
    with pytest.raises(gm.Preempted):
        sample(
            *("2x4",),
            to=gm.ZarrSink(tmp_path / "draws"),
            checkpoint=tmp_path / "run",
            callback=terminate_at(*point),
        )
    to = gm.ZarrSink(tmp_path / "draws")
    draws = sample("3", to=to, checkpoint=tmp_path / "run")
    assert draws.num_draws == 30
    for found in (draws, gm.open_draws(tmp_path / "draws")):
        for name, expected in whole.position.items():
            x, expected = np.asarray(found.position[name]), np.asarray(expected)
            assert x.shape == expected.shape
            assert np.linalg.norm(x - expected) < 1e-4 * np.linalg.norm(expected)
    np.testing.assert_allclose(draws.warmup["step_size"], whole.warmup["step_size"], rtol=1e-5)
    for part in ("inertia", "log_density_grad"):
        ours, theirs = (getattr(d.state, part)["effect"] for d in (draws, whole))
        x, expected = (np.asarray(*jax.tree.leaves(s))[:, :NUM_ROWS] for s in (ours, theirs))
        assert np.linalg.norm(x - expected) < 1e-3 * np.linalg.norm(expected)
        assert not np.asarray(ours.values)[:, NUM_ROWS:].any()
    # Chains move, and each of them is far from the others by the same measure.
    assert 0.3 < whole.acceptance_rate.mean() < 1
    x = np.asarray(whole.position["effect"])
    assert np.linalg.norm(x[0] - x[1]) > 0.1 * np.linalg.norm(x[0])


@gm.pytree
@dataclass(frozen=True, eq=False)
class UndeclaredWalker(Walker):
    """A chain that does not say that its momentum has the rows of the position."""

    inertia: Any = gm.shared()


@gm.pytree
@dataclass(frozen=True, eq=False)
class Undeclared(GeneralizedHMC):
    walker: ClassVar[type] = UndeclaredWalker


def test_rows_that_no_field_declares_are_not_taken_to_another_mesh(tmp_path):
    with pytest.raises(gm.Preempted):
        sample("2x4", Undeclared, checkpoint=tmp_path, callback=terminate_at("warm-up", 20))
    with pytest.raises(ValueError, match=r"inertia\['effect'\] .* shape \[4, 16\], and here \[4, 15\]"):
        sample("3", Undeclared, checkpoint=tmp_path)
