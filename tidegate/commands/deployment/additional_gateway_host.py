"""``gateway``: gateway workers on a further host."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from policy.config.convert import require
from store.state_dir import StateDir
from tidegate.commands.deployment.up_run_down import (
    adopt,
    lock,
    printed_progress,
    secret_option,
    timeout_option,
)
from tidegate.supervisor.remote_document_feed import RemoteDocumentFeed

# For the controller to answer, where this host has served nothing yet.
FIRST_S = 60.0
_ADDRESS = "HOST:PORT[,HOST:PORT] or http:// URLs, as the deployment file's cluster.controller"


@click.command(
    help="Run gateway workers on this host, until SIGINT or SIGTERM, for the controller of another host.\n\n"
    "They serve its models from its replicas, and serve on with what they know while it does not answer. "
    "Of several controllers they follow the one that leads."
)
@click.option("--controller", required=True, metavar="HOST:PORT[,HOST:PORT]", help="Its cluster.controller.")
@secret_option
@click.option("--host", help="Listen address of the OpenAI API; default: as in the deployment file.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Its port.")
@click.option("--admin-host", help="Listen address of the admin port.")
@click.option("--admin-port", type=click.IntRange(1, 65_535), help="The admin port.")
@click.option("--workers", type=click.IntRange(1, 256), help="Worker processes.")
@timeout_option
@click.pass_obj
def gateway(
    state: StateDir, /, controller: str, secret_file: Path | None, timeout_s: float | None, **given: Any
) -> None:
    addresses = ",".join(map(_address, controller.split(",")))
    _lock = lock(state)
    if secret_file is None and not state.secret_path.exists():
        raise click.UsageError(
            "--secret-file: expected a copy of the file `secret` of the controller's state"
        )
    adopt(state, secret_file)
    overrides = {name: value for name, value in given.items() if value is not None}
    sys.exit(asyncio.run(_serve(state, RemoteDocumentFeed(state, addresses, overrides), timeout_s)))


def _address(given: str) -> str:
    """``HOST:PORT`` of an address or a URL."""
    address = given.strip().removeprefix("http://").rstrip("/")
    host, _, port = address.rpartition(":")
    require(host and port.isascii() and port.isdigit(), "--controller", given, _ADDRESS)
    return address


async def _serve(state: StateDir, remote: RemoteDocumentFeed, timeout_s: float | None) -> int:
    from tidegate.supervisor.supervisor import Supervisor  # noqa: PLC0415 - `--help` answers without it

    progress = printed_progress(state)
    document = await remote.first_document(timeout_s or FIRST_S, lambda text: click.echo(f"  {text}"))
    supervisor = Supervisor(state, document, ray=False, timeout_s=timeout_s, progress=progress, remote=remote)
    return await supervisor.run()
