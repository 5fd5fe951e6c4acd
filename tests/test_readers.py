"""The readers that `place_from_reader` shows run as printed, on files that the test writes."""

import re
import textwrap

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import zarr
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

NUM_ROWS = 60_000
GROUP = 7_001  # rows; groups end within the shards of eight devices


def write_files(folder):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_ROWS, 784), np.uint8)
    images.tofile(folder / "images.u8")
    zarr.create_array(folder / "images.zarr", data=images)
    columns = {name: rng.normal(size=NUM_ROWS).astype(np.float32) for name in ("x", "unread", "y")}
    table = pyarrow.table({name: pyarrow.array(x) for name, x in columns.items()})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=GROUP)
    return images, np.stack([columns["x"], columns["y"]], axis=1)


def test_the_readers_of_the_docstring_read_what_place_places(tmp_path, monkeypatch):
    images, table = write_files(tmp_path)
    _, shown = (gm.place_from_reader.__doc__ or "").split("file::\n")
    code = re.sub(r"^(place_from_reader)", r"placed += [gm.\1", textwrap.dedent(shown), flags=re.M)
    code = re.sub(r"(P\(\"data\"\)\))$", r"\1]", code, flags=re.M)
    monkeypatch.chdir(tmp_path)
    mesh, placed = gm.make_mesh(data=7, devices=jax.devices()[:7]), []
    modules = {"np": np, "zarr": zarr, "pyarrow": pyarrow, "gm": gm, "P": P}
    exec(code, modules | {"mesh": mesh, "placed": placed})
    assert len(placed) == 3
    for found, expected in zip(placed, (images, images, table), strict=True):
        assert found.num_rows == NUM_ROWS  # which seven devices do not divide
        np.testing.assert_array_equal(found.unpad(), expected)
