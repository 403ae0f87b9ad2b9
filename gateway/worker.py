"""A gateway worker: two listening sockets in, one event loop, drained on SIGTERM."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway.control.certificate_watcher import LOOK_EVERY_S, Certificates
from gateway.control.controller_feed import catalog_feed, fleet_feed
from gateway.control.deployment_file_watcher import DeploymentWatcher
from gateway.control.report_sender import Reporter, ReportSender
from gateway.garbage_collection import QUIET_EVERY_S, collect_if_quiet
from gateway.http.acceptor import Acceptor
from gateway.http.server import HttpServer
from gateway.http.upload_budget import UploadBudget
from gateway.intake.access_feed import AccessFeed
from gateway.intake.shared_limits import SharedLimits
from gateway.intake.usage_journal import UsageJournal
from gateway.malloc_tuning import FreedMemory
from gateway.request_pipeline import Gateway
from gateway.routing.external_server_poller import ExternalPoller
from gateway.routing.outlier_ejection import ReplicaProber
from gateway.routing.shared_counters import BEAT_EVERY_S, LOCAL, SharedRows
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.exemplars import WRITE_EVERY_S
from gateway.telemetry.structured_log import LibraryHandler, StructuredLog
from gateway.telemetry.traces.exporter import TraceExporter
from policy.config.deployment import Deployment
from policy.wire.controller import SIGNALS
from store.event_loop.timer_coalescing import sleep_to_next
from store.event_loop.uvicorn_server import UvicornServer
from store.key_derivation import salt_secret
from store.os_process import read_usage
from store.state_dir import StateDir

if TYPE_CHECKING:
    from gateway.grpc_server.port import GrpcServer

PUBLISH_EVERY_S = 0.5
# After uploads have ended, before those that wait go on.
RESUME_AFTER_S = 0.005


class AdminServer(UvicornServer):
    """The admin port's server, which accepts as the client port does."""

    def __init__(self, app: ASGIApp, tls: Callable[[], ssl.SSLContext] | None) -> None:
        self._tls = tls
        self._acceptor: Acceptor | None = None
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
                # Longer than clients keep connections, as httpx does for 5 s.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )
        # It imports the protocol, in 12 ms: before clients are served, not while the first of them wait.
        self.config.load()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        assert sockets is not None
        self._acceptor = Acceptor(asyncio.get_running_loop(), sockets[0], self._protocol, LOCAL, self._tls)
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.BaseProtocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.BaseProtocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


