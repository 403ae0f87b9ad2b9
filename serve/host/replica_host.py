"""The replica host: it owns a replica's resources and supervises its engine, a child process.

This module is over 400 lines: the life of an engine is one state machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from policy.config.deployment import ModelSpec
from policy.errors import EngineFailed, TidegateError
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S
from policy.stats.backoff import Backoff, failures_after
from policy.types import Replica, ReplicaLoad, ReplicaPhase, StartPath
from policy.wire.controller_reports import EngineReport, GpuReport
from policy.wire.heartbeat import (
    HEARTBEAT_PERIOD_S,
    AdapterRef,
    AdapterUse,
    GpuCommand,
    Heartbeat,
    HeartbeatResponse,
    Timeouts,
)
from serve.async_waiting import wait_at_most
from serve.engine.engine_server import EngineEvent
from serve.engine.interface import EngineSpec
from serve.engine.step_stats import merge
from serve.gpu_metrics import devices, watch
from serve.host import cpu_core_assignment
from serve.host.engine_process import EngineProcess
from serve.host.version_check import NodeVersions
from serve.host.weight_verification import (
    Prepare,
    ResolvedWeights,
    prepare_verified,
    record_read,
    was_read_before,
)
from store.json_log_format import line
from store.log_file import RotatingLog
from store.model_weights.prepare import prepare as prepare_weights
from store.progress_report import ProgressLine
from store.state_dir import StateDir, cache_dir, default_root, private_directory

RESTART_BACKOFF = Backoff(0.2, 10.0, factor=4.0)


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a host: one shape of one revision of a model.

    ``weights`` are those of the revision, ``None`` for an engine without weights. ``state_dir`` is a path on
    the head node, used for logs if this node can create it. With ``loopback`` the whole fleet is on this
    machine, so that only loopback is listened on. ``versions`` are the head's.
    """

    model: ModelSpec
    weights: ResolvedWeights | None
    shape: str
    generation: int
    state_dir: str
    controller: str
    secret: str
    loopback: bool = True
    versions: NodeVersions


class GpuAccess:
    """When a host's engine may use its GPUs: this one always may, as no other engine uses them.

    :class:`serve.host.time_shared_engine.TimeSharedGpuAccess` shares them with others. ``visible`` is the
    value of ``CUDA_VISIBLE_DEVICES`` for an engine that shares GPUs; it inherits the file ``descriptors``.
    """

    visible: str | None = None
    descriptors: tuple[int, ...] = ()

    async def acquire(self) -> None:
        """Return when the engine may be started."""

    def released(self) -> None:
        """The engine's process has ended."""

    def changed(self) -> None:
        """The state of the replica has changed."""

    def reported(self, phase: ReplicaPhase) -> None:
        """The engine's own phase, with each of its load lines."""

    def ordered(self, order: GpuCommand) -> None:
        """The controller's order what to do with the GPUs."""

    def phase(self, replica: Replica) -> ReplicaPhase:
        """The state of ``replica`` as heartbeats report it."""
        return replica.state


