"""Runs a controller and its HTTP API in the current event loop, whatever process that is."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from policy.deployment_file.parse import parse
from serve.actuator.interface import Actuator
from serve.controller.controller import Controller
from serve.controller.routes import build_app
from serve.http import HttpServer
from store.state_dir import StateDir, listen

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long


async def serve_controller(actuator: Actuator, state: StateDir, address: str) -> None:
    """Serve at ``address`` (``HOST:PORT``) until cancelled or until either part fails.

    The port is fixed, so a predecessor that is just ending is waited for.
    """
    open_adapters = partial(_open_adapters, state)
    controller = Controller(
        actuator, state, os.getpid(), open_adapters, wall=time.time, monotonic=time.monotonic
    )
    host, _, port = address.rpartition(":")
    for attempt in range(50):
        try:
            sock = listen(host, int(port))
            break
        except OSError:
            if attempt == 49:
                raise
            await asyncio.sleep(0.2)
    config = uvicorn.Config(
        build_app(controller, state.secret()), http="httptools", access_log=False, log_level="warning",
        lifespan="off", timeout_graceful_shutdown=1,
    )  # fmt: skip
    tasks = {
        asyncio.create_task(HttpServer(config).serve(sockets=[sock])),
        asyncio.create_task(controller.run()),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        sock.close()


def _open_adapters(state: StateDir) -> AdapterStore:
    from serve.adapters.adapter_store import AdapterStore  # noqa: PLC0415 - its database takes long to import

    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    return AdapterStore(state, deployment.store or f"sqlite:///{state.database_path}")
