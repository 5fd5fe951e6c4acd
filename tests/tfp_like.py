"""Distributions with the methods of TFP's, so that they are tested where TFP is not installed.

Like TFP's they are pytrees that compute when JAX puts them together, sample by ``seed=``, hold what
they were made with in ``parameters``, and tell their support by a bijector.
"""

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LOG_2PI = float(np.log(2 * np.pi))


def real_tfp() -> Any:
    """Return TFP on JAX, or skip the test."""
    pytest.importorskip("tensorflow_probability")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("tensorflow_probability.substrates.jax")


def summed(x, num_axes):
    return jnp.sum(x, axis=tuple(range(x.ndim - num_axes, x.ndim)))


@dataclass(frozen=True)
class Bijector:
    """An elementwise one: the identity, or the exponential function."""

    is_exp: bool

    def forward(self, x):
        return jnp.exp(x) if self.is_exp else x

    def inverse(self, y):
        return jnp.log(y) if self.is_exp else y

    def forward_log_det_jacobian(self, x, event_ndims):
        return summed(x if self.is_exp else jnp.zeros_like(x), event_ndims)

    def inverse_event_ndims(self, event_ndims):
        return event_ndims

    def inverse_event_shape(self, shape):
        return shape


class Distribution:
    dynamic: tuple[str, ...] = ()

    def __init_subclass__(cls):
        def flatten(self):
            rest = tuple((k, v) for k, v in self.parameters.items() if k not in cls.dynamic)
            return [self.parameters[name] for name in cls.dynamic], rest

        def unflatten(rest, children):
            return cls(**dict(zip(cls.dynamic, children, strict=True)), **dict(rest))

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)

    def __init__(self, name, batch_shape, event_shape, **parameters):
        self.parameters = parameters | {"name": name}
        self.batch_shape, self.event_shape = tuple(batch_shape), tuple(event_shape)

    def __getattr__(self, name):
        if name in self.__dict__.get("parameters", ()):
            return self.parameters[name]
        raise AttributeError(name)

    def copy(self, **others):
        return type(self)(**(self.parameters | others))

    def sample(self, sample_shape=(), seed=None):
        return self.draw(seed, tuple(np.ravel(sample_shape).astype(int)))

    def experimental_default_event_space_bijector(self):
        return Bijector(is_exp=False)


class Normal(Distribution):
    dynamic = ("loc", "scale")

    def __init__(self, loc, scale, name="Normal"):
        loc, scale = jnp.asarray(loc, float), jnp.asarray(scale, float)
        shape = jnp.broadcast_shapes(loc.shape, scale.shape)
        super().__init__(name, shape, (), loc=loc, scale=scale)

    def draw(self, key, shape):
        return self.loc + self.scale * jax.random.normal(key, (*shape, *self.batch_shape))

    def log_prob(self, value):
        return -0.5 * ((value - self.loc) / self.scale) ** 2 - jnp.log(self.scale) - 0.5 * LOG_2PI


class HalfNormal(Distribution):
    dynamic = ("scale",)

    def __init__(self, scale, name="HalfNormal"):
        scale = jnp.asarray(scale, float)
        super().__init__(name, scale.shape, (), scale=scale)

    def draw(self, key, shape):
        return self.scale * jnp.abs(jax.random.normal(key, (*shape, *self.batch_shape)))

    def log_prob(self, value):
        inside = -0.5 * (value / self.scale) ** 2 - jnp.log(self.scale) + 0.5 * np.log(2 / np.pi)
        return jnp.where(value > 0, inside, -jnp.inf)

    def experimental_default_event_space_bijector(self):
        return Bijector(is_exp=True)


class Bernoulli(Distribution):
    dynamic = ("logits",)

    def __init__(self, logits, name="Bernoulli"):
        logits = jnp.asarray(logits, float)
        super().__init__(name, logits.shape, (), logits=logits)

    def draw(self, key, shape):
        uniform = jax.random.uniform(key, (*shape, *self.batch_shape))
        return (uniform < jax.nn.sigmoid(self.logits)).astype(jnp.int32)

    def log_prob(self, value):
        return value * self.logits - jnp.logaddexp(0.0, self.logits)

    def experimental_default_event_space_bijector(self):
        return None


class Categorical(Distribution):
    dynamic = ("logits",)

    def __init__(self, logits, name="Categorical"):
        logits = jnp.asarray(logits, float)
        super().__init__(name, logits.shape[:-1], (), logits=logits)

    def draw(self, key, shape):
        return jax.random.categorical(key, self.logits, shape=(*shape, *self.batch_shape))

    def log_prob(self, value):
        log_probs = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_probs, value[..., None].astype(int), axis=-1)[..., 0]

    def experimental_default_event_space_bijector(self):
        return None


class Sample(Distribution):
    """Independent draws of a distribution without a batch."""

    dynamic = ("distribution",)

    def __init__(self, distribution, sample_shape, name=None):
        sizes = tuple(int(n) for n in np.ravel(sample_shape))
        parameters = {"distribution": distribution, "sample_shape": sizes}
        super().__init__(name, (), (*sizes, *distribution.event_shape), **parameters)

    def draw(self, key, shape):
        return self.distribution.sample((*shape, *self.sample_shape), seed=key)

    def log_prob(self, value):
        return summed(self.distribution.log_prob(value), len(self.sample_shape))

    def experimental_default_event_space_bijector(self):
        return self.distribution.experimental_default_event_space_bijector()


class Independent(Distribution):
    dynamic = ("distribution",)

    def __init__(self, distribution, reinterpreted_batch_ndims, name=None):
        batch = distribution.batch_shape
        cut = len(batch) - reinterpreted_batch_ndims
        parameters = {"reinterpreted_batch_ndims": reinterpreted_batch_ndims}
        event = (*batch[cut:], *distribution.event_shape)
        super().__init__(name, batch[:cut], event, distribution=distribution, **parameters)

    def draw(self, key, shape):
        return self.distribution.sample(shape, seed=key)

    def log_prob(self, value):
        return summed(self.distribution.log_prob(value), self.reinterpreted_batch_ndims)

    def experimental_default_event_space_bijector(self):
        return self.distribution.experimental_default_event_space_bijector()


class Root:
    """A part that depends on no other."""

    def __init__(self, distribution):
        self.distribution = distribution


class JointDistributionCoroutine:
    Root = Root
