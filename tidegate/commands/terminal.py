"""Output to a terminal or a pipe: tables and JSON on standard output, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

# A pipe has no width; most tables need about this many columns to keep each row on one line.
_PIPE_COLUMNS = 140


def console() -> Console:
    """A console on standard output, as wide as the terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


def warn(text: str) -> None:
    click.echo(text, err=True)


def table(items: Iterable[T], *columns: tuple[str, Callable[[T], object]], title: str | None = None) -> Table:
    """A table with a row for each item. A column is its head and the function that gives its cells.

    A leading ``>`` aligns a column right. ``None`` is shown as ``-``.
    """
    return table_of_rows(
        [head for head, _ in columns], ([cell(item) for _, cell in columns] for item in items), title=title
    )


def print_list(
    name: str, found: list[T], columns: Iterable[tuple[str, Callable[[T], object]]], *, as_json: bool
) -> None:
    """Print what a command found: a table, or one JSON object with the list under ``name``."""
    if as_json:
        print_json({name: found})
    else:
        console().print(table(found, *columns))


def print_change(view: object, sentence: str, *, as_json: bool) -> None:
    """Print what was changed: ``view`` as JSON, or the ``sentence`` about it."""
    if as_json:
        print_json(view)
    else:
        click.echo(sentence)


def print_facts(title: str, view: object, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print one thing: ``view`` as JSON, or the ``facts`` of it that are not ``None``, a line each."""
    if as_json:
        print_json(view)
    else:
        click.echo("\n".join([title, *(f"  {name}: {it}" for name, it in facts.items() if it is not None)]))


def table_of_rows(
    heads: Sequence[str], rows: Iterable[Iterable[object]], *, title: str | None = None
) -> Table:
    """As :func:`table`, with the cells of each row."""
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for head in heads:
        right = head.startswith(">")
        made.add_column(head.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> str | Text:
    if isinstance(value, str | Text):
        return value
    return "-" if value is None else str(value)


class ProgressBar:
    """Progress on standard error: one bar per task on a terminal, otherwise one line per task or step.

    ``amount`` formats the position of a task and ``unit`` names it. The bars disappear at the end.
    """

    def __init__(self, unit: str, amount: Callable[[float], str] = "{:.0f}".format) -> None:
        self._unit = unit
        self._amount = amount
        self._tasks: dict[str, TaskID] = {}
        self._advanced = 0
        # The total of each running task, None of a finished one.
        self._totals: dict[str, float | None] = {}
        self._step = ""
        self._bar = Progress(
            TextColumn("{task.description:<16}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[position]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._bar.stop()
        for task in self._totals if error is None else ():
            self._finish(task)

    def note(self, text: str) -> None:
        if self._bar.disable:
            warn(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def update(
        self, done: float, total: float | None, *, task: str = "", step: str = "", text: str = ""
    ) -> None:
        """``task`` has come to ``done`` of ``total`` (``None``: unknown), and now runs ``step``.

        ``text`` describes the step. Without a terminal a line is printed when a step begins, or, for tasks
        without steps, when the task ends.
        """
        text = text or step or task
        if self._bar.disable:
            self._print(done, total, task, step, text)
            return
        if task not in self._tasks:
            self._tasks[task] = self._bar.add_task(text, total=total, position="")
        if step != self._step:
            self._bar.reset(self._tasks[task], total=total)
            self._step = step
        position = "" if total is None else f"{self._amount(min(done, total))} of {self._amount(total)}"
        position = f"{position} {self._unit}".strip()
        self._bar.update(self._tasks[task], description=text, completed=done, total=total, position=position)

    def advance(self, total: float, task: str, _: object = None) -> None:
        """One more of ``total`` units of the only task is done."""
        self._advanced += 1
        self.update(self._advanced, total, task=task)

    def _print(self, done: float, total: float | None, task: str, step: str, text: str) -> None:
        if step:
            if step != self._step:
                warn(text)
            self._step = step
        elif total is not None and self._totals.setdefault(task, total) is not None:
            self._totals[task] = total
            if done >= total:
                self._finish(task)

    def _finish(self, task: str) -> None:
        if (total := self._totals[task]) is not None:
            self._totals[task] = None
            warn(f"{task}: {self._amount(total)} {self._unit}")
