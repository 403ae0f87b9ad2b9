"""An engine process of a host: its start, its events and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping

import msgspec

from policy.errors import EngineFailed
from serve.engine.engine_server import EngineEvent
from store.log_file import RotatingLog
from store.os_process import end_child

KILL_AFTER_S = 10.0
# How long to read the pipe of a dead engine for its last output.
LAST_OUTPUT_S = 0.2

# Ray limits its workers' threads and metrics; the engine must not inherit that.
_NOT_INHERITED = frozenset(
    {
        "OMP_NUM_THREADS",
        "PROMETHEUS_MULTIPROC_DIR",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_API_KEY",
    }
)


class EngineProcess:
    """A child process that runs :mod:`serve.engine.main`; ``log`` takes its output."""

    def __init__(self, process: asyncio.subprocess.Process, events: int, log: RotatingLog) -> None:
        assert process.stdout is not None
        self.pid = process.pid
        self._process = process
        self._events = events
        self._log_pump = asyncio.create_task(log.pump(process.stdout))

    @classmethod
    async def start(
        cls, environment: Mapping[str, str], log: RotatingLog, inherited: Collection[int] = ()
    ) -> EngineProcess:
        """Start a process, which waits for its specification as the first :meth:`command`.

        ``environment`` is added to the one of this process; the ``inherited`` file descriptors stay open.
        """
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        own = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1",
            # A redirect could leave the domains of `allowed_media_domains`.
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        }  # fmt: skip
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "serve.engine.main", "--events", str(write),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, pass_fds=(write, *inherited),
                env={**kept, **own, **environment},
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return cls(process, read, log)

    def command(self, line: bytes) -> None:
        """Write a line to its standard input, unless it has ended."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.write(line + b"\n")

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    async def events(self, silence_s: Callable[[], float | None]) -> AsyncIterator[EngineEvent]:
        """Its events until its pipe closes.

        Raises :class:`policy.errors.EngineFailed` when none came for ``silence_s()`` seconds.
        """
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._events, "rb")
        )
        # The engine's children may hold the pipe open after it died, so its exit counts.
        ended = asyncio.create_task(self._process.wait())
        ended.add_done_callback(lambda _: loop.call_later(LAST_OUTPUT_S, reader.feed_eof))
        try:
            while True:
                async with asyncio.timeout(silence_s()):
                    line = await reader.readline()
                if not line.endswith(b"\n"):
                    return
                yield msgspec.json.decode(line, type=EngineEvent)
        except TimeoutError:
            raise EngineFailed(f"the engine was silent for {silence_s():g} s") from None
        finally:
            ended.cancel()
            transport.close()

    async def wait(self) -> str:
        """How it ended: its signal or exit code, once its events have ended."""
        try:
            async with asyncio.timeout(KILL_AFTER_S):
                code = await self._process.wait()
        except TimeoutError:
            return "no exit code"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def end(self) -> bool:
        """End it and its children, within a bounded time and even if cancelled; returns whether it ended."""
        ending = asyncio.create_task(end_child(self._process, KILL_AFTER_S, group=True))
        try:
            return await asyncio.shield(ending)
        finally:
            # Whoever cancels may give its resources to others next.
            await asyncio.wait([ending])
            self._log_pump.cancel()