class ReplicaHost:
    """Runs one engine and restarts it in place with back-off.

    ``replica`` is its state. ``changed`` is set whenever more than its load has changed. ``lost`` is set once
    the host should be replaced: the engine failed too often in a row, or was ordered to leave.
    """

    def __init__(
        self,
        spec: HostSpec,
        *,
        replica: str,
        address: str,
        node: str,
        core_claims: Path | None = None,
        prepare: Prepare = prepare_weights,
        stable_s: float = STABLE_S,
        gpus: GpuAccess | None = None,
        engine: type[EngineProcess] = EngineProcess,
    ) -> None:
        """``core_claims`` is the file of this node's core claims, ``prepare`` fetches weights.

        An engine that lived for ``stable_s`` seconds ends a row of failures. ``engine`` runs its process.
        """
        self.spec = spec
        self.replica = Replica(
            id=replica, model=spec.model.name, shape=spec.shape, generation=spec.generation, node=node,
            state=ReplicaPhase.STARTING, load=ReplicaLoad(at=time.time()),
        )  # fmt: skip
        self.changed = asyncio.Event()
        self.lost = asyncio.Event()
        self._shape = spec.model.shapes[spec.shape]
        self._address = address
        self._core_claims = core_claims or cpu_core_assignment.default_path()
        self._prepare = prepare
        self._stable_s = stable_s
        self._gpus = gpus or GpuAccess()
        self._engine_process = engine
        # The highest term of the controllers that gave orders.
        self._term = 0
        self._hold: tuple[AdapterRef, ...] = ()
        self._uses: list[AdapterUse] = []
        self._waiting: tuple[AdapterUse, ...] = ()
        self._engine: EngineReport | None = None
        self._preempted = self._preempted_before = 0
        self._gpu_report: GpuReport | None = None
        self._began = self._drain_began = 0.0
        self._ready_at: float | None = None
        self._process: EngineProcess | None = None
        # Why the host cannot go on: an engine process that does not end.
        self._stuck = ""
        self._cores: tuple[int, ...] = ()
        self._log = _log_of(Path(spec.state_dir), f"replica-{replica}.log")
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def replicas(self) -> tuple[ReplicaHost, ...]:
        """The hosts that send heartbeats: itself."""
        return (self,)

    def snapshot(self) -> Replica:
        """The replica as heartbeats report it."""
        return msgspec.structs.replace(self.replica, state=self._gpus.phase(self.replica))

    def take_heartbeat(self) -> Heartbeat:
        """The replica, its power, and its adapter usage and steps since the last call."""
        uses, self._uses = (*self._uses, *self._waiting), []
        engine, self._engine = self._engine, None
        return Heartbeat(replica=self.snapshot(), uses=uses, engine=engine, gpus=self._gpu_report)

    def obey(self, orders: HeartbeatResponse) -> None:
        """Pass the controller's orders to the engine; one that starts later receives them first.

        Orders of a controller that was deposed are refused.
        """
        if orders.term < self._term:
            self._note("warning", f"orders of term {orders.term} are refused; the term is {self._term}")
            return
        self._term = orders.term
        if orders.leave and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(orders.leave))
        if orders.hold is not None and orders.hold != self._hold:
            self._hold = orders.hold
            self.command(b"hold " + msgspec.json.encode(self._hold))
        if orders.timeouts is not None and orders.timeouts != Timeouts.of(self.spec.model.control):
            self._take(orders.timeouts)
        if orders.gpus is not None:
            self._gpus.ordered(orders.gpus)

    def _note(self, level: str, text: str) -> None:
        """Add a line to the log; a full disk loses it, as it does the engine's."""
        with contextlib.suppress(OSError):
            self._log.write(line(level, text, {}))

    def _take(self, timeouts: Timeouts) -> None:
        """Put new timeouts into force, also in the engine that runs."""
        model = self.spec.model
        model = msgspec.structs.replace(model, control=timeouts.within(model.control))
        self.spec = msgspec.structs.replace(self.spec, model=model)
        self.command(f"progress {timeouts.progress_timeout_s}".encode())

    async def start(self) -> None:
        """Return when the engine is ready; raises :class:`EngineFailed` after too many failures in a row."""
        self.begin()
        await self._settled.wait()
        if self.replica.state is not ReplicaPhase.READY:
            raise EngineFailed(self.replica.reason)

    def begin(self) -> None:
        """Start the engine without waiting for it."""
        self._watching = asyncio.create_task(self._watch_cards())
        self._task = asyncio.create_task(self._keep_alive())
        self._task.add_done_callback(self._ended)

    async def drain(self, why: str = "draining") -> None:
        """Refuse new requests at once, and return when none is in flight or after the drain timeout.

        A second call, such as at a SIGTERM while the host leaves, waits for the same drain to end.
        """
        if self.replica.state is ReplicaPhase.READY:
            self._drain_began = time.monotonic()
            self._become(ReplicaPhase.DRAINING, why)
            self.command(b"drain")
        while self.replica.state is ReplicaPhase.DRAINING and not self._drained.is_set():
            left_s = self._drain_began + self.spec.model.control.mode.drain_timeout_s - time.monotonic()
            if left_s <= 0:
                return
            # The timeout may change meanwhile.
            await wait_at_most(self._drained, min(left_s, HEARTBEAT_PERIOD_S))

    async def stop(self) -> None:
        """End the engine and everything that it started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for task in (self._watching, self._leaving):
            if task is not None:
                task.cancel()
        # Only now, because the resources of a stopped replica may be given to another. The reason why a
        # host gave up is kept: it may be all that the controller receives.
        self._become(ReplicaPhase.STOPPED, self.replica.reason if self.lost.is_set() else "stopped")
        self._log.close()

    def command(self, line: bytes) -> None:
        """Send a command line to the engine, if there is one."""
        if self._process is not None:
            self._process.command(line)

    def kill(self) -> None:
        """Kill the engine, if there is one; it is started again."""
        if self._process is not None:
            self._process.kill()

    def update(self, **changes: Any) -> None:
        """Change fields of the replica; the next heartbeat reports them."""
        self.replica = msgspec.structs.replace(self.replica, **changes)

    def _become(self, state: ReplicaPhase, reason: str = "") -> None:
        self.update(state=state, reason=reason)
        self.changed.set()
        self._gpus.changed()

    async def _leave(self, why: str) -> None:
        """Drain, and let the host be replaced."""
        await self.drain(why)
        self.lost.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # The engine is no longer supervised, so the host must be replaced.
            self._become(ReplicaPhase.STARTING, repr(error))
            self.lost.set()
        self._settled.set()

    async def _keep_alive(self) -> None:
        while True:
            await self._gpus.acquire()
            self._began, self._ready_at = time.monotonic(), None
            try:
                await self._run_engine(await self._prepare_weights())
            except (TidegateError, OSError) as error:
                self._failed(str(error))
            finally:
                # GPUs of a process that does not end stay in use.
                if not self._stuck:
                    self._gpus.released()
            if self._stuck:
                self._become(self.replica.state, self._stuck)
            if self.replica.state is ReplicaPhase.DRAINING:
                self._drained.set()
                return
            failures = self.replica.failures
            if self._stuck or failures >= MAX_FAILURES:
                self.lost.set()
                return
            await asyncio.sleep(RESTART_BACKOFF.delay_s(failures))

    def _failed(self, reason: str) -> None:
        """The engine does not serve any more; one that drained until now keeps its state."""
        if self.replica.state is ReplicaPhase.DRAINING:
            return
        # Time before ready does not count: a slow start that fails is another failure of the row.
        lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        failures = failures_after(self.replica.failures, lived_s, self._stable_s)
        self._waiting = ()
        self.update(
            url="",
            load=ReplicaLoad(at=time.time()),
            failures=failures,
            incarnation=self.replica.incarnation + 1,
        )
        self._become(ReplicaPhase.STARTING, reason)

    async def _prepare_weights(self) -> str:
        """The directory of the weights on this node, and this node's cores; empty without weights."""
        if (weights := self.spec.weights) is None:
            return ""
        known = await asyncio.to_thread(was_read_before, weights.digest)
        self.update(start_path=StartPath.CACHED if known else StartPath.COLD)
        loop = asyncio.get_running_loop()

        def log_progress(progress: ProgressLine) -> None:
            if progress.fraction is not None or progress.step not in ("fetch", "verify"):
                # A download or build, or the wait for another process that does it.
                loop.call_soon_threadsafe(partial(self.update, start_path=StartPath.COLD))
            self._note("info", f"{progress.step}: {progress.message}")

        prepared = await asyncio.to_thread(
            prepare_verified,
            weights,
            token_file=self.spec.model.token_file,
            progress=log_progress,
            prepare=self._prepare,
        )
        if not self._shape.gpus and not self._cores:
            self._cores = await asyncio.to_thread(
                cpu_core_assignment.claim_cores, self._core_claims, self._shape.cpus
            )
        return str(prepared.path)

    async def _run_engine(self, weights: str) -> None:
        """Run an engine process until it ends. Its failure is reported before its end is waited for."""
        process = self._process = await self._engine_process.start(
            self._environment(), self._log, self._gpus.descriptors
        )
        self.update(pid=process.pid)
        failed = ""
        try:
            process.command(msgspec.json.encode(self._engine_spec(weights)))
            # Once it listens, an engine reports every second.
            async for event in process.events(
                lambda: self.spec.model.control.progress_timeout_s if self.replica.url else None
            ):
                failed = self.receive(event) or failed
            self._failed(failed or f"the engine ended with {await process.wait()}")
        except (TidegateError, OSError) as error:
            self._failed(str(error))
        finally:
            if not await process.end():
                self._stuck = f"{self.replica.reason}; its process {process.pid} does not end after SIGKILL"

    def receive(self, event: EngineEvent) -> str:
        """Take an event of the engine; returns the error that it reports."""
        if event.url:
            start_s = time.monotonic() - self._began
            self.update(url=event.url, max_model_len=event.max_model_len, start_s=start_s)
            if self.spec.weights is not None:
                record_read(self.spec.weights.digest)
        if (line := event.line) is not None:
            self.update(load=line.load, adapters=line.adapters)
            if line.state is ReplicaPhase.READY and self.replica.state is ReplicaPhase.STARTING:
                self._ready_at = time.monotonic()
                self._become(ReplicaPhase.READY)
                self._settled.set()
            elif (
                self.replica.state is ReplicaPhase.DRAINING
                # An engine that sleeps has nothing to drain.
                and line.state in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP)
                and not line.load.in_flight
            ):
                self._drained.set()
            # Waiting counts are as current as the last line, even if nothing else changed.
            self._waiting = tuple(
                AdapterUse(name=use.name, digest=use.digest, waiting=use.waiting)
                for use in event.uses
                if use.waiting
            )
            self._gpus.reported(line.state)
        if event.engine is not None:
            if event.engine.preempted < self._preempted:
                # Totals of a restarted engine start at zero.
                self._preempted_before += self._preempted
            self._preempted = event.engine.preempted
            total = self._preempted_before + self._preempted
            self._engine = merge(self._engine, msgspec.structs.replace(event.engine, preempted=total))
        self._uses.extend(msgspec.structs.replace(use, waiting=0) for use in event.uses)
        return event.failed

    def _engine_spec(self, weights: str) -> EngineSpec:
        model, shape, adapters = self.spec.model, self._shape, self.spec.model.adapters
        return EngineSpec(
            kind=model.engine,
            model=model.name,
            runner=model.runner,
            host=self._address,
            secret=self.spec.secret,
            bound=shape.max_in_flight,
            weights=weights,
            tensor_parallel=shape.tensor_parallel,
            share=shape.share,
            cpus=0 if shape.gpus else shape.cpus,
            engine_args={**model.engine_args, **shape.engine_args},
            sim=model.sim,
            progress_timeout_s=model.control.progress_timeout_s,
            adapter_slots=0 if adapters is None else adapters.slots_per_replica,
            max_rank=0 if adapters is None else adapters.max_rank,
            max_bytes=0 if adapters is None else adapters.max_bytes,
            # The head's directory exists on the head only; other nodes pull from it.
            blobs=(str(StateDir(Path(self.spec.state_dir)).adapters), str(cache_dir("adapters"))),
            controller=self.spec.controller,
            hold=self._hold,
            sleeps=self._gpus.visible is not None,
        )

    async def _watch_cards(self) -> None:
        async for report in watch(devices(self._shape.gpus, os.environ | self._environment())):
            share = self._shape.share
            if report is not None and share < 1:
                # The others on the card report their own part.
                parts = {"watts": share * report.watts, "joules": share * report.joules}
                self._gpu_report = msgspec.structs.replace(report, **parts)
                continue
            self._gpu_report = report

    def _environment(self) -> dict[str, str]:
        """The environment variables that this host adds for its engine."""
        env = {}
        if self._cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
            # During a mode switch two engines share cores. With OpenMP's default spinning at barriers the
            # initialisation of a model took 154 s. This short spin costs nothing without contention
            # (28 tok/s, against 26 by default and 23 without spinning).
            env["GOMP_SPINCOUNT"] = "10000"
        env |= self.spec.model.env
        if self._gpus.visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus.visible
        return env


def _log_of(root: Path, name: str) -> RotatingLog:
    """The log below ``root``, or below the user's own directory on a node that cannot create that."""
    try:
        return RotatingLog(StateDir(root).logs / name)
    except OSError:
        try:
            return RotatingLog(StateDir(default_root()).logs / name)
        except (OSError, RuntimeError):  # a user without a home
            return RotatingLog(private_directory() / "logs" / name)
