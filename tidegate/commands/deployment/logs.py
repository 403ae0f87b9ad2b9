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
    help="Print the last lines of PART's log (gateway-0, controller, ray, supervisor, ...), or of all.\n\n"
    "PART may be the beginning of several names: `logs replica` shows every replica."
)
@click.argument("part", required=False, default="")
@click.option(
    "-n", "lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many lines."
)
@click.option("-f", "follow", is_flag=True, help="Go on printing what is added.")
@click.pass_obj
def logs(state: StateDir, part: str, lines: int, follow: bool) -> None:
    known = _known(state.logs)
    chosen = _chosen(known, part)
    if known and not chosen:
        raise click.UsageError(f"no log's name begins with {part!r}; there are: {', '.join(known)}")
    if not known:
        raise Unreachable(f"no logs under {state.logs}")
    followers = {name: Follower(path) for name, path in chosen.items()} if follow else {}
    alone = bool(part) and len(chosen) == 1
    for name, path in chosen.items():
        _print(name, tail(path, lines), alone=alone)
    try:
        while followers:
            for name, follower in followers.items():
                _print(name, follower.lines(), alone=bool(part) and len(followers) == 1)
            # Parts that have begun since, unless one was named in full.
            if part not in followers:
                new = _chosen(_known(state.logs), part)
                followers |= {name: Follower(new[name], whole=True) for name in new if name not in followers}
            time.sleep(_POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def _known(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.log"))}


def _chosen(known: dict[str, Path], part: str) -> dict[str, Path]:
    """The log that is called ``part``, else those whose names begin with it."""
    if part in known:
        return {part: known[part]}
    return {name: path for name, path in known.items() if name.startswith(part)}


def _print(name: str, lines: list[str], *, alone: bool) -> None:
    for line in lines:
        click.echo(line if alone else f"{name:<14} | {line}")
