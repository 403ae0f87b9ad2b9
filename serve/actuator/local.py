"""The actuator of one machine: each replica host is a process of its own (``--no-ray``).

Each host has its own session and is recorded on disk, so that a restarted controller finds it again and a
stop leaves no process behind. A host has GPUs of its own, from its start until its process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from policy.config.deployment import Cluster, ModelSpec
from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S, LayerKey
from policy.stats.backoff import Backoff
from serve.actuator.gpu_cards import GpuGrant, choose
from serve.actuator.interface import ActuatorLayer, NodeResources, host_spec, same_host
from serve.actuator.placement_feasibility import machine
from serve.actuator.serve_application_status import required_resources
from serve.host.gpu_group_host import HostProcessSpec
from serve.host.weight_verification import ResolvedWeights
from store.log_file import RotatingLog
from store.os_process import ProcessId, end_all, start_key, started_at, terminate
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# Maximum time for hosts to end at a stop; the gateways have drained by then.
GRACE_S = 15.0
# Maximum time for the event loop to notice that a child ended.
NOTICED_S = 10.0
BACKOFF = Backoff(0.5, 30.0, factor=4.0)


class HostProcess(ProcessId, frozen=True, kw_only=True):
    """A host process and its ``gpus``."""

    replica: str
    leaving: bool = False
    gpus: GpuGrant = GpuGrant()


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A layer and its host processes, oldest first; a ``deleted`` one is removed with its last process."""

    key: LayerKey
    digest: str
    model: ModelSpec
    weights: ResolvedWeights | None
    wanted: int
    processes: tuple[HostProcess, ...] = ()
    failures: int = 0
    retry_at: float = 0.0
    deleted: bool = False


class _ForeignRecord(msgspec.Struct, frozen=True):
    """What is read of a layer that another version recorded."""

    processes: tuple[ProcessId, ...] = ()


