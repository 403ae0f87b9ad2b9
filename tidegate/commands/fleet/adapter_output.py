"""The tables of ``tidegate adapters``.

How far the adding of an adapter is: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

import click
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from policy.wire.controller import AddLine
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, VersionStatus
from tidegate.commands.fleet.status_tables import age

_COLORS = {
    AdapterState.READY: "green",
    AdapterState.PARTIAL: "yellow",
    AdapterState.FETCHING: "yellow",
    AdapterState.FAILED: "red",
}

# Replicas that are named in one row; of more their number is said.
_NAMED = 2


def overview(status: AdaptersStatus) -> Table:
    """One row for each version that a name stands for; with several base models they are told too."""
    several = len(status.models) > 1
    columns = ["name", "version", "rank", "size", "lives on", "requests/s", "hit rate", "last used", "state"]
    table = _table(*(["model"] if several else []), *columns)
    for adapter in status.adapters:
        live = [version for version in adapter.versions if version.share]
        for row in map(list, [_row(adapter, version, status.at) for version in live] or [_absent(adapter)]):
            table.add_row(*([adapter.model] if several else []), *row)
    return table


def history(adapter: AdapterStatus, at: float) -> RenderableType:
    """The versions of one name that are kept, newest first, and what the plan and replicas say of them."""
    head = _table("model", "tenants", "state", "note")
    tenants = ", ".join(adapter.tenants) or "everybody"
    head.add_row(adapter.model, tenants, _state(adapter), Text(adapter.note, style="dim"))
    versions = _table("version", "share", "digest", "rank", "size", "added", "lives on", "source")
    for version in reversed(adapter.versions):
        versions.add_row(
            f"v{version.number}",
            f"{version.share:.4g}" if version.share else "-",
            version.digest[:12],
            str(version.rank),
            _size(version.size),
            f"{age(at - version.at)} ago",
            _places(version),
            version.source,
        )
    plans = [
        Text(f"v{version.number} is planned so: {version.why}", style="dim")
        for version in reversed(adapter.versions)
        if version.why
    ]
    refusals = [
        Text(f"v{version.number} is refused by {refusal.replica}: {refusal.reason}", style="yellow")
        for version in adapter.versions
        for refusal in version.refused
    ]
    return Group(head, Text(), versions, *plans, *refusals)


def _row(adapter: AdapterStatus, version: VersionStatus, at: float) -> tuple[RenderableType, ...]:
    share = "" if version.share == 1 else f" {version.share:.4g}"
    return (
        Text(adapter.name, style="bold"),
        f"v{version.number}@{version.digest[:12]}{share}",
        str(version.rank),
        _size(version.size),
        _places(version),
        f"{version.requests_per_s:.2f}" if version.requests_per_s >= 0.005 else "-",
        "-" if version.hit_rate is None else f"{version.hit_rate:.0%}",
        "-" if version.last_used is None else f"{age(at - version.last_used)} ago",
        _state(adapter),
    )


def _absent(adapter: AdapterStatus) -> tuple[RenderableType, ...]:
    """One that is not there yet, and why."""
    return (Text(adapter.name, style="bold"), *("-",) * 3, Text(adapter.note), *("-",) * 3, _state(adapter))


def _places(version: VersionStatus) -> str:
    named = ", ".join(version.loaded[:_NAMED])
    more = len(version.loaded) - _NAMED
    return f"{named} and {more} more" if more > 0 else named or "-"


def _state(adapter: AdapterStatus) -> Text:
    return Text(str(adapter.state), style=_COLORS[adapter.state])


def _size(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column in ("rank", "size", "requests/s", "hit rate", "share")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


class AddProgress:
    """Shows each :class:`policy.wire.controller.AddLine` that it is called with; with ``quiet`` none."""

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
