"""The Python lines that an operation of a compiled program comes from."""

import re
from dataclasses import dataclass
from pathlib import Path

_TABLE_LINE = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Frame:
    """A line of Python on the way to an operation."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        function = f" ({self.function})" if self.function else ""
        return f"{self._short_file}:{self.line}{function}"

    @property
    def _short_file(self) -> str:
        """The file, below the folder of this package or the working folder where it is there."""
        for folder in (Path(__file__).parents[3], Path.cwd()):
            if Path(self.file).is_relative_to(folder):
                return str(Path(self.file).relative_to(folder))
        return self.file


def read_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """Read the tables of source lines that stand before the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table = None
    for line in text.splitlines():
        if line in tables:
            table = tables[line]
        elif table is not None and (entry := _TABLE_LINE.match(line)):
            table[int(entry.group(1))] = (
                entry.group(2) if entry.group(2) is not None else entry.group(3)
            )
        elif line:
            table = None
    entries = {number: _fields(entry) for number, entry in tables["StackFrames"].items()}
    # Some versions count parents from 1 with 1 for none: there the first frame is its own parent.
    shift = int(any(entry.get("parent_frame_id") == number for number, entry in entries.items()))
    frames: dict[int, tuple[Frame, ...]] = {}
    for number, entry in sorted(entries.items()):  # a parent stands before its children
        above = frames.get(entry.get("parent_frame_id", 0) - shift, ())
        frames[number] = (_frame(entry, tables), *above)
    return frames


def _frame(entry: dict[str, int], tables: dict[str, dict[int, str]]) -> Frame:
    location = _fields(tables["FileLocations"].get(entry.get("file_location_id", 0), ""))
    return Frame(
        tables["FileNames"].get(location.get("file_name_id", 0), "?"),
        location.get("line", 0),
        tables["FunctionNames"].get(location.get("function_name_id", 0), ""),
    )


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
