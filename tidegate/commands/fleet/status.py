"""``status``."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from store.state_dir import StateDir
from tidegate.commands.fleet.status_data import gather
from tidegate.commands.fleet.status_tables import render
from tidegate.commands.terminal import console
from tidegate.exit_codes import Exit


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