async def work(  # noqa: PLR0915 - the composition root of a process
    state: StateDir, client_fd: int, admin_fd: int, worker: int, *, uncompiled: str
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; ``uncompiled`` is why the sources run, if they do."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, uvloop.Loop):
        raise RuntimeError("the gateway runs on uvloop only")
    log = StructuredLog(worker)
    _take_libraries_lines(log)
    watcher = DeploymentWatcher(state, log)

    def current() -> Deployment:
        return watcher.deployment

    shared = SharedRows(state.rows_path, worker)
    # It only decides ties between replicas.
    rng = random.Random()  # noqa: S311
    access = AccessLog(
        state.logs / f"access-{worker}.log", worker, lambda lines: log.warning("access_lost", lines=lines)
    )
    limits = SharedLimits(state.limits_path, shared.row)
    gateway = Gateway(
        watcher,
        state.secret(),
        salt_secret(state.secret()),
        admin_token=state.admin_token,
        log=log,
        access=access,
        traces=TraceExporter(
            worker, rng, lambda count, cause: log.warning("traces_lost", cause=cause, traces=count)
        ),
        rng=rng,
        shared=shared,
        captures=state.captures,
        accounting=state.accounting_socket_path,
        journal=UsageJournal(state.usage_path, log),
        limits=limits,
    )
    sender = ReportSender(current().cluster.controller, SIGNALS, state.secret(), log)
    reporter = Reporter(
        gateway.metrics, gateway.admission, current, sender.send,
        running=gateway.deadlines.running, routes=gateway.routes.describe,
    )  # fmt: skip
    background = BackgroundTasks(log)
    certificates = Certificates(current().gateway, log)

    def read(deployment: Deployment) -> None:
        gateway.read(deployment)
        if deployment.needs_controller and "reports" not in background.tasks:
            background.start("reports", reporter.run())
            address, timeout_s = deployment.cluster.controller, deployment.gateway.connect_timeout_s
            for feed in (
                fleet_feed(address, state, gateway.fleet, log, connect_timeout_s=timeout_s),
                catalog_feed(address, state, gateway.catalog, log, connect_timeout_s=timeout_s),
            ):
                feed.start_from_disk()
                background.start(feed.name, feed.stream.run())
                if worker == 0:
                    background.start(f"{feed.name}_file", feed.keep_on_disk())

    def beat() -> None:
        shared.beat()
        gateway.limiter.beat()

    read(current())
    access_feed = AccessFeed(
        state.access_path, gateway.tenants, gateway.admin_keys, log, limits.publish_access
    )
    access_feed.start_from_disk()
    for name, upkeep in {
        "access_file": access_feed.run(),
        "deployment": watcher.follow(read),
        "external_servers": ExternalPoller(gateway.fleet, current, log).run(),
        "probes": ReplicaProber(gateway.fleet, gateway.metrics, current, state.secret()).run(),
        "metrics": _publish_metrics(gateway, f"gateway-{worker}", log),
        "shared_counters": _every(BEAT_EVERY_S, beat),
        "memory": FreedMemory().run(),
        "idle_timeouts": gateway.deadlines.run(),
        "sse_keepalive": gateway.keepalive.run(),
        "usage_journal": gateway.journal.run(),
        "capture": gateway.capture.run(),
        "access_log": gateway.access.run(),
        "traces": gateway.traces.run(),
        "certificates": _every(LOOK_EVERY_S, certificates.look),
    }.items():
        background.start(name, upkeep)

    client = HttpServer(
        gateway.client,
        gateway.body_limit,
        gateway.count_refused,
        shared,
        UploadBudget(gateway.upload_limits, partial(loop.call_later, RESUME_AFTER_S)),
        proxies=gateway.proxies,
        refusal_headers=gateway.client.cors_headers,
    )
    background.start("garbage", _every(QUIET_EVERY_S, lambda: collect_if_quiet(client.connections)))
    admin = AdminServer(gateway.admin, certificates.of("gateway.admin_tls"))
    stopping = asyncio.Event()

    def drain() -> None:
        gateway.draining = True
        log.info("draining")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    admin_task = asyncio.create_task(admin.serve(sockets=[socket.socket(fileno=admin_fd)]))
    # The series of a model take 9 ms to make: before clients are served.
    for _ in gateway.metrics.slices():
        await asyncio.sleep(0)
    await client.start(socket.socket(fileno=client_fd), certificates.of("gateway.tls"))
    grpc_servers = await _grpc_servers(gateway, client.uploads, current(), log)
    log.info("worker_started", pid=os.getpid(), compiled=not uncompiled)
    if uncompiled:
        log.warning("not_compiled", reason=uncompiled)
    await stopping.wait()
    # Load balancers see by /readyz that it drains, and send no more, before it accepts no more.
    await asyncio.sleep(current().gateway.drain_delay_s)
    drain_s = current().gateway.drain_timeout_s
    await asyncio.gather(client.drain(drain_s), *(server.drain(drain_s) for server in grpc_servers))
    gateway.end_captures()
    admin.should_exit = True
    await admin_task
    if "reports" in background.tasks:
        await reporter.leave()
    for task in background.tasks.values():
        task.cancel()
    sender.close()
    await gateway.close()
    shared.close()
    log.info("worker_stopped")


async def _grpc_servers(
    gateway: Gateway, uploads: UploadBudget, deployment: Deployment, log: StructuredLog
) -> list[GrpcServer]:
    """The gRPC ports that are configured, started."""
    if not deployment.grpc_ports:
        return []
    # gRPC costs 30 MB, and has packages of its own.
    from gateway.endpoint_picker.handlers import EndpointPickerHandlers  # noqa: PLC0415
    from gateway.external_scaler.handlers import ExternalScalerHandlers  # noqa: PLC0415
    from gateway.grpc_server.port import GrpcServer  # noqa: PLC0415

    servers: list[GrpcServer] = []
    if (picker := deployment.endpoint_picker) is not None:
        servers.append(
            GrpcServer("endpoint_picker", picker, EndpointPickerHandlers(gateway, uploads, log), log)
        )
    if (scaler := deployment.external_scaler) is not None:
        servers.append(
            GrpcServer("external_scaler", scaler, ExternalScalerHandlers(gateway.fleet), log, watch=True)
        )
    for server in servers:
        await server.start()
    return servers


class BackgroundTasks:
    """The background tasks by name. One that ends by an error ends the worker, which is then replaced."""

    def __init__(self, log: StructuredLog) -> None:
        self._log = log
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.tasks[name] = asyncio.create_task(work, name=name)
        self.tasks[name].add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("background_failed", cause=error, task=task.get_name())
            os.kill(os.getpid(), signal.SIGTERM)


def _take_libraries_lines(log: StructuredLog) -> None:
    for library in ("uvicorn", "asyncio", "opentelemetry"):
        logging.getLogger(library).addHandler(LibraryHandler(log))


async def _publish_metrics(gateway: Gateway, process: str, log: StructuredLog) -> None:
    """Publish every :data:`PUBLISH_EVERY_S`; what may block is done in a thread, and less often.

    At the end of the worker, :meth:`Gateway.close` publishes what is left.
    """
    clock, write_at, lag_s = asyncio.get_running_loop().time, 0.0, 0.0
    while True:
        due = clock() + PUBLISH_EVERY_S
        await asyncio.sleep(PUBLISH_EVERY_S)
        lag_s = max(lag_s, clock() - due)
        try:
            for _ in itertools.chain(gateway.measure(), gateway.metrics.slices()):
                await asyncio.sleep(0)
            if clock() >= write_at:
                write_at = clock() + WRITE_EVERY_S
                await asyncio.to_thread(gateway.metrics.exemplars.write)
                usage = await asyncio.to_thread(read_usage)
                gateway.metrics.publish_process(process, usage, lag_s)
                lag_s = 0.0
        except OSError as error:  # no descriptor, no room on the disk: nothing that serving needs
            log.warning("metrics_not_published", cause=error)


async def _every(period_s: float, action: Callable[[], None]) -> None:
    while True:
        await sleep_to_next(period_s)
        action()
