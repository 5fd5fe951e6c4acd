"""A run put together from its newest checkpoint, on the mesh at hand."""

import dataclasses
import warnings
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from gspmd_mcmc import tree
from gspmd_mcmc.sampling.checkpoint import Checkpoints, Damaged
from gspmd_mcmc.sampling.encoding import decode, encode
from gspmd_mcmc.sampling.errors import SamplingWarning
from gspmd_mcmc.sampling.fingerprint import fingerprint, plates, require_same
from gspmd_mcmc.sampling.keeping import read_sink
from gspmd_mcmc.sampling.layout import Layout
from gspmd_mcmc.sampling.moving import Move, describe_mesh, moved_layout, read_spec
from gspmd_mcmc.sampling.run import Run
from gspmd_mcmc.sampling.same_target import evaluated_anew, require_same_density
from gspmd_mcmc.sampling.start import require_same_precision
from gspmd_mcmc.tree import PyTree

Document = dict[str, Any]


def rebuild(
    checkpoints: Checkpoints, target: Any, mesh: Mesh | None, num_samples: int | None
) -> tuple[Run, Document]:
    """Return the run of the newest checkpoint that can be read, and that checkpoint's document.

    Damaged ones are put aside, with a warning.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError
        If none can be read, or they are of another model.
    """
    failures: dict[int, Exception] = {}
    for number in checkpoints.steps():
        try:
            document = checkpoints.read(number)
            run = _read_run(checkpoints, number, document, target, mesh)
        except (Damaged, OSError) as error:
            failures[number] = error
            continue
        _put_aside(checkpoints, failures)
        return _of_length(run, num_samples), document
    if not failures:
        raise FileNotFoundError(f"path: {checkpoints.path} holds no checkpoint of a run")
    shown = "\n".join(f"  {number}: {error}" for number, error in failures.items())
    raise ValueError(f"path: no checkpoint in {checkpoints.path} can be read:\n{shown}")


def _put_aside(checkpoints: Checkpoints, failures: dict[int, Exception]) -> None:
    for number, error in failures.items():
        checkpoints.put_aside(number)
        warnings.warn(
            f"checkpoint {number} in {checkpoints.path} is damaged: {error}. It was put aside, and the "
            "run goes on from the one before",
            SamplingWarning,
            stacklevel=5,
        )


def _of_length(run: Run, num_samples: int | None) -> Run:
    """Set how many draws are asked for; raise if there are more already."""
    if num_samples is None:
        return run
    done = 0 if run.collecting is None else run.collecting.num_draws
    if num_samples < done:
        raise ValueError(
            f"num_samples: the run has {done} draws already; expected no fewer, got {num_samples}"
        )
    attributes = run.plan.attributes | {"num_samples": num_samples}
    run.plan = dataclasses.replace(run.plan, num_samples=num_samples, attributes=attributes)
    return run


def _read_run(
    checkpoints: Checkpoints, number: int, document: Document, target: Any, mesh: Mesh | None
) -> Run:
    """Read the arrays of a checkpoint to where they belong on the mesh, and make the run of them."""
    saved = _decode(document, [_shape(x) for x in document["arrays"]])
    positions = saved["state"]["states"].position
    require_same_precision("path", saved["state"]["states"].log_density)
    require_same(document["fingerprint"], fingerprint(target, positions), checkpoints.path)
    layout, shapes, move = _plan_layout(document, saved, target, mesh)
    arrays = checkpoints.restore(number, encode(shapes)[1])
    found = _decode(document, arrays)
    state = found["state"]
    if move is not None:
        states = move.fill({"states": state["states"]}, state["states"].position)["states"]
        state = move.fill(state, states.position) | {"states": states}
    kernel = tree.replace(state["kernel"], target=target)
    states = _states(kernel, state["states"], layout, checkpoints.path, is_moved=move is not None)
    rng_key = jax.random.wrap_key_data(state["rng_key"], impl=document["rng_impl"])
    sink = read_sink(document["sink"], checkpoints.path)
    run = Run(found["plan"], kernel, states, rng_key, 0, layout, sink)
    run.put_back(state, document["counts"])
    return run


def _plan_layout(
    document: Document, saved: PyTree, target: Any, mesh: Mesh | None
) -> tuple[Layout, PyTree, Move | None]:
    """Return the layout, the shapes with shardings of all arrays, and the move to them, if any."""
    described = {"mesh": describe_mesh(mesh), "plates": plates(target)}
    if all(document[name] == value for name, value in described.items()):
        shapes = [_shape(x, mesh) for x in document["arrays"]]
        layout = Layout(mesh, tuple(read_spec(spec) for spec in document["specs"]))
        return layout, _decode(document, shapes), None
    positions = saved["state"]["states"].position
    layout = moved_layout(mesh, document["specs"], target, positions)
    move = Move.of(positions, target, layout)
    state = {name: x for name, x in saved["state"].items() if name != "rng_key"}
    return layout, {"state": saved["state"] | move.shapes(state), "plan": saved["plan"]}, move


def _states(kernel: Any, states: Any, layout: Layout, path: Any, *, is_moved: bool) -> Any:
    """Return the states; what depends on how rows are cut is evaluated anew, if they are cut anew."""
    fresh = evaluated_anew(kernel, states, layout)
    require_same_density(f"target: the run in {path} cannot be gone on with", states, fresh)
    cuts = [jax.tree.map(lambda x: (x.shape, x.dtype), s.terms) for s in (fresh, states)]
    if not is_moved and cuts[0] == cuts[1]:
        return states
    names = ("position", "log_density", "log_density_grad", "terms")
    return tree.replace(states, **{name: getattr(fresh, name) for name in names})


def _decode(document: Document, arrays: list[Any]) -> PyTree:
    try:
        return decode(document["tree"], arrays)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"path: the run has a function or class that cannot be imported here: {error}. Resume it "
            "from a program that has the modules which the run was begun with"
        ) from error


def _shape(described: dict[str, Any], mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
    dtype = jax.numpy.dtype(described["dtype"])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"path: the run has arrays of {dtype}; resume it with jax_enable_x64")
    shape = tuple(described["shape"])
    if mesh is None or described["spec"] is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(mesh, read_spec(described["spec"]))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
