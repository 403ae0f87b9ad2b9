"""The processes that were started: recorded on disk, so that a later supervisor or `down` can end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable

import msgspec
import psutil

from store.os_process import ProcessId, end_all, start_key, started_at
from store.state_dir import StateDir


class RecordedProcess(ProcessId, frozen=True, kw_only=True):
    """A process of ours."""

    name: str
    created: float = msgspec.field(name="created_at")

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class ProcessRecord:
    """The file of recorded processes of one state directory."""

    # Between SIGTERM and SIGKILL for a process whose supervisor died.
    _GRACE_S = 5.0

    def __init__(self, state: StateDir) -> None:
        self._state = state
        # Children of this process that something here waits for.
        self.started: set[int] = set()
        # By pid, oldest first.
        self.entries = {
            entry.pid: entry for entry in state.load(state.processes_path, list[RecordedProcess]) or []
        }
        # What the file has.
        self._saved = dict(self.entries)

    def living(self) -> tuple[RecordedProcess, ...]:
        return tuple(entry for entry in self.entries.values() if entry.process() is not None)

    def add(self, name: str, pid: int) -> None:
        """Record a process that was just started, unless it has exited already."""
        self.started.add(pid)
        if (created := started_at(pid)) is None:
            return
        self.entries[pid] = RecordedProcess(name=name, pid=pid, created=created, start_key=start_key(pid))
        self._save()

    def snapshot(self) -> None:
        """Record this process and all its descendants, and forget those that have exited.

        A full disk keeps the last record in the file; the next snapshot writes it.
        """
        self.collect_orphans()
        this = psutil.Process()
        self.entries = {entry.pid: entry.with_key() for entry in self.living()}
        for process in (this, *this.children(recursive=True)):
            if process.pid in self.entries:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.entries[process.pid] = RecordedProcess(
                        name=process.name(),
                        pid=process.pid,
                        created=process.create_time(),
                        start_key=start_key(process.pid),
                    )
        if self.entries != self._saved:
            with contextlib.suppress(OSError):
                self._save()

    def collect_orphans(self) -> None:
        """Reap adopted processes that have exited; a process in ``started`` is left to what waits for it."""
        with contextlib.suppress(ChildProcessError):
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if exited.si_pid in self.started:
                    return
                os.waitpid(exited.si_pid, os.WNOHANG)

    def end(
        self, entries: Iterable[RecordedProcess], ended: Callable[[RecordedProcess], None]
    ) -> tuple[RecordedProcess, ...]:
        """SIGTERM, and SIGKILL after the grace time; calls ``ended`` for each that exits.

        Blocks meanwhile; returns those that still run.
        """
        processes = {entry: process for entry in entries if (process := entry.process()) is not None}
        running = end_all(processes.values(), self._GRACE_S)
        left = tuple(entry for entry, process in processes.items() if process in running)
        for entry in processes:
            if entry not in left:
                ended(entry)
        return left

    def keep(self, entries: Iterable[RecordedProcess]) -> None:
        """Forget all processes but these."""
        self.entries = {entry.pid: entry for entry in entries}
        if self.entries:
            self._save()
        else:
            self.clear()

    def clear(self) -> None:
        self.entries, self._saved = {}, {}
        self._state.processes_path.unlink(missing_ok=True)

    def _save(self) -> None:
        self._state.save(self._state.processes_path, list(self.entries.values()))
        self._saved = dict(self.entries)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent exits, such as the Ray head's detached daemons."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