class LocalActuator:
    """The actuator port over child processes."""

    name = "local"

    def __init__(
        self,
        state: StateDir,
        cluster: Cluster,
        cards: Sequence[str] = (),
        *,
        interpreter: str = sys.executable,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``cards`` are the GPUs of this machine that hosts may use; ``interpreter`` runs the hosts."""
        self._state = state
        self._cluster = cluster
        self._cards = tuple(cards)
        self._interpreter = interpreter
        self._wall = wall
        self._path = state.hosts_path
        self._log = RotatingLog(state.logs / "hosts.log")
        # Why the hosts of a predecessor are not known, until they have ended.
        self._unreadable = ""
        self._records: dict[LayerKey, LayerRecord] = self._read()
        self._unsaved = False
        # Layers of a predecessor that were not looked at yet.
        self._found = set(self._records)
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._lock = asyncio.Lock()

    def _read(self) -> dict[LayerKey, LayerRecord]:
        try:
            found = self._state.load(self._path, list[LayerRecord]) or []
        except msgspec.DecodeError as error:
            self._unreadable = str(error)
            return {}
        return {record.key: record for record in found}

    async def _end_foreign(self) -> None:
        """End the hosts that another version recorded: nobody could scale them, and they have GPUs."""
        if not self._unreadable:
            return
        foreign: list[_ForeignRecord] = []
        with contextlib.suppress(msgspec.DecodeError):
            foreign = self._state.load(self._path, list[_ForeignRecord]) or []
        await self._end([process for record in foreign for process in record.processes])
        aside = self._state.set_aside(self._path)
        log.warning("%s cannot be read (%s); kept as %s", self._path, self._unreadable, aside)
        self._unreadable = ""

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        async with self._lock:
            await self._end_foreign()
            for key in tuple(self._records):
                await self._reconcile(key)
            records = dict(self._records)
        return {
            key: ActuatorLayer(
                wanted=record.wanted,
                digest=record.digest,
                trouble=f"{record.failures} hosts in a row failed" if record.failures >= MAX_FAILURES else "",
                waits=self._waits(record),
                unplaced=self._unplaced(record),
                retry_at=record.retry_at if record.failures and record.retry_at > self._wall() else None,
                hosts=tuple(process.replica for process in record.processes),
            )
            for key, record in records.items()
            if not record.deleted
        }

    async def nodes(self) -> Sequence[NodeResources]:
        return machine(self._cards)

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        async with self._lock:
            record = self._records.get(key)
            if record is None or record.deleted:
                leaving = record.processes if record else ()
                self._put(
                    LayerRecord(
                        key=key, digest=digest, model=model, weights=weights, wanted=count, processes=leaving
                    )
                )
            await self._reconcile(key)

    async def scale(self, key: LayerKey, count: int) -> None:
        async with self._lock:
            record = self._records.get(key)
            if record is None or record.deleted:
                raise ActuatorFailed(f"there is no layer {key} to scale")
            record = msgspec.structs.replace(record, wanted=count)
            if not count:
                # Earlier failures do not delay the next start.
                record = msgspec.structs.replace(record, failures=0, retry_at=0.0)
            self._put(record)
            await self._reconcile(key)

    async def kill(self, key: LayerKey, replica: str) -> None:
        async with self._lock:
            record = self._records.get(key)
            for process in record.processes if record is not None else ():
                found = process.process()
                if same_host(process.replica, replica) and found is not None:
                    # Its engine ends too: its standard input closes.
                    found.kill()

    async def delete(self, key: LayerKey) -> None:
        async with self._lock:
            if key not in self._records:
                return
            self._put(msgspec.structs.replace(self._records[key], wanted=0, deleted=True))
            await self._reconcile(key)

    async def stop(self) -> None:
        await self._end_foreign()
        await self._end([process for record in self._records.values() for process in record.processes])
        # A child that ended is a zombie until the event loop has noticed it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICED_S):
                await asyncio.gather(*(child.wait() for child in self._children.values()))
        self._records.clear()
        self._save()

    async def _end(self, processes: Sequence[ProcessId]) -> None:
        running = [found for p in processes if (found := p.process()) is not None]
        # The engine of a killed host ends too: its standard input closes.
        await asyncio.to_thread(end_all, running, GRACE_S)

    async def close(self) -> None:
        self._log.close()

    async def _reconcile(self, key: LayerKey) -> None:
        """Forget processes that ended, then start or end hosts to match the desired count."""
        record = self._records[key]
        for pid in [pid for pid, child in self._children.items() if child.returncode is not None]:
            del self._children[pid]
        living = tuple(p.with_key() for p in record.processes if p.process() is not None)
        died = sum(not p.leaving for p in record.processes) > sum(not p.leaving for p in living)
        record = msgspec.structs.replace(record, processes=living)
        # What ended before this process began, as in a power cut, is no failure of a start; and what ended
        # together, as by a fault of a GPU driver, is one.
        if died and key not in self._found:
            failures = record.failures + 1
            retry_at = self._wall() + BACKOFF.delay_s(failures)
            record = msgspec.structs.replace(record, failures=failures, retry_at=retry_at)
        self._found.discard(key)
        if record.deleted and not record.processes:
            del self._records[key]
            self._save()
            return
        youngest = max((p.created for p in record.processes if not p.leaving), default=math.inf)
        # Whether a host is ready is not known here, so its maximum start time does not count.
        if record.failures and self._wall() - youngest > record.model.control.start_timeout_s + STABLE_S:
            record = msgspec.structs.replace(record, failures=0)
        self._put(record)
        staying = [p for p in record.processes if not p.leaving]
        for _ in range(record.wanted - len(staying)):
            # A clock that was set back must not delay a start for longer than the back-off.
            if self._wall() < record.retry_at <= self._wall() + BACKOFF.max_s:
                break
            if (gpus := self._granted(record)) is None:
                break
            record = await self._start(record, gpus)
        # The newest are removed first: the oldest has the warmest caches.
        removed = staying[record.wanted :]
        for process in removed:
            if (found := process.process()) is not None:
                terminate(found)
        kept = tuple(msgspec.structs.replace(p, leaving=p.leaving or p in removed) for p in record.processes)
        self._put(msgspec.structs.replace(record, processes=kept))

    def _granted(self, record: LayerRecord) -> GpuGrant | None:
        """GPUs for another host of the layer; ``None`` while too few are free."""
        needed = self._needed(record)
        held = (process.gpus for each in self._records.values() for process in each.processes)
        return choose(needed, self._cards, held) if needed else GpuGrant()

    def _needed(self, record: LayerRecord) -> float:
        shape = record.model.shapes[record.key.shape]
        return float(required_resources(record.model, shape, self._cluster)["num_gpus"])

    def _unplaced(self, record: LayerRecord) -> int:
        """How many hosts of the layer wait for GPUs."""
        missing = record.wanted - sum(not process.leaving for process in record.processes)
        return missing if missing > 0 and self._granted(record) is None else 0

    def _waits(self, record: LayerRecord) -> str:
        if not (missing := self._unplaced(record)):
            return ""
        of = (
            f"the {len(self._cards)} GPUs of this machine"
            if self._cards
            else "this machine, where none was found"
        )
        return (
            f"{missing} of {record.key.shape} wait: {self._needed(record):g} GPUs each are not free of {of}"
        )

    async def _start(self, record: LayerRecord, gpus: GpuGrant) -> LayerRecord:
        key = record.key
        replica = f"{key.model.replace('/', '.')}-{key.shape}-g{key.generation}-{secrets.token_hex(3)}"
        spec = host_spec(
            key, record.model, record.weights, self._state, self._cluster.controller, loopback=True
        )
        child = await asyncio.create_subprocess_exec(
            self._interpreter, "-m", "serve.host.process_replica", replica, stdin=asyncio.subprocess.PIPE,
            stdout=self._log.descriptor, stderr=self._log.descriptor, start_new_session=True,
            env=os.environ | _visible(gpus),
        )  # fmt: skip
        self._children[child.pid] = child
        try:
            # A process that ended at once has no start time; the next call counts it as failed.
            process = HostProcess(
                pid=child.pid, created=started_at(child.pid) or 0.0, start_key=start_key(child.pid),
                replica=replica, gpus=gpus,
            )  # fmt: skip
            record = msgspec.structs.replace(record, processes=(*record.processes, process))
            self._put(record)
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(HostProcessSpec(spec=spec, replica=replica)) + b"\n")
            child.stdin.close()
        except BaseException:
            # It would wait for its specification, and no later controller could find it.
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            raise
        return record

    def _put(self, record: LayerRecord) -> None:
        if self._records.get(record.key) != record or self._unsaved:
            self._records[record.key] = record
            self._save()

    def _save(self) -> None:
        self._unsaved = True
        self._state.save(self._path, list(self._records.values()))
        self._unsaved = False


def _visible(gpus: GpuGrant) -> dict[str, str]:
    """The environment variables that show a host its GPUs."""
    if not gpus.cards:
        return {}
    # NVML counts GPUs in this order; by default CUDA begins with the fastest.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.cards), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
