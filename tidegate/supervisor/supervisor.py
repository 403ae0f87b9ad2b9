"""The supervisor: starts the processes of a deployment, watches them, serves its socket, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from typing import Literal

import psutil

from gateway.telemetry.metric_files import merge_ended
from policy.deployment_file.diff import ChangeEffect, ConfigChange, diff
from policy.deployment_file.parse import parse
from policy.errors import ConfigError, EngineFailed, PreconditionFailed, TidegateError
from policy.wire.accounting_api import AdminRole, AuditEntry
from serve.autoscaler.custom_policy_check import check_custom_policies
from serve.controller.client import ControllerClient
from store.os_process import local_user
from store.state_dir import StateDir
from store.tenancy import audit_spool
from tidegate.deployment_file import DeploymentDocument
from tidegate.exit_codes import ExitCode, exit_of
from tidegate.redaction import redact
from tidegate.supervisor import control_socket, preflight, readiness
from tidegate.supervisor.children import ProcessSpec, SupervisedProcess, log_end
from tidegate.supervisor.controller_watch import TIMEOUT_S, watch_controller
from tidegate.supervisor.orphan_cleanup import ELECTED, forget_targets, leave_cluster
from tidegate.supervisor.process_record import ProcessRecord, RecordedProcess, adopt_orphans
from tidegate.supervisor.progress_events import ProgressEvent, ProgressLog
from tidegate.supervisor.remote_document_feed import RemoteDocumentFeed
from tidegate.supervisor.startup import SERVERS_S, Startup

_SNAPSHOT_S = 2.0
_APPLY_S = 60.0
_COLLECT_S = 0.1
_HEAD_GRACE_S = 20.0
_ACCOUNTING_GRACE_S = 20.0


class Supervisor:
    """One deployment on this machine, from start to stop. The caller holds the state's lock.

    With a ``remote`` controller it is the gateway of a further host, with that controller's deployment; with
    an ``address`` beside it, the host of one of the controllers, which listens there, or on ``host``.
    """

    def __init__(
        self, state: StateDir, document: DeploymentDocument, *, ray: bool, timeout_s: float | None,
        progress: ProgressLog, remote: RemoteDocumentFeed | None = None, address: str = "", host: str = "",
    ) -> None:  # fmt: skip
        deployment = document.deployment
        self._state = state
        self._raw: object = document.raw
        self._deployment = deployment
        self._progress = progress
        self._stopping = asyncio.Event()
        self._applying = asyncio.Lock()
        self._merging: set[asyncio.Task[None]] = set()
        self._phase: Literal["starting", "ready", "stopping"] = "starting"
        self._record = ProcessRecord(state)
        self._remote = remote
        self._address = address
        self._actuator: Literal["ray", "local", "external", "remote"] = (
            "remote"
            if remote and not address
            else "external"
            if not deployment.needs_controller
            else "ray"
            if ray and deployment.deploys
            else "local"
        )
        self._start = Startup(
            deployment=deployment,
            state=state,
            record=self._record,
            progress=progress,
            ray=ray,
            remote=remote is not None,
            address=address,
            host=host,
            timeout_s=timeout_s or max(spec.control.start_timeout_s for spec in deployment.models),
            servers_timeout_s=timeout_s or SERVERS_S,
            child=self._child,
            controller_client=self._controller,
        )

    async def run(self) -> int:
        """Start, run until a signal or ``stop``, stop all processes; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        adopt_orphans()
        # With a delay, because asyncio must collect a child that exits while it is being started.
        loop.add_signal_handler(
            signal.SIGCHLD, lambda: loop.call_later(_COLLECT_S, self._record.collect_orphans)
        )
        server = await control_socket.serve(self._state.socket_path, self._answer)
        snapshots = asyncio.create_task(self._keep_record())
        failure: TidegateError | None = None
        try:
            await self._until_stopped()
        except TidegateError as error:
            failure = error
        except OSError as error:
            failure = EngineFailed(str(error))
        self._phase = "stopping"
        self._progress.emit(ProgressEvent(kind="stopping", message="stopping all processes"))
        complete = await self._end()
        snapshots.cancel()
        if failure is not None:
            last = ProgressEvent(kind="failed", message=str(failure), exit_code=exit_of(failure))
        elif complete:
            last = ProgressEvent(kind="stopped", message="all processes have stopped")
        else:
            message = "not all processes have stopped: run `tidegate down` again"
            last = ProgressEvent(kind="stopped", message=message, exit_code=ExitCode.FAILED)
        self._progress.emit(last)
        server.close()
        # Followers read the last event before this process exits.
        await asyncio.sleep(0.05)
        self._state.socket_path.unlink(missing_ok=True)
        return last.exit_code

    def status(self) -> control_socket.SupervisorStatus:
        gateway = self._deployment.gateway
        now = asyncio.get_running_loop().time()
        return control_socket.SupervisorStatus(
            pid=os.getpid(),
            since=psutil.Process().create_time(),
            phase=self._phase,
            actuator=self._actuator,
            endpoint="" if self._address else readiness.client_url(gateway),
            admin="" if self._address else readiness.admin_url(gateway),
            document=self._raw,
            processes=tuple(
                control_socket.ProcessStatus(
                    name=child.spec.name,
                    pid=child.pid,
                    restarts=child.restarts,
                    up_s=now - child.started_at if child.pid else 0.0,
                )
                for child in self._start.children
            ),
        )

    async def _answer(
        self, request: control_socket.SupervisorRequest
    ) -> AsyncIterator[control_socket.SupervisorResponseLine]:
        if request.command == "apply":
            await self.apply(request.document)
        if request.command in ("apply", "status"):
            yield control_socket.SupervisorResponseLine(status=self.status())
            return
        stop = request.command == "stop"
        if stop:
            self._stopping.set()
        async for event in self._progress.follow(stop=stop):
            yield control_socket.SupervisorResponseLine(event=event)

    async def apply(self, document: object) -> None:
        """Apply all of a deployment file or nothing.

        Raises :class:`policy.errors.ConfigError` for an invalid file, for a custom policy that fails on a
        sample view and for changes that need a restart, and the controller's errors.
        """
        if self._remote is not None and not self._address:
            raise PreconditionFailed(f"apply at the host of a controller, {self._remote.addresses}")
        deployment = parse(document)
        preflight.check_keys(deployment, self._state)
        # One at a time, so that the stored file, the controller and the next comparison agree.
        async with self._applying:
            changes = diff(self._deployment, deployment)
            for change in changes:
                if change.effect is ChangeEffect.RESTART:
                    raise ConfigError(
                        change.path, change.after, f"{change.before!r}, or down and up: {change.why}"
                    )
            if self._phase != "ready":
                raise EngineFailed(f"the deployment is {self._phase}; apply when it is ready")
            # Here too: a watched file was not seen by the command line.
            await asyncio.to_thread(check_custom_policies, deployment)
            if deployment.needs_controller:
                await asyncio.to_thread(self._controller(_APPLY_S).apply, document)
            # Gateway workers read this file when it changes.
            self._state.save(self._state.deployment_path, document)
            self._raw = document
            self._deployment = deployment
            await asyncio.to_thread(self._record_apply, changes)
        self._note("applied a new deployment file")

    async def apply_if_new(self, document: object) -> None:
        """Apply a file that may be in force already: each host of a controller watches a copy of it."""
        if await asyncio.to_thread(self._controller().document) != document:
            await self.apply(document)

    def _record_apply(self, changes: tuple[ConfigChange, ...]) -> None:
        """Add the changes to the audit trail; on a full disk say so, as they are in force."""
        entry = AuditEntry(
            at=time.time(), actor=local_user(), role=AdminRole.ADMIN, action="apply", target="deployment",
            before={change.path: redact(change.before, change.path) for change in changes},
            after={change.path: redact(change.after, change.path) for change in changes},
        )  # fmt: skip
        try:
            audit_spool.append(self._state, entry)
        except OSError as error:
            self._note(f"the audit trail cannot be written: {error}")

    async def _until_stopped(self) -> None:
        await self._clean_up_after_predecessor()
        self._state.secret()
        self._state.admin_token()
        self._state.save(self._state.deployment_path, self._raw)
        if self._remote is None:
            # A start applies the whole file, including adapters that were removed by command.
            self._state.removed_path.unlink(missing_ok=True)
        shutil.rmtree(self._state.metrics_dir, ignore_errors=True)
        self._state.metrics_dir.mkdir(mode=0o700)
        start = asyncio.create_task(self._start.run())
        stopped = asyncio.create_task(self._stopping.wait())
        watching = asyncio.create_task(self._watch_controller())
        try:
            await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
                return
            start.result()
            self._phase = "ready"
            self._progress.emit(ProgressEvent(kind="ready", message=self._address or self.status().endpoint))
            await stopped
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_controller(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._remote is not None:
                tasks.create_task(self._remote.follow(self._raw, self._follow, self._note))
            if self._address or (self._remote is None and self._deployment.needs_controller):
                tasks.create_task(self._restart_hanging())

    async def _restart_hanging(self) -> None:
        with contextlib.closing(self._controller(TIMEOUT_S, self._address)) as client:
            await watch_controller(client.hangs, self._start.restart_controller, self._note)

    def _follow(self, document: DeploymentDocument) -> None:
        """Take a new deployment of the remote controller; gateway workers read the file when it changes."""
        self._state.save(self._state.deployment_path, document.raw)
        self._raw, self._deployment = document.raw, document.deployment
        self._note("the controller has a new deployment file")

    async def _end(self) -> bool:
        """Stop the gateway workers (with drain), accounting, the controller and its replicas, and Ray.

        Returns whether all have exited; otherwise the record is kept for `down`.
        """
        start = self._start
        if self._address:
            return await self._end_elected()
        start.stop_recovering()
        gateway = self._deployment.gateway
        drain_s = gateway.drain_delay_s + gateway.drain_timeout_s + 5.0
        await asyncio.gather(*(self._end_child(child, drain_s) for child in start.workers))
        for sock in start.sockets:
            sock.close()
        if start.accounting is not None:
            await self._end_child(start.accounting, _ACCOUNTING_GRACE_S)
        replicas_s = 30.0 + max(spec.control.mode.drain_timeout_s for spec in self._deployment.models)
        left_cluster = not start.joined or await self._leave_cluster(replicas_s)
        if start.controller is not None:
            await self._end_child(start.controller, replicas_s)
        if start.head is not None:
            await self._end_child(start.head, _HEAD_GRACE_S)
        left: tuple[RecordedProcess, ...] = ()
        while remaining := self._remaining(left):
            left += await asyncio.to_thread(self._record.end, remaining, self._report_ended)
        if left:
            self._note(f"these processes do not exit: {', '.join(map(str, left))}")
        if left or not left_cluster:
            return False
        self._record.clear()
        forget_targets(self._state)
        return True

    async def _end_elected(self) -> bool:
        """Stop the controller. Replicas that it started go on while another controller answers."""
        replicas_s = 30.0 + max(spec.control.mode.drain_timeout_s for spec in self._deployment.models)
        if self._start.controller is not None:
            await self._end_child(self._start.controller, replicas_s)
        # `down` ends them, should all controllers be killed. On a full disk the last snapshot has them.
        remaining = self._remaining(())
        with contextlib.suppress(OSError):
            self._record.keep(remaining)
        return True

    async def _leave_cluster(self, replicas_s: float) -> bool:
        """Delete our applications there; those on our own head end with it."""
        address = self._deployment.cluster.address
        with contextlib.suppress(TidegateError, OSError):
            code, _ = await leave_cluster(self._state, self._record, replicas_s)
            if code == 0:
                return True
        if address == "local":
            return True
        self._note(f"cannot clean up the Ray cluster at {address}{log_end(self._state, 'cluster')}")
        return False

    async def _end_child(self, child: SupervisedProcess, grace_s: float) -> None:
        pid = child.pid
        await child.stop(grace_s)
        if pid:
            self._progress.emit(ProgressEvent(kind="ended", step=child.spec.name, message=f"pid {pid}"))

    def _remaining(self, left: tuple[RecordedProcess, ...]) -> list[RecordedProcess]:
        self._record.snapshot()
        return [entry for entry in self._record.living() if entry.pid != os.getpid() and entry not in left]

    def _report_ended(self, entry: RecordedProcess) -> None:
        self._progress.emit(ProgressEvent(kind="ended", step=entry.name, message=f"pid {entry.pid}"))

    def _signalled(self) -> None:
        if self._stopping.is_set():
            # A second signal skips the drain.
            for child in self._start.children:
                child.kill()
        self._stopping.set()

    async def _clean_up_after_predecessor(self) -> None:
        """End the recorded processes of a supervisor that was killed: they would hold our ports."""
        # Replicas of an elected controller may have another leader.
        ours = [entry for entry in self._record.living() if not self._address or entry.name in ELECTED]
        for entry in await asyncio.to_thread(self._record.end, ours, self._report_ended):
            self._note(f"{entry} of an earlier run does not exit")
        self._record.keep(entry for entry in self._record.living() if entry not in ours)
        self._record.add("supervisor", os.getpid())

    def _child(self, spec: ProcessSpec) -> SupervisedProcess:
        return SupervisedProcess(
            spec, self._state, self._record, note=self._note, on_exit=self._forget_metrics
        )

    def _note(self, message: str) -> None:
        self._progress.emit(ProgressEvent(kind="note", message=message))

    def _forget_metrics(self, pid: int) -> None:
        # Gauges of live processes would include the dead worker; counters are kept and summed. Without
        # descriptors for a look into the folder, the next worker that collects its metrics removes them.
        with contextlib.suppress(OSError):
            for path in self._state.metrics_dir.glob(f"gauge_live*_{pid}.db"):
                path.unlink(missing_ok=True)
        merging = asyncio.create_task(self._merge_metrics())
        self._merging.add(merging)
        merging.add_done_callback(self._merging.discard)

    async def _merge_metrics(self) -> None:
        """Merge the counts of ended processes; what fails is merged after the next end of one."""
        if self._phase == "stopping":
            return
        try:
            await asyncio.to_thread(merge_ended, self._state.metrics_dir)
        except Exception as error:  # noqa: BLE001 - a file may be broken: prometheus_client raises whatever
            self._note(f"the metric files of ended processes cannot be merged: {error}")

    async def _keep_record(self) -> None:
        while True:
            # Without descriptors for a look at the processes, the next one finds them.
            with contextlib.suppress(OSError):
                self._record.snapshot()
            await asyncio.sleep(_SNAPSHOT_S)

    def _controller(self, timeout_s: float = 2.0, address: str = "") -> ControllerClient:
        addresses = address or self._deployment.cluster.controller
        return ControllerClient(addresses, self._state.secret(), timeout_s=timeout_s)
