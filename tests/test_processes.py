"""Several processes on one machine: they compute what one does, or say why not."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest.mock import create_autospec

import jax
import numpy as np
import processes_model as model
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.multihost.agreement import disagreement
from gspmd_mcmc.multihost.processes import spans_processes

WORKER = Path(__file__).parent / "processes_worker.py"
TIMEOUT = 500  # of a busy machine; a quiet one needs a tenth
# Two heartbeats of four seconds, and a busy machine's slack.
BOUND = 25

# Warnings are errors, but for that of a few rows on many devices, which these tests are about.
STRICT = ("-W", "error", "-W", "ignore:small data on many devices")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(case, num_processes, out):
    """Run a case on fresh processes; return their return codes, what they said, when they ended."""
    port = free_port()
    paths = {"PYTHONPATH": f"{WORKER.parent.parent}{os.pathsep}{WORKER.parent}"}
    processes = []
    for i in range(num_processes):
        command = [sys.executable, *STRICT, WORKER, case, port, num_processes, i, out]
        with open(out / f"log{i}", "w") as log:
            processes.append(
                subprocess.Popen(
                    list(map(str, command)), stdout=log, stderr=log, env=os.environ | paths
                )
            )
    try:
        codes = [p.wait(TIMEOUT) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return codes, [(out / f"log{i}").read_text() for i in range(num_processes)]


def results_of(case, num_processes, out):
    codes, logs = launch(case, num_processes, out)
    assert codes == [0] * num_processes, logs[int(np.flatnonzero(codes)[0])][-3000:]
    found = [json.loads((out / f"found{i}.json").read_text()) for i in range(num_processes)]
    return found, [dict(np.load(out / f"values{i}.npz")) for i in range(num_processes)], logs


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder_of_two):
    return results_of("two", 2, folder_of_two)


def apart(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_two_processes_draw_what_one_process_draws(two):
    """NUTS with warm-up, shared and local latents, rows that the mesh does not divide."""
    _, values, _ = two
    draws = model.sampled(gm.make_mesh(chains=2, data=2, devices=jax.devices()[:4]))
    expected = model.values_of(draws)
    assert expected["acceptance_rate"].mean() > 0.3
    for found in values:
        for name in ("slope", "spread", "effect", "log_density", "step_size"):
            assert apart(found[name], expected[name]) < 1e-5, name
        for name in ("rhat_slope", "rhat_spread", "rhat_effect"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    # Another chain is far away by the same measure.
    assert apart(values[0]["slope"][0], expected["slope"][1]) > 1e-2


def test_two_processes_go_on_plot_climb_and_take_a_numpyro_model_as_one_does(two, folder_of_two):
    mesh = gm.make_mesh(chains=2, data=2, devices=jax.devices()[:4])
    expected = model.further(mesh, model.sampled(mesh))
    shown = [name for name in expected if name.startswith("shown effect")]
    assert len(shown) == model.NUM_ROWS  # and no pad
    for process in range(2):
        found = dict(np.load(folder_of_two / f"further{process}.npz"))
        assert set(found) == set(expected)
        for name, x in expected.items():
            assert apart(found[name], x) < 1e-4, name
    # By the same measure other draws are far away.
    assert apart(expected["more"][0], expected["more"][1]) > 1e-2
    assert apart(expected["more"], expected["numpyro"]) > 1e-2


def test_each_process_holds_and_reads_its_share_of_the_rows_alone(two):
    bytes_of_row = 4 * 4  # x of three numbers, and y; as float32
    rows = [process["placement"]["rows"] for process in two[0]]
    assert rows == [[0, 12], [12, model.NUM_ROWS]]  # the pad is on the last process
    for process, (first, last) in zip(two[0], rows, strict=True):
        placed, over_chains = process["placement"], process["over_chains"]
        assert placed["local_is_equal"] and placed["read_is_equal"] and placed["unpadded"]
        assert placed["num_rows"] == [model.NUM_ROWS] * 3
        assert placed["held"] == 24 * bytes_of_row // 2
        assert placed["asked"][0][0] == first and placed["asked"][-1][1] == last
        assert all(first <= a < b <= last for a, b in placed["asked"])
        # Where the processes lie over the chains, each needs every row; devices share one read.
        assert over_chains["held"] == 22 * bytes_of_row
        assert len(over_chains["asked"]) == 2


def test_rows_of_groups_are_read_by_the_process_that_holds_them(two, folder_of_two):
    rows = jax.tree.map(np.asarray, model.rows())
    mesh = gm.make_mesh(data=-1, devices=jax.devices()[:4])

    def place(groups):
        return groups.place({"age": model.AGE}), groups.place_rows(rows)

    expected = model.sampled_by_group(mesh, place)
    asked = [{tuple(rows) for rows in process["read_by_group"]} for process in two[0]]
    for process in range(2):
        found = dict(np.load(folder_of_two / f"groups{process}.npz"))
        for name, x in expected.items():
            assert apart(found[f"r {name}"], x) < 1e-5 and apart(found[f"l {name}"], x) < 1e-5, name
        read = set().union(*asked[process])
        assert 0 < len(read) < 0.9 * model.NUM_ROWS, "each reads its share"
    assert set().union(*asked[0], *asked[1]) == set(range(model.NUM_ROWS))


def test_processes_that_are_given_different_things_say_which(two):
    for process in two[0]:
        found = process["errors"]
        assert found["keys"].startswith("ProcessesDisagree: ") and "labels" in found["keys"]
        assert found["keys of rows"].startswith("ProcessesDisagree: ")
        assert "keys: process 0 has" in found["keys of rows"]
        assert "tile_rows: process 0 has 4; process 1 has 64" in found["tiles"]
        for case in ("shape", "spec", "dtype", "key", "settings", "position"):
            assert found[case].startswith("ProcessesDisagree: ")
        assert "leaf ['x']: process 0 has float32[8, 2]" in found["shape"]
        assert "process 1 has float32[9, 2]" in found["shape"]
        assert f"under {P()}; process 1" in found["spec"]
        assert "process 0 has int32 rows" in found["dtype"]
        assert "rng_key: process 0 has threefry2x32 key [0, 0]; process 1" in found["key"]
        assert "num_samples: process 0 has 5; process 1 has 6" in found["settings"]
        assert "initial_position['effect']: process 0 has" in found["position"]
        assert "slope" not in found["position"]  # which is the same
        assert "process 0 gave 3 (expected 2)" in found["rows"]
        assert "called twice; this is process" in found["twice"]
        assert found["room"].startswith("ValueError: num_samples=6: draws of several processes stay")


def test_an_interrupt_of_one_process_stops_all_at_the_same_chunk(two):
    first, second = (process["stopped"] for process in two[0])
    assert first == second
    assert 0 < first["draws"] < 1 << 14
    assert len(first["chunks"]) == 3  # Chunks are sized by the time that they take, and yet alike.


def test_process_0_alone_shows_progress(two):
    _, _, (first, second) = two
    assert "leapfrogs/s" in first
    assert "leapfrogs/s" not in second


def test_a_process_shows_its_draws_and_holds_its_part(two):
    found, values, _ = two
    assert found[0]["repr"].startswith("Draws(2 chains x 6 draws")
    for i, process in enumerate(found):
        assert process["part"] == {"chain": [i], "effect": list(range(model.NUM_ROWS)), "lp": [1, 6]}
        np.testing.assert_array_equal(values[i]["part"], values[i]["effect"][i : i + 1])
        # Where rows lie over the processes, each has its own.
        first, last = process["placement"]["rows"]
        assert process["part_of_rows"] == list(range(first, last))


def test_pad_of_draws_copies_the_last_row(two):
    for process in two[0]:
        assert process["padded_rows"] == {"effect": [2, model.NUM_ROWS]}
        assert process["pad_copies"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Give ``ended(how)``: the folder of a run of two that lost one, their codes, what they said."""

    @functools.cache
    def run(how):
        out = tmp_path_factory.mktemp(how)
        codes, logs = launch(how, 2, out)
        return out, codes, logs, time.time()

    return run


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("killed", -9, ""), ("raised", 1, "process 1 of 2 ends by its error: OSError: the disk")],
)
def test_a_process_that_ends_ends_the_others_soon(how, code, says, ended):
    out, codes, (of_other, of_ended), at = ended(how)
    assert codes[1] == code and codes[0] not in (0, None)
    assert at - float((out / "died").read_text()) < BOUND
    assert "another process of this run has ended" in of_other or "another task died" in of_other
    assert says in of_ended


