"""One of several processes: ``python processes_worker.py CASE PORT NUM_PROCESSES PROCESS OUT``."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import processes_model as model
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import reporting
from gspmd_mcmc.sampling.reporting import Report

case, port, num_processes, process = sys.argv[1], *map(int, sys.argv[2:5])
out = Path(sys.argv[5])
HEARTBEAT = 4


def join(num_devices, heartbeat=100):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    where = f"127.0.0.1:{port}"
    gm.initialize(where, num_processes, process, heartbeat_seconds=heartbeat, exit_on_error=True)


def error_of(function, *arguments, **options):
    """Return what a call raises, in words; every process goes on."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def bytes_held(tree):
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards)


def check_placement(mesh):
    """Lay rows out in three ways; return what this process holds of them, and read."""
    whole = model.rows()
    data = gm.place(whole, mesh, P("data"))
    share = gm.local_rows(model.NUM_ROWS, mesh, P("data"))
    local = gm.place_local({k: x[share] for k, x in whole.items()}, mesh, P("data"))
    asked = []

    def reader(start, stop):
        asked.append([start, stop])
        return whole["x"][start:stop]

    read = gm.place_from_reader(reader, whole["x"].shape, np.float32, mesh, P("data"))
    same = [gm.to_host((data[k].values, local[k].values)) for k in data]
    return {
        "held": bytes_held(data),
        "rows": [share.start, share.stop],
        "asked": asked,
        "local_is_equal": all(np.array_equal(a, b) for a, b in same),
        "read_is_equal": bool(np.array_equal(*gm.to_host((data["x"].values, read.values)))),
        "num_rows": [data["x"].num_rows, local["x"].num_rows, read.num_rows],
        "unpadded": bool(np.array_equal(data["y"].unpad(), whole["y"])),
    }


def check_groups(mesh):
    """Lay rows with their groups as each process has them; return draws, and what it read."""
    whole, asked = model.rows(), []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole)

    def taken(rows):
        asked.append(rows.tolist())
        return jax.tree.map(lambda x: x[rows], whole)

    def read(groups):
        shape = {"age": jax.ShapeDtypeStruct(model.AGE.shape, np.float32)}
        table = groups.place_from_reader(lambda i: {"age": model.AGE[i]}, shape)
        return table, groups.place_rows_from_reader(taken, shapes)

    def local(groups):
        table = groups.place_local({"age": model.AGE[groups.local_groups()]})
        return table, groups.place_local_rows(taken(groups.local_rows()))

    draws = {name: model.sampled_by_group(mesh, place) for name, place in (("r", read), ("l", local))}
    return {f"{kind} {name}": x for kind, d in draws.items() for name, x in d.items()}, asked


def other_keys(mesh):
    groups = gm.Groups(model.GROUP, mesh, P("data"))
    keys = np.roll(model.GROUP, process)
    groups.place_rows(model.rows(), keys)


def other_tiles(mesh):
    """Cut rows as machines with other cores would."""
    groups = gm.Groups(np.repeat(np.arange(8), 4), mesh, P("data"), tile_rows=4 << 4 * process)
    groups.place_rows({"y": np.zeros(32, np.float32)})


def errors(mesh):
    """Give the processes different things."""
    mine = np.zeros((8 + process, 2), np.float32)
    dtype = np.float32 if process else np.int32
    data = gm.place(model.rows(), mesh, P("data"))
    target = model.target_of(data)
    key = jax.random.key(process)
    moved = {"slope": np.ones(3), "spread": 0.0, "effect": np.full(model.NUM_ROWS, float(process))}
    return {
        "shape": error_of(gm.place, {"x": mine}, mesh, P("data")),
        "spec": error_of(gm.place, {"x": np.zeros(8)}, mesh, P("data") if process else P()),
        "dtype": error_of(gm.place_local, np.zeros((4, 2), dtype), mesh, P("data")),
        "rows": error_of(gm.place_local, np.zeros((3 - process, 2)), mesh, P("data")),
        "key": error_of(gm.sample, key, target, model.start, mesh=mesh, progress=False),
        "settings": error_of(model.sampled, mesh, num_samples=5 + process),
        "position": error_of(gm.sample, jax.random.key(0), target, moved, mesh=mesh),
        "keys": error_of(gm.Groups, [0, 1, process], mesh, P("data")),
        "keys of rows": error_of(other_keys, mesh),
        "tiles": error_of(other_tiles, mesh),
        "twice": error_of(gm.initialize),
        "room": error_of(model.sampled, mesh, device_bytes=100),
    }


def stopped_at(mesh):
    """Have process 1 take a Ctrl-C in its third chunk; return how many draws this process made."""
    advance, sizes = Report.advance, []

    def interrupted(report, steps, **numbers):
        advance(report, steps, **numbers)
        sizes.append(steps)
        if process == 1 and len(sizes) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    Report.advance = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    data = gm.place(np.zeros(8, np.float32), mesh, P("data"))
    target = gm.Posterior(of_mean, gm.Plate(of_row, data))
    kernel = gm.HMC(target, 0.1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)
        draws = gm.sample(
            *(jax.random.key(0), target, {"m": np.float32(0)}),
            **{"mesh": mesh, "kernel": kernel, "num_warmup": 0, "num_samples": 1 << 14},
        )
    Report.advance = advance
    return {"draws": draws.num_draws, "chunks": sizes}


