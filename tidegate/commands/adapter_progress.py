"""How far the adding of an adapter is: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from serve.client import AddLine


class AddProgress:
    """Shows each :class:`serve.client.AddLine` that it is called with; with ``quiet`` none."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._quiet = quiet
        self._step = ""
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.fields[step]}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True, highlight=False),
                transient=True,
            )
            self._task = self._bar.add_task(name, total=None, step="")

    def __enter__(self) -> AddProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, line: AddLine) -> None:
        """Show ``line``."""
        if self._bar is not None:
            if line.step != self._step:
                self._bar.reset(self._task, total=None)
            self._bar.update(
                self._task, description=line.message, completed=line.done, total=line.total, step=line.step
            )
        elif not self._quiet and line.step != self._step:
            click.echo(f"  {line.step:<12}{line.message}")
        self._step = line.step
