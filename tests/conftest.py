"""The suite runs on 8 virtual CPU devices; rank promotion and warnings are errors."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
