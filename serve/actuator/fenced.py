"""An actuator for controllers that elect their leader: orders of one that was deposed are refused."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from policy.config.deployment import ModelSpec
from policy.errors import NotLeader
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import Actuator, ActuatorLayer, NodeResources
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import own_directory

log = logging.getLogger("tidegate.controller")

# Orders take milliseconds: a controller that is in the middle of one for so long is paused.
PAUSED_S = 2.0
_POLL_S = 0.01
_LOCKS = Path("/proc/locks")
# On every Linux, and the same directory for all processes of a user, whatever their environment.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - with a directory of this user's own below it


class Fence(Protocol):
    """Lets orders through in the order of their terms."""

    def passed(self, term: int) -> AbstractAsyncContextManager[None]:
        """Hold other orders up; raises :class:`policy.errors.NotLeader` if one of a higher term passed."""

    def highest(self) -> int:
        """The highest term that passed: also of a database that was before this one."""


def passed(fence: Fence | None, term: int) -> AbstractAsyncContextManager[None]:
    """An order of ``term`` passes the ``fence``, if there is one."""
    return nullcontext() if fence is None else fence.passed(term)


class FencedActuator:
    """The actuator port over another one, for a controller that leads in ``term``.

    An order is refused with :class:`policy.errors.NotLeader` once the controller does not lead any more, and,
    if it is paused after that check, by the ``fence``, or by an actuator that knows terms itself.
    """

    def __init__(self, actuator: Actuator, term: int, leads: Callable[[], bool], fence: Fence | None) -> None:
        self.name = actuator.name
        self._inner = actuator
        self._term = term
        self._leads = leads
        self._fence = fence

    @asynccontextmanager
    async def _order(self) -> AsyncIterator[None]:
        if not self._leads():
            raise NotLeader(f"this controller, of term {self._term}, does not lead any more")
        async with passed(self._fence, self._term):
            yield

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        async with self._order():
            return await self._inner.layers()

    async def nodes(self) -> Sequence[NodeResources]:
        return await self._inner.nodes()

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        async with self._order():
            await self._inner.deploy(key, model, weights, digest, count)

    async def scale(self, key: LayerKey, count: int) -> None:
        async with self._order():
            await self._inner.scale(key, count)

    async def kill(self, key: LayerKey, replica: str) -> None:
        async with self._order():
            await self._inner.kill(key, replica)

    async def delete(self, key: LayerKey) -> None:
        async with self._order():
            await self._inner.delete(key)

    async def stop(self) -> None:
        async with self._order():
            await self._inner.stop()

    async def close(self) -> None:
        await self._inner.close()


class MachineFence:
    """The fence of the processes of one machine: a locked file with the highest term that passed.

    Who holds the lock is in the middle of an order. One that was paused there is killed by the next one:
    otherwise its order could still be carried out, after those of a higher term.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @asynccontextmanager
    async def passed(self, term: int) -> AsyncIterator[None]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            await self._lock(descriptor)
            highest = _term(descriptor)
            if highest > term:
                raise NotLeader(f"an order of term {term} comes after one of term {highest}")
            if highest < term:
                os.pwrite(descriptor, f"{term:032}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def highest(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return _term(descriptor)
        finally:
            os.close(descriptor)

    async def _lock(self, descriptor: int) -> None:
        clock = asyncio.get_running_loop().time
        paused_at = clock() + PAUSED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if clock() >= paused_at:
                    self._kill_holder(descriptor)
                    paused_at = clock() + PAUSED_S
            await asyncio.sleep(_POLL_S)

    def _kill_holder(self, descriptor: int) -> None:
        file = os.fstat(descriptor)
        for line in _LOCKS.read_text().splitlines():
            # As in "1: FLOCK  ADVISORY  WRITE 4711 00:2b:1234 0 EOF"; waiting ones have an arrow.
            _, kind, *rest = line.split()
            if kind != "FLOCK" or rest[3].rpartition(":")[2] != str(file.st_ino):
                continue
            pid = int(rest[2])
            if pid != os.getpid() and _has_open(pid, file):
                log.warning("the controller with pid %d is paused within an order: it is killed", pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether the process has the file open. Its inode number alone may be that of a file elsewhere.

    The device in ``/proc/locks`` does not tell: on btrfs and overlayfs ``stat`` gives another one.
    """
    with suppress(OSError):  # it has ended, or is another user's
        return any(os.path.samestat(file, each.stat()) for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _term(descriptor: int) -> int:
    return int(os.pread(descriptor, 32, 0) or b"0")


def machine_fence(secret: str) -> MachineFence:
    """The fence of the deployment with the internal ``secret`` on this machine."""
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    name = hashlib.sha256(f"fence {secret}".encode()).hexdigest()[:16]
    return MachineFence(own_directory(base / f"tidegate-{os.getuid()}") / f"{name}.term")
