"""``status``."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from store.state import StateDir
from tidegate.commands.console import console
from tidegate.commands.status_table import render
from tidegate.commands.view import gather
from tidegate.exits import Exit


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
        console().print(render(view))
    if view.supervisor is None:
        sys.exit(Exit.NOT_RUNNING)
