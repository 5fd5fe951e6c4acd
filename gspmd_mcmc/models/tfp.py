"""What TFP's users bring: its distributions, known by their methods, and its spelling of our calls.

TensorFlow Probability is never imported. Its distributions have the methods that are asked for here;
another library's, or a class of your own, may have them too.
"""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gspmd_mcmc.models.supports import is_of_numpyro, is_of_tfp

SHAPES = "jax.eval_shape(type(it).sample, it, rng_key) has shapes and dtypes"
# Attributes of TFP's distributions, and what there is instead.
INSTEAD = {
    "batch_shape": SHAPES,
    "dtype": SHAPES,
    "event_shape": SHAPES,
    "experimental_default_event_space_bijector": "condition(y=y) samples on the whole real line, and "
    "its params(position) are the constrained values",
    "experimental_pin": "condition(y=y) is the posterior given y",
    "experimental_shard_axis_names": "a Sharded has its axes",
    "prob": "jnp.exp(log_prob(value))",
    "sample_distributions": "sample(rng_key) draws values, log_prob_parts(value) is each part's",
    "unnormalized_log_prob": "log_prob(value), and terms(position) of a posterior",
}


class AnswersTFP:
    """A distribution that tells, where it lacks what TFP's have, what there is instead."""

    if not TYPE_CHECKING:  # for a type checker it would have all attributes

        def __getattr__(self, name: str) -> Any:
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            what = f"{type(self).__name__} has no {name}{instead}"
            raise AttributeError(what, name=name, obj=self)


def name_of(distribution: Any) -> str | None:
    """Return the name that a distribution of TFP's was given; None where it has its class's."""
    name = _given(distribution).get("name")
    return None if name is None or type(distribution).__name__ in name else name


def without_root(part: Any) -> Any:
    """Return what TFP's ``Root`` marks, or the part itself where it is none."""
    return part.distribution if type(part).__name__ == "Root" else part


def refuse_foreign(what: str, distribution: Any) -> None:
    """Raise where a distribution is TFP's, but not on JAX, or only one device's part of it."""
    module = type(distribution).__module__
    if module.startswith("tensorflow_probability.") and ".substrates.jax." not in module:
        raise TypeError(
            f"{what}: {module} does not compute on JAX. Import TFP as tensorflow_probability.substrates"
            ".jax, of tfp-nightly: stable TFP, 0.25, does not import on this JAX"
        )
    if axes := tuple(jax.tree.leaves(getattr(distribution, "experimental_shard_axis_names", ()))):
        raise TypeError(
            f"{what}: TFP's Sharded is one device's part of a distribution, inside pmap over {axes}. "
            "Take gspmd_mcmc.Sharded(distribution, axis) of the whole distribution, outside pmap"
        )


def rows_of_event(distribution: Any) -> tuple[Any, int | None]:
    """Take the first axis of an event apart: the rows, where they do not depend on each other.

    Returns
    -------
    distribution, num_rows
        Of ``Sample(d, [rows, ...])`` ``Sample(d, [...])`` and the rows, to be drawn alike. Of
        ``Independent(d, n)`` (NumPyro's ``to_event(n)``) ``Independent(d, n - 1)`` and None: ``d`` has
        the rows. Of all others the distribution itself, and None: the event may couple its rows.
    """
    if is_of_numpyro(distribution) and type(distribution).__name__ == "Independent":
        num_axes = distribution.reinterpreted_batch_ndims - 1
        return distribution.base_dist.to_event(num_axes), None
    given = _given(distribution)
    if "sample_shape" in given:
        num_rows, *rest = np.ravel(distribution.sample_shape).tolist()
        return distribution.copy(sample_shape=rest), num_rows
    if "reinterpreted_batch_ndims" in given:
        num_axes = int(distribution.reinterpreted_batch_ndims) - 1
        return distribution.copy(reinterpreted_batch_ndims=num_axes), None
    return distribution, None


def _given(distribution: Any) -> dict[str, Any]:
    """Return what a distribution of TFP's was made with."""
    return getattr(distribution, "parameters", {}) if is_of_tfp(distribution) else {}
