"""``logs``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from policy.errors import Unreachable
from store.state_dir import StateDir
from tidegate.log_tail import Follower, tail

_POLL_S = 0.25


@click.command(
    help="Print the last lines of the log of PROCESS (gateway-0, controller, ray, ...), or of all."
    "\n\nA prefix selects several processes: `logs replica` shows every replica."
)
@click.argument("process", required=False, default="")
@click.option(
    "-n", "lines", type=click.IntRange(min=0), default=50, show_default=True, help="Number of lines."
)
@click.option("-f", "follow", is_flag=True, help="Keep printing new lines.")
@click.pass_obj
def logs(state: StateDir, process: str, lines: int, follow: bool) -> None:
    known = _known(state.logs)
    selected = _selected(known, process)
    if known and not selected:
        raise click.UsageError(f"no log of a process {process!r}; there are: {', '.join(known)}")
    if not known:
        raise Unreachable(f"no logs under {state.logs}")
    followers = {name: Follower(path) for name, path in selected.items()} if follow else {}
    for name, path in selected.items():
        _print(name, tail(path, lines), alone=bool(process) and len(selected) == 1)
    try:
        while followers:
            for name, follower in followers.items():
                _print(name, follower.lines(), alone=bool(process) and len(followers) == 1)
            # Follow processes that started meanwhile too, unless one was named in full.
            if process not in followers:
                new = _selected(_known(state.logs), process)
                followers |= {name: Follower(new[name], whole=True) for name in new if name not in followers}
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
    return {name: path for name, path in known.items() if name.startswith(process)}


def _print(name: str, lines: list[str], *, alone: bool) -> None:
    for line in lines:
        click.echo(line if alone else f"{name:<14} | {line}")
