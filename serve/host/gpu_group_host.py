"""Host of a shared GPU group: it holds the GPUs of the largest shape, and keeps one host process per engine.

The processes outlive it: a successor on the same GPUs takes them over, so that its end interrupts no stream.
Without one they end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import sys
import time
from pathlib import Path

import msgspec
import psutil

from policy.config.shared_gpus import GpuGroup, cards, gpu_group_of
from policy.scaling.reconcile_steps import STABLE_S
from policy.stats.backoff import Backoff, failures_after
from serve.host.replica_host import HostSpec, ReplicaHost
from serve.host.shared_gpu_locks import GpuLocks, open_lock, try_lock
from serve.host.time_shared_engine import EngineSlot, TimeSharedGpuAccess
from store.log_file import RotatingLog
from store.os_process import ProcessId, end_all, start_key, started_at, terminate
from store.state_dir import StateDir, default_root, own_directory, private_directory, write_atomic

log = logging.getLogger("tidegate.host")

LOOK_S = 0.2
BACKOFF = Backoff(0.5, 30.0, factor=4.0)
# Time beyond the drain timeout for hosts to end.
GRACE_S = 10.0
# Without a holder of the group for so long, its engines drain and end: the GPUs may be given to others.
UNHELD_S = 60.0
UNHELD_LOOK_S = 1.0
_LEASE = "held.lock"
# A host shows every second that it is not stopped or blocked; one that did not for so long is killed. The
# first sign comes after its imports.
SIGN_OF_LIFE_S, HUNG_S, FIRST_SIGN_S = 1.0, 15.0, 120.0


class HostProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The standard input of a host process: what it runs, and in which group, if any.

    ``folder`` is that of the group on this node.
    """

    spec: HostSpec
    replica: str
    address: str = "127.0.0.1"
    node: str = "local"
    slot: EngineSlot | None = None
    folder: str = ""


class GroupEngineProcess(ProcessId, frozen=True, kw_only=True):
    """The host process of one engine, or none; ``made_of`` identifies its specification and GPUs."""

    shape: str
    index: int
    made_of: str
    failures: int = 0
    retry_at: float = 0.0
    replica: str = ""
    pid: int = 0
    created: float = 0.0

    def process(self) -> psutil.Process | None:
        return super().process() if self.pid else None


