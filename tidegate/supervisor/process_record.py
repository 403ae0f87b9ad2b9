"""The processes that were started: recorded before they are relied on, ended by record alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import psutil

from store.process import end_all, find, started_at
from store.state_dir import StateDir

# How long a process whose supervisor died has between SIGTERM and SIGKILL.
ORPHAN_GRACE_S = 5.0


class RecordedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of ours; ``created_at`` tells it from a later one with the same pid."""

    name: str
    pid: int
    created_at: float

    def process(self) -> psutil.Process | None:
        """The process, while it lives."""
        return find(self.pid, self.created_at)


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
        if (created_at := started_at(pid)) is None:
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
    """SIGTERM, and SIGKILL after ``grace_s``; returns those that still run. ``tell`` names the others."""
    found = {entry: process for entry in entries if (process := entry.process()) is not None}
    running = end_all(found.values(), grace_s)
    for entry, process in found.items():
        if process not in running:
            tell(entry)
    return tuple(entry for entry, process in found.items() if process in running)
