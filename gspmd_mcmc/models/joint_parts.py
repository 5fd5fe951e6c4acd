"""Parts of a joint distribution: how they are held, checked, ordered, and gone through."""

import inspect
import keyword
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from gspmd_mcmc import tree
from gspmd_mcmc.models.sharded import Sharded, check_value, draw_part, is_distribution, plain, shown
from gspmd_mcmc.models.tfp import name_of, refuse_foreign
from gspmd_mcmc.placement.mesh import auto_mesh
from gspmd_mcmc.placement.modules import hold, release
from gspmd_mcmc.placement.padding import is_padded, real_rows
from gspmd_mcmc.targets.function import as_partial


def run(joint: Any, visit: Callable[[int, str, Any], Any]) -> None:
    """Go through the parts: ``visit(index, name, part)`` returns the value that later ones see."""

    def checked(name: str, part: Any) -> Any:
        check_name(name)
        if not is_distribution(part):
            raise TypeError(
                f"part {name!r}: expected a distribution, Sharded(distribution) or (of a coroutine) "
                f"Root(distribution), got {shown(part)}"
            )
        refuse_foreign(f"part {name!r}", part)
        if name in seen:
            raise ValueError(f"two parts are called {name!r}; give them names: Sharded(..., name=...)")
        if isinstance(part, Sharded) and part.mesh is None:
            part = tree.replace(part, mesh=joint.mesh)
        seen.append(name)
        return visit(len(seen) - 1, name, part)

    seen: list[str] = []
    _released(joint).visit_parts(checked)
    if not seen:
        raise ValueError("the joint distribution has no parts")


def trace(joint: Any, observed: dict[str, Any], fact: Callable) -> dict[str, Any]:
    """Run the model in the abstract, on what is observed; give ``fact(name, part, value)`` by name."""

    def model(key: jax.Array, observed: dict[str, Any]) -> None:
        def visit(index: int, name: str, part: Any) -> Any:
            if name in observed:
                check_value(f"observed {name!r}", part, observed[name])
            value = real_rows(observed[name]) if name in observed else draw_part(part, key)
            found[name] = fact(name, part, value)
            return value

        run(joint, visit)

    found: dict[str, Any] = {}
    jax.eval_shape(model, jax.random.key(0), observed)
    return found


# The parts as they are written: checks, names, and what functions take.


def checked_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh, if it is one that arrays can be laid over."""
    if mesh is not None:
        auto_mesh("mesh", mesh)
    return mesh


@tree.pytree
@dataclass(frozen=True, eq=False)
class _Held:
    """A distribution taken apart: TFP's, put together again, compute with what stands for arrays."""

    leaves: list[Any]
    treedef: Any = tree.static()


def held_part(part: Any) -> Any:
    """Return a part as a pytree whose leaves are its arrays."""

    def held(node: Any) -> Any:
        if isinstance(node, Sharded):  # its mesh stays in sight
            return tree.replace(node, distribution=held(node.distribution))
        return _Held(*jax.tree.flatten(node, is_leaf=is_padded)) if is_distribution(node) else node

    function_or_distribution = part if is_distribution(part) else as_partial(part)
    return hold(jax.tree.map(held, function_or_distribution, is_leaf=is_distribution))


def _released(joint: Any) -> Any:
    """Undo `held_part` of all parts."""

    def released(node: Any) -> Any:
        return node.treedef.unflatten(node.leaves) if isinstance(node, _Held) else node

    return jax.tree.map(released, release(joint), is_leaf=lambda node: isinstance(node, _Held))


def check_part(what: str, part: Any) -> None:
    """Raise unless a part is a distribution, or a function."""
    if not is_distribution(part) and (isinstance(part, type) or not callable(part)):
        raise TypeError(
            f"{what}: expected a distribution, or a function that returns one, got {shown(part)}"
        )


def check_name(name: Any) -> None:
    """Raise unless a name can be a keyword of `condition`."""
    is_word = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    if not is_word or name.startswith("_"):
        raise ValueError(f"expected the name of a part to be an identifier, got {name!r}")


def name_of_part(distribution: Any, index: int) -> str:
    """Return the name that a part or its distribution was given, or its number's."""
    name = distribution.name if isinstance(distribution, Sharded) else None
    name = name_of(plain(distribution)) if name is None else name
    return f"var{index}" if name is None else name


def _parameters(part: Any) -> list[inspect.Parameter]:
    return [] if is_distribution(part) else list(inspect.signature(part).parameters.values())


def required(part: Any) -> list[str]:
    """Names of the values that a function takes by place."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(part) if p.kind in by_place and p.default is p.empty]


def num_taken(part: Any, most: int) -> int:
    """How many of the values before it a function takes."""
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in _parameters(part))
    return most if takes_all else len(required(part))


def taken_by(part: Any, names: Iterable[str]) -> list[str]:
    """Names of the parts that a function takes; of arguments with a default, those that are parts."""
    return [p.name for p in _parameters(part) if p.name in names or p.default is p.empty]


def in_order(takes: dict[str, list[str]]) -> tuple[str, ...]:
    """Order parts as they are written, but each after those that it takes."""
    for name, others in takes.items():
        unknown = [other for other in others if other not in takes]
        if unknown:
            raise ValueError(f"{name!r} takes {unknown[0]!r}, which is none of {list(takes)}")
    order: list[str] = []
    while len(order) < len(takes):
        ready = [n for n in takes if n not in order and set(takes[n]) <= set(order)]
        if not ready:
            circle = {n: takes[n] for n in takes if n not in order}
            raise ValueError(f"parts take each other in a circle: {circle}")
        order.append(ready[0])
    return tuple(order)