def test_a_run_continues_from_what_a_killed_process_of_two_has_left(ended):
    """On two processes to the bit, on one to rounding."""
    out, *_ = ended("killed")
    copy = shutil.copytree(out / "run", out / "copy")
    found, values, _ = results_of("continued", 2, out)
    num_draws = model.LONG["num_samples"]
    for process in found:
        assert 0 < process["before"] < num_draws == process["draws"]
        assert process["equal"] == {"slope": True, "spread": True, "effect": True}
        assert process["disagree"].startswith("ProcessesDisagree: sample: ")
        assert "num_samples: process 0 has 401; process 1 has 402" in process["disagree"]
        assert "part0'; process 1 has" in process["elsewhere"]
    alone = model.long_run(gm.make_mesh(data=2, devices=jax.devices()[:2]), checkpoint=copy)
    assert alone.num_draws == num_draws
    for name, expected in values[0].items():
        assert apart(np.asarray(alone.position[name]), expected) < 1e-3, name
    assert apart(values[0]["slope"][0], values[0]["slope"][1]) > 1e-2  # another chain's, so measured


def test_more_than_two_processes_are_told_apart():
    stated = [{"call": "sample", "num_samples": str(5 + (i == 2))} for i in range(4)]
    message = disagreement("sample", stated)
    assert "num_samples: processes 0, 1, 3 have 5; process 2 has 6" in message
    assert "call" not in message


