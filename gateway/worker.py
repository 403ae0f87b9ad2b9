"""A gateway worker: two listening sockets in, one event loop, drained on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway.control.controller_feed import ControllerFeed, catalog_feed, fleet_feed
from gateway.control.deployment_watcher import FollowedDeployment
from gateway.control.report_sender import Reporter, ReportSender
from gateway.http.server import Server
from gateway.request_pipeline import Gateway
from gateway.routing.external_servers import ExternalPoller
from gateway.routing.health_probes import Probes
from gateway.routing.shared_counters import BEAT_EVERY_S, SharedCounts, SharedRows
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.structured_log import LibraryHandler, Log
from policy.config.deployment import Deployment
from policy.types import Fleet
from policy.wire.catalog import Catalog
from policy.wire.controller import SIGNALS
from store.api_keys import salt_secret
from store.state_dir import StateDir

PUBLISH_EVERY_S = 0.5


class AdminServer(uvicorn.Server):
    """The admin port's server, which leaves signals to the worker."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def work(state: StateDir, client_fd: int, admin_fd: int, worker: int, *, compiled: bool) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, uvloop.Loop):
        raise RuntimeError("the gateway runs on uvloop only")
    log = Log(worker)
    logging.getLogger("uvicorn").addHandler(LibraryHandler(log))
    logging.getLogger("asyncio").addHandler(LibraryHandler(log))

    document = FollowedDeployment(state, log)
    # Ties between replicas are all that it decides.
    shared = SharedRows(state.rows_path, worker)
    rng = random.Random()  # noqa: S311
    gateway = Gateway(
        document,
        state.secret(),
        salt_secret(state),
        log=log,
        rng=rng,
        shared=shared,
        captures=state.captures,
    )
    post = ReportSender(lambda: document.deployment.cluster.controller, SIGNALS, state.secret(), log)
    reporter = Reporter(gateway.metrics, gateway.admission, lambda: document.deployment, post.send)
    background: dict[str, asyncio.Task[None]] = {}

    def start(name: str, task: Coroutine[Any, Any, None]) -> None:
        background[name] = _supervised(log, name, task)

    def read(deployment: Deployment) -> None:
        gateway.read(deployment)
        if deployment.needs_controller and "controller" not in background:
            start("reports", reporter.run())
            for name, source in _sources(deployment, state, gateway, log).items():
                source.start_from_disk()
                start(name, source.stream.run())
                if worker == 0:
                    start(f"{name}_file", source.keep_on_disk())

    read(document.deployment)
    start("document", document.follow(read))
    for name, upkeep in _upkeep(gateway, document, state, shared, log).items():
        start(name, upkeep)

    client = Server(gateway.client, lambda: document.deployment.gateway.max_body_bytes, gateway.count_refused)
    admin = AdminServer(gateway.admin)
    stopping = asyncio.Event()

    def drain() -> None:
        gateway.readiness.draining = True
        log.info("draining")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    admin_task = asyncio.create_task(admin.serve(sockets=[socket.socket(fileno=admin_fd)]))
    await client.start(socket.socket(fileno=client_fd))
    log.info("worker_started", pid=os.getpid(), compiled=compiled)
    await stopping.wait()
    await client.drain(document.deployment.gateway.drain_timeout_s)
    gateway.end_captures()
    admin.should_exit = True
    await admin_task
    if "reports" in background:
        await reporter.leave()
    for task in background.values():
        task.cancel()
    await post.close()
    gateway.close()
    shared.close()
    log.info("worker_stopped")


def _upkeep(
    gateway: Gateway, document: FollowedDeployment, state: StateDir, shared: SharedCounts, log: Log
) -> dict[str, Coroutine[Any, Any, None]]:
    """Background tasks, with or without a controller."""

    def current() -> Deployment:
        return document.deployment

    return {
        "prober": ExternalPoller(gateway.fleet, current).run(),
        "probes": Probes(gateway.fleet, gateway.metrics, current, state.secret()).run(),
        "metrics": _publish(gateway.metrics, log),
        "shared": _beat(shared),
        "deadlines": gateway.deadlines.run(),
        "capture": gateway.capture.run(),
    }


def _sources(
    deployment: Deployment, state: StateDir, gateway: Gateway, log: Log
) -> dict[str, ControllerFeed[Fleet] | ControllerFeed[Catalog]]:
    """The controller's documents, by the name of the task that follows each."""
    address, timeout_s = deployment.cluster.controller, deployment.gateway.connect_timeout_s
    return {
        "controller": fleet_feed(address, state, gateway.fleet, log, connect_timeout_s=timeout_s),
        "catalog": catalog_feed(address, state, gateway.catalog, log, connect_timeout_s=timeout_s),
    }


async def _publish(metrics: Metrics, log: Log) -> None:
    while True:
        await asyncio.sleep(PUBLISH_EVERY_S)
        try:
            metrics.publish()
        except OSError as error:  # no descriptor, no room on the disk: nothing that serving needs
            log.warning("metrics_not_published", error=type(error).__name__)


async def _beat(shared: SharedCounts) -> None:
    while True:
        await asyncio.sleep(BEAT_EVERY_S)
        shared.beat()


def _supervised(log: Log, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a background task; one that ends by an error ends the worker, which is then replaced."""
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_failed", task=task.get_name(), error=type(error).__name__)
            os.kill(os.getpid(), signal.SIGTERM)

    task.add_done_callback(ended)
    return task
