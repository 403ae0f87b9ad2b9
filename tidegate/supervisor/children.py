"""Child processes: started, logged, recorded, restarted with back-off, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from policy.errors import EngineFailed
from policy.stats.backoff import Backoff, failures_after
from store import json_log_format
from store.log_file import RotatingLog
from store.os_process import end_child
from store.state_dir import StateDir
from tidegate.log_tail import tail
from tidegate.supervisor import parent_death
from tidegate.supervisor.process_record import ProcessRecord

# The working directory of children, so that a checkout runs without being installed.
ROOT = Path(__file__).resolve().parents[2]
_LINE_BYTES = 1024 * 1024
# Between SIGTERM and SIGKILL for a process that runs once.
_GRACE_S = 10.0
BACKOFF = Backoff(0.1, 10.0)
# After a run of this many seconds the back-off starts over.
STABLE_S = 30.0
# Of a child that does not run, after which a start fails, with this much of its log.
MAX_FAILURES = 3
LOG_LINES = 15


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start: ``fds`` are inherited, ``env`` is the whole environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    fds: tuple[int, ...] = ()


@dataclass
class SupervisedProcess:
    """A process that is restarted until :meth:`stop`. ``on_exit`` gets the pid of each one that exited."""

    spec: ProcessSpec
    state: StateDir
    record: ProcessRecord
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
        """The pid of the running process, 0 between two runs."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after ``grace_s``; returns when it has exited."""
        if self._task is None:
            return
        self._stopping.set()
        self._send(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            self._send(signal.SIGKILL)
        await self._task

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self.started_at = loop.time()
            try:
                await self._run_once()
            except Exception as error:  # noqa: BLE001 - whatever fails after an exit, it is started again
                self.note(f"after the exit of {self.spec.name}: {error}")
            if self._stopping.is_set():
                return
            self.failures = failures_after(self.failures, loop.time() - self.started_at, STABLE_S)
            delay = BACKOFF.delay_s(self.failures)
            self.note(f"{self.spec.name} exited ({_status(self.exit_code)}); restart in {delay:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return
            self.restarts += 1

    async def _run_once(self) -> None:
        with contextlib.ExitStack() as opened:
            try:
                if self.restarts and self.before_restart is not None:
                    await self.before_restart()
                    if self._stopping.is_set():
                        return
                    self.started_at = asyncio.get_running_loop().time()
                log = opened.enter_context(
                    contextlib.closing(RotatingLog(self.state.logs / f"{self.spec.name}.log"))
                )
                process = self._process = await spawn(
                    self.spec, self.record, stderr=asyncio.subprocess.STDOUT
                )
            except Exception as error:  # noqa: BLE001 - whatever a start lacks, it is tried again
                self.exit_code = None
                self.note(f"{self.spec.name} cannot be started: {error}")
                return
            if self._stopping.is_set():
                self._send(signal.SIGTERM)
            assert process.stdout is not None
            pump = asyncio.create_task(log.pump(process.stdout))
            self.exit_code = await process.wait()
            # A grandchild may keep the other end of the pipe open.
            await asyncio.wait({pump}, timeout=0.5)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        self.on_exit(process.pid)

    def _send(self, number: signal.Signals) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def spawn(spec: ProcessSpec, record: ProcessRecord, *, stderr: int) -> asyncio.subprocess.Process:
    """Start ``spec`` in a new session that ends when this process dies, and record it."""
    # stdout is a pipe, because only the process that writes a log file can rotate it.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
        *spec.argv,
        env=dict(spec.env),
        pass_fds=spec.fds,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    try:
        record.add(spec.name, process.pid)
    except OSError:
        # Without a record it could not be ended later.
        process.kill()
        raise
    return process


class ToolLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output of a tool: its progress, its result or its error."""

    message: str = ""
    fraction: float | None = None
    path: str = ""
    error: str = ""


async def run_tool(
    spec: ProcessSpec,
    state: StateDir,
    record: ProcessRecord,
    on_line: Callable[[ToolLine], None] = lambda line: None,
) -> tuple[int, ToolLine]:
    """Run ``spec`` to its end; returns its exit status and its last line.

    Cancelled, it ends the process first. All output goes to the process's log.
    """
    log = RotatingLog(state.logs / f"{spec.name}.log")
    process = await spawn(spec, record, stderr=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    pump = asyncio.create_task(log.pump(process.stderr))
    last = ToolLine()
    try:
        async for line in process.stdout:
            try:
                last = msgspec.json.decode(line, type=ToolLine)
            except msgspec.MsgspecError:  # other output
                written = line
            else:
                on_line(last)
                level = "error" if last.error else "info"
                text = last.error or last.message or last.path
                written = json_log_format.line(level, text, {"fraction": last.fraction})
            with contextlib.suppress(OSError):
                log.write(written)
        return await process.wait(), last
    finally:
        if process.returncode is None:
            await end_child(process, _GRACE_S)
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        log.close()


def check_alive(children: Iterable[SupervisedProcess]) -> None:
    """Raise :class:`policy.errors.EngineFailed` with the end of the log of a child that keeps failing."""
    for child in children:
        if child.failures >= MAX_FAILURES and not child.pid:
            raise EngineFailed(
                f"{child.spec.name} exited {child.failures} times ({_status(child.exit_code)})"
                + log_end(child.state, child.spec.name)
            )


def log_end(state: StateDir, pattern: str) -> str:
    """The end of the newest log that matches ``pattern``, to append to a message."""
    logs = sorted(state.logs.glob(f"{pattern}.log"), key=lambda path: path.stat().st_mtime)
    last = tail(logs[-1], LOG_LINES) if logs else []
    return "".join(f"\n  {entry.process} | {entry.text}" for entry in last)


def _status(exit_code: int | None) -> str:
    if exit_code is None:
        return "not started"
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit status {exit_code}"
