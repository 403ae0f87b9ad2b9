"""``status``."""

from __future__ import annotations

import sys
import time

import click
import msgspec
from rich.console import Console

from store.state import StateDir
from tidegate.commands.status_table import render
from tidegate.commands.view import gather
from tidegate.exits import Exit

_PIPE_COLUMNS = 140


@click.command(help="Show processes, models and replicas; works with the controller away.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(state: StateDir, as_json: bool) -> None:
    view = gather(state, time.time())
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
    elif view.supervisor is None:
        click.echo(f"Nothing is running on {state.root}.", err=True)
    else:
        # A pipe has no width of its own; the table needs about this much to stay on single lines.
        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        Console(highlight=False, width=width).print(render(view))
    if view.supervisor is None:
        sys.exit(Exit.NOT_RUNNING)
