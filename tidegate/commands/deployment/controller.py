"""``controller``: one of several controllers of a deployment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from policy.config.convert import require
from policy.config.deployment import Deployment
from policy.errors import PreconditionFailed
from store.state_dir import StateDir, listen
from tidegate import deployment_file
from tidegate.commands.deployment.up_run_down import (
    adopt,
    lock,
    no_ray_option,
    printed_progress,
    secret_option,
    timeout_option,
    watch_option,
    watching,
)
from tidegate.commands.options import file_argument
from tidegate.supervisor.remote_document_feed import RemoteDocumentFeed


@click.command(
    help="Run one of the controllers of FILE on this host, until SIGINT or SIGTERM.\n\n"
    "All do so with the same FILE, database and secret. One leads; when it ends, another one takes over. "
    "FILE counts until one was applied: change the deployment with `tidegate apply`, or run with --watch. "
    "Gateways are started by `tidegate gateway`."
)
@file_argument
@click.option("--address", required=True, metavar="HOST:PORT", help="Its address: one of cluster.controller.")
@click.option("--host", default="", help="Listen address; default: the host of --address.")
@secret_option
@no_ray_option
@timeout_option
@watch_option
@click.pass_obj
def controller(
    state: StateDir, /, file: Path, address: str, host: str, secret_file: Path | None, *, no_ray: bool,
    timeout_s: float | None, watch: bool,
) -> None:  # fmt: skip
    document = deployment_file.load(file, ray=not no_ray)
    _check(document.deployment, address, no_ray=no_ray)
    _lock = lock(state)
    adopt(state, secret_file)
    from tidegate.supervisor.supervisor import Supervisor  # noqa: PLC0415 - `--help` answers without it

    remote = RemoteDocumentFeed(state, document.deployment.cluster.controller, None)
    ray = document.deployment.deploys and not no_ray
    progress = printed_progress(state)

    async def supervise() -> int:
        supervisor = Supervisor(
            state, document, ray=ray, timeout_s=timeout_s, progress=progress,
            remote=remote, address=address, host=host,
        )  # fmt: skip
        watched = file if watch else None
        # Nothing was applied yet: another leader may have an older file.
        apply = supervisor.apply_if_new
        return await watching(supervisor.run(), watched, None, apply, progress, no_ray=no_ray)

    sys.exit(asyncio.run(supervise()))


def _check(deployment: Deployment, address: str, *, no_ray: bool) -> None:
    """Raise :class:`ConfigError` where the controllers of ``deployment`` cannot take over from each other."""
    cluster = deployment.cluster
    if not deployment.needs_controller:
        raise PreconditionFailed("every model is external: there is nothing to control")
    several = "HOST:PORT,HOST:PORT of all controllers"
    require(cluster.election is not None, "cluster.controller", cluster.controller, several)
    # Behind one address, such as that of a service, each has one of its own.
    one = address in cluster.controllers or len(cluster.controllers) == 1
    require(one, "--address", address, f"one of cluster.controller: {', '.join(cluster.controllers)}")
    if not deployment.deploys:
        return
    if not no_ray:
        joined = "HOST:PORT of a Ray cluster that outlives this machine, or --no-ray"
        require(cluster.address != "local", "cluster.address", cluster.address, joined)
        return
    for other in cluster.controllers:
        try:
            listen(other.rpartition(":")[0].strip("[]"), 0).close()
        except OSError:
            here = "an address of this machine: with --no-ray replicas are processes of one machine"
            require(False, "cluster.controller", other, here)
