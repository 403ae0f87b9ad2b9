"""The tables of ``tidegate adapters``, and the progress of adding an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.wire.controller import AddLine
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, VersionStatus
from tidegate.commands.terminal import Bar, table
from tidegate.commands.units import age, size

_COLORS = {
    AdapterState.READY: "green",
    AdapterState.PARTIAL: "yellow",
    AdapterState.FETCHING: "yellow",
    AdapterState.FAILED: "red",
}

# Replicas that a cell names; the others are counted.
_NAMED_REPLICAS = 2


def overview(status: AdaptersStatus) -> Table:
    """One row for each version that a name serves; with several base models they have a column."""
    several = len(status.models) > 1
    rows = table(
        *(["model"] if several else []),
        *("name", "version", ">rank", ">size", "loaded on", ">requests/s", ">hit rate", "last used", "state"),
    )
    for adapter in status.adapters:
        served = [_row(adapter, version, status.at) for version in adapter.versions if version.share]
        for row in served or [_missing(adapter)]:
            rows.add_row(*([adapter.model] if several else []), *row)
    return rows


def history(adapter: AdapterStatus, at: float) -> RenderableType:
    """The stored versions of one name, newest first, with their placement and the refusals of replicas."""
    head = table("model", "tenants", "state", "note")
    head.add_row(
        adapter.model,
        ", ".join(adapter.tenants) or "all",
        _state(adapter),
        Text(adapter.note, style="dim"),
    )
    versions = table("version", ">share", "digest", ">rank", ">size", "added", "loaded on", "source")
    newest_first = adapter.versions[::-1]
    for version in newest_first:
        versions.add_row(
            f"v{version.number}",
            f"{version.share:.4g}" if version.share else "-",
            version.digest[:12],
            str(version.rank),
            size(version.size),
            f"{age(at - version.at)} ago",
            _loaded_on(version),
            version.source,
        )
    placements = [
        Text(f"placement of v{version.number}: {version.why}", style="dim")
        for version in newest_first
        if version.why
    ]
    refusals = [
        Text(f"v{version.number} is refused by {refusal.replica}: {refusal.reason}", style="yellow")
        for version in adapter.versions
        for refusal in version.refused
    ]
    return Group(head, Text(), versions, *placements, *refusals)


@contextmanager
def add_progress(name: str, *, quiet: bool) -> Iterator[Callable[[AddLine], None]]:
    """Shows each :class:`policy.wire.controller.AddLine` that the yielded function is called with."""
    if quiet:
        yield lambda line: None
        return
    with Bar("", size) as bar:
        yield lambda line: bar.update(
            line.done, line.total, task=name, step=line.step, text=f"{line.step:<12}{line.message}"
        )


def _row(adapter: AdapterStatus, version: VersionStatus, at: float) -> tuple[RenderableType, ...]:
    share = "" if version.share == 1 else f" {version.share:.4g}"
    return (
        Text(adapter.name, style="bold"),
        f"v{version.number}@{version.digest[:12]}{share}",
        str(version.rank),
        size(version.size),
        _loaded_on(version),
        f"{version.requests_per_s:.2f}" if version.requests_per_s >= 0.005 else "-",
        "-" if version.hit_rate is None else f"{version.hit_rate:.0%}",
        "-" if version.last_used is None else f"{age(at - version.last_used)} ago",
        _state(adapter),
    )


def _missing(adapter: AdapterStatus) -> tuple[RenderableType, ...]:
    """A name without a version yet, and why."""
    return (Text(adapter.name, style="bold"), *("-",) * 3, Text(adapter.note), *("-",) * 3, _state(adapter))


def _loaded_on(version: VersionStatus) -> str:
    named = ", ".join(version.loaded[:_NAMED_REPLICAS])
    more = len(version.loaded) - _NAMED_REPLICAS
    return f"{named} and {more} more" if more > 0 else named or "-"


def _state(adapter: AdapterStatus) -> Text:
    return Text(str(adapter.state), style=_COLORS[adapter.state])
