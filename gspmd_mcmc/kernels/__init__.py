"""Transition kernels: `init(position) -> State`, `step(rng_key, state) -> (State, Info)`."""
