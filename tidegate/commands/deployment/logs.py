"""``logs``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import click

from policy.errors import Unreachable
from store.state_dir import StateDir
from tidegate.commands.units import duration
from tidegate.log_entries import LEVELS, LogEntry, entries
from tidegate.log_tail import LogFollower, is_at_least, tail

_POLL_S = 0.25
_LINES = 50
# Shown if they are named: a line for each request would hide everything else.
_ACCESS = "access-"


@click.command(
    help="Print the log of PROCESS (gateway-0, controller, ray, ...), or of all but access logs, as lines of"
    " time, level, process and text."
    "\n\nA prefix selects several processes: `logs replica` shows every replica."
)
@click.argument("process", required=False, default="")
@click.option(
    "-n", "lines", type=click.IntRange(min=0),
    help=f"Number of lines of each process; default: {_LINES}, or all with --since.",
)  # fmt: skip
@click.option(
    "--since", metavar="DURATION", type=duration, help="Only lines of the last e.g. 90s, 10m or 2h."
)
@click.option(
    "--level", type=click.Choice(LEVELS[:-1]), default=LEVELS[0], help="Only lines of this level or above."
)
@click.option("-f", "follow", is_flag=True, help="Keep printing new lines.")
@click.pass_obj
def logs(  # noqa: PLR0917 - click passes them by name
    state: StateDir, process: str, lines: int | None, since: float | None, level: str, follow: bool
) -> None:
    known = _known(state.logs)
    selected = _selected(known, process)
    if known and not selected:
        raise click.UsageError(f"no log of a process {process!r}; there are: {', '.join(known)}")
    if not known:
        raise Unreachable(f"no logs under {state.logs}")
    followers = {name: LogFollower(path) for name, path in selected.items()} if follow else {}
    count = _LINES if lines is None and since is None else lines
    first = 0.0 if since is None else time.time() - since
    _print(entry for path in selected.values() for entry in tail(path, count, since=first, level=level))
    try:
        while followers:
            new: list[LogEntry] = []
            for name, follower in followers.items():
                new += entries(name, follower.lines(), time.time())
            _print(entry for entry in new if is_at_least(entry, level))
            # Follow processes that started meanwhile too, unless one was named in full.
            if process not in followers:
                started = _selected(_known(state.logs), process)
                followers |= {
                    name: LogFollower(path, whole=True)
                    for name, path in started.items()
                    if name not in followers
                }
            time.sleep(_POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def _known(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.log"))}


def _selected(known: dict[str, Path], process: str) -> dict[str, Path]:
    """The log named ``process``, or else those whose names begin with it."""
    if process in known:
        return {process: known[process]}
    names = (name for name in known if name.startswith(process) and (process or not name.startswith(_ACCESS)))
    return {name: known[name] for name in names}


def _print(found: Iterable[LogEntry]) -> None:
    """In the order of time; lines of one process and instant stay together."""
    for entry in sorted(found, key=lambda entry: entry.at):
        click.echo(str(entry))
