"""Where tables are printed.

Progress on standard error: a bar that goes when the work is done; nothing moves where none is seen.

Arguments and options that several commands have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

# A pipe has no width of its own; a table needs about this much to stay on single lines.
_PIPE_COLUMNS = 140


def console() -> Console:
    """A console on standard output, as wide as the terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def moving(width: int, how_far: ProgressColumn) -> Progress:
    """A bar after so many characters of text, then ``how_far`` it is, and since when."""
    return Progress(
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        how_far,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


class Bar:
    """Shows ``bar`` while it is entered; what a command knows of its work is what it adds."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Say something above the bar."""
        if self._bar.disable:
            click.echo(text, err=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)


# A file that is there.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def trace_option(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--trace``."""
    return click.option(
        "--trace",
        required=required,
        type=FILE,
        help="A trace as it was published or captured, or a workload in YAML.",
    )
