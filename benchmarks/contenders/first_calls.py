"""One contender's first two calls in a process of its own: target, warm-up, draws and summary.

``python -m benchmarks.contenders.first_calls '{"contender": "ours", "model": "arK", ...}'`` prints a
line of JSON. Imports, data and the start of JAX's backend come before the clock.
"""

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders.ess_program import Problem

COMPILED = "/jax/core/compile/backend_compile_duration"


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of the first and the second call, and how many programs the first compiled."""
    call = CONTENDERS[task["contender"]]()
    settings = SimpleNamespace(**task)
    problem = Problem.of(settings)
    jnp.zeros(3).block_until_ready()
    programs = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == COMPILED:
            programs.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    warnings.simplefilter("ignore")  # of short runs
    start = time.perf_counter()
    run = call(problem, settings)
    jax.block_until_ready(run(jax.random.key(0)))
    first_s, num_programs = time.perf_counter() - start, len(programs)
    # On the same target, as in a session.
    start = time.perf_counter()
    jax.block_until_ready(run(jax.random.key(1)))
    return {"first_s": first_s, "second_s": time.perf_counter() - start, "programs": num_programs}


def _ours() -> Callable:
    gm = importlib.import_module("gspmd_mcmc")
    target_of = importlib.import_module("benchmarks.contenders.ess_ours").target_of

    def call(problem: Problem, task: Any) -> Callable:
        target = target_of(problem)
        position = gm.per_chain(jax.tree.map(jnp.asarray, problem.start))

        def run(key):
            draws = gm.sample(
                key,
                target,
                position,
                num_chains=task.chains,
                num_warmup=task.num_warmup,
                num_samples=task.num_samples,
                max_tree_depth=task.max_tree_depth,
                progress=False,
            )
            str(draws.summary())
            return draws.position

        return run

    return call


def _numpyro() -> Callable:
    infer = importlib.import_module("numpyro.infer")
    diagnostics = importlib.import_module("numpyro.diagnostics")
    numpyro = importlib.import_module("numpyro")
    flat = importlib.import_module("benchmarks.contenders.ess_numpyro")._flat

    def call(problem: Problem, task: Any) -> Callable:
        log_density, data, start = problem.for_peers()

        def model(data):
            position = {name: numpyro.sample(name, flat(x.shape[1:])) for name, x in start.items()}
            numpyro.factor("log_density", log_density(position, data))

        def run(key):
            # A sampler for each call: `NUTS` of vectorized chains cannot be run twice, as it maps its
            # step over the chains once more.
            sampler = infer.MCMC(
                infer.NUTS(model, max_tree_depth=task.max_tree_depth),
                num_warmup=task.num_warmup,
                num_samples=task.num_samples,
                num_chains=task.chains,
                chain_method="vectorized",
                progress_bar=False,
            )
            sampler.run(key, data, init_params=start)
            draws = sampler.get_samples(group_by_chain=True)
            diagnostics.summary(draws)
            return draws

        return run

    return call


def _blackjax() -> Callable:
    blackjax = importlib.import_module("blackjax")

    def call(problem: Problem, task: Any) -> Callable:
        log_density, data, start = problem.for_peers()
        depth = {"max_num_doublings": task.max_tree_depth}

        @jax.jit
        def sample(key, start, data):
            def one(key, position):
                warmup_key, sample_key = jax.random.split(key)
                adaptation = blackjax.window_adaptation(
                    blackjax.nuts, lambda x: log_density(x, data), **depth
                )
                (state, found), _ = adaptation.run(warmup_key, position, task.num_warmup)
                kernel = blackjax.nuts(lambda x: log_density(x, data), **(found | depth))

                def body(state, key):
                    state, _ = kernel.step(key, state)
                    return state, state.position

                return jax.lax.scan(body, state, jax.random.split(sample_key, task.num_samples))[1]

            return jax.vmap(one)(jax.random.split(key, task.chains), start)

        def run(key):
            draws = sample(key, start, data)
            for x in draws.values():
                blackjax.diagnostics.effective_sample_size(x)
                blackjax.diagnostics.potential_scale_reduction(x)
                np.quantile(x, [0.05, 0.95], axis=(0, 1))
            return draws

        return run

    return call


CONTENDERS = {"ours": _ours, "numpyro": _numpyro, "blackjax": _blackjax}

if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
