"""The steps of a start: environment, model, ray, replica, gateway, server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from policy.config.deployment import Deployment
from policy.config.port_conflicts import listeners
from policy.errors import EngineFailed, ModelUnavailable, PreconditionFailed, TidegateError, Unreachable
from policy.types import EMPTY_FLEET, EngineKind, Replica, ReplicaPhase
from serve import ray_launcher
from serve.actuator.gpu_cards import cards_of_machine
from serve.actuator.placement_feasibility import check_placeable, machine
from serve.controller.client import ControllerClient
from store.key_derivation import own_key
from store.state_dir import StateDir
from tidegate.supervisor import command_lines, external_server_status, preflight, readiness
from tidegate.supervisor.children import (
    ProcessSpec,
    SupervisedProcess,
    ToolLine,
    check_alive,
    log_end,
    run_tool,
)
from tidegate.supervisor.process_record import ProcessRecord
from tidegate.supervisor.progress_events import ProgressEvent, ProgressLog

_POLL_S = 0.25
_GATEWAY_POLL_S = 0.05
RETRY_S = 5.0
# External servers run already: this bounds the wait for one that serves, unless the caller sets a limit.
SERVERS_S = 10.0
# The logs whose ends are shown when a step fails.
_LOGS = {
    "ray": ("ray",),
    "replica": ("controller", "replica-*"),
    "gateway": ("gateway-*",),
    "controller": ("controller",),
}


@dataclass
class Startup:
    """What one start needs, and what it has started so far.

    On a ``remote`` host only the gateway is started: controller and replicas run elsewhere. With an
    ``address`` only the controller is started that has it, one of several, listening there or on ``host``.
    """

    deployment: Deployment
    state: StateDir
    record: ProcessRecord
    progress: ProgressLog
    ray: bool
    remote: bool
    address: str
    host: str
    timeout_s: float
    servers_timeout_s: float
    child: Callable[[ProcessSpec], SupervisedProcess]
    controller_client: Callable[[], ControllerClient]
    sockets: list[socket.socket] = field(default_factory=list)
    workers: list[SupervisedProcess] = field(default_factory=list)
    accounting: SupervisedProcess | None = None
    controller: SupervisedProcess | None = None
    head: SupervisedProcess | None = None
    joined: bool = False
    _idle: frozenset[str] = frozenset()
    _recovery: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run all steps; raises a :class:`policy.errors.TidegateError` that names the process that failed."""
        if self.address:
            await self._elected_controller()
            return
        self._environment()
        # The gateway starts first: it can queue requests and answer probes while weights are fetched, which
        # may take an hour, and while Ray is imported.
        self._gateway_workers()
        if not self.remote:
            await self._models()
        if self.deployment.needs_controller and not self.remote:
            if self.ray and self.deployment.deploys:
                await self._ray()
            else:
                self.controller = self.child(command_lines.local_controller(self.state))
                self.controller.start()
            await self._replicas()
        await self._gateway()
        await self._servers()

    @property
    def children(self) -> list[SupervisedProcess]:
        others = (self.accounting, self.controller, self.head)
        return self.workers + [child for child in others if child is not None]

    async def _elected_controller(self) -> None:
        host, _, port = self.address.rpartition(":")
        host = self.host or host
        preflight.bind("--host" if self.host else "--address", host.strip("[]"), int(port)).close()
        spec = command_lines.elected_controller(self.state, self.address, f"{host}:{port}", ray=self.ray)
        self.controller = self.child(spec)
        self.controller.start()
        await self._until("controller", self._election, self.controller)
        self.progress.done("controller", f"at {self.address}")

    async def _election(self) -> str | None:
        """What this host's controller waits for before it leads or stands by."""
        known = (await asyncio.to_thread(self.controller_client().leaders))[self.address]
        if known is None:
            return readiness.without_controller(self.state)
        return None if known.leader else f"no controller leads yet {known.trouble}".rstrip()

    def _environment(self) -> None:
        if self.deployment.cluster.election is not None and not self.remote:
            raise PreconditionFailed(
                "the controllers of this deployment elect their leader: run `tidegate controller FILE"
                " --address HOST:PORT` for each of them, and `tidegate gateway`"
            )
        problems = preflight.problems_of_access(self.deployment, None if self.remote else self.state)
        for listener in listeners(self.deployment, ray=self.ray):
            if self.remote and not listener.path.startswith("gateway."):
                continue
            try:
                sock = preflight.bind(*listener)
            except PreconditionFailed as error:
                problems.append(str(error))
                continue
            if listener.path.startswith("gateway."):
                self.sockets.append(sock)
            else:
                sock.close()
        if self.ray and self.deployment.deploys and self.deployment.cluster.address == "local":
            ours = {entry.pid for entry in self.record.living()}
            if (foreign := preflight.foreign_ray(ours)) is not None:
                problems.append(foreign)
        if not self.ray and not self.remote:
            check_placeable(self.deployment, machine(cards_of_machine(self.deployment.cluster, os.environ)))
        if (package := preflight.missing_package(self.deployment)) is not None:
            problems.append(package)
        available = preflight.available_memory()
        sizes = {
            spec.name: preflight.weights_bytes(Path(spec.source))
            for spec in self.deployment.models
            if spec.source.startswith("/")
        }
        memory = preflight.memory_problem(self.deployment, sizes, available)
        if memory is not None and not self.remote:
            problems.append(memory)
        if problems:
            raise PreconditionFailed("\n".join(problems))
        self.progress.done("environment", f"ports free, {available / 1024**3:.1f} GiB of memory available")

    async def _models(self) -> None:
        sizes: dict[str, int] = {}
        for spec in self.deployment.models:
            if spec.engine is EngineKind.VLLM:
                path = await self._prepare(spec.name)
                sizes[spec.name] = preflight.weights_bytes(path)
                self.progress.done("model", f"{spec.name}: {sizes[spec.name] / 1024**3:.2f} GiB at {path}")
        # The size of a fetched model is known only now.
        problem = preflight.memory_problem(self.deployment, sizes, preflight.available_memory())
        if sizes and problem is not None:
            raise PreconditionFailed(problem)

    async def _prepare(self, model: str) -> Path:
        self.progress.step("model", f"{model}: preparing")
        code, last = await self._run_tool(
            command_lines.prepare_model(self.state, model), "model", f"{model}: "
        )
        if code or not last.path:
            why = last.error or f"preparation ended with status {code}{log_end(self.state, 'models')}"
            raise ModelUnavailable(f"{model}: {why}")
        return Path(last.path)

    def _gateway_workers(self) -> None:
        fd, admin_fd = (sock.fileno() for sock in self.sockets)
        for worker in range(self.deployment.gateway.workers):
            child = self.child(command_lines.gateway_worker(self.state, worker, fd, admin_fd))
            self.workers.append(child)
            child.start()
        self.accounting = self.child(command_lines.accounting(self.state))
        self.accounting.start()

    async def _ray(self) -> None:
        address = self.deployment.cluster.address
        if address == "local":
            self.progress.step("ray", "starting a head on this machine")
            self.head = self.child(command_lines.ray_head(self.deployment, self.state))
            self.head.before_restart = self._recover_head
            self.head.start()
            await self._until("ray", self._head_listens, self.head)
        else:
            self.progress.step("ray", f"joining {address}")
        await self.start_controller()
        self.progress.done("ray", f"controller at {self.deployment.cluster.controller}")

    async def _head_listens(self) -> str | None:
        host, _, port = ray_launcher.address(self.deployment).rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return "starting a head on this machine"
        writer.close()
        return None

    async def _run_tool(self, tool: ProcessSpec, step: str, prefix: str = "") -> tuple[int, ToolLine]:
        def show(line: ToolLine) -> None:
            if line.message:
                self.progress.step(step, prefix + line.message, line.fraction)

        return await run_tool(tool, self.state, self.record, show)

    async def start_controller(self) -> None:
        """Make sure that the controller actor exists."""
        self.joined = True
        code, last = await self._run_tool(command_lines.cluster(self.state, "start"), "ray")
        if code:
            why = last.error or f"exit status {code}"
            raise EngineFailed(f"the controller did not start: {why}{log_end(self.state, 'cluster')}")

    async def restart_controller(self) -> None:
        """Kill the controller, which is started again by its supervisor or by Ray."""
        if self.controller is not None:
            self.controller.kill()
            return
        code, last = await self._run_tool(command_lines.cluster(self.state, "restart"), "ray")
        if code:
            raise EngineFailed(last.error or f"exit status {code}{log_end(self.state, 'cluster')}")

    async def _recover_head(self) -> None:
        """End the daemons that a killed head left on its ports, and start a controller on the new head."""
        self.record.snapshot()
        left = [entry for entry in self.record.living() if entry.pid not in self.record.started]
        await asyncio.to_thread(self.record.end, left, lambda entry: None)
        self.stop_recovering()
        self._recovery = asyncio.create_task(self._restore_controller())

    async def _restore_controller(self) -> None:
        while True:
            try:
                await self._until("ray", self._head_listens)
                await self.start_controller()
            except (TidegateError, OSError) as error:
                self.progress.emit(
                    ProgressEvent(kind="note", message=f"the controller is not back yet: {error}")
                )
                await asyncio.sleep(RETRY_S)
            else:
                self.progress.emit(ProgressEvent(kind="note", message="the controller is back"))
                return

    def stop_recovering(self) -> None:
        """Cancel a recovery: the supervisor stops, or another head died."""
        if self._recovery is not None:
            self._recovery.cancel()

    async def _replicas(self) -> None:
        await self._until("replica", self._missing_replicas, *self.children)
        idle = f", except {', '.join(sorted(self._idle))} (0 desired replicas)" if self._idle else ""
        self.progress.done("replica", f"every model has a ready replica{idle}")

    async def _missing_replicas(self) -> str | None:
        try:
            fleet = await asyncio.to_thread(lambda: self.controller_client().fleet())
        except Unreachable:
            fleet = EMPTY_FLEET
        missing = readiness.waiting_for(self.deployment, fleet)
        if fleet is EMPTY_FLEET and missing:
            return readiness.without_controller(self.state)
        self._idle = readiness.idle(self.deployment, fleet)
        return "; ".join(missing) or None

    async def _gateway(self) -> None:
        key = own_key(self.state.secret())

        async def check() -> str | None:
            return await asyncio.to_thread(readiness.gateway_missing, self.deployment, key)

        await self._until("gateway", check, *self.children, poll_s=_GATEWAY_POLL_S)
        await asyncio.to_thread(readiness.answers, self.deployment, self._idle, key)
        self.progress.done("gateway", readiness.client_url(self.deployment.gateway))

    async def _servers(self) -> None:
        """Wait until every external model that lists servers has one that serves it; name the others."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.servers_timeout_s
        models = [
            name for name in external_server_status.external_models(self.deployment) if name not in self._idle
        ]
        while models:
            servers = await asyncio.to_thread(self._known_servers)
            missing = [
                name
                for name in models
                if not any(s.model == name and s.state is ReplicaPhase.READY for s in servers or ())
            ]
            lines = {name: external_server_status.reasons(name, servers) for name in models}
            late = clock() >= deadline
            needed = [name for name in missing if self._must_serve(name, servers or ())]
            if not missing or (late and not needed):
                for name in models:
                    self.progress.done("server", f"{name}: {external_server_status.summary(name, servers)}")
                    for line in lines[name]:
                        self.progress.emit(ProgressEvent(kind="note", message=f"{name}: {line}"))
                return
            said = {name: lines[name] or [external_server_status.summary(name, servers)] for name in missing}
            self.progress.step("server", "; ".join(f"{name}: {', '.join(said[name])}" for name in missing))
            check_alive(self.workers)
            if late:
                text = "".join(
                    f"\n{name}: {external_server_status.summary(name, servers)}"
                    + "".join(f"\n  {line}" for line in lines[name])
                    for name in missing
                )
                raise PreconditionFailed(
                    f"no external server serves after {self.servers_timeout_s:.0f} s{text}"
                )
            await asyncio.sleep(_POLL_S)

    def _must_serve(self, model: str, servers: Iterable[Replica]) -> bool:
        """Whether a start fails without a server of the model: pods and unfound servers may come later."""
        discovery = self.deployment.model(model).discovery
        if discovery is None:
            return True
        return discovery.kubernetes is None and any(each.model == model for each in servers)

    def _known_servers(self) -> tuple[Replica, ...] | None:
        fleet = external_server_status.gateway_fleet(self.deployment.gateway, self.state.admin_token())
        return fleet.servers(self.deployment, 0.0) if fleet is not None else None

    async def _until(
        self,
        step: str,
        check: Callable[[], Awaitable[str | None]],
        *needed: SupervisedProcess,
        poll_s: float = _POLL_S,
    ) -> None:
        """Poll until nothing is missing; fails at the deadline, or when a child keeps failing."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout_s
        while (missing := await check()) is not None:
            self.progress.step(step, missing)
            check_alive(needed)
            if clock() >= deadline:
                ends = [log_end(self.state, pattern) for pattern in _LOGS[step]]
                raise EngineFailed(
                    f"{step}: not ready after {self.timeout_s:.0f} s: {missing}{''.join(ends)}"
                )
            await asyncio.sleep(poll_s)