def of_mean(params):
    return -0.5 * params["m"] ** 2


def of_row(params, x):
    return -0.5 * (x - params["m"]) ** 2


def of_two():
    """Chains over the processes: NUTS with warm-up, and all that users see of the run."""
    join(2)
    mesh = gm.make_mesh(chains=2, data=2)
    found: dict[str, Any] = {
        "placement": check_placement(gm.make_mesh(data=-1)),
        "over_chains": check_placement(mesh),
    }
    draws = model.sampled(mesh)
    if process == 0:
        found["repr"] = repr(draws)  # by one process alone
    tree = draws.to_datatree()
    found["part"] = {
        "chain": tree.posterior.chain.values.tolist(),
        "effect": tree.posterior.effect_dim_0.values.tolist(),
        "lp": list(tree.sample_stats.lp.shape),
    }
    by_rows = model.sampled(gm.make_mesh(data=-1), gm.HMC, num_warmup=0, num_samples=2)
    found["part_of_rows"] = by_rows.to_datatree().posterior.effect_dim_0.values.tolist()
    values = model.values_of(draws) | {"part": tree.posterior.effect.values}
    np.savez(out / f"values{process}.npz", allow_pickle=False, **values)
    np.savez(out / f"further{process}.npz", allow_pickle=False, **model.further(mesh, draws))
    of_groups, found["read_by_group"] = check_groups(gm.make_mesh(data=-1))
    np.savez(out / f"groups{process}.npz", allow_pickle=False, **of_groups)
    found["padded_rows"] = draws.padded_rows
    found["pad_copies"] = bool(pad_copies(draws.position["effect"]))
    found["errors"] = errors(mesh)
    found["stopped"] = stopped_at(gm.make_mesh(data=-1))
    write(found)


def write(found):
    (out / f"found{process}.json").write_text(json.dumps(found))


def pad_copies(effect):
    x = np.asarray(gm.to_host(effect))
    return (x[:, :, model.NUM_ROWS :] == x[:, :, model.NUM_ROWS - 1 : model.NUM_ROWS]).all()


def dies(how):
    """Have process 1 end in its third chunk of draws or a later one; the others say when, and how.

    What was saved of the one that is killed is for `continued`, so it lives until draws are on disk: a
    checkpoint is begun once the one before is whole, which may take longer than some chunks.
    """
    join(1, HEARTBEAT)
    advance, sizes = Report.advance, []

    def num_saved():
        return gm.open_draws(out / "run" / "draws").num_draws

    def ended(report, steps, **numbers):
        advance(report, steps, **numbers)
        sizes.append(steps)
        is_late = sum(sizes) > model.LONG["num_warmup"] + 2 * model.CHUNK
        if process == 1 and is_late and (how == "raised" or num_saved()):
            (out / "died").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk of process 1 is full")

    Report.advance = ended  # pyright: ignore[reportAttributeAccessIssue]
    saving = {"checkpoint": out / "run", "every": 0.0} if how == "killed" else {}
    model.long_run(gm.make_mesh(data=-1), **saving)


def continued():
    """Continue what process 1 of `dies` has left, and make the same run without an end of it."""
    join(1)
    mesh = gm.make_mesh(data=-1)
    other = {"checkpoint": out / "run", "num_samples": 401 + process}
    found: dict[str, Any] = {"disagree": error_of(model.long_run, mesh, **other)}
    folder = out / f"part{process}"
    folder.mkdir()
    found["elsewhere"] = error_of(model.long_run, mesh, checkpoint=folder)
    found["before"] = gm.open_draws(out / "run" / "draws").num_draws
    draws, whole = model.long_run(mesh, checkpoint=out / "run"), model.long_run(mesh)
    found["draws"] = draws.num_draws
    values = {k: np.asarray(x) for k, x in draws.position.items()}
    wanted = {k: np.asarray(gm.to_host(x)) for k, x in whole.position.items()}
    wanted["effect"] = wanted["effect"][:, :, : model.NUM_ROWS]
    found["equal"] = {k: bool(np.array_equal(values[k], wanted[k])) for k in wanted}
    np.savez(out / f"values{process}.npz", allow_pickle=False, **values)
    write(found)


def alone():
    jax.config.update("jax_platforms", "cpu")
    gm.initialize()
    assert jax.process_count() == 1
    first = error_of(gm.initialize)
    (out / "alone.json").write_text(json.dumps(first))


CASES = {
    "two": of_two,
    "killed": lambda: dies("killed"),
    "raised": lambda: dies("raised"),
    "continued": continued,
    "alone": alone,
}
reporting.SECONDS_A_LINE = 0.0  # these runs end within a minute
CASES[case]()
