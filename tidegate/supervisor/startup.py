"""The start, step by step: environment, model, ray, replica, gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from policy.config.deployment import Deployment
from policy.errors import EngineFailed, ModelUnavailable, PreconditionFailed, TidegateError, Unreachable
from policy.types import EMPTY_FLEET, EngineKind
from serve import cluster
from serve.controller.client import ControllerClient
from store.api_keys import own_key
from store.state_dir import StateDir
from tidegate.supervisor import command_lines, preflight, readiness
from tidegate.supervisor.children import Child, ProcessSpec, check_alive, log_end, run_once
from tidegate.supervisor.events import Event, Progress
from tidegate.supervisor.process_record import ORPHAN_GRACE_S, ProcessRecord, end

_POLL_S = 0.25
_GATEWAY_POLL_S = 0.05
_RETRY_S = 5.0
# Which logs say why a step does not come to its end.
_LOGS = {"ray": ("ray",), "replica": ("controller", "replica-*"), "gateway": ("gateway-*",)}


class _ToolLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of progress of a tool that we run."""

    step: str = ""
    message: str = ""
    fraction: float | None = None
    path: str = ""
    error: str = ""


@dataclass
class Startup:
    """What one start needs, and what it has started so far, for whoever must end it."""

    deployment: Deployment
    state: StateDir
    ledger: ProcessRecord
    progress: Progress
    ray: bool
    timeout_s: float
    child: Callable[[ProcessSpec], Child]
    snapshot: Callable[[], None]
    controller_client: Callable[[], ControllerClient]
    sockets: list[socket.socket] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    controller: Child | None = None
    head: Child | None = None
    joined: bool = False
    _idle: frozenset[str] = frozenset()
    _recovery: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """All steps; raises a :class:`policy.errors.TidegateError` that says which part failed."""
        self._environment()
        await self._models()
        # The gateway starts beside Ray: its imports cost seconds, and requests may queue already.
        self._gateway_workers()
        if self.deployment.needs_controller:
            await (self._ray() if self.ray else self._local())
            await self._replicas()
        await self._gateway()

    @property
    def children(self) -> list[Child]:
        """Everything that is kept running."""
        rest = [child for child in (self.controller, self.head) if child is not None]
        return self.workers + rest

    def _environment(self) -> None:
        gateway = self.deployment.gateway
        problems = preflight.check_ports(preflight.internal_ports(self.deployment, ray=self.ray))
        for path, host, port in (
            ("gateway.port", gateway.host, gateway.port),
            ("gateway.admin_port", gateway.admin_host, gateway.admin_port),
        ):
            try:
                self.sockets.append(preflight.bind(path, host, port))
            except PreconditionFailed as error:
                problems.append(str(error))
        if self.ray and self.deployment.needs_controller and self.deployment.cluster.address == "local":
            ours = {entry.pid for entry in self.ledger.living()}
            if (foreign := preflight.foreign_ray(ours)) is not None:
                problems.append(foreign)
        available = preflight.available_memory()
        sizes = {
            spec.name: preflight.weights_bytes(Path(spec.source))
            for spec in self.deployment.models
            if spec.source.startswith("/")
        }
        if (memory := preflight.memory_problem(self.deployment, sizes, available)) is not None:
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
        # Only now is the size of a fetched model known.
        problem = preflight.memory_problem(self.deployment, sizes, preflight.available_memory())
        if sizes and problem is not None:
            raise PreconditionFailed(problem)

    async def _prepare(self, model: str) -> Path:
        self.progress.step("model", f"{model}: preparing")
        last = _ToolLine()

        def relay(line: bytes) -> None:
            nonlocal last
            last = _tool_line(line) or last
            if last.message:
                self.progress.step("model", f"{model}: {last.message}", last.fraction)

        code = await run_once(command_lines.prepare_model(self.state, model), self.state, self.ledger, relay)
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
        host, _, port = cluster.address(self.deployment).rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return "starting a head on this machine"
        writer.close()
        return None

    async def start_controller(self) -> None:
        """Make sure that the controller actor exists; harmless when it does."""
        self.joined = True
        last = _ToolLine()

        def relay(line: bytes) -> None:
            nonlocal last
            last = _tool_line(line) or last
            if last.message:
                self.progress.step("ray", last.message, last.fraction)

        code = await run_once(command_lines.cluster(self.state, "start"), self.state, self.ledger, relay)
        if code:
            why = last.error or f"exit status {code}"
            raise EngineFailed(f"the controller did not start: {why}{log_end(self.state, 'cluster')}")

    async def _recover_head(self) -> None:
        """A head that was killed leaves daemons on its ports, and a new one has no controller."""
        self.snapshot()
        left = [entry for entry in self.ledger.living() if entry.pid not in self.ledger.started]
        await asyncio.to_thread(end, left, grace_s=ORPHAN_GRACE_S, tell=lambda entry: None)
        self.stop_recovering()
        self._recovery = asyncio.create_task(self._controller_again())

    async def _controller_again(self) -> None:
        while True:
            try:
                await self._until("ray", self._head_listens)
                await self.start_controller()
            except TidegateError as error:
                self.progress.emit(Event(kind="note", message=f"the controller is still away: {error}"))
                await asyncio.sleep(_RETRY_S)
            else:
                self.progress.emit(Event(kind="note", message="the controller is back"))
                return

    def stop_recovering(self) -> None:
        """The end is near, or another head died."""
        if self._recovery is not None:
            self._recovery.cancel()

    async def _local(self) -> None:
        self.controller = self.child(command_lines.local_controller(self.state))
        self.controller.start()

    async def _replicas(self) -> None:
        await self._until("replica", self._replicas_lack, *self.children)
        but = f", but {', '.join(sorted(self._idle))}, whose target is 0" if self._idle else ""
        self.progress.done("replica", f"every model has a ready replica{but}")

    async def _replicas_lack(self) -> str | None:
        try:
            fleet = await asyncio.to_thread(lambda: self.controller_client().fleet())
        except Unreachable:
            fleet = EMPTY_FLEET
        lacking = readiness.waiting_for(self.deployment, fleet)
        if fleet is EMPTY_FLEET and lacking:
            return "waiting for the controller"
        self._idle = readiness.idle(self.deployment, fleet)
        return "; ".join(lacking) or None

    def _events(self) -> list[str]:
        """What the controller did last, where its log is Ray's."""
        try:
            return [f"\n  {event}" for event in self.controller_client().status().events[-10:]]
        except Unreachable:
            return []

    async def _gateway(self) -> None:
        key = own_key(self.state.secret())

        async def lacks() -> str | None:
            return await asyncio.to_thread(readiness.gateway_lacks, self.deployment, key)

        await self._until("gateway", lacks, *self.children, poll_s=_GATEWAY_POLL_S)
        await asyncio.to_thread(readiness.answers, self.deployment, self._idle, key)
        gateway = self.deployment.gateway
        self.progress.done("gateway", readiness.endpoint(gateway.host, gateway.port))

    async def _until(
        self, step: str, lacks: Callable[[], Awaitable[str | None]], *needed: Child, poll_s: float = _POLL_S
    ) -> None:
        """Poll until nothing lacks; give up on a child that keeps failing, or at the deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout_s
        while (lacking := await lacks()) is not None:
            self.progress.step(step, lacking)
            check_alive(needed)
            if clock() >= deadline:
                ends = [log_end(self.state, pattern) for pattern in _LOGS[step]]
                ends += await asyncio.to_thread(self._events) if step == "replica" else []
                raise EngineFailed(
                    f"{step}: not ready after {self.timeout_s:.0f} s: {lacking}{''.join(ends)}"
                )
            await asyncio.sleep(poll_s)


def _tool_line(line: bytes) -> _ToolLine | None:
    """A tool's line of JSON; anything else it prints is in its log."""
    try:
        return msgspec.json.decode(line, type=_ToolLine)
    except msgspec.MsgspecError:
        return None