class GpuGroupHost:
    """Starts a host process for each engine of the group, and restarts those that end.

    ``lost`` is set if it cannot go on. Engines send their own heartbeats.
    """

    replicas: tuple[ReplicaHost, ...] = ()

    def __init__(self, spec: HostSpec, group: GpuGroup, *, address: str, node: str) -> None:
        self.spec = spec
        self.lost = asyncio.Event()
        self._group = group
        self._address = address
        self._node = node
        root = _root(spec)
        # By address: the node has another id once its Ray was restarted.
        self._folder = own_directory(root / f"{_plain(spec.model.name)}-g{spec.generation}-{address}")
        self._log = RotatingLog(StateDir(root.parent).ensure().logs / "hosts.log")
        self._lease = open_lock(self._folder / _LEASE)
        self._path = self._folder / "members.json"
        self._members: dict[tuple[str, int], GroupEngineProcess] = {}
        # What the file has.
        self._written: dict[tuple[str, int], GroupEngineProcess] = {}
        self._children: dict[int, asyncio.subprocess.Process] = {}
        # By replica: its last sign of life, and when that was noticed.
        self._signs: dict[str, tuple[int, float]] = {}
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when every engine has a host process, of a predecessor or new, or waits for a retry."""
        while not try_lock(self._lease):  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(LOOK_S)
        if self._path.exists():
            old = msgspec.json.decode(self._path.read_bytes(), type=list[GroupEngineProcess])
            self._members = {(member.shape, member.index): member for member in old}
            self._written = dict(self._members)
        await self._look()
        self._supervising = asyncio.create_task(self._supervise())
        self._supervising.add_done_callback(self._ended)

    async def drain(self) -> None:
        """Refuse new requests at once, and return when all hosts have ended or after the drain timeout."""
        if self._supervising is not None:
            self._supervising.cancel()
        for process in self._processes():
            terminate(process)
        deadline = time.monotonic() + self.spec.model.control.mode.drain_timeout_s + GRACE_S
        while self._processes() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End every host and its engine."""
        if self._supervising is not None:
            self._supervising.cancel()
        await asyncio.to_thread(end_all, self._processes(), 0.0)
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        self._path.unlink(missing_ok=True)
        os.close(self._lease)
        self._log.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.lost.set()

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Start what is missing or of another specification; count what has ended as failed.

        What a full disk, or a lack of descriptors or processes, prevents is tried again by a later look: the
        engines that serve go on.
        """
        for pid in [pid for pid, child in self._children.items() if child.returncode is not None]:
            del self._children[pid]
        for shape, count in self._group.engines.items():
            for index in range(count):
                with contextlib.suppress(OSError):
                    self._members[shape, index] = await self._look_at(shape, index)
        if self._members != self._written:
            with contextlib.suppress(OSError):
                write_atomic(self._path, msgspec.json.encode(list(self._members.values())), mode=0o600)
                self._written = dict(self._members)

    async def _look_at(self, shape: str, index: int) -> GroupEngineProcess:
        assignment = self._assignment(shape, index)
        made_of = _digest(assignment)
        member = self._members.get(
            (shape, index), GroupEngineProcess(shape=shape, index=index, made_of=made_of)
        )
        process, now = member.process(), time.time()
        if member.made_of != made_of:
            if process is not None:
                # Its GPUs or its specification are no longer those of the group.
                await asyncio.to_thread(end_all, [process], GRACE_S)
            member, process = GroupEngineProcess(shape=shape, index=index, made_of=made_of), None
        if process is not None:
            if self._is_hung(member.replica):
                process.kill()
            return member.with_key()
        if member.pid:
            self._signs.pop(member.replica, None)
            sign_of_life(self._folder, member.replica).unlink(missing_ok=True)
            member = _failed(member, now, now - member.created)
        if now < member.retry_at <= now + BACKOFF.max_s:
            return member
        name = f"{_plain(self.spec.model.name)}-{shape}-g{self.spec.generation}-{secrets.token_hex(3)}"
        try:
            pid = await self._start(msgspec.structs.replace(assignment, replica=name))
        except OSError as error:
            log.warning("a host of shape %s cannot be started: %s", shape, error)
            return _failed(member, now, 0.0)
        created, key = time.time(), ""
        # Whatever prevents a look at it, a process that was started is not lost.
        with contextlib.suppress(OSError):
            created = started_at(pid) or created
            key = start_key(pid)
        return msgspec.structs.replace(member, pid=pid, created=created, start_key=key, replica=name)

    def _is_hung(self, replica: str) -> bool:
        """Whether a host showed no sign of life for too long; the clock of the machine does not count."""
        try:
            sign = sign_of_life(self._folder, replica).stat().st_mtime_ns
        except FileNotFoundError:
            sign = 0
        now = time.monotonic()
        if replica not in self._signs or self._signs[replica][0] != sign:
            self._signs[replica] = (sign, now)
        return now - self._signs[replica][1] > (HUNG_S if sign else FIRST_SIGN_S)

    async def _start(self, assignment: HostProcessSpec) -> int:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve.host.process_replica", assignment.replica,
            stdin=asyncio.subprocess.PIPE,
            stdout=self._log.descriptor, stderr=self._log.descriptor, start_new_session=True,
        )  # fmt: skip
        self._children[child.pid] = child
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(assignment) + b"\n")
        child.stdin.close()
        return child.pid

    def _assignment(self, shape: str, index: int) -> HostProcessSpec:
        positions = tuple(cards(self.spec.model.shapes[shape], index))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(card) for card in range(self._group.gpus)] if visible is None else visible.split(",")
        used = tuple(names[card] for card in positions if card < len(names))
        return HostProcessSpec(
            spec=msgspec.structs.replace(self.spec, shape=shape), replica="", address=self._address,
            node=self._node, slot=EngineSlot(cards=positions, visible=used), folder=str(self._folder),
        )  # fmt: skip

    def _processes(self) -> list[psutil.Process]:
        found = (member.process() for member in self._members.values())
        return [process for process in found if process is not None]


def _failed(member: GroupEngineProcess, now: float, lived_s: float) -> GroupEngineProcess:
    """The member without a process, and when another is started."""
    failures = failures_after(member.failures, lived_s, STABLE_S)
    retry_at = now + BACKOFF.delay_s(failures)
    return msgspec.structs.replace(member, pid=0, failures=failures, retry_at=retry_at)


def sign_of_life(folder: Path, replica: str) -> Path:
    """The file whose time of modification shows that the host of a replica is not stopped or blocked."""
    return folder / f"{replica}.alive"


async def show_life(folder: Path, replica: str) -> None:
    """Show signs of life until cancelled."""
    path = sign_of_life(folder, replica)
    while True:
        # On a full disk the file stays, and its time changes.
        with contextlib.suppress(OSError):
            path.touch()
        await asyncio.sleep(SIGN_OF_LIFE_S)


async def until_unheld(folder: Path, held_s: float = UNHELD_S) -> None:
    """Return once no process has held the group of ``folder`` for ``held_s`` seconds."""
    lease, since = open_lock(folder / _LEASE), time.monotonic()
    try:
        while time.monotonic() - since < held_s:
            await asyncio.sleep(UNHELD_LOOK_S)
            if try_lock(lease, shared=True):
                os.close(lease)
                lease = open_lock(folder / _LEASE)
            else:
                since = time.monotonic()
    finally:
        os.close(lease)


Host = ReplicaHost | GpuGroupHost


def host_of(assignment: HostProcessSpec) -> Host:
    """The host for an assignment: of one engine, alone or in a group, or of the model's shared GPU group."""
    spec, slot = assignment.spec, assignment.slot
    replica, address, node = assignment.replica, assignment.address, assignment.node
    if slot is not None:
        locks = GpuLocks(own_directory(Path(assignment.folder).parent / f"locks-{address}"), slot.visible)
        return TimeSharedGpuAccess(spec, slot, locks, replica=replica, address=address, node=node).host
    group = gpu_group_of(spec.model)
    if group is None:
        return ReplicaHost(spec, replica=replica, address=address, node=node)
    return GpuGroupHost(spec, group, address=address, node=node)


def _root(spec: HostSpec) -> Path:
    """The folder of groups: in the state directory, or the user's own on a node that cannot create that."""
    for root in (Path(spec.state_dir), default_root(), private_directory()):
        try:
            return own_directory(StateDir(root).ensure().root / "gpus")
        except (OSError, RuntimeError):
            continue
    raise AssertionError("the private directory exists")


def _plain(model: str) -> str:
    return model.replace("/", ".")


def _digest(assignment: HostProcessSpec) -> str:
    return hashlib.sha256(msgspec.json.encode(assignment)).hexdigest()[:16]
