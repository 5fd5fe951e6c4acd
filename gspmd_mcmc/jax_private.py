"""Everything that this package uses of JAX beyond its public API; JAX may change it in any release.

Importing the package reads none of these names and changes nothing in JAX. A name is looked up where
it is needed first. Without it results stay right, and one warning says what is slower or missing.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import jax

from gspmd_mcmc.errors import SamplingWarning


class Name(NamedTuple):
    """Where JAX has a name, and what happens without it."""

    where: str
    lost: str


OLD_RANK = "a PositionalSharding refuses arrays that have fewer axes than the sharding has"
NAMES = {
    "dce_jaxpr": Name(
        "jax.interpreters.partial_eval:dce_jaxpr",
        "unused operations are found without looking into calls and loops. Some fused kernels and "
        "indexed plates are left out, and from_numpyro may warn of random numbers without need",
    ),
    "donation_vector": Name(
        "jax._src.api_util:donation_vector",
        "arrays that functions close over stay in memory, after jax.clear_caches() too",
    ),
    "eval_jaxpr": Name("jax.core:eval_jaxpr", "programs cannot be rewritten, and gradients are slower"),
    "get_axis_env": Name(
        "jax._src.core:get_axis_env", "gradients over several CPU devices are slower under jax.vmap"
    ),
    "out_sharding_handlers": Name(
        "jax._src.interpreters.pxla:_orig_out_sharding_handlers",
        "results of programs that read a PositionalSharding have a sharding without a mesh and a spec, "
        "and jax.vmap over jax.lax.with_sharding_constraint fails. Use sharding.named()",
    ),
    "to_sdy_sharding": Name("jax.sharding:NamedSharding._to_sdy_sharding", OLD_RANK),
    "to_xla_hlo_sharding": Name("jax.sharding:NamedSharding._to_xla_hlo_sharding", OLD_RANK),
}


@cache
def found(name: str) -> Any | None:
    """Return what JAX has by a name of `NAMES`; warn and return None if it is gone."""
    where, lost = NAMES[name]
    try:
        return resolve_name(where)
    except (ImportError, AttributeError):
        _warn(f"has no {where}", lost)
        return None


def _warn(what: str, lost: str) -> None:
    message = f"JAX {jax.__version__} {what}: {lost}. gspmd_mcmc was not tested with this JAX"
    warnings.warn(message, SamplingWarning, stacklevel=3)


@contextmanager
def forgetting_donations() -> Iterator[None]:
    """Let go of the structures of calls with donated arguments.

    JAX keeps 4,096 of them, with the functions in them and the arrays that those close over, and
    ``jax.clear_caches`` does not reach them.
    """
    try:
        yield
    finally:
        if (keeper := found("donation_vector")) is not None:
            keeper.cache_clear()


# Programs that JAX has traced, their equations and variables. Older versions of JAX have two classes,
# of programs with and without their constants; JAX 0.12 has one.


def open_program(program: Any) -> Any:
    """Return a program without its constants: the one that has ``eqns``, ``invars`` and ``outvars``."""
    return getattr(program, "jaxpr", program)


def is_program(x: Any) -> bool:
    """Tell whether a parameter of an equation is a program."""
    return hasattr(x, "eqns")


def is_literal(atom: Any) -> bool:
    """Tell whether an operand of an equation is a number, not a variable."""
    return hasattr(atom, "val")


def fresh_variable(like: Any) -> Any:
    """Return another variable of the same type."""
    return type(like)(like.aval)


def with_equations(program: Any, eqns: Sequence[Any]) -> Any:
    """Return a program, with its constants, that has other equations."""
    inner = open_program(program)
    new = inner.replace(eqns=list(eqns))
    return new if inner is program else program.replace(jaxpr=new)


def with_constants(inner: Any, constants: Sequence[Any], like: Any) -> Any:
    """Return a program with constants, of the class of another one that has some."""
    return type(like)(inner, list(constants))


def evaluate(program: Any, *args: Any) -> list[Any]:
    """Run a program that has its constants; its intermediates may be NaN under ``jax_debug_nans``."""
    eval_jaxpr: Any = found("eval_jaxpr")
    with jax.debug_nans(False):
        return eval_jaxpr(open_program(program), program.consts, *args)


@cache
def can_rewrite() -> bool:
    """Tell whether a program's equations can be replaced, which is tried; warn if they cannot."""
    try:
        program = jax.make_jaxpr(lambda x: x * 2.0 + 1.0)(jax.ShapeDtypeStruct((), "float32"))
        first, last = open_program(program).eqns
        variable = fresh_variable(first.outvars[0])
        eqns = [
            first.replace(outvars=[variable], source_info=first.source_info),
            last.replace(invars=[variable, *last.invars[1:]], params=dict(last.params)),
        ]
        new = with_equations(program, eqns)
        new = with_constants(open_program(new), new.consts, program)
        open_program(new).debug_info.with_unknown_names()
        (out,) = jax.eval_shape(lambda x: evaluate(new, x), jax.ShapeDtypeStruct((), "float32"))
        assert out.shape == ()
    except Exception as error:  # whatever the internals of another JAX raise
        what = f"has programs that cannot be rewritten ({type(error).__name__}: {error})"
        _warn(what, "gradients are slower, and some indexed plates are not streamed")
        return False
    return True


def without_unused(
    inner: Any, is_wanted: Sequence[bool], keep_inputs: bool = False
) -> tuple[Any, list[bool]]:
    """Leave out the equations that no wanted output depends on.

    Parameters
    ----------
    inner
        A program without its constants.
    is_wanted
        One flag per output; the program returned has the wanted ones.
    keep_inputs
        Whether the program returned has the inputs that it does not read, too.

    Returns
    -------
    program, is_kept
        The program, and for each input of the given one whether this one has it.
    """
    exact: Callable | None = found("dce_jaxpr")
    if exact is not None:
        return exact(inner, list(is_wanted), instantiate=keep_inputs)
    outvars = [v for v, wanted in zip(inner.outvars, is_wanted, strict=True) if wanted]
    live, eqns = {id(v) for v in outvars}, []
    for eqn in reversed(inner.eqns):
        if eqn.effects or any(id(v) in live for v in eqn.outvars):
            live |= {id(v) for v in eqn.invars}
            eqns.insert(0, eqn)
    is_kept = [keep_inputs or id(v) in live for v in inner.invars]
    invars = [v for v, kept in zip(inner.invars, is_kept, strict=True) if kept]
    names = inner.debug_info.with_unknown_names()
    return inner.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=names), is_kept
