"""The progress of a run on a terminal; apart, so that rich is imported where something is shown."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Progress):
    """Progress on a terminal: a bar for each phase."""

    def __init__(self, console: Console, *, is_shown: bool):
        done = TextColumn("{task.completed}/{task.total}")
        name, numbers = TextColumn("{task.description:>8}"), TextColumn("{task.fields[numbers]}")
        columns = name, BarColumn(bar_width=6), done, numbers, TimeRemainingColumn()
        super().__init__(*columns, console=console, disable=not is_shown)

    def phase(self, name: str, total: int, done: int) -> None:
        """Begin a bar."""
        self._phase = self.add_task(name, total=total, completed=done, numbers="compiling")

    def show(self, done: int, numbers: str) -> None:
        """Show how many steps are done."""
        self.update(self._phase, completed=done, numbers=numbers)
