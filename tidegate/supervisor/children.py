"""Child processes: started, logged, recorded, restarted with backoff, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policy.errors import EngineFailed
from policy.stats.backoff import Backoff, failures_after
from store.log_file import RotatingLog
from store.process import end_child
from store.state_dir import StateDir
from tidegate.log_tail import tail
from tidegate.supervisor import parent_death
from tidegate.supervisor.process_record import ProcessRecord

# Children import our packages from here, so that a checkout runs without being installed.
ROOT = Path(__file__).resolve().parents[2]
_LINE_BYTES = 1024 * 1024
# Between SIGTERM and SIGKILL for what runs once.
_GRACE_S = 10.0
BACKOFF = Backoff(0.1, 10.0)
# A process that ran this long (seconds) and ends starts a new row of failures.
STABLE_S = 30.0


@dataclass(frozen=True)
class ProcessSpec:
    """What to run: ``fds`` are inherited, ``env`` is the whole environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    fds: tuple[int, ...] = ()


@dataclass
class Child:
    """A part that is kept running until :meth:`stop`. ``on_exit`` gets the pid of each that ended."""

    part: ProcessSpec
    state: StateDir
    ledger: ProcessRecord
    note: Callable[[str], None]
    on_exit: Callable[[int], None] = lambda pid: None
    before_restart: Callable[[], Awaitable[None]] | None = None
    restarts: int = 0
    failures: int = 0
    started_at: float = 0.0
    exit_code: int | None = None
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        """The pid of the running process, 0 between two lives."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def start(self) -> None:
        """Begin to keep it running."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after ``grace_s``; returns when it is gone."""
        if self._task is None:
            return
        self._stopping.set()
        self._send(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            self._send(signal.SIGKILL)
        await self._task

    def kill(self) -> None:
        """SIGKILL now; :meth:`stop` is on its way already."""
        self._send(signal.SIGKILL)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        log = RotatingLog(self.state.logs / f"{self.part.name}.log")
        try:
            while not self._stopping.is_set():
                began = loop.time()
                self.started_at = began
                await self._live(log)
                if self._stopping.is_set():
                    return
                self.failures = failures_after(self.failures, loop.time() - began, STABLE_S)
                delay = BACKOFF.delay_s(self.failures)
                self.note(f"{self.part.name} ended ({_how(self.exit_code)}); again in {delay:.1f} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
                    return
                self.restarts += 1
                if self.before_restart is not None:
                    await self.before_restart()
        finally:
            log.close()

    async def _live(self, log: RotatingLog) -> None:
        try:
            self._process = await spawn(self.part, self.ledger, stderr=asyncio.subprocess.STDOUT)
        except OSError as error:
            self.exit_code = None
            self.note(f"{self.part.name} cannot be started: {error}")
            return
        if self._stopping.is_set():
            self._send(signal.SIGTERM)
        assert self._process.stdout is not None
        pump = asyncio.create_task(log.pump(self._process.stdout))
        self.exit_code = await self._process.wait()
        # A grandchild may hold the pipe's other end for as long as it lives.
        await asyncio.wait({pump}, timeout=0.5)
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        self.on_exit(self._process.pid)

    def _send(self, number: signal.Signals) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def spawn(part: ProcessSpec, ledger: ProcessRecord, *, stderr: int) -> asyncio.subprocess.Process:
    """Start ``part`` in a session of its own, tied to this process's life, and record it."""
    # stdout is a pipe: the file behind it is rotated by the one process that writes it.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
        *part.argv,
        env=dict(part.env),
        pass_fds=part.fds,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    try:
        ledger.add(part.name, process.pid)
    except OSError:
        # What cannot be recorded could not be ended later.
        process.kill()
        raise
    return process


async def run_once(
    part: ProcessSpec, state: StateDir, ledger: ProcessRecord, on_line: Callable[[bytes], None]
) -> int:
    """Run ``part`` to its end, each line of its output to ``on_line``; returns the exit status.

    Cancelled, it ends the process first. Its standard error goes to the part's log.
    """
    log = RotatingLog(state.logs / f"{part.name}.log")
    process = await spawn(part, ledger, stderr=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    pump = asyncio.create_task(log.pump(process.stderr))
    try:
        async for line in process.stdout:
            with contextlib.suppress(OSError):
                log.write(line)
            on_line(line)
        return await process.wait()
    finally:
        if process.returncode is None:
            await end_child(process, _GRACE_S)
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        log.close()


def check_alive(children: Iterable[Child], most: int = 3) -> None:
    """Raise :class:`policy.errors.EngineFailed` with the log's end for a child that keeps failing."""
    for child in children:
        if child.failures >= most and not child.pid:
            raise EngineFailed(
                f"{child.part.name} ended {child.failures} times ({_how(child.exit_code)})"
                + log_end(child.state, child.part.name)
            )


def log_end(state: StateDir, pattern: str, lines: int = 15) -> str:
    """The end of the newest log called ``pattern``, to be put under a message."""
    logs = sorted(state.logs.glob(f"{pattern}.log"), key=lambda path: path.stat().st_mtime)
    last = tail(logs[-1], lines) if logs else []
    return "".join(f"\n  {logs[-1].stem} | {line}" for line in last)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "not started"
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit status {exit_code}"
