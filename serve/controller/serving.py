"""A controller and its HTTP API in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from policy.deployment_file.parse import parse
from serve.actuator.by_engine import ActuatorByEngine
from serve.actuator.interface import Actuator
from serve.actuator.kubernetes import KubernetesActuator
from serve.controller.controller import Controller
from serve.controller.routes import build_app
from serve.import_database_in_thread import import_database
from store.event_loop.uvicorn_server import UvicornServer
from store.state_dir import StateDir, listen

# Longer than clients do, httpx for 5 s: else a connection may be closed as a request is sent on it.
KEEP_ALIVE_S = 75

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long


class ControllerParts(NamedTuple):
    """A controller, its actuator for all models, and the part of that for workloads of Kubernetes."""

    controller: Controller
    actuator: Actuator
    workloads: KubernetesActuator

    def start(self) -> list[asyncio.Task[None]]:
        """What runs as long as the controller does."""
        controller = self.controller
        works = (controller.run(), controller.audit.run(), self.workloads.report(controller.beat))
        return [asyncio.create_task(work) for work in works]


def parts_of(
    own: Actuator,
    state: StateDir,
    term: int = 0,
    fenced: Callable[[Actuator], Actuator] = lambda actuator: actuator,
) -> ControllerParts:
    """A controller that leads in ``term``, over ``own`` for the replicas that Tidegate starts."""
    models = parse(state.load(state.deployment_path, dict[str, object])).models
    workloads = KubernetesActuator(state, models, term)
    by_engine = ActuatorByEngine(own, workloads)
    actuator = fenced(by_engine)
    controller = Controller(
        actuator, state, os.getpid(), partial(open_adapters, state),
        wall=time.time, monotonic=time.monotonic, term=term, by_engine=by_engine,
    )  # fmt: skip
    return ControllerParts(controller, actuator, workloads)


async def serve_controller(actuator: Actuator, state: StateDir, address: str) -> None:
    """Serve at ``address`` (``HOST:PORT``) until cancelled or until either part fails."""
    parts = parts_of(actuator, state)
    sock = await listen_soon(address)
    app = build_app(parts.controller, state.secret())
    tasks = {asyncio.create_task(serve_app(app, sock)), *parts.start()}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await parts.workloads.close()
        sock.close()


def stop_signals() -> asyncio.Event:
    """An event that is set by SIGTERM and SIGINT from now on."""
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    return stopping


async def listen_soon(address: str) -> socket.socket:
    """Listen at ``address``. The port is fixed, so a predecessor that is just ending is waited for."""
    host, _, port = address.rpartition(":")
    for attempt in range(50):
        try:
            return listen(host.strip("[]"), int(port))
        except OSError:
            if attempt == 49:
                raise
            await asyncio.sleep(0.2)
    raise AssertionError


async def serve_app(app: ASGIApp, sock: socket.socket) -> None:
    """Serve ``app`` on ``sock`` until cancelled."""
    config = uvicorn.Config(
        app, http="httptools", access_log=False, log_level="warning",
        log_config=None, lifespan="off", timeout_graceful_shutdown=1, timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    await UvicornServer(config).serve(sockets=[sock])


def open_adapters(state: StateDir) -> AdapterStore:
    """The adapters of the deployment in ``state``."""
    import_database()
    from serve.adapters.adapter_store import AdapterStore  # noqa: PLC0415

    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    return AdapterStore(state, state.database_url(deployment.store))