def test_a_mesh_of_some_processes_is_refused(monkeypatch):
    devices = np.array([types.SimpleNamespace(process_index=i) for i in range(2)])
    mesh = create_autospec(jax.sharding.Mesh, instance=True, devices=devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert spans_processes(mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match=r"it lies on processes \[0, 1\] of 4"):
        spans_processes(mesh)


def test_the_hook_of_errors_is_replaced_where_the_user_asks(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    hook = lambda *error: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", hook)
    gm.initialize("127.0.0.1:1", 1, 0)
    assert sys.excepthook is hook
    gm.initialize("127.0.0.1:1", 1, 0, exit_on_error=True)
    assert sys.excepthook is not hook


def test_a_process_alone_stays_alone(tmp_path):
    codes, logs = launch("alone", 1, tmp_path)
    assert codes == [0], logs[0][-2000:]
    said = json.loads((tmp_path / "alone.json").read_text())
    assert said.startswith("RuntimeError: initialize: JAX has started its devices already")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"coordinator_address": "host"}, 'expected "host:port"'),
        ({"num_processes": 0}, "num_processes: expected an integer of at least 1, got 0"),
        ({"process_id": -1}, "process_id: expected an integer of at least 0"),
        ({"num_processes": 2, "process_id": 2}, "process_id=2 of num_processes=2"),
        ({"heartbeat_seconds": 0}, "heartbeat_seconds: expected 1 or more"),
    ],
)
def test_initialize_checks_its_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        gm.initialize(**arguments)


def test_initialize_comes_first():
    jax.devices()
    with pytest.raises(RuntimeError, match="has started its devices already"):
        gm.initialize("127.0.0.1:1", 2, 0)


def test_one_process_places_rows_of_its_own_and_reads():
    mesh, x = gm.make_mesh(chains=2, data=4), model.rows()["x"]
    expected = gm.place(x, mesh, P("data"))
    share = gm.local_rows(len(x), mesh, P("data"))
    assert (share.start, share.stop) == (0, len(x))
    read = gm.place_from_reader(lambda a, b: x[a:b], x.shape, x.dtype, mesh, P("data"))
    for placed in (gm.place_local({"x": x}, mesh, P("data"))["x"], read):
        assert placed.num_rows == len(x)
        assert placed.values.sharding == expected.values.sharding
        np.testing.assert_array_equal(placed.values, expected.values)


def test_a_reader_of_columns_and_few_rows():
    """Shards of pad alone, rows and columns both laid out."""
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    mesh = gm.make_mesh(data=4, model=2)
    read = gm.place_from_reader(lambda a, b: x[a:b], x.shape, x.dtype, mesh, P("data", "model"))
    np.testing.assert_array_equal(read.values, x[[0, 1, 2, 2]])
    assert read.values.addressable_shards[0].data.shape == (1, 2)


@pytest.mark.parametrize(
    ("shape", "says"), [((5, 3), "asked for rows 0 to 1: expected shape"), ((), "expected rows")]
)
def test_a_reader_that_returns_other_rows_is_told(shape, says):
    mesh = gm.make_mesh(data=-1)
    with pytest.raises(ValueError, match=says):
        gm.place_from_reader(lambda a, b: np.zeros((b - a, 2)), shape, np.float32, mesh, P("data"))


def test_leaves_of_other_rows_are_told():
    with pytest.raises(ValueError, match="place_local: expected leaves with the same rows"):
        gm.place_local({"x": np.zeros(8), "y": np.zeros(9)}, gm.make_mesh(data=-1), P("data"))
