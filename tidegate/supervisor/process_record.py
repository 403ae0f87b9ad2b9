"""The processes that were started: recorded before they are relied on, ended by record alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
import psutil

from store.state_dir import StateDir

# A recycled pid would have to be born within this of the recorded birth; the kernel's boot time,
# which creation times are computed from, moves by up to a second when the clock is set.
_SAME_BIRTH_S = 2.0
# How long whoever lost its supervisor gets after SIGTERM, and anyone after SIGKILL.
ORPHAN_GRACE_S = 5.0
_KILL_S = 5.0
_POLL_S = 0.02


class RecordedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of ours; ``created_at`` tells it from a later one with the same pid."""

    name: str
    pid: int
    created_at: float

    def process(self) -> psutil.Process | None:
        """The process, while it lives."""
        try:
            found = psutil.Process(self.pid)
            alive = abs(found.create_time() - self.created_at) < _SAME_BIRTH_S
            return found if alive and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; one that ended and was not collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ProcessRecord:
    """The file of recorded processes of one state directory."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        # Who started these waits for them, too.
        self.started: set[int] = set()
        self._entries = {
            entry.pid: entry for entry in state.load(state.processes_path, list[RecordedProcess]) or []
        }

    @property
    def entries(self) -> tuple[RecordedProcess, ...]:
        """Everything recorded, oldest first."""
        return tuple(self._entries.values())

    def living(self) -> tuple[RecordedProcess, ...]:
        """Those that still run."""
        return tuple(entry for entry in self._entries.values() if entry.process() is not None)

    def add(self, name: str, pid: int) -> None:
        """Record a process that was just started; one that is gone already is not recorded."""
        self.started.add(pid)
        try:
            created_at = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            return
        self._entries[pid] = RecordedProcess(name=name, pid=pid, created_at=created_at)
        self._save()

    def adopt(self, processes: Iterable[psutil.Process]) -> None:
        """Record descendants that are not yet recorded, and forget the dead; saved when it changed."""
        before = dict(self._entries)
        self._entries = {entry.pid: entry for entry in self.living()}
        for process in processes:
            if process.pid in self._entries:
                continue
            try:
                entry = RecordedProcess(
                    name=process.name(), pid=process.pid, created_at=process.create_time()
                )
            except psutil.NoSuchProcess:
                continue
            self._entries[process.pid] = entry
        if self._entries != before:
            self._save()

    def clear(self) -> None:
        """Forget everything."""
        self._entries = {}
        self._state.processes_path.unlink(missing_ok=True)

    def _save(self) -> None:
        self._state.save(self._state.processes_path, list(self._entries.values()))


def end(
    entries: Iterable[RecordedProcess], *, grace_s: float, tell: Callable[[RecordedProcess], None]
) -> tuple[RecordedProcess, ...]:
    """SIGTERM, ``grace_s`` to go, SIGKILL; returns those that live on. ``tell`` names each that ended."""
    victims = {entry: process for entry in entries if (process := entry.process()) is not None}
    for process in victims.values():
        _signal(process.terminate)
    for entry in _wait(victims, grace_s):
        _signal(victims[entry].kill)
    left = _wait(victims, _KILL_S)
    for entry in victims:
        if entry not in left:
            tell(entry)
    return left


def _wait(entries: Iterable[RecordedProcess], timeout_s: float) -> tuple[RecordedProcess, ...]:
    """Those that live on after ``timeout_s``; one that nobody collected does not live."""
    deadline = time.monotonic() + timeout_s
    while left := tuple(entry for entry in entries if entry.process() is not None):
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return left


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
