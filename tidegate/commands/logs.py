"""``logs``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from policy.errors import Unreachable
from store.state import StateDir
from tidegate.logtail import Follower, tail

_POLL_S = 0.25


@click.command(
    help="Print the last lines of PART's log (gateway-0, controller, ray, supervisor, ...), or of all."
)
@click.argument("part", required=False)
@click.option(
    "-n", "lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many lines."
)
@click.option("-f", "follow", is_flag=True, help="Go on printing what is added.")
@click.pass_obj
def logs(state: StateDir, part: str | None, lines: int, follow: bool) -> None:
    known = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    if part is not None and part not in known:
        raise click.UsageError(f"no log is called {part!r}; there are: {', '.join(known) or 'none'}")
    if not known:
        raise Unreachable(f"no logs under {state.logs}")
    chosen = {part: known[part]} if part else known
    followers = {name: Follower(path) for name, path in chosen.items()} if follow else {}
    for name, path in chosen.items():
        _print(name, tail(path, lines), alone=part is not None)
    try:
        while followers:
            for name, follower in followers.items():
                _print(name, follower.lines(), alone=part is not None)
            if part is None:
                followers |= _new(state.logs, followers)
            time.sleep(_POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def _new(folder: Path, followers: dict[str, Follower]) -> dict[str, Follower]:
    """Followers of the logs that parts have begun since."""
    return {
        path.stem: Follower(path, whole=True) for path in folder.glob("*.log") if path.stem not in followers
    }


def _print(name: str, lines: list[str], *, alone: bool) -> None:
    for line in lines:
        click.echo(line if alone else f"{name:<14} | {line}")
